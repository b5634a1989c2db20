"""Pooling requests: parameters and outputs."""
