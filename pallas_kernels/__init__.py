"""Kernels of a model's forward pass: attention over paged KV, KV writes, matrix products, recurrences over states.

Each operation has one public function in a module of its own, and an implementation for each platform, which
`jaxengine.pallas_kernels.registry` names. The package depends on jax, the layout of KV pages and the platform; it has
no models, requests or layers, and sees of a device mesh only the shards that shard_map passes in.
"""

if __name__ != "jaxengine.pallas_kernels":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.pallas_kernels. If you meant another package, "
        "rename it, or take the checkout of jaxengine off sys.path"
    )
