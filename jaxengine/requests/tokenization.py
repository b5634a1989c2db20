"""vLLM's tokenization_kwargs: how the prompts of one call become tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.prepared import Prompt
from jaxengine.scheduler.base.errors import RequestError, refuse

_NAME, _KEEP = "tokenization_kwargs", "truncate_prompt_tokens"


def num_kept(given: Any, keep: int | None = None, *others: str) -> int | None:
    """Return truncate_prompt_tokens of tokenization_kwargs, unchecked, also a None there, or `keep` if the key is
    absent. Raises RequestError if `given` is neither None nor a mapping whose keys are this one and `others`.
    """
    allowed = (_KEEP, *others)
    if given is not None and (not isinstance(given, Mapping) or given.keys() - {*allowed}):
        raise refuse(_NAME, given, f"a dict that may have {', '.join(allowed)}")
    return (given or {}).get(_KEEP, keep)


def tokenized(inputs: InputProcessor, prompt: Prompt, given: Any) -> Prompt:
    """Return a prompt of a generating model with its token ids.

    given: tokenization_kwargs, not None, which may have add_special_tokens, for texts, True by default;
    truncate_prompt_tokens, how many to keep, -1 for max_model_len - 1; and truncation_side, where the others are left
    out, "left" by default. Raises RequestError for other keys and values, and for media and embeddings.
    """
    keep = num_kept(given, None, "add_special_tokens", "truncation_side")
    side, special = given.get("truncation_side", "left"), given.get("add_special_tokens", True)
    if side not in ("left", "right"):
        raise refuse(f"{_NAME}.truncation_side", side, "'left' or 'right'")
    if type(special) is not bool:
        raise refuse(f"{_NAME}.add_special_tokens", special, "True or False")
    if keep is not None and (type(keep) is not int or not (keep == -1 or keep >= 1)):
        raise refuse(f"{_NAME}.{_KEEP}", keep, "-1 or an int >= 1")
    parts: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
    if media := parts.keys() & {"multi_modal_data", "prompt_embeds"}:
        raise RequestError(f"{_NAME} are for prompts without {min(media)}", param=_NAME)
    text, ids, _ = inputs.read_prompt(prompt)
    if text is not None and "prompt_token_ids" not in parts:
        parts["prompt"], ids = text, inputs.require_tokenizer().encode(text, add_special_tokens=special)
    if keep is not None:
        most = inputs.config.max_model_len - 1 if keep == -1 else keep
        ids = ids[:most] if side == "right" else ids[-most:]
    return {**parts, "prompt_token_ids": ids}
