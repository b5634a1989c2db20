"""Map of a vocabulary's tokens to a smaller one, in which tokens that read alike are one (DeepSeek-AI 2026, Engram)."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, normalizers

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character decode to
_ONE_SPACE = "\ue000"  # keeps a token that is one space, for private use


def folded_ids(tokenizer: Tokenizer) -> list[int]:
    """Return for each token id the number of its text among the different texts of tokens, counted in the order of ids.

    Texts are compared after NFKC, without accents, in lower case, with each run of spaces, tabs and ends of lines as
    one space, and without spaces at both ends unless nothing else is left. A text that this leaves empty, and a token
    of bytes that are no character, in its own spelling, are compared as they are.
    """
    folding = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    found = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        known = tokenizer.id_to_token(token_id) if _UNKNOWN in text else folding.normalize_str(text) or text
        found.append(numbers.setdefault(known, len(numbers)))
    return found
