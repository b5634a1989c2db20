"""Parts of all layers: matrices, norms, embeddings, rope, a step's sections."""
