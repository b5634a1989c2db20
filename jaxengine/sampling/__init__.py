"""Sampling, from logits to tokens and logprobs: pure functions, traced inside compiled programs."""
