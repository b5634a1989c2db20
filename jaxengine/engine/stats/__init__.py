"""Counts and measurements of an engine, and its timeline."""
