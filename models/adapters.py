"""LoRA adapters of a step's tokens, and the choice of the form in which matrix products apply them.

Free of jax, so that the scheduler can import it. models/lora.py describes how adapters are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

    from jaxengine.pallas_kernels.matmul.lora import LoraVisits


class Adapters(NamedTuple):
    """Section `ForwardBatch.sections["adapters"]`: the adapters of a step's tokens.

    Attributes:
      slots: i32[T], the pool slot of each token's adapter; -1 for none.
      form: i32[], how matrix products apply the adapters: 0 not at all, because no row of any replica has one; 1 flat,
        2 grouped (jaxengine.models.layers.base.lora).
      visits: schedule that the grouped form reads; None if there is none.
    """

    slots: jax.Array
    form: jax.Array
    visits: LoraVisits | None = None


def are_few(num_used: int, num_slots: int) -> bool:
    """Return whether a step whose requests use `num_used` of `num_slots` pool slots is faster if it reads only these
    slots: True if they are at most seven eighths of all slots.
    """
    return 8 * num_used <= 7 * num_slots
