"""Tokens at the beginning and the end of a text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.processors import TemplateProcessing


def with_ends(
    begin: tuple[str, int] | None,
    end: tuple[str, int] | None,
    *,
    pairs: bool = False,
    after_begin: Sequence[tuple[str, int]] = (),
    between: tuple[str, int] | None = None,
) -> TemplateProcessing:
    """Return a post-processor that puts tokens before and after a text. begin, end: (name, id) of the tokens; None for
    none. after_begin: further tokens after `begin`, if that is given. pairs: whether a pair of texts gets these tokens
    too, with `end`, and after it `between`, also between the texts; otherwise a pair gets none. The second text is of
    type 1.
    """
    # Placeholder names stand for the tokens, whose names may have spaces. $A in a template is the text.
    around = {"BEGIN": [] if begin is None else [begin, *after_begin], "END": [] if end is None else [end]}
    around["BETWEEN"] = [] if between is None else [between]
    known = [
        {"id": key, "ids": [number for _, number in tokens], "tokens": [name for name, _ in tokens]}
        for key, tokens in around.items()
        if tokens
    ]
    before, after, inner = (key if tokens else "" for key, tokens in around.items())
    single = " ".join(part and f"{part}:0" for part in (before, "$A", after)).strip()
    second = f"{inner and f' {inner}:0'} $B:1{after and f' {after}:1'}"
    pair = single + second if pairs else "$A:0 $B:1"
    return TemplateProcessing(single=single, pair=pair, special_tokens=known)
