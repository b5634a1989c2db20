"""Functions compiled for the devices, as pure functions and shapes: forward passes, epilogues and state changes."""
