"""New weights for a running engine, and weights and pools that leave the devices."""
