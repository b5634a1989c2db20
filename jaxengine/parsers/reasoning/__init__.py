"""Parsers of reasoning, by the form that models write it in."""
