"""Reader of SentencePiece's `tokenizer.model`: a protocol buffer with the pieces, their training settings, and the
preparation of texts.

Its fields are those of sentencepiece_model.proto; only those that change tokens are read, without Google's library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.vocabularies.byte_pairs import MAX_TOKENS, too_long
from jaxengine.tokens.vocabularies.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces

# Wire types of protocol buffers, and the sizes in bytes of wire types with a fixed size.
VARINT, LENGTH = 0, 2
FIXED = {1: 8, 5: 4}
MAX_VARINT_BYTES = 10
# Numbers of fields, by message. The first line is the model's: pieces, settings of the trainer and of the normalizer.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, TYPE = 1, 2, 3
MODEL_TYPE, WHITESPACE_AS_SUFFIX, FIRST_ID = 3, 24, 40
CHAR_MAP, DUMMY_PREFIX, EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5
UNIGRAM, BPE = 1, 2
# Roles of the ids in fields FIRST_ID and up -> ids in a file that gives none; -1 is no token.
ROLES = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}


class SentencePieceModel(NamedTuple):
    """Content of a tokenizer.model file.

    Attributes:
      pieces: the vocabulary.
      is_unigram: whether it is a unigram model; otherwise it is BPE.
      tokens: texts of existing special tokens by role: unk_token, bos_token, eos_token, pad_token.
    """

    pieces: Pieces
    is_unigram: bool
    tokens: dict[str, str]


def read_sentencepiece(source: bytes, path: Path) -> SentencePieceModel:
    """Return the content of a tokenizer.model file. source: the file's bytes. path: path for errors.

    Raises ModelFileError if the bytes are not such a file; for pieces that are too many, too long, empty or not
    distinct, and if none is unknown; and for a model that is neither unigram nor BPE, or that does not mark where words
    begin, or marks where they end.
    """
    names: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(source, path):
        if number in (PIECES, TRAINER, NORMALIZER) and not isinstance(value, bytes):
            raise ModelFileError(path, f"not a SentencePiece model: field {number} is not a message")
        if number == PIECES:
            piece = dict(_fields(value, path))
            if len(names) == MAX_TOKENS:
                raise ModelFileError(path, f"must have at most {MAX_TOKENS} pieces")
            names.append(_text(piece.get(PIECE, b""), path))
            scores.append(_score(piece.get(SCORE, bytes(4)), path))
            types.append(_type(piece.get(TYPE, NORMAL), path))
        elif number in (TRAINER, NORMALIZER):
            (trainer if number == TRAINER else normalizer).update(_fields(value, path))
    kind = trainer.get(MODEL_TYPE, UNIGRAM)
    if not names or UNKNOWN not in types or len({*names, ""}) != len(names) + 1:
        raise ModelFileError(path, "not a SentencePiece model: it must have distinct pieces, one of them unknown")
    if (problem := too_long(names)) is not None:
        raise ModelFileError(path, problem)
    if kind not in (UNIGRAM, BPE) or trainer.get(WHITESPACE_AS_SUFFIX) or not normalizer.get(ESCAPE_WHITESPACES, 1):
        raise ModelFileError(path, "must be a unigram or BPE model that marks where words begin; others are not read")
    ids = {role: _signed(trainer.get(FIRST_ID + at, given)) for at, (role, given) in enumerate(ROLES.items())}
    char_map = normalizer.get(CHAR_MAP, b"")
    pieces = Pieces(
        names,
        scores,
        types,
        char_map if isinstance(char_map, bytes) else b"",
        adds_space=bool(normalizer.get(DUMMY_PREFIX, 1)),
        strips=bool(normalizer.get(EXTRA_WHITESPACES, 1)),
        isolates=True,
    )
    tokens = {f"{role}_token": names[at] for role, at in ids.items() if 0 <= at < len(names)}
    return SentencePieceModel(pieces, kind == UNIGRAM, tokens)


def with_fairseq_ids(pieces: Pieces) -> Pieces:
    """Return XLM-RoBERTa's vocabulary: four special tokens in place of the first three pieces, and <mask> after all
    pieces. pieces: those of its file, more than three.
    """
    special = [CONTROL, CONTROL, CONTROL, UNKNOWN]
    return pieces._replace(
        names=["<s>", "<pad>", "</s>", "<unk>", *pieces.names[3:], "<mask>"],
        scores=[0.0] * 4 + [*pieces.scores[3:], 0.0],
        types=[*special, *pieces.types[3:], CONTROL],
    )


def _fields(source: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of the message in `source`: an int for a varint, bytes for other wire
    types. path: path for errors. Raises ModelFileError for a damaged message or a group.
    """
    at = 0
    while at < len(source):
        key, at = _varint(source, at, path)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(source, at, path)
            yield key >> 3, value
            continue
        size = FIXED.get(kind, 0)
        if kind == LENGTH:
            size, at = _varint(source, at, path)
        elif not size:
            raise ModelFileError(path, f"not a SentencePiece model: wire type {kind} at byte {at}")
        if size > len(source) - at:
            raise ModelFileError(path, f"not a SentencePiece model: {size} bytes announced at byte {at} of a message")
        yield key >> 3, source[at : at + size]
        at += size


def _varint(source: bytes, at: int, path: Path) -> tuple[int, int]:
    """Return (number, offset of the next byte) for the varint at byte `at`. Each byte has seven bits of the number, the
    lowest first; the eighth bit is set except in the last byte. Raises ModelFileError, naming `path`, if the varint
    does not end within MAX_VARINT_BYTES and within the source.
    """
    value = 0
    for shift, byte in enumerate(source[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise ModelFileError(path, f"not a SentencePiece model: a number without an end at byte {at} of a message")


def _signed(value: Any) -> int:
    """Return a varint, read as an unsigned 64-bit number, as the signed number that it encodes; -1, which means no
    token, for a value that is not an int.
    """
    if not isinstance(value, int):
        return -1
    return value - (1 << 64) if value >> 63 else value


def _text(value: Any, path: Path) -> str:
    """Return a piece's bytes, decoded from UTF-8. Raises ModelFileError if the value is not bytes in UTF-8."""
    try:
        return value.decode()
    except (AttributeError, UnicodeDecodeError):
        raise ModelFileError(path, "not a SentencePiece model: a piece is not UTF-8 text") from None


def _type(value: Any, path: Path) -> int:
    """Return a piece's type unchanged. Raises ModelFileError if it is not one of NORMAL to BYTE."""
    if not isinstance(value, int) or not NORMAL <= value <= BYTE:
        shown = value if isinstance(value, int) else f"{len(value)} bytes"
        raise ModelFileError(path, f"not a SentencePiece model: a piece's type must be {NORMAL} to {BYTE}, got {shown}")
    return value


def _score(value: Any, path: Path) -> float:
    """Return the float that 4 bytes encode as little-endian float32. Raises ModelFileError if the value is not 4 bytes,
    or the float is not finite.
    """
    score = struct.unpack("<f", value)[0] if isinstance(value, bytes) and len(value) == 4 else math.nan
    if not math.isfinite(score):
        raise ModelFileError(path, "not a SentencePiece model: a score is not a finite float")
    return score
