"""Tokens of a GGUF file that end an assistant's turn, found by their names.

Files of chat models often name the base model's end of text only, which the model never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EOS_LIST = "tokenizer.ggml.eos_token_ids"
# Keys of one id each, in the order in which they count.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4
# Ends of turns and of messages with tool calls, as llama.cpp has them, and of further families.
TURN_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "<|EOT|>", "<end_of_utterance>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"),
        *("[|endofturn|]", "<|endofturn|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    )
)
# If the vocabulary has one of these, `<|end|>`, the end of a message, does not end a turn: an answer has several.
_MESSAGE_END, _MANY_MESSAGES = "<|end|>", ("<|return|>", "<|calls|>", "<|flush|>")


def named_turn_ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids, ascending, of the control and user-defined tokens in a file's vocabulary whose names are in
    TURN_ENDS.

    Returns () for metadata without a vocabulary. Without one token type for each token, every token counts. Of a name
    that the vocabulary has twice the last id counts. `<|end|>` is left out if one of _MANY_MESSAGES is among these
    tokens: an answer then has several messages.
    """
    tokens, types = metadata.get("tokenizer.ggml.tokens"), _as_list(metadata.get("tokenizer.ggml.token_type"))
    if not isinstance(tokens, list):
        return ()
    found = {token: at for at, token in enumerate(tokens) if isinstance(token, str) and token in TURN_ENDS}
    if isinstance(types, list) and len(types) == len(tokens):
        found = {token: at for token, at in found.items() if types[at] in (CONTROL, USER_DEFINED)}
    if any(name in found for name in _MANY_MESSAGES):
        found.pop(_MESSAGE_END, None)
    return tuple(sorted(found.values()))


def listed_ends(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the value of EOS_LIST as a list, a single value as a list of one; [] if it is absent. Entries are not
    checked.
    """
    listed = _as_list(metadata.get(EOS_LIST))
    return [] if listed is None else listed if isinstance(listed, list) else [listed]


def _as_list(value: Any) -> Any:
    """Return the elements of an array as a list; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
