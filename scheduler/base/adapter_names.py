"""Names of adapters that look alike: a request for one adapter must not be served by another by mistake."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# Characters that show nothing and that str.isprintable lets pass: variation selectors, joiners, fillers and blanks.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def seen_as(name: str) -> str:
    """Return a name in a form that is equal for all names that look alike: case-folded, NFKC, white space reduced to
    single inner spaces, invisible characters removed.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", _UNSEEN.sub("", name)).casefold())
    return " ".join(_UNSEEN.sub("", folded).split())


def alike(name: str, others: Iterable[str]) -> str | None:
    """Return the first of `others` that looks like this name (`seen_as`); None if there is none."""
    look = seen_as(name)
    return next((other for other in others if seen_as(other) == look), None)
