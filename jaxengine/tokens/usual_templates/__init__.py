"""Chat templates of families whose checkpoints have none: their own libraries, or their authors, write prompts."""
