"""Views of a weight source under other names, shapes and encodings, and each device's part of a weight."""
