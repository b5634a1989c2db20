"""The engine loop, its optional extensions, and its counts and metrics. It handles token ids, never text."""
