"""Text in, text out: prompts to checked requests, tokens to what a caller sees."""
