"""Device meshes and the rules that lay arrays out on them; independent of models and kernels."""

if __name__ != "jaxengine.sharding":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.sharding. If you meant another package, rename it, "
        "or take the checkout of jaxengine off sys.path"
    )
