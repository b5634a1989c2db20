"""Builder of a tokenizer from the metadata of a GGUF file.

A GGUF file contains the vocabulary and names the way in which texts are split (see vocabularies.splits). The types of
vocabularies are, in llama.cpp's terms: "gpt2", byte-level BPE with a list of merges; "llama", SentencePiece BPE, whose
merges follow from the scores; "t5", SentencePiece's unigram model; "bert", word pieces; "gemma4", BPE over characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.gguf_ends import listed_ends, named_turn_ends
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.vocabularies.byte_pairs import SPACE_MARK, byte_pair_tokenizer, merges_of_ranks, too_long
from jaxengine.tokens.vocabularies.ends import with_ends
from jaxengine.tokens.vocabularies.pieces import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    Pieces,
    add_marked_tokens,
    byte_pair_pieces,
    unigram_pieces,
)
from jaxengine.tokens.vocabularies.splits import SPLITTINGS
from jaxengine.tokens.word_pieces import word_piece_tokenizer

TEMPLATE = "tokenizer.chat_template"
OTHER_WAY = "give another with --tokenizer org/name or a folder"


class _Metadata:
    """Typed access to the tokenizer's metadata. Methods raise ModelFileError for missing values and wrong types."""

    def __init__(self, values: Mapping[str, Any], path: str):
        self._values, self.path = values, path

    def fail(self, what: str, key: str) -> ModelFileError:
        """Return (not raise) the ModelFileError for a value. what: the fault. key: the value's name after
        "tokenizer.ggml.".
        """
        return ModelFileError(self.path, what, f"tokenizer.ggml.{key}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of tokenizer.ggml.KEY, or `default` if it is missing. Raises ModelFileError if its type is
        not exactly `kind`.
        """
        value = self._values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if type(value) is not kind:
            raise self.fail(f"must be {kind.__name__}, got {type(value).__name__}", key)
        return value

    def texts(self, key: str) -> list[str]:
        """Return the list of strings tokenizer.ggml.KEY. Raises ModelFileError if it is missing, empty or of another
        type.
        """
        values = self.get(key, list)
        if not values or not all(type(value) is str for value in values):
            raise self.fail("must be a list of strings that is not empty", key)
        return values

    def numbers(self, key: str, length: int) -> np.ndarray | None:
        """Return the array tokenizer.ggml.KEY, or None if it is missing. Raises ModelFileError if it is not an array or
        does not have `length` entries.
        """
        values = self.get(key, np.ndarray)
        if values is not None and len(values) != length:
            raise self.fail(f"must have one entry for each of {length} tokens, got {len(values)}", key)
        return values

    def token_id(self, key: str, size: int) -> int | None:
        """Return the token id tokenizer.ggml.KEY, or None if it is missing. Raises ModelFileError unless it is an int
        in [0, size).
        """
        number = self.get(key, int)
        if number is not None and not 0 <= number < size:
            raise self.fail(f"must be from 0 to {size - 1}, got {number}", key)
        return number


def build_tokenizer(values: Mapping[str, Any], path: str) -> Tokenizer:
    """Return the tokenizer of a GGUF file, including its special tokens and the BOS and EOS that the file requests.

    values: the file's metadata by key. path: path of the file, for errors. A token without a name gets the name
    [EMPTY_ID], and without types all tokens are normal. Raises ModelFileError for metadata that is incomplete,
    contradictory, or names an unknown model or pre-tokenizer.
    """
    metadata = _Metadata(values, path)
    tokens = metadata.texts("tokens")
    if (problem := too_long(tokens)) is not None:
        raise metadata.fail(problem, "tokens")
    types = metadata.numbers("token_type", len(tokens))
    types = np.full(len(tokens), NORMAL) if types is None else types
    # llama.cpp gives unnamed tokens a name too.
    vocabulary = {token or f"[EMPTY_{number}]": number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise metadata.fail(f"only {len(vocabulary)} of {len(tokens)} tokens are distinct", "tokens")
    kind = metadata.get("model", str)
    if kind not in _MODELS:
        supported = ", ".join(map(repr, _MODELS))
        raise metadata.fail(f"tokenizer model {kind!r} is not supported; supported: {supported}; {OTHER_WAY}", "model")
    special = special_tokens(values, path)
    return _MODELS[kind](_Parts(metadata, vocabulary, types, special))


class _Parts(NamedTuple):
    """Checked parts of a file's vocabulary: the metadata, token ids by token, token types by id, and ids of special
    tokens.
    """

    metadata: _Metadata
    vocabulary: dict[str, int]
    types: np.ndarray
    special: SpecialTokens

    @property
    def names(self) -> list[str]:
        """Tokens in the order of their ids."""
        return list(self.vocabulary)

    def pieces(self, adds_space: bool) -> Pieces:
        """Return the vocabulary of a SentencePiece model. adds_space: whether a space is put before texts if the file
        does not say. Raises ModelFileError unless each token has a finite score and the character map, if any, is
        bytes.
        """
        scores = self.metadata.numbers("scores", len(self.vocabulary))
        if scores is None or not np.isfinite(scores).all():
            raise self.metadata.fail("must hold one finite score for each token", "scores")
        char_map = self.metadata.get("precompiled_charsmap", np.ndarray)
        if char_map is not None and char_map.dtype.itemsize != 1:
            raise self.metadata.fail(f"must be bytes, got {char_map.dtype}", "precompiled_charsmap")
        return Pieces(
            self.names,
            scores.tolist(),
            self.types.tolist(),
            b"" if char_map is None else char_map.tobytes(),
            adds_space=self.metadata.get("add_space_prefix", bool, adds_space),
            strips=self.metadata.get("remove_extra_whitespaces", bool, False),
        )

    def finished(self, tokenizer: Tokenizer, adds_bos: bool, adds_eos: bool = False) -> Tokenizer:
        """Add special tokens, and the BOS, EOS and, between two texts, SEP that the file requests, to a tokenizer in
        place, and return it.

        adds_bos, adds_eos: defaults if the file does not say. A requested token whose id the file does not give is left
        out. Raises ModelFileError for a request that is not a bool.
        """
        names = self.names
        add_marked_tokens(tokenizer, names, self.types.tolist())
        bos = self.special.bos if self.metadata.get("add_bos_token", bool, adds_bos) else None
        eos = self.special.eos if self.metadata.get("add_eos_token", bool, adds_eos) else None
        sep = self.metadata.token_id(_WORD_ROLES["sep"], len(names))
        sep = sep if self.metadata.get("add_sep_token", bool, False) else None
        begin, end, between = (None if at is None else (names[at], at) for at in (bos, eos, sep))
        tokenizer.post_processor = with_ends(begin, end, pairs=True, between=between)
        return tokenizer


def _of_merges(parts: _Parts) -> Tokenizer:
    """Return a BPE tokenizer with the file's merges. For Kimi's files without merges, these are derived from the order
    of the normal tokens.

    Raises ModelFileError for an unknown pre-tokenizer, for missing merges, and for a merge that is not two tokens whose
    concatenation is a token.
    """
    metadata, vocabulary = parts.metadata, parts.vocabulary
    pre = metadata.get("pre", str, "gemma4" if metadata.get("model", str) == "gemma4" else "default")
    splitting = SPLITTINGS.get(pre)
    if splitting is None:
        raise metadata.fail(f"pre-tokenizer {pre!r} is not known; {OTHER_WAY}", "pre")
    if pre.startswith("kimi") and metadata.get("merges", list) is None:
        ranks = {name: at for name, at in vocabulary.items() if parts.types[at] == NORMAL}
        return parts.finished(byte_pair_tokenizer(vocabulary, merges_of_ranks(ranks), splitting), splitting.adds_bos)
    merges = []
    for merge in metadata.texts("merges"):
        left, space, right = merge.partition(" ")
        if not (left and right) or " " in right:
            raise metadata.fail(f"a merge must be two tokens with a space between, got {merge[:100]!r}", "merges")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise metadata.fail(f"{merge[:100]!r} has a part or a result that is not in the vocabulary", "merges")
        merges.append((left, right))
    return parts.finished(byte_pair_tokenizer(vocabulary, merges, splitting), splitting.adds_bos)


def _of_scores(parts: _Parts) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer. It puts a space and BOS before texts unless the file says otherwise. Raises
    ModelFileError for invalid metadata.
    """
    return parts.finished(byte_pair_pieces(parts.pieces(adds_space=True)), adds_bos=True)


def _of_unigrams(parts: _Parts) -> Tokenizer:
    """Return a SentencePiece unigram tokenizer. It appends EOS unless the file says otherwise. Raises ModelFileError
    for invalid metadata, and if the file names no unknown token.
    """
    pieces = parts.pieces(adds_space=False)
    unknown = parts.special.unk
    if not pieces.with_types(UNKNOWN):
        if unknown is None:
            raise parts.metadata.fail("must name the unknown token, which no token_type does", "unknown_token_id")
        pieces = pieces._replace(types=[UNKNOWN if at == unknown else kind for at, kind in enumerate(pieces.types)])
    return parts.finished(unigram_pieces(pieces), adds_bos=False, adds_eos=True)


def _of_words(parts: _Parts) -> Tokenizer:
    """Return BERT's tokenizer. The file marks tokens at the beginning of a word with U+2581; BERT's vocabulary marks
    the other ones with ## instead, so names are converted. Texts are lower-cased unless the file says otherwise, and
    accents are then removed, unless it says otherwise. Raises ModelFileError if the converted words are not distinct,
    or if the unknown token, [CLS] or [SEP] is neither named nor in the vocabulary.
    """
    metadata, names = parts.metadata, parts.names
    marked = {at for at in range(len(names)) if parts.types[at] in (CONTROL, UNKNOWN)}
    words: dict[str, int] = {}
    for at, name in enumerate(names):
        is_special = at in marked or (name.startswith("[") and name.endswith("]") and len(name) > 2)
        starts = name.startswith(SPACE_MARK) and len(name) > 1
        words[name if is_special else name[1:] if starts else f"##{name}"] = at
    if len(words) != len(names):
        raise metadata.fail(f"only {len(words)} of {len(names)} words are distinct", "tokens")
    roles = {"unk_token": parts.special.unk, "cls_token": parts.special.bos}
    roles |= {f"{role}_token": metadata.token_id(key, len(names)) for role, key in _WORD_ROLES.items()}
    if roles["cls_token"] is None:
        roles["cls_token"] = metadata.token_id("cls_token_id", len(names))
    spelt = {at: word for word, at in words.items()}
    for role, default in _WORD_DEFAULTS.items():
        at = roles[role] if roles.get(role) is not None else words.get(default)
        if at is None:
            raise metadata.fail(f"must name the {role}, as no token is {default}", "tokens")
        roles[role] = at
    lowers = metadata.get("normalizer.lowercase", bool, True)
    tokenizer = word_piece_tokenizer(
        words,
        {role: spelt[at] for role, at in roles.items() if at is not None},
        lowers=lowers,
        strips_accents=metadata.get("normalizer.strip_accents", bool, lowers),
    )
    add_marked_tokens(tokenizer, [spelt[at] for at in range(len(names))], parts.types.tolist())
    return tokenizer


# The second name is misspelt in the format.
_WORD_ROLES = {"sep": "seperator_token_id", "mask": "mask_token_id", "pad": "padding_token_id"}
_WORD_DEFAULTS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
# Builders by `tokenizer.ggml.model`.
_MODELS: dict[str | None, Callable[[_Parts], Tokenizer]] = {
    "gpt2": _of_merges,
    "llama": _of_scores,
    "t5": _of_unigrams,
    "bert": _of_words,
    "gemma4": _of_merges,
}


def special_tokens(values: Mapping[str, Any], path: str) -> SpecialTokens:
    """Return the ids of the special tokens in GGUF metadata; turn_ends are eot and eom, the listed ends, and tokens
    whose names end turns. values: the metadata by key. path: path of the file, for errors. Raises ModelFileError for
    ids outside the vocabulary.
    """
    metadata = _Metadata(values, path)
    size = len(metadata.texts("tokens"))
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        ids[name] = metadata.token_id(f"{name}_token_id", size)
    ends = [end for end in (ids["eot"], ids["eom"]) if end is not None]
    listed = listed_ends(values)
    if not all(type(number) is int and 0 <= number < size for number in listed):
        raise metadata.fail(f"must be ids from 0 to {size - 1}, got {str(listed)[:100]}", "eos_token_ids")
    ends = tuple(dict.fromkeys((*ends, *listed, *named_turn_ends(values))))
    return SpecialTokens(ids["bos"], ids["eos"], ids["unknown"], ids["padding"], ends)


def chat_template_of(values: Mapping[str, Any], path: str) -> str | dict[str, str] | None:
    """Return the file's chat template as Jinja source. For a file with several, return a dict from names to sources, in
    which the unnamed one is "default". Returns None if the file has none.

    values: the file's metadata by key. path: path of the file, for errors. Raises ModelFileError if a template is not a
    text.
    """
    named = {key: value for key, value in values.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    for key, template in named.items():
        if type(template) is not str:
            raise ModelFileError(path, f"must be a text, got {type(template).__name__}", key)
    only = named.pop(TEMPLATE, None)
    if not named:
        return only
    default = {} if only is None else {"default": only}
    return default | {key.removeprefix(f"{TEMPLATE}."): template for key, template in named.items()}
