"""Endpoint /v1/completions."""
