"""pictures: embeddings of pictures and videos, made on the devices, in the places of tokens."""
