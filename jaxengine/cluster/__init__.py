"""Engines of several processes: the worker processes, and the messages between them and host 0."""
