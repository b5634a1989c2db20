"""Vocabularies of tiktoken: a line for each token, with its bytes in base64 and its rank, which is its id.

The file contains neither the splitting of texts nor the special tokens. These are in the code of the models'
repositories, which is not run, so a row here contains them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.vocabularies.byte_pairs import MAX_TOKENS, byte_pair_tokenizer, merges_of_ranks, spelt, too_long
from jaxengine.tokens.vocabularies.ends import with_ends
from jaxengine.tokens.vocabularies.splits import SPLITTINGS

MAX_SPECIAL = 4096
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} (?:0|[1-9][0-9]{0,6})")


class Ranks(NamedTuple):
    """Facts about a model family's ranks file, from the code of its repositories.

    Attributes:
      file: name of the file of ranks.
      splitting: name of the splitting, a key of SPLITTINGS.
      special: special tokens after the ranks, in order. Names in tokenizer_config.json (`added_tokens_decoder`) take
        precedence.
      more: least number of special tokens.
      unnamed: format of the name of special tokens without one, with their id or, if `counts`, a running number.
      tokens: special tokens by role, unless the folder names others.
      adds_bos: whether texts begin with the beginning-of-text token.
      begins: special tokens that texts begin with, if they do not begin with that.
    """

    file: str
    splitting: str
    special: tuple[str, ...] = ()
    more: int = 0
    unnamed: str = ""
    counts: bool = False
    tokens: Mapping[str, str] = {}
    adds_bos: bool = False
    begins: tuple[str, ...] = ()


KIMI = Ranks("tiktoken.model", "kimi-k2", more=256, unnamed="<|reserved_token_{}|>")
QWEN = Ranks(
    "qwen.tiktoken",
    "qwen2",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    208,
    "<|extra_{}|>",
    counts=True,
    tokens={"eos_token": "<|endoftext|>"},
)
# Meta's original files, which have the same name as SentencePiece's.
LLAMA3 = Ranks(
    "tokenizer.model",
    "llama-bpe",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>"),
    ),
    256,
    "<|reserved_special_token_{}|>",
    counts=True,
    tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    adds_bos=True,
)
GLM4 = Ranks(
    "tokenizer.model",
    "glm4",
    (
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
        *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>"),
        "<|end_of_video|>",
    ),
    tokens={"eos_token": "<|endoftext|>"},
    begins=("[gMASK]", "<sop>"),
)


def is_tiktoken(source: bytes) -> bool:
    """Return whether a file's content (`source`) is in tiktoken's format: its first line has a token in base64 and a
    rank.
    """
    return _LINE.fullmatch(source[: source.find(b"\n")].rstrip()) is not None


def read_tiktoken(source: bytes, row: Ranks, named: Mapping[int, str], bos: str | None, path: Path) -> Tokenizer:
    """Return the tokenizer of a file of ranks, with its special tokens.

    source: content of the file at `path`. named: special tokens by id, as the folder names them. bos: text of the
    beginning-of-text token, which is put before texts if `row.adds_bos` and it is a special token; without
    `row.adds_bos` those of `row.begins` are. Raises ModelFileError for malformed lines, for ranks that are not the
    numbers from 0 on, and for too many or too long tokens.
    """
    tokens = spelt(_tokens(source, path))
    if (problem := too_long(tokens)) is not None:
        raise ModelFileError(path, problem)
    ranks = {name: rank for rank, name in enumerate(tokens)}
    splitting = SPLITTINGS[row.splitting]._replace(ignore_merges=True)
    tokenizer = byte_pair_tokenizer(ranks, merges_of_ranks(ranks), splitting)
    special = _special(row, named, len(tokens), path)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    begins = [bos] if row.adds_bos else row.begins
    if found := [(name, len(tokens) + special.index(name)) for name in begins if name in special]:
        tokenizer.post_processor = with_ends(found[0], None, after_begin=found[1:])
    return tokenizer


def _tokens(source: bytes, path: Path) -> Sequence[bytes]:
    """Return the tokens in a file's content (`source`), as bytes, by rank. Raises ModelFileError unless there are 256
    to MAX_TOKENS lines with distinct tokens and the ranks from 0 on.
    """
    lines = source.split()
    size = len(lines) // 2
    if len(lines) % 2 or not 256 <= size <= MAX_TOKENS:
        raise ModelFileError(path, f"must have a token and a rank in each of 256 to {MAX_TOKENS} lines")
    try:
        ranks = [int(rank) for rank in lines[1::2]]
        tokens = [base64.b64decode(token, validate=True) for token in lines[::2]]
    except (ValueError, binascii.Error) as error:
        raise ModelFileError(path, f"must have tokens in base64 and ranks: {str(error)[:100]}") from None
    if sorted(ranks) != list(range(size)) or len(set(tokens)) != size:
        raise ModelFileError(path, f"must have {size} distinct tokens with the ranks from 0 on")
    return [token for _, token in sorted(zip(ranks, tokens, strict=True))]


def _special(row: Ranks, named: Mapping[int, str], first: int, path: Path) -> list[str]:
    """Return the special tokens in the order of their ids, which begin at `first`. named: special tokens by id, which
    take precedence over those of `row`. Ids without a token, up to the last one and at least `row.more` in all, get the
    names that `row.unnamed` makes. Raises ModelFileError for more than MAX_SPECIAL.
    """
    known = dict(enumerate(row.special, first)) | {at: name for at, name in named.items() if at >= first}
    size = max(row.more, max(known, default=first) + 1 - first)
    if size > MAX_SPECIAL:
        raise ModelFileError(path, f"must have at most {MAX_SPECIAL} special tokens, the folder names {size}")
    taken = set(known.values())
    free = (name for name in map(row.unnamed.format, count()) if name not in taken)
    return [
        known[at] if at in known else next(free) if row.counts else row.unnamed.format(at)
        for at in range(first, first + size)
    ]
