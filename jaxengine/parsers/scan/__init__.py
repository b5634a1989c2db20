"""Scanners that several parsers use: markers, JSON, Python calls, typed text, events."""
