"""GGUF fields of families with recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxengine.models.config.attention import LayerState
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, as_array, gguf_fields, gguf_of_layers
from jaxengine.models.config.state import GatedDelta, StateSpace

_HEADS_KV, _RECURRENT, _INTERVAL = "attention.head_count_kv", "attention.recurrent_layers", "full_attention_interval"


def gguf_hybrid(gguf: GGUFConfig, state: LayerState, **options: Any) -> dict[str, Any]:
    """Return `gguf_fields` with this state, and no rope, in the layers without KV heads, as `attention.head_count_kv`
    lists them. options: those of gguf_fields. Raises ModelConfigError for a field that is missing, wrong or not
    supported, and if layers with attention differ in their KV heads.
    """
    fields = gguf.fields
    heads = gguf_of_layers(fields, _HEADS_KV, minimum=0)
    if len(set(heads) - {0}) != 1:
        raise fields.fail(_HEADS_KV, "one number above 0, and 0 in layers with a state")
    metadata = {**gguf.metadata, f"{fields.prefix}{_HEADS_KV}": max(heads)}
    return with_states(gguf_fields(gguf._replace(metadata=metadata), **options), state, [not each for each in heads])


def gguf_state_space(fields: ConfigFields) -> StateSpace:
    """Return the Mamba-2 of a file's layers, normed after its gate. Raises ModelConfigError for fields that are missing
    or wrong.
    """
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.fail("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
    return StateSpace(
        num_heads=heads,
        head_dim=size // heads,
        num_groups=fields.integer("ssm.group_count"),
        state_size=fields.integer("ssm.state_size"),
        conv_kernel=fields.integer("ssm.conv_kernel"),
    )


def with_states(shape: dict[str, Any], state: LayerState, recurrent: Sequence[bool]) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shape`, with this state and no rope in the recurrent layers. recurrent: whether
    each layer of the file is; further layers than the model's do not count.
    """
    layers, own = zip(shape["attention"], recurrent, strict=False), {"rope": None, "window": None, "state": state}
    attention = (replace(each, **own) if is_state else each for each, is_state in layers)
    return {**shape, "attention": tuple(attention)}


def gguf_delta(fields: ConfigFields) -> GatedDelta:
    """Return the gated delta net of a file of Qwen3-Next or Qwen3.5. Raises ModelConfigError for fields that are
    missing or wrong.
    """
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise fields.fail("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
    return GatedDelta(
        num_k_heads=fields.integer("ssm.group_count"),
        num_v_heads=heads,
        k_head_dim=fields.integer("ssm.state_size"),
        v_head_dim=size // heads,
        conv_kernel=fields.integer("ssm.conv_kernel"),
    )


def gguf_delta_fields(gguf: GGUFConfig, **options: Any) -> dict[str, Any]:
    """Return `gguf_fields` with gated delta nets in the layers that `attention.recurrent_layers` lists; without it, in
    all but every `full_attention_interval`-th (default: 4th). options: those of gguf_fields. Raises ModelConfigError
    for a field that is missing, wrong or not supported.
    """
    fields = gguf.fields
    count, every = fields.integer("block_count"), fields.integer(_INTERVAL, 4)
    listed = as_array(fields.value(_RECURRENT, [(layer + 1) % every > 0 for layer in range(count)]))
    if listed.dtype != np.bool_ or listed.shape != (count,):
        raise fields.fail(_RECURRENT, f"true or false for each of {count} layers")
    return with_states(gguf_fields(gguf, partial_rotary=True, **options), gguf_delta(fields), listed.tolist())
