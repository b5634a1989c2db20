"""Structured output: which tokens a request may take next so that its text keeps to a grammar."""
