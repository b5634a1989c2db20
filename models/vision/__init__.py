"""Towers: what turns patches of pictures into embeddings. A file for each family's, and what several share."""
