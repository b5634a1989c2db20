"""From an engine's tokens to a caller's outputs: text, stops, log-probabilities."""
