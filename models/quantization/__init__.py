"""How weights are stored and multiplied: a scheme a file, chosen by the name of a checkpoint's module."""
