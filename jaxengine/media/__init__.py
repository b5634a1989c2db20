"""Input images and videos: from a request's content parts to decoded pixels. Independent of models and jax."""
