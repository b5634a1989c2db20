"""Reads Mistral AI's own tokenizer files: tekken.json, or SentencePiece's tokenizer.model.v1 to .v7.

tekken.json has byte pairs by rank, as tiktoken's files, and after the special tokens, which have the first ids. Either
file names a version of the chat format, from which the chat template follows.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import parse_object, read_bytes, read_text
from jaxengine.tokens.mistral.dialect import leave_out_guards
from jaxengine.tokens.mistral.template import VERSIONS, MistralFormat
from jaxengine.tokens.vocabularies.byte_pairs import MAX_TOKENS, byte_pair_tokenizer, merges_of_ranks, spelt, too_long
from jaxengine.tokens.vocabularies.ends import with_ends
from jaxengine.tokens.vocabularies.pieces import CONTROL, NORMAL, UNKNOWN, add_marked_tokens, byte_pair_pieces
from jaxengine.tokens.vocabularies.sentencepiece import read_sentencepiece
from jaxengine.tokens.vocabularies.splits import Splitting

TEKKEN = "tekken.json"
MAX_TEKKEN_BYTES, MAX_PIECES_BYTES, MAX_PATTERN_CHARS = 1 << 28, 1 << 25, 1 << 14
MAX_SPECIAL, MAX_SPECIAL_CHARS = 4096, 128
ROLES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_PIECES = re.compile(r"tokenizer\.model\.v(\d{1,2})(m1)?")
# Special tokens of a tekken.json of version 3 or 7 that lists none, in the order of their ids.
_SPECIAL = """
    <unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
    [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
"""
_LAST_UNLISTED = 7


class MistralFile(NamedTuple):
    """Content of a tokenizer file.

    Attributes:
      backend: the tokenizer, with special tokens, which puts <s> before texts.
      ids: ids of the special tokens by role, as in ROLES; None for a missing one.
      form: the chat format.
    """

    backend: Tokenizer
    ids: dict[str, int | None]
    form: MistralFormat


def mistral_file(folder: Path) -> str | None:
    """Return the name of a folder's tokenizer file in Mistral AI's format: tekken.json, otherwise the latest version of
    tokenizer.model.v1 to .v7; None if it has neither.
    """
    if (folder / TEKKEN).is_file():
        return TEKKEN
    names = (path.name for path in folder.glob("tokenizer.model.v*") if _PIECES.fullmatch(path.name))
    return max(names, key=_version_of_pieces, default=None)


def read_mistral_file(folder: Path, name: str) -> MistralFile:
    """Return the content of the folder's tokenizer file `name`, a result of `mistral_file`; its tokenizer puts the BOS
    token before texts and leaves GUARD out of them. Raises ModelFileError for an invalid file, and for a version of the
    chat format that is not known.
    """
    path = folder / name
    backend, form = _read_tekken(path) if name == TEKKEN else _read_pieces(path)
    ids = {role: backend.token_to_id(text) for role, text in ROLES.items()}
    if ids["bos"] is None or ids["eos"] is None:
        raise ModelFileError(path, f"must have the special tokens {ROLES['bos']} and {ROLES['eos']}")
    backend.post_processor = with_ends((ROLES["bos"], ids["bos"]), None)
    leave_out_guards(backend)
    return MistralFile(backend, ids, form)


def _version_of_pieces(name: str) -> int:
    """Return the version in the name of a SentencePiece file; 0 for another name."""
    found = _PIECES.fullmatch(name)
    return int(found[1]) if found else 0


def _read_pieces(path: Path) -> tuple[Tokenizer, MistralFormat]:
    """Return the tokenizer and the chat format of a SentencePiece file, whose name has the version. Raises
    ModelFileError for an invalid file, a model that is not BPE, and a version that is not known.
    """
    source = read_bytes(path.parent, path.name, MAX_PIECES_BYTES) or b""
    pieces, is_unigram, _ = read_sentencepiece(source, path)
    if is_unigram:
        raise ModelFileError(path, "must be a BPE model")
    tokenizer = byte_pair_pieces(pieces)
    kinds = [kind if kind in (CONTROL, UNKNOWN) else NORMAL for kind in pieces.types]
    add_marked_tokens(tokenizer, pieces.names, kinds)
    found = _PIECES.fullmatch(path.name)
    return tokenizer, MistralFormat(_known(_version_of_pieces(path.name), path), images=bool(found and found[2]))


def _read_tekken(path: Path) -> tuple[Tokenizer, MistralFormat]:
    """Return the tokenizer and the chat format of a tekken.json. Its vocabulary has default_vocab_size tokens: the
    special ones, and then the first ones of the list vocab.

    Raises ModelFileError without config or vocab; for a pattern of no or too many characters, a version that is not
    known, sizes that do not fit the list or the limits, too long tokens, and the errors of `_special`, `_ranked` and
    `_format`.
    """
    content = parse_object(path, read_text(path.parent, path.name, MAX_TEKKEN_BYTES) or "", dict)
    config, vocabulary = content.get("config"), content.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocabulary, list):
        raise ModelFileError(path, "must have a mapping, config, and a list, vocab")
    pattern, version = config.get("pattern"), str(config.get("version"))
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise ModelFileError(path, f"must be a regular expression of at most {MAX_PATTERN_CHARS} characters", "pattern")
    number = _known(int(version[1:]) if re.fullmatch(r"v\d{1,2}", version) else version, path)
    count, size = _size(config, "default_num_special_tokens", path), _size(config, "default_vocab_size", path)
    if not count < size <= min(MAX_TOKENS, len(vocabulary) + count) or count > MAX_SPECIAL:
        allowed = f"more than default_num_special_tokens (at most {MAX_SPECIAL}) and no more than there are tokens"
        raise ModelFileError(path, f"must be {allowed}, got {size}", "default_vocab_size")
    special = _special(content.get("special_tokens"), count, number, path)
    tokens = spelt(_ranked(vocabulary[: size - count], path))
    if (problem := too_long(tokens)) is not None:
        raise ModelFileError(path, problem)
    return _tokenizer(tokens, special, pattern), _format(content, number, special, path)


def _tokenizer(tokens: Sequence[str], special: Sequence[str], pattern: str) -> Tokenizer:
    """Return the tokenizer in which special tokens have the first ids, and `tokens`, by rank, the others. A token that
    is spelt like a special one is left out.
    """
    taken = {*special}
    ranks = {name: rank for rank, name in enumerate(tokens)}
    merges = merges_of_ranks(ranks)
    ids = {name: at for at, name in enumerate(special)}
    ids |= {name: len(special) + rank for name, rank in ranks.items() if name not in taken}
    merges = [pair for pair in merges if "".join(pair) not in taken and not taken & {*pair}]
    tokenizer = byte_pair_tokenizer(ids, merges, Splitting((pattern,), ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def _known(version: Any, path: Path) -> int:
    """Return a version of the chat format. Raises ModelFileError for one that is not known."""
    if version not in VERSIONS:
        names = ", ".join(f"v{each}" for each in VERSIONS)
        raise ModelFileError(path, f"the version must be one of {names}, got {str(version)[:20]}")
    return version


def _size(config: Mapping[str, Any], name: str, path: Path) -> int:
    """Return the number of tokens in the field `name`. Raises ModelFileError unless it is an integer >= 0."""
    value = config.get(name)
    if type(value) is not int or value < 0:
        raise ModelFileError(path, f"must be an integer >= 0, got {str(value)[:100]}", name)
    return value


def _special(listed: Any, count: int, version: int, path: Path) -> list[str]:
    """Return the `count` special tokens in the order of their ids; ids without one get a name with the id. listed: the
    field special_tokens; None for the usual tokens, which only versions up to _LAST_UNLISTED allow. Raises
    ModelFileError for tokens that are not distinct texts, of 2 to MAX_SPECIAL_CHARS characters, with ranks below
    `count`.
    """
    if listed is None and version > _LAST_UNLISTED:
        raise ModelFileError(path, f"must be a list in version {version}", "special_tokens")
    named = dict(enumerate(_SPECIAL.split()))
    if listed is not None:
        entries = [each if isinstance(each, dict) else {} for each in (listed if isinstance(listed, list) else [{}])]
        if not all(type(each.get("rank")) is int and isinstance(each.get("token_str"), str) for each in entries):
            raise ModelFileError(path, "must be a list of tokens with rank and token_str", "special_tokens")
        named = {each["rank"]: each["token_str"] for each in entries}
        if len(named) != len(entries):
            raise ModelFileError(path, "must have a rank of its own for each token", "special_tokens")
    found = [named.get(at, f"<SPECIAL_{at}>") for at in range(count)]
    if len({*found}) != count or any(not 0 <= at < count for at in named):
        raise ModelFileError(path, f"must have distinct tokens of ranks below {count}", "special_tokens")
    if not all(1 < len(each) <= MAX_SPECIAL_CHARS for each in found):
        raise ModelFileError(path, f"must have tokens of 2 to {MAX_SPECIAL_CHARS} characters", "special_tokens")
    return found


def _ranked(vocabulary: Sequence[Any], path: Path) -> list[bytes]:
    """Return the bytes of tokens by rank. Raises ModelFileError for entries that are not tokens in base64 in the order
    of their ranks, the single bytes first.
    """
    try:
        tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in vocabulary]
        ranks = [each["rank"] for each in vocabulary]
    except (TypeError, KeyError, ValueError, binascii.Error) as error:
        raise ModelFileError(path, f"must have rank and token_bytes in base64: {str(error)[:100]}", "vocab") from None
    single = [bytes([byte]) for byte in range(256)]
    if ranks != list(range(len(tokens))) or len({*tokens}) != len(tokens) or tokens[:256] != single:
        raise ModelFileError(path, "must have distinct tokens with the ranks from 0 on, single bytes first", "vocab")
    return tokens


def _format(content: Mapping[str, Any], version: int, special: Sequence[str], path: Path) -> MistralFormat:
    """Return the chat format of a tekken.json. It thinks from version 13 on, if `special` has the tokens of thoughts,
    and has efforts, the default first, from version 15 on. Raises ModelFileError for invalid values of
    reasoning_effort.
    """
    thinks = version >= 13 and {"[THINK]", "[/THINK]"} <= {*special}
    builder = content.get("model_settings_builder")
    effort = builder.get("reasoning_effort") if isinstance(builder, dict) else None
    efforts: tuple[str, ...] = ()
    if version >= 15 and isinstance(effort, dict):
        values, default = effort.get("values"), effort.get("default")
        words = [each for each in values if _is_word(each)] if isinstance(values, list) else []
        if not words or words != values or default not in words:
            raise ModelFileError(path, "must have a list of values, and one of them as default", "reasoning_effort")
        efforts = (str(default), *(each for each in words if each != default))
    has_images = isinstance(content.get("image") or content.get("multimodal") or None, dict)
    return MistralFormat(version, has_images, bool(content.get("audio")), thinks, efforts)


def _is_word(value: Any) -> bool:
    """Return whether a value is a text of 1 to 32 small letters and underscores, which may stand in a template as it
    is.
    """
    return isinstance(value, str) and re.fullmatch("[a-z_]{1,32}", value) is not None
