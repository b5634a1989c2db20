"""Byte-pair encoding over the bytes of a text, by a list of merges or by the ranks of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxengine.tokens.vocabularies.splits import Splitting

SPACE_MARK = "\u2581"
MAX_TOKENS = 1 << 20
# Every split of a token is tried. The longest existing tokens, runs of blanks, have some hundred characters.
MAX_TOKEN_CHARS = 1024
MAX_VOCABULARY_CHARS = 1 << 22


def byte_pair_tokenizer(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], splitting: Splitting
) -> Tokenizer:
    """Return a byte-pair tokenizer without special tokens, with the pre-tokenizer, normalizer and decoder of
    `splitting`.

    vocabulary: ids by token; tokens are spelt as bytes or as characters, as splitting.spells_bytes says. merges: pairs
    of tokens whose concatenation is a token, the best first.
    """
    falls_back = not splitting.spells_bytes
    model = models.BPE(
        vocab=dict(vocabulary),
        merges=list(merges),
        ignore_merges=splitting.ignore_merges,
        byte_fallback=falls_back,
        fuse_unk=falls_back,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    if (normalizer := splitting.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    if splitting.spells_bytes:
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    return tokenizer


def too_long(tokens: Collection[str]) -> str | None:
    """Return an error text with the allowed lengths if a token, or all tokens together, are too long; None otherwise.
    tokens: all tokens of a vocabulary, at least one.
    """
    longest, total = max(map(len, tokens)), sum(map(len, tokens))
    if longest <= MAX_TOKEN_CHARS and total <= MAX_VOCABULARY_CHARS:
        return None
    allowed = f"at most {MAX_TOKEN_CHARS} characters each and {MAX_VOCABULARY_CHARS} between them"
    return f"tokens must have {allowed}, got {longest} and {total}"


def merges_of_ranks(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges, the best first, of a vocabulary in which a merge is the better the lower the rank of its
    result.

    These are all splits of each token into two others. Among the splits of one token, the one whose parts have the
    lowest ranks comes first, as the token was made from it.
    """
    cuts = [(ranks[left + right], max(ranks[left], ranks[right]), left, right) for left, right in splits_in_two(ranks)]
    cuts.sort()
    return [(left, right) for *_, left, right in cuts]


def splits_in_two(tokens: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens whose concatenation is a token, in the order of these tokens, and for one token the
    shortest first part first.
    """
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in tokens and token[cut:] in tokens:
                yield token[:cut], token[cut:]


def spelt(tokens: Iterable[bytes]) -> list[str]:
    """Return each run of bytes as a text with one printable character per byte, as in GPT-2 (Radford et al. 2019)."""
    return [token.decode("latin-1").translate(CHAR_OF_BYTE) for token in tokens]


def _char_of_byte() -> dict[int, str]:
    """Return a map from each byte to the character that spells it: printable Latin-1 characters spell themselves, and
    the other bytes get U+0100 and up, in order.
    """
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    plain = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


CHAR_OF_BYTE = _char_of_byte()
