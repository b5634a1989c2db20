"""The adapters of a step's tokens, and which form of their products a step does better to take.

Knows nothing of jax, so that the scheduler can import it. How adapters are stored is models/lora.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax

    from jaxengine.pallas_kernels.matmul.lora import LoraVisits


class Adapters(NamedTuple):
    """`ForwardBatch.sections["adapters"]`: the adapters of a step's tokens.

    Attributes:
      slots: i32[T], the pool slot of each token's adapter; -1 for none.
      form: i32[], how products take them: 0 not at all, for no row of any replica has one; 1 flat, 2 grouped
        (jaxengine.models.layers.lora).
      visits: what the grouped form reads; None where there is none.
    """

    slots: jax.Array
    form: jax.Array
    visits: LoraVisits | None = None


def are_few(num_used: int, num_slots: int) -> bool:
    """Whether a step whose requests use this many pool slots does better to read those alone."""
    return 8 * num_used <= 7 * num_slots
