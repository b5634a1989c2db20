"""GGUF fields of families with recurrent states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerState
from jaxengine.models.config.fields import MAX_HEADS, ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_experts, gguf_fields, gguf_flags, gguf_of_layers
from jaxengine.models.config.state import GatedDelta, SelectiveScan, StateSpace

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
    """Return the Mamba-2 of a file's layers, by the fields `ssm.time_step_rank` (heads), `inner_size`, `group_count`,
    `state_size` and `conv_kernel`, normed after its gate. Raises ModelConfigError for fields that are missing or wrong,
    and an inner size that is no multiple of the heads.
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


def gguf_scan(fields: ConfigFields, **norms: Any) -> SelectiveScan:
    """Return the Mamba of a file's layers, by the fields `ssm.inner_size`, `state_size`, `time_step_rank` and
    `conv_kernel`. norms: fields of SelectiveScan on norms. Raises ModelConfigError for fields that are missing or
    wrong.
    """
    return SelectiveScan(
        channels=fields.integer("ssm.inner_size"),
        state_size=fields.integer("ssm.state_size"),
        time_rank=fields.integer("ssm.time_step_rank"),
        conv_kernel=fields.integer("ssm.conv_kernel"),
        **norms,
    )


def gguf_mamba(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields` of a file of Mamba or, with `ssm.dt_b_c_rms` (default: false), Falcon Mamba, whose norms
    have the epsilon of all norms. The sizes of attention, which no layer has, are those that config.json is read with.
    Raises ModelConfigError for a field that is missing, wrong or not supported.
    """
    fields, norms = gguf.fields, {}
    if fields.boolean("ssm.dt_b_c_rms", False):
        norms = {"norms": "plain", "eps": fields.number("attention.layer_norm_rms_epsilon")}
    state = gguf_scan(fields, **norms)
    return _states_only(gguf, state, math.gcd(state.channels, MAX_HEADS), 1, state.channels)


def gguf_mamba2(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields` of a file of Mamba-2, with its heads as those of attention. Raises ModelConfigError for a
    field that is missing, wrong or not supported.
    """
    state = gguf_state_space(gguf.fields)
    return _states_only(gguf, state, state.num_heads, state.head_dim, state.inner_size)


def _states_only(gguf: GGUFConfig, state: LayerState, heads: int, head_dim: int, ffn_size: int) -> dict[str, Any]:
    """Return `gguf_fields` with this state in all layers, no rope and no window, and these sizes in place of the
    file's, which are 0. Raises ModelConfigError in the cases of gguf_fields.
    """
    sizes = {"attention.head_count": heads, _HEADS_KV: heads, "feed_forward_length": ffn_size}
    # Rope, which no layer has, must have an even size.
    sizes |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 2)
    metadata = {**gguf.metadata, **{f"{gguf.fields.prefix}{name}": value for name, value in sizes.items()}}
    shared = gguf_fields(gguf._replace(metadata=metadata))
    own: dict[str, Any] = {"head_dim": head_dim, "rope": None, "window": None, "state": state}
    return shared | {"attention": tuple(replace(each, **own) for each in shared["attention"])}


def gguf_jamba(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields` of a file of Jamba: Mamba, with norms, in layers without KV heads, attention without rope in
    the others, and, unless there is one expert, experts in every second layer from number 1 on, as in all published
    models; files do not say where. Raises ModelConfigError for a field that is missing, wrong or not supported.
    """
    fields, experts = gguf.fields, None
    if fields.integer("expert_count", 0, minimum=0) > 1:
        dense = tuple(range(0, fields.integer("block_count"), 2))
        experts = gguf_experts(fields, norm_weights=False, dense_layers=dense)
    metadata = {**gguf.metadata, f"{fields.prefix}expert_count": 0 if experts is None else experts.num_experts}
    state = gguf_scan(fields, norms="weighted", eps=fields.number("attention.layer_norm_rms_epsilon"))
    shared = gguf_hybrid(gguf._replace(metadata=metadata), state, experts=experts)
    return shared | {"attention": tuple(replace(each, rope=None) for each in shared["attention"])}


def with_states(shape: dict[str, Any], state: LayerState, recurrent: Sequence[bool]) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shape`, with this state, no rope and no window in the recurrent layers.
    recurrent: whether each layer of the file is; further layers than the model's do not count.
    """
    layers, own = zip(shape["attention"], recurrent, strict=False), {"rope": None, "window": None, "state": state}
    attention = (replace(each, **own) if is_state else each for each, is_state in layers)
    return {**shape, "attention": tuple(attention)}


def gguf_delta(fields: ConfigFields) -> GatedDelta:
    """Return the gated delta net of a file of Qwen3-Next or Qwen3.5, by the fields `ssm.group_count` (key heads),
    `time_step_rank` (value heads), `state_size`, `inner_size` and `conv_kernel`. Raises ModelConfigError for fields
    that are missing or wrong, and an inner size that is no multiple of the value heads.
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
    listed = gguf_flags(fields, _RECURRENT, [(layer + 1) % every > 0 for layer in range(count)])
    return with_states(gguf_fields(gguf, partial_rotary=True, **options), gguf_delta(fields), listed)
