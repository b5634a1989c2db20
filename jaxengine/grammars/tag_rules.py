"""Rules of structural tags in llguidance's notation, with the tokens of a vocabulary."""

from __future__ import annotations

import json

import llguidance

from jaxengine.marker_words import marker_parts


def lark_of(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the Lark grammar of rules as jaxengine.requests.structured.structural_tags writes them, as JSON.

    A word that is a special or added token of the vocabulary is that token, as grammars cannot match it as text. One
    that ends sequences is left out: it comes where the grammar may end, and nothing follows it. Raises ValueError for
    JSON that cannot be read, and for text up to a word in which another text precedes a token.
    """
    rules: list[str] = []
    for pieces in json.loads(text):
        terms = []
        for piece in pieces:
            if isinstance(piece, str):
                terms.append(piece)
            elif "word" in piece:
                terms.append(_word(piece["word"], tokenizer))
            else:
                terms.append(_until(piece["until"], rules, tokenizer))
        rules.append("".join(terms))
    return "\n".join(rules)


def _until(text: str, rules: list[str], tokenizer: llguidance.LLTokenizer) -> str:
    """Return the term of any text up to and including `text`. Unless `text` begins with a special token of the
    tokenizer, appends a rule of its own to `rules`. Raises ValueError for such a token after other text.
    """
    parts = _parts(text, tokenizer)
    if parts[0][1] is not None:
        return f"/(?s:.*)/ {_word(text, tokenizer)}"  # no text is a token
    if len(parts) > 1:
        raise ValueError(f"the text {text!r} must begin with its token, if another text precedes it")
    name = f"until_{len(rules)}"
    rules.append(f"{name}[suffix={json.dumps(text, ensure_ascii=False)}]: /(?s:.*)/")
    return name


def _word(text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the term of a text: a literal or token for each of its parts; "" for a token that ends sequences."""
    ends = set(tokenizer.eos_tokens)
    return " ".join(
        json.dumps(part, ensure_ascii=False) if token_id is None else '""' if token_id in ends else f"<[{token_id}]>"
        for part, token_id in _parts(text, tokenizer)
    )


def _parts(text: str, tokenizer: llguidance.LLTokenizer) -> list[tuple[str, int | None]]:
    """Return the parts of a text, each with its id if it is a special or added token, else None. A text that is such a
    token, or in which none is found, is a single part; parts without an id are never adjacent.
    """
    found: list[tuple[str, int | None]] = []
    for part in (text, *marker_parts(text)):
        ids = tokenizer.tokenize_str(part)
        special = ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None
        if part == text and special is not None:
            return [(text, special)]
        if special is not None or part != text:
            found.append((part, special))
    if all(special is None for _, special in found):
        return [(text, None)]
    joined: list[tuple[str, int | None]] = []
    for part, special in found:
        if special is None and joined and joined[-1][1] is None:
            joined[-1] = joined[-1][0] + part, None
        else:
            joined.append((part, special))
    return joined
