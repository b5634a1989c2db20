"""Pooled results of requests and of tokens."""
