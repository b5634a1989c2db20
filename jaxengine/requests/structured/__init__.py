"""Structured outputs of a request: parameters and the JSON schemas they accept."""
