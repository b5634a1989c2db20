"""Pictures and videos as they come in: from what a caller sends to decoded pixels. Knows no model and no jax."""
