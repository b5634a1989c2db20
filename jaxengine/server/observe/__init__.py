"""Metrics, spans, timeline and status of a server."""
