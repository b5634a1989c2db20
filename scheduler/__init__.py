"""Which tokens run next: requests, pages, prefix cache, policy and packing. numpy only; no device, no text."""

if __name__ != "jaxengine.scheduler":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.scheduler. If you meant another package, rename it, "
        "or take the checkout of jaxengine off sys.path"
    )
