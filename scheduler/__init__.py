"""Scheduler: decides which tokens each step computes. Requests, pages, prefix cache, policy and
packing, in numpy only.
"""

if __name__ != "jaxengine.scheduler":
    raise ImportError(
        f"{__name__!r} is jaxengine's own folder; import jaxengine.scheduler. If you meant another package, rename it, "
        "or take the checkout of jaxengine off sys.path"
    )
