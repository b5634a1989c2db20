"""Output processing: an engine's tokens to a caller's outputs, with text, stops and log-probabilities."""
