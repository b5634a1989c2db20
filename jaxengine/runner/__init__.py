"""The only room that calls the device: compiled steps, memory, stages."""
