"""Parameters of a request: sampling parameters, their limits, and the prepared prompt."""
