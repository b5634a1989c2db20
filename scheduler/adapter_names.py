"""Names of adapters that look alike: a request for one must not be served by another by mistake."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# Characters that show nothing and that str.isprintable lets pass: variation selectors, joiners, fillers and blanks.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def seen_as(name: str) -> str:
    """Returns what a name looks like: without case, compatibility forms (NFKC), repeated white space and white space at
    the ends, and characters that show nothing.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", _UNSEEN.sub("", name)).casefold())
    return " ".join(_UNSEEN.sub("", folded).split())


def alike(name: str, others: Iterable[str]) -> str | None:
    """Returns the first of other names that looks like this one, None without one."""
    look = seen_as(name)
    return next((other for other in others if seen_as(other) == look), None)
