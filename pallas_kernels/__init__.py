"""Attention over paged keys and values, one public operation per file family.

Knows jax, the storage layout of KV pages and the platform; knows nothing of models, requests, layers or device meshes
beyond the shards that shard_map hands it. The implementation is picked by a row of `pallas_kernels.registry.KERNELS`.
"""
