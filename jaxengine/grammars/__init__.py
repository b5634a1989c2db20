"""Structured output: token masks that say which tokens a request may take next so that its text follows a grammar."""
