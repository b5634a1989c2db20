"""Ragged paged attention: one op, an implementation for each platform."""
