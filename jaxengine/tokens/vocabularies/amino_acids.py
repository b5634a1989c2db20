"""ESM's tokenizer of proteins, from a vocab.txt with a token on each line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.vocabularies.ends import with_ends

CLASSES = ("EsmTokenizer", "EsmTokenizerFast")
MODEL_TYPES = ("esm",)
# Special tokens by role if the folder names no others.
TOKENS = {
    "unk_token": "<unk>",
    "cls_token": "<cls>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "eos_token": "<eos>",
}


def build_amino_acids(source: str, tokens: Mapping[str, AddedToken], folder: Path) -> Tokenizer:
    """Return the tokenizer of ESM's vocab.txt. It finds the longest tokens anywhere in a text; what is between them is
    the unknown token once for each word, and white space is nothing. The tokens cls and eos enclose a text.

    source: the file's text; a token's id is the number of its line, from 0. tokens: special tokens by role, with the
    keys of TOKENS. folder: of the files, for errors. Raises ModelFileError if unk, cls or eos is not in the vocabulary.
    """
    texts = {role: token.content for role, token in tokens.items()}
    vocab = {line.strip(): number for number, line in enumerate(source.splitlines())}
    for role in ("unk_token", "cls_token", "eos_token"):
        if texts.get(role) not in vocab:
            raise ModelFileError(folder / "vocab.txt", f"does not have the {role}, {str(texts.get(role))[:100]!r}")
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=texts["unk_token"]))
    longest_first = sorted(filter(None, vocab), key=len, reverse=True)
    pattern = Regex("|".join(map(re.escape, longest_first)))
    tokenizer.pre_tokenizer = Sequence([Split(pattern, "isolated"), WhitespaceSplit()])
    first, last = texts["cls_token"], texts["eos_token"]
    tokenizer.post_processor = with_ends((first, vocab[first]), (last, vocab[last]), pairs=True)
    tokenizer.add_special_tokens([token for token in tokens.values() if token.content in vocab])
    return tokenizer
