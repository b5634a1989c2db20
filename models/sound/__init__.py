"""Towers for sound: they encode spectrograms to keys and values that a decoder's layers attend to."""
