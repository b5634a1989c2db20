"""What a request asks for: sampling parameters, their limits, and the prepared prompt."""
