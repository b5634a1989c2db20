"""BERT's tokenizer from a vocab.txt, which has a word or a piece of a word on each line, for repositories older than
tokenizer.json.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import WordPiece as PiecesDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.vocabularies.ends import with_ends

VOCAB = "vocab.txt"
# Special tokens by role if the folder names no others. Those of the first three roles must be in the vocabulary.
TOKENS = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}
_NEEDED = ("unk_token", "cls_token", "sep_token")
# Other classes have a vocab.txt, too, and split text in other ways.
CLASSES = tuple(f"{kind}Tokenizer{fast}" for kind in ("Bert", "DistilBert", "Electra") for fast in ("", "Fast"))
MODEL_TYPES = ("bert", "distilbert", "electra")


def build_word_pieces(source: str, tokens: Mapping[str, str], config: Mapping[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer of a vocab.txt.

    Args:
      source: the file's text; a token's id is the number of its line, from 0.
      tokens: special tokens by role, with the keys of TOKENS.
      config: tokenizer_config.json, of which do_lower_case, strip_accents and tokenize_chinese_chars are used.
      folder: folder of the files, for errors.

    Raises ModelFileError for an option that is not a bool or not supported, and if unk, cls or sep is not in the
    vocabulary.
    """
    # Not str.splitlines(), which would also split at other characters that a word may contain.
    lines = io.StringIO(source, newline=None)
    vocab = {line.rstrip("\n"): number for number, line in enumerate(lines)}
    for role in _NEEDED:
        if tokens[role] not in vocab:
            raise ModelFileError(folder / VOCAB, f"does not have the {role}, {tokens[role][:100]!r}")
    path = folder / "tokenizer_config.json"
    if _flag(config, "do_basic_tokenize", True, path) is not True or config.get("never_split"):
        raise ModelFileError(path, "do_basic_tokenize must be true and never_split empty: others are not supported")
    return word_piece_tokenizer(
        vocab,
        tokens,
        lowers=_flag(config, "do_lower_case", True, path),
        strips_accents=_flag(config, "strip_accents", None, path),
        parts_chinese=_flag(config, "tokenize_chinese_chars", True, path),
    )


def word_piece_tokenizer(
    vocab: Mapping[str, int],
    tokens: Mapping[str, str],
    *,
    lowers: bool,
    strips_accents: bool | None,
    parts_chinese: bool = True,
) -> Tokenizer:
    """Return BERT's tokenizer.

    Args:
      vocab: ids by word, or by ## followed by a piece that does not begin a word.
      tokens: special tokens by role, with the keys of TOKENS; those of the first three roles must be in `vocab`.
      lowers: whether words are lower-cased first.
      strips_accents: whether accents are removed; None: the same as lowers.
      parts_chinese: whether each Chinese character is a word.
    """
    tokenizer = Tokenizer(WordPiece(dict(vocab), unk_token=tokens["unk_token"]))
    tokenizer.normalizer = BertNormalizer(
        clean_text=True, handle_chinese_chars=parts_chinese, strip_accents=strips_accents, lowercase=lowers
    )
    tokenizer.pre_tokenizer = BertPreTokenizer()
    first, last = tokens["cls_token"], tokens["sep_token"]
    tokenizer.post_processor = with_ends((first, vocab[first]), (last, vocab[last]), pairs=True)
    tokenizer.decoder = PiecesDecoder(prefix="##")
    special = [token for token in dict.fromkeys(tokens.values()) if token in vocab]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _flag(config: Mapping[str, Any], name: str, default: bool | None, path: Path) -> Any:
    """Return the flag `name` of `config` (tokenizer_config.json), `default` if it is missing or null. Raises
    ModelFileError if it is not a bool.
    """
    value = config.get(name)
    if value is not None and type(value) is not bool:
        raise ModelFileError(path, f"must be true or false, got {str(value)[:100]}", name)
    return default if value is None else value
