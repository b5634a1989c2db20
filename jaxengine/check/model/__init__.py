"""Programs that are compiled for a model: its shapes, its steps, and the roofline of each."""
