"""Proposers of drafts: what may come next, for the model to verify. A file and a row of the registry each."""
