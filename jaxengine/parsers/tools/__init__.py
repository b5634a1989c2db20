"""Parsers of tool calls, by the form that models write them in."""
