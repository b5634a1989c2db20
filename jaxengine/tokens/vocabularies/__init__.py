"""Tokenizers built from the parts in model files: vocabularies, scores, ranks and names of splittings."""
