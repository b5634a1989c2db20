"""Checkpoint formats other than GGUF: safetensors and Orbax."""
