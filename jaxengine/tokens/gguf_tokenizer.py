"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary and names the pre-tokenizer (`tokenizer.ggml.pre`), whose implementation is code. The
ones below are llama.cpp's (src/llama-vocab.cpp) as `tokenizers` components. Two kinds of models are supported: "gpt2",
byte-level BPE with a merge list, and "llama", SentencePiece BPE, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.gguf_ends import listed_ends, named_turn_ends
from jaxengine.tokens.special_tokens import SpecialTokens

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE_MARK = "\u2581"
# Every split of a token is tried. The longest existing tokens, runs of blanks, have some hundred characters.
MAX_TOKEN_CHARS = 1024
MAX_VOCABULARY_CHARS = 1 << 22

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's splitting for files that name none.
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS = {
    "smollm": _smollm,
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "llama3": lambda: _split(LLAMA3_SPLIT),
    "llama-v3": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
    "gpt-2": _gpt2,
    "default": lambda: _split(*DEFAULT_SPLITS),
}
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
# Pre-tokenizers with NFC normalisation: Qwen's own tokenizer has it, llama.cpp omits it.
COMPOSING_NAMES = ("qwen2",)


class _Metadata:
    """Typed access to the tokenizer's metadata. Raises ModelFileError for missing values and wrong types."""

    def __init__(self, values: Mapping[str, Any], path: str):
        self._values, self.path = values, path

    def fail(self, what: str, key: str) -> ModelFileError:
        return ModelFileError(self.path, what, f"tokenizer.ggml.{key}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if type(value) is not kind:
            raise self.fail(f"must be {kind.__name__}, got {type(value).__name__}", key)
        return value

    def texts(self, key: str) -> list[str]:
        values = self.get(key, list)
        if not values or not all(type(value) is str for value in values):
            raise self.fail("must be a list of strings that is not empty", key)
        return values

    def numbers(self, key: str, length: int) -> np.ndarray | None:
        values = self.get(key, np.ndarray)
        if values is not None and len(values) != length:
            raise self.fail(f"must have one entry for each of {length} tokens, got {len(values)}", key)
        return values


def build_tokenizer(values: Mapping[str, Any], path: str) -> Tokenizer:
    """Builds the tokenizer of a GGUF file, including special tokens and the BOS/EOS that it asks for.

    values: the file's metadata by key. path: of the file, for errors.

    Raises ModelFileError for metadata that is incomplete, contradictory, or names an unknown model or pre-tokenizer.
    """
    metadata = _Metadata(values, path)
    tokens = metadata.texts("tokens")
    longest, total = max(map(len, tokens)), sum(map(len, tokens))
    if longest > MAX_TOKEN_CHARS or total > MAX_VOCABULARY_CHARS:
        text = f"tokens must have at most {MAX_TOKEN_CHARS} characters each and {MAX_VOCABULARY_CHARS} between them"
        raise metadata.fail(f"{text}, got {longest} and {total}", "tokens")
    types = metadata.numbers("token_type", len(tokens))
    types = np.full(len(tokens), NORMAL) if types is None else types
    # llama.cpp gives unnamed tokens a name too.
    vocabulary = {token or f"[EMPTY_{number}]": number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise metadata.fail(f"only {len(vocabulary)} of {len(tokens)} tokens are distinct", "tokens")
    kind = metadata.get("model", str)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(metadata, vocabulary)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece_bpe(metadata, vocabulary, types), True
    else:
        raise metadata.fail(f"tokenizer model {kind!r} is not supported; supported: 'gpt2', 'llama'", "model")
    names = list(vocabulary)
    tokenizer.add_special_tokens(
        [
            AddedToken(names[at], special=True, normalized=False)
            for at in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN)))
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(names[at], special=False, normalized=False) for at in np.flatnonzero(types == USER_DEFINED)]
    )
    special = special_tokens(values, path)
    tokenizer.post_processor = _frame(
        names,
        special.bos if metadata.get("add_bos_token", bool, adds_bos) else None,
        special.eos if metadata.get("add_eos_token", bool, False) else None,
    )
    return tokenizer


def special_tokens(values: Mapping[str, Any], path: str) -> SpecialTokens:
    """Special token ids in GGUF metadata, checked against its vocabulary. Raises ModelFileError."""
    metadata = _Metadata(values, path)
    size = len(metadata.texts("tokens"))
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        key = f"{name}_token_id"
        ids[name] = number = metadata.get(key, int)
        if number is not None and not 0 <= number < size:
            raise metadata.fail(f"must be from 0 to {size - 1}, got {number}", key)
    ends = [end for end in (ids["eot"], ids["eom"]) if end is not None]
    listed = listed_ends(values)
    if not all(type(number) is int and 0 <= number < size for number in listed):
        raise metadata.fail(f"must be ids from 0 to {size - 1}, got {str(listed)[:100]}", "eos_token_ids")
    ends = tuple(dict.fromkeys((*ends, *listed, *named_turn_ends(values))))
    return SpecialTokens(ids["bos"], ids["eos"], ids["unknown"], ids["padding"], ends)


def chat_template_of(values: Mapping[str, Any], path: str) -> str | None:
    """The file's chat template, Jinja source, or None if it has none. Raises ModelFileError if it is not a text."""
    template = values.get("tokenizer.chat_template")
    if template is not None and type(template) is not str:
        raise ModelFileError(path, f"must be a text, got {type(template).__name__}", "tokenizer.chat_template")
    return template


def _byte_level_bpe(metadata: _Metadata, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Builds a byte-level BPE tokenizer; returns it, and whether texts begin with BOS by default. Raises
    ModelFileError.
    """
    pre = metadata.get("pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise metadata.fail(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}", "pre")
    merges = []
    for merge in metadata.texts("merges"):
        left, space, right = merge.partition(" ")
        if not (left and right) or " " in right:
            raise metadata.fail(f"a merge must be two tokens with a space between, got {merge[:100]!r}", "merges")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise metadata.fail(f"{merge[:100]!r} has a part or a result that is not in the vocabulary", "merges")
        merges.append((left, right))
    is_llama3 = pre in LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    if pre in COMPOSING_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _sentencepiece_bpe(metadata: _Metadata, vocabulary: dict[str, int], types: np.ndarray) -> Tokenizer:
    """Builds a SentencePiece BPE tokenizer. types: of each token, see NORMAL and the following. Raises ModelFileError.

    SentencePiece merges the neighbours whose union has the best score; the equivalent merges are all splits of each
    piece, sorted by score.
    """
    scores = metadata.numbers("scores", len(vocabulary))
    if scores is None or not np.isfinite(scores).all():
        raise metadata.fail("must hold one finite score for each token", "scores")
    pieces = {name: at for name, at in vocabulary.items() if types[at] in (NORMAL, USER_DEFINED, UNUSED)}
    cuts = [
        (-float(scores[at]), len(name[:cut]), at, pieces[name[:cut]], name[:cut], name[cut:])
        for name, at in pieces.items()
        for cut in range(1, len(name))
        if name[:cut] in pieces and name[cut:] in pieces
    ]
    cuts.sort()
    unknown = next((name for name, at in vocabulary.items() if types[at] == UNKNOWN), None)
    merges = [(left, right) for *_, left, right in cuts]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks = normalizers.Replace(" ", SPACE_MARK)
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _frame(names: list[str], bos: int | None, eos: int | None) -> processors.PostProcessor:
    """Post-processor that adds BOS and EOS; a file that asks for one without naming it gets none."""
    before = "" if bos is None else f"{names[bos]}:0 "
    after = "" if eos is None else f" {names[eos]}:0"
    around = [(names[at], at) for at in (bos, eos) if at is not None]
    return processors.TemplateProcessing(single=f"{before}$A:0{after}", special_tokens=around)
