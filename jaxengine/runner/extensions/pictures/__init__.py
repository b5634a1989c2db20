"""Pictures: embeddings of images and videos, made on the devices and placed at their placeholder tokens."""
