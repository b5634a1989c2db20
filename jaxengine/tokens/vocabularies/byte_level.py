"""GPT-2's byte-level tokenizers from vocab.json and merges.txt, for repositories without tokenizer.json: older ones of
GPT-2 and RoBERTa, and most fine-tunes of Whisper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxengine.models.params.errors import ModelFileError

VOCAB, MERGES = "vocab.json", "merges.txt"


class ByteLevelKind(NamedTuple):
    """Tokenizer class that reads VOCAB and MERGES.

    Attributes:
      tokens: special tokens by role, where the folder names no others.
      encloses: whether a text is put between the tokens of the roles cls_token and sep_token.
    """

    tokens: Mapping[str, str]
    encloses: bool = False


_GPT2 = ByteLevelKind(dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"))
_ROBERTA = ByteLevelKind(
    {
        **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
        **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
        **{f"{role}_token": f"<{role}>" for role in ("unk", "pad", "mask")},
    },
    encloses=True,
)
_CLASSES = {"GPT2": _GPT2, "CodeGen": _GPT2, "Whisper": _GPT2, "Roberta": _ROBERTA}
# Values of config.json's model_type with these kinds, where no file names a class.
_LIKE_GPT2 = ("gpt2", "gpt_neo", "gptj", "gpt_bigcode", "opt", "codegen", "phi", "whisper")
_MODEL_TYPES: dict[str, ByteLevelKind] = {
    **dict.fromkeys(_LIKE_GPT2, _GPT2),
    **dict.fromkeys(("roberta", "data2vec-text"), _ROBERTA),
}


def kind_of(class_name: Any, model_type: Any) -> ByteLevelKind | None:
    """Return the kind of a tokenizer class, with or without Fast at its end, or, if it is None, of a model_type; None
    for those that read no such files.
    """
    if class_name is None:
        return _MODEL_TYPES.get(str(model_type))
    stem, ending, fast = str(class_name).rpartition("Tokenizer")
    return _CLASSES.get(stem) if ending and fast in ("", "Fast") else None


def read_byte_level(
    vocab: Mapping[str, Any],
    merges: str,
    tokens: Sequence[AddedToken],
    enclosing: tuple[str, str] | None,
    folder: Path,
    *,
    adds_space: bool = False,
) -> Tokenizer:
    """Return the tokenizer of a vocabulary.

    Args:
      vocab: content of vocab.json, ids by token.
      merges: content of merges.txt, two tokens in each line, the best pair first, perhaps after a line with a version.
      tokens: special tokens, of which those count that the vocabulary has.
      enclosing: tokens before and after a text, both also between two; None if nothing is added.
      folder: folder of the files, for errors.
      adds_space: whether a text begins as if a space stood before it.

    Raises ModelFileError for ids that are not integers, a line that has not two tokens, and an enclosing token that the
    vocabulary lacks.
    """
    if not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise ModelFileError(folder / VOCAB, "must map tokens to ids")
    lines = [line for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    if (wrong := next((line for line, pair in zip(lines, pairs, strict=True) if len(pair) != 2), None)) is not None:
        raise ModelFileError(folder / MERGES, f"must have two tokens in each line, got {wrong[:100]!r}")
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=[(one, other) for one, other in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in tokens if token.content in vocab])
    if enclosing is not None:
        for token in enclosing:
            if token not in vocab:
                raise ModelFileError(folder / VOCAB, f"does not have {token[:100]!r}, which stands around texts")
        before, after = ((token, int(vocab[token])) for token in enclosing)
        tokenizer.post_processor = processors.RobertaProcessing(after, before, True, adds_space)
    return tokenizer
