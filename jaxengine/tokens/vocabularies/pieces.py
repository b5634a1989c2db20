"""SentencePiece vocabularies as tokenizers: byte-pair encoding by scores, and the unigram model.

Texts are prepared as in SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226): characters are mapped, a space
becomes U+2581, and one is put in front of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxengine.tokens.vocabularies.byte_pairs import SPACE_MARK, splits_in_two

# Types of pieces, as SentencePiece and GGUF (`tokenizer.ggml.token_type`) number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Pieces(NamedTuple):
    """SentencePiece vocabulary, with the preparation of texts.

    Attributes:
      names, scores, types: name, score and type of each piece, by id; names are distinct.
      char_map: SentencePiece's compiled map of characters; empty for none.
      adds_space: whether a space is put in front of the text.
      strips: whether spaces at both ends are removed and runs of spaces become one.
      only_first: whether adds_space leaves out text after a special token, and text that begins with a space.
      isolates: whether user-defined pieces are separate tokens wherever the prepared text contains them; otherwise
        they are tokens found in the original text.
    """

    names: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    char_map: bytes = b""
    adds_space: bool = True
    strips: bool = False
    only_first: bool = False
    isolates: bool = False

    def with_types(self, *types: int) -> list[int]:
        """Return the ascending ids of the pieces that have one of these types."""
        return _of(self.types, *types)


def byte_pair_pieces(pieces: Pieces) -> Tokenizer:
    """Return a byte-pair tokenizer. Unknown characters become byte tokens, or the unknown token if there are no byte
    tokens.

    SentencePiece merges the neighbours whose concatenation has the best score. The equivalent list of merges has all
    splits of each piece, sorted by score.
    """
    mergeable = (NORMAL, UNUSED) if pieces.isolates else (NORMAL, USER_DEFINED, UNUSED)
    known = {pieces.names[at]: at for at in pieces.with_types(*mergeable)}
    cuts = []
    for left, right in splits_in_two(known):
        at = known[left + right]
        cuts.append((-float(pieces.scores[at]), len(left), at, known[left], left, right))
    cuts.sort()
    vocabulary = {name: at for at, name in enumerate(pieces.names)}
    unknown = next((pieces.names[at] for at in pieces.with_types(UNKNOWN)), None)
    merges = [(left, right) for *_, left, right in cuts]
    ignores = pieces.isolates and bool(pieces.with_types(USER_DEFINED))
    model = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=ignores,
    )
    tokenizer = Tokenizer(model)
    if ignores and pieces.with_types(BYTE):
        tokenizer.pre_tokenizer = _splits_written_bytes()
    return _with_texts(tokenizer, pieces)


def unigram_pieces(pieces: Pieces) -> Tokenizer:
    """Return a unigram tokenizer, which splits a text into the pieces with the largest sum of scores. Unknown
    characters become byte tokens, or the unknown token if there are no byte tokens. Unless a normal piece has a space
    after its first character, each word is split by itself. `pieces` must contain an unknown piece.
    """
    unknown = pieces.with_types(UNKNOWN)[0]
    has_bytes = bool(pieces.with_types(BYTE))
    scored = [(name, float(score)) for name, score in zip(pieces.names, pieces.scores, strict=True)]
    tokenizer = Tokenizer(models.Unigram(scored, unknown, has_bytes))
    splits: list[Any] = []
    # Pieces end with words unless one says otherwise; words are then looked up in a cache.
    if not any(pieces.names[at].rfind(SPACE_MARK) > 0 for at in pieces.with_types(NORMAL)):
        splits.append(pre_tokenizers.Split(SPACE_MARK, "merged_with_next"))
    if has_bytes:
        splits.append(_splits_written_bytes())
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return _with_texts(tokenizer, pieces)


def add_marked_tokens(tokenizer: Tokenizer, names: Sequence[str], types: Sequence[int]) -> None:
    """Make control and unknown pieces special tokens of `tokenizer`, and user-defined pieces tokens that are found in
    texts before anything else. Changes `tokenizer` in place. names, types: names and types of all pieces, by id.
    """
    special = [AddedToken(names[at], special=True, normalized=False) for at in _of(types, CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens(special)
    defined = [AddedToken(names[at], special=False, normalized=False) for at in _of(types, USER_DEFINED)]
    tokenizer.add_tokens(defined)


def _splits_written_bytes() -> Any:
    """Return a pre-tokenizer that splits the text "<0x0A>" after its "<", so that it is read as characters and does not
    match the byte token of that name.
    """
    return pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")


def longest_of(texts: Sequence[str]) -> str:
    """Return a regular expression that matches the longest of the texts that begins at a position. texts: not empty
    ones.

    The expression is a trie, as an alternation would be slow.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = None  # a text ends
    nodes = [root]
    for node in nodes:  # grows
        nodes += [rest for char, rest in node.items() if char]
    found: dict[int, str] = {}
    for node in reversed(nodes):
        rests = [re.escape(char) + found.pop(id(rest)) for char, rest in node.items() if char]
        one = rests[0] if len(rests) == 1 else f"(?:{'|'.join(rests)})" if rests else ""
        found[id(node)] = f"(?:{one})?" if rests and "" in node else one
    return found[id(root)]


def _of(types: Sequence[int], *wanted: int) -> list[int]:
    """Return the indices, ascending, at which `types` has one of the wanted values."""
    return [at for at, kind in enumerate(types) if kind in wanted]


def _with_texts(tokenizer: Tokenizer, pieces: Pieces) -> Tokenizer:
    """Set the tokenizer's normalizer and decoder for the vocabulary, and extend its pre-tokenizer if user-defined
    pieces are isolated or only the first word gets a mark. The normalizer applies the vocabulary's character map, joins
    and strips spaces if it `strips`, and writes spaces as SPACE_MARK, one of which is put in front if it `adds_space`;
    the decoder does the reverse. Changes `tokenizer` in place and returns it.
    """
    steps: list[Any] = [normalizers.Precompiled(pieces.char_map)] if pieces.char_map else []
    if pieces.strips:
        # Not \s: a mark of the end of a line is a character like others, unless the map makes it a space. Runs first,
        # as looking for the end of the text after each space of a run takes time by the square of its length.
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    splits: list[Any] = []
    if pieces.adds_space and pieces.only_first:
        splits.append(pre_tokenizers.Metaspace(SPACE_MARK, "first", split=False))
    else:
        steps += [normalizers.Prepend(SPACE_MARK)] * pieces.adds_space
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    if pieces.isolates and (defined := [pieces.names[at] for at in pieces.with_types(USER_DEFINED)]):
        splits.append(pre_tokenizers.Split(Regex(longest_of(defined)), "isolated"))
    if splits:
        own = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits + own)
    if steps:
        tokenizer.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    shown: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.adds_space:
        shown.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(shown)
    return tokenizer
