"""Error of an invalid image, video or sound."""

from __future__ import annotations


class MediaError(ValueError):
    """Error for an image, video or sound that cannot be used.

    The message continues the item's name, "is an SVG; allowed: ...": the caller that has the name prepends it.
    """
