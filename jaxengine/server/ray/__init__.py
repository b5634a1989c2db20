"""Engines as replicas of Ray Serve: ingresses that route, replicas that serve HTTP, and a store of responses."""
