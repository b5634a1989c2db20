"""Model families in flax.nnx, their configurations and their checkpoint loaders.

Independent of requests, scheduling policies and text. Importing this package is cheap: of its own modules only
`_names`, which explains failed imports of another package called `models`.
"""

if __name__ != "jaxengine.models":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.models. If you meant another package, rename it, or take "
        f"the checkout of jaxengine off sys.path"
    )
