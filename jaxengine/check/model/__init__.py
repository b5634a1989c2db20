"""What is compiled for a model: its shapes, its programs, the roofline of each."""
