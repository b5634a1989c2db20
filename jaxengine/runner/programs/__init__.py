"""What is compiled for the devices: forward passes, their epilogues and state changes, as pure functions and shapes."""
