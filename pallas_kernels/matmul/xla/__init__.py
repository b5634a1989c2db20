"""Products in plain XLA, for every platform without a kernel of its own."""
