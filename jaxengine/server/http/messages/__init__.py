"""Endpoint /v1/messages."""
