"""Tokenizers built from the parts that files bring: vocabularies, scores, ranks and names of splittings."""
