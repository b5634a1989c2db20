"""Mistral AI's own tokenizer files, and the chat templates that go with them."""
