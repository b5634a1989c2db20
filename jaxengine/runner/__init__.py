"""Device side of the engine, the only package that calls devices: compiled steps, memory, pipeline stages."""
