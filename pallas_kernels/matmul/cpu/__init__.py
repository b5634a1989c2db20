"""Products whose instructions are chosen for XLA:CPU."""
