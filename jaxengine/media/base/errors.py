"""The error of an invalid image or video."""

from __future__ import annotations


class MediaError(ValueError):
    """Raised for an image or video that cannot be used.

    The message continues the item's name, "is an SVG; allowed: ...": the caller that knows the name prepends it.
    """
