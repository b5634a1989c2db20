"""Endpoints /v1/embeddings, /pooling, /classify, /score and /rerank."""
