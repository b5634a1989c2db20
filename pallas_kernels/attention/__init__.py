"""Ragged paged attention: one public operation, one implementation per platform."""
