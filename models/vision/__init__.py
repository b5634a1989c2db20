"""Vision towers, which encode image patches to embeddings: a file for each family's, and parts that several share."""
