"""Model families in flax.nnx, their configurations and their checkpoint loaders.

Independent of requests, scheduling policies and text. Importing this package imports none of its modules.
"""

if __name__ != "jaxengine.models":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.models. If you meant another package, rename it, "
        "or take the checkout of jaxengine off sys.path"
    )
