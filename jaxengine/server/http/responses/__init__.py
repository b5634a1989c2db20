"""Endpoint /v1/responses."""
