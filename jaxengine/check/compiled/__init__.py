"""Reading compiled modules: instructions, cycles, exchanges between devices."""
