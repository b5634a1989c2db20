"""Storage and multiplication of weights: one scheme per file, chosen by the name of a checkpoint's module."""
