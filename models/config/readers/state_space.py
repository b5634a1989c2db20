"""Fields of Mamba-2 that configurations of several families share."""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.state import StateSpace


def read_state_space(fields: ConfigFields, inner_size: int, *, norm: str | None) -> StateSpace:
    """Return the StateSpace in the fields that configurations with Mamba-2 share: mamba_n_heads, mamba_d_head ("auto"
    or absent: inner_size over the heads), mamba_n_groups (default: 1), mamba_d_state, mamba_d_conv (4), mamba_conv_bias
    (true; null is false), mamba_proj_bias (false) and time_step_limit. inner_size: elements of a token's inputs in all
    heads together. norm: StateSpace.norm. `hidden_act` is the activation, which the caller has checked. Raises
    ModelConfigError for fields that are missing or wrong, and if the heads together do not have inner_size elements.
    """
    num_heads, auto = fields.integer("mamba_n_heads"), fields.value("mamba_d_head", "auto") == "auto"
    head_dim = inner_size // num_heads if auto else fields.integer("mamba_d_head")
    if head_dim * num_heads != inner_size:
        raise ModelConfigError(
            f"mamba_n_heads * mamba_d_head must be the {inner_size} inputs of Mamba-2, got {num_heads} * {head_dim}"
        )
    return StateSpace(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.integer("mamba_n_groups", 1),
        state_size=fields.integer("mamba_d_state"),
        conv_kernel=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.boolean("mamba_conv_bias", True, null_is_false=True),
        bias=fields.boolean("mamba_proj_bias", False),
        norm=norm,
        activation=fields.text("hidden_act", "silu"),
        dt_limits=read_dt_limits(fields),
    )


def read_dt_limits(fields: ConfigFields) -> tuple[float, float]:
    """Return `time_step_limit`, the bounds of time steps, as (low, high); (0, inf) if it is absent. Raises
    ModelConfigError unless it is two numbers with 0 <= low < high.
    """
    given = fields.value("time_step_limit", [0.0, float("inf")])
    limits = [_dt_limit(each) for each in given] if isinstance(given, (list, tuple)) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise fields.fail("time_step_limit", "two numbers, 0 <= low < high")
    return limits[0], limits[1]


def _dt_limit(value: Any) -> float:
    """Return one limit of time steps as a float. Infinity is {"__float__": "Infinity"}, as transformers 5 writes it, or
    any number over 1e30, which no time step reaches. Returns -1 for a value that is not a number; the caller refuses
    any result below 0.
    """
    if value == {"__float__": "Infinity"}:
        return float("inf")
    if type(value) not in (int, float):
        return -1.0
    return float("inf") if value > 1e30 else float(max(value, -1))
