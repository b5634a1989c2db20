"""What is wrong with one picture or video. Knows neither its name nor who sent it."""

from __future__ import annotations


class MediaError(ValueError):
    """A picture or video that cannot be used.

    The message goes on where the item's name ends, "is an SVG; allowed: ...": whoever knows the name puts it in front.
    """
