"""Draft proposers, which guess tokens for the model to verify. Each is a file and a row of the registry."""
