"""Prompts of embeddings in place of tokens: rows that replace those of a model's table, read from arrays and files.

A prompt's rows are media without an encoder (jaxengine.scheduler.base.media): one item for each page of them, so that
room is needed only for the pages that a step computes, and equal beginnings are found in the prefix cache.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.embeds import GivenEmbeds, decoded, read_embeds, without_torch
from jaxengine.models.weights.formats.torch_zip import TorchFileError, read_torch
from jaxengine.requests.media.inputs import PROMPT_EMBEDS
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.scheduler.base.media import EMBEDS, Media, MediaItem
from jaxengine.scheduler.base.sampling_fields import ROWS

# Stands for each embedding in the prompt's token ids.
PLACEHOLDER = 0
_OTHERS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")


def embeds_prompt(prompt: Mapping[str, Any], config: ResolvedConfig, hidden_size: int) -> tuple[list[int], Media]:
    """Return (placeholder token ids, Media) of a prompt with `prompt_embeds`.

    The value of that key is an array [n, hidden_size] of a floating-point dtype, as numpy reads it, or a file or its
    base64: .npy, safetensors, or what torch.save writes. Raises RequestError for another value, an engine without
    enable_prompt_embeds, a prompt that has text, tokens or media as well, and n outside 1 to max_model_len - 1.
    """
    if not config.enable_prompt_embeds:
        problem = "prompt_embeds is given; the engine was started without enable_prompt_embeds"
        raise RequestError(problem, param=PROMPT_EMBEDS)
    if beside := [name for name in _OTHERS if prompt.get(name) is not None]:
        problem = f"a prompt has prompt_embeds and {beside[0]}; allowed: one of them"
        raise RequestError(problem, param=PROMPT_EMBEDS)
    try:
        values = _read(prompt[PROMPT_EMBEDS], config)
    except MediaError as error:
        raise RequestError(f"prompt_embeds {error}", param=PROMPT_EMBEDS) from None
    if values.shape[1] != hidden_size:
        problem = f"prompt_embeds has rows of {values.shape[1]} elements; the model's hidden states have {hidden_size}"
        raise RequestError(problem, param=PROMPT_EMBEDS, value=values.shape[1])
    if not 1 <= len(values) < config.max_model_len:
        problem = f"prompt_embeds has {len(values)} rows; allowed: 1 to {config.max_model_len - 1} (max_model_len - 1)"
        raise RequestError(problem, param=PROMPT_EMBEDS, value=len(values))
    return [PLACEHOLDER] * len(values), _media(values, config.block_size)


def check_embedded(params: Any) -> None:
    """Raise RequestError for sampling parameters that need the prompt's token ids, such as prompt_logprobs and
    penalties.
    """
    rows = {name: row.neutral for name, row in ROWS.items() if row.reads_prompt}
    for name, neutral in {"prompt_logprobs": None, **rows}.items():
        if (value := getattr(params, name)) != neutral:
            problem = f"{name} is {value}; allowed with prompt_embeds: {neutral}, as the prompt has no tokens"
            raise RequestError(problem, param=name, value=value)


def _read(value: Any, options: MediaOptions) -> np.ndarray:
    """Return the rows f32[n, E] of an array, of the bytes (or base64) of a .npy, safetensors or torch.save file with
    one tensor, or of a value that numpy converts to an array. options: max_media_bytes is the limit of a file. Raises
    MediaError for values or files that cannot be used.
    """
    if isinstance(value, (str, bytes)):
        data = decoded(value, options.max_media_bytes)
        if not data.startswith(b"PK\3\4"):
            return read_embeds(GivenEmbeds(data), options).values
        try:
            tensors = read_torch(io.BytesIO(data), options.max_media_bytes)
        except TorchFileError as error:
            raise MediaError(f"is a file of torch.save that is not read: {error}") from None
        if len(tensors) != 1:
            raise MediaError(f"has {len(tensors)} tensors; allowed: one")
        (value,) = tensors.values()
    try:
        array = np.asarray(without_torch(value))
    except Exception:  # whatever an object's own __array__ raises
        raise MediaError(f"is {show_value(type(value).__name__)}, which numpy cannot read as an array") from None
    return read_embeds(GivenEmbeds(array), options).values


def _media(values: np.ndarray, size: int) -> Media:
    """Return the Media of a prompt of embeddings, `values` f32[n, E]: an item for each page of `size` tokens; the last
    may be shorter.
    """
    items = []
    for first in range(0, len(values), size):
        rows = values[first : first + size]
        places = np.arange(len(rows), dtype=np.int32)
        digest = hashlib.sha256(b"prompt embeds" + rows.tobytes()).digest()
        items.append(MediaItem(EMBEDS, digest, first + places, rows, np.empty((0, len(rows)), np.int32), places))
    return Media(tuple(items))
