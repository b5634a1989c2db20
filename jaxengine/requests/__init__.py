"""Request preparation and output processing: prompts to checked requests, tokens to the caller's outputs."""
