"""Tokens at the beginning and the end of a text."""

from __future__ import annotations

from tokenizers.processors import TemplateProcessing


def with_ends(begin: tuple[str, int] | None, end: tuple[str, int] | None, *, pairs: bool = False) -> TemplateProcessing:
    """Return a post-processor that puts tokens before and after a text. begin, end: (name, id) of the tokens; None for
    none. pairs: whether a pair of texts gets these tokens too, with `end` also between the texts; otherwise a pair gets
    none. The second text is of type 1.
    """
    # Placeholder names stand for the tokens, whose names may have spaces. $A in a template is the text.
    around = {"BEGIN": begin, "END": end}
    known = [{"id": key, "ids": [one[1]], "tokens": [one[0]]} for key, one in around.items() if one is not None]
    before, after = ("" if one is None else key for key, one in around.items())
    single = " ".join(part and f"{part}:0" for part in (before, "$A", after)).strip()
    pair = f"{single} $B:1" + (after and f" {after}:1") if pairs else "$A:0 $B:1"
    return TemplateProcessing(single=single, pair=pair, special_tokens=known)
