"""The user's own functions on logits inside the samplers, and the per-slot parameters that they read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.config.features.logits_processors import processor_classes, processors_digest, source_file
from jaxengine.runner.base.device_state import DeviceState, TokenState
from jaxengine.runner.base.extension import EVERYWHERE, DeviceExtension, HostExtension, Kept, StageShape, StateChange
from jaxengine.runner.executables.program_sources import file_digest
from jaxengine.runner.programs.state_changes import own_slot
from jaxengine.sampling.state import write_slots
from jaxengine.sampling.top_tokens import first_id
from jaxengine.scheduler.base.logits_processor import LogitsProcessor, VocabColumns
from jaxengine.scheduler.base.token_params import PROCESSOR

NAME, COLUMN_ROWS = "logits_processors", "processor columns"
NUM_ROWS = 64  # slots whose parameters one state change writes


class ProcessorsExtension(DeviceExtension):
    """Device extension of logits processors. Its section of TokenState is i32[R, 1 + columns]: a bit for each processor
    that a slot uses, and the 32 bits of each parameter. Samplers only read it.

    Attributes:
      processors: classes of the option logits_processors, in its order.
      width: columns of a slot.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        self.processors = processor_classes(shape.config.logits_processors)
        self._digest = processors_digest(shape.config.logits_processors)
        self.width = 1 + sum(len(each.columns) for each in self.processors)

    def tokens(self) -> Kept:
        return Kept((self.shape.num_slots, self.width), jnp.int32)

    @property
    def description(self) -> str:
        """Names, sources and settings of the processors, as text, which is part of the key of every stored program."""
        root = Path(__file__).parents[3]
        files = [source_file(each) for each in self.processors]
        sources = [None if file is None else file_digest(root, file) for file in files]
        names, columns = self.shape.config.logits_processors, [dict(each.columns) for each in self.processors]
        return repr((names, sources, columns, self._digest))

    @property
    def changes(self) -> Mapping[str, StateChange]:
        shapes = [((NUM_ROWS,), np.int32, EVERYWHERE), ((NUM_ROWS, self.width), np.int32, EVERYWHERE)]
        return {COLUMN_ROWS: StateChange(_write_rows, shapes)}

    def process(
        self, tokens: TokenState, logits: jax.Array, slots: jax.Array, counts: jax.Array, features: jax.Array
    ) -> jax.Array:
        """Return the logits f32[S, V / n] after the processors have been applied, one after the other.

        Processors that no row uses are skipped; rows that do not use one, and tokens with -inf, stay as they are.
        slots: i32[S]. counts: i32[S, V / n], 2 * (times in the output) + (1 if in the prompt) of each token. features:
        i32[], features of the step. Raises ValueError at tracing if a processor returns another shape or dtype.
        """
        rows = tokens.sections[NAME].at[slots].get(mode="fill", fill_value=0)
        token_ids = first_id(logits) + jnp.arange(logits.shape[1], dtype=jnp.int32)
        at = 1
        for number, each in enumerate(self.processors):
            columns = {}
            for name, column in each.columns.items():
                columns[name], at = _typed(rows[:, at : at + 1], column.dtype), at + 1
            given = (counts >> 1, counts & 1 > 0) if each.uses_counts else (None, None)
            vocab = VocabColumns(token_ids, *given)
            is_used = rows[:, :1] >> number & 1 > 0
            logits = lax.cond(
                features & (PROCESSOR << number) > 0,
                lambda logits, each=each, columns=columns, vocab=vocab, is_used=is_used: jnp.where(
                    is_used & (logits > -jnp.inf), _processed(each, logits, columns, vocab), logits
                ),
                lambda logits: logits,
                logits,
            )
        return logits

    def on_host(self, runner: Any) -> HostExtension:
        return SlotColumns(runner, self)


class SlotColumns(HostExtension):
    """Host extension that sets the processors' parameters of slots."""

    def __init__(self, runner: Any, extension: ProcessorsExtension):
        super().__init__(runner)
        self._processors, self._width = extension.processors, extension.width

    def words(self, values: Mapping[int, tuple[float | int | bool, ...]]) -> np.ndarray:
        """Return a request's row i32[1 + columns] for `set_columns`: bits of the processors that it uses, then the 32
        bits of each parameter of all processors. Processors that it does not use have their defaults.

        values: values of all columns of each processor that the request uses, by the processor's number.
        """
        words = [sum(1 << number for number in values)]
        for number, each in enumerate(self._processors):
            columns = list(each.columns.values())
            own = values.get(number) or [column.default for column in columns]
            words += [column.word(value) for column, value in zip(columns, own, strict=True)]
        return np.array(words, np.int64).astype(np.int32)

    def set_columns(self, rows: list[tuple[int, np.ndarray | None]]) -> None:
        """Write rows of `words` to the devices, for slots numbered over all replicas; None for a slot that uses no
        processor.
        """
        none = np.zeros(0, np.int32)
        own = [(slot, none if words is None else words) for slot, words in rows]
        self.runner.change_slots(COLUMN_ROWS, own, NUM_ROWS, self._width)


def _processed(each: type[LogitsProcessor], logits: jax.Array, columns: Mapping[str, Any], vocab: VocabColumns) -> Any:
    """Call a processor and return its logits. Raises ValueError, while programs are traced, for a wrong shape
    or dtype.
    """
    found = each.process(logits, columns, vocab)
    if getattr(found, "shape", None) != logits.shape or found.dtype != logits.dtype:
        got = f"{getattr(found, 'dtype', type(found).__name__)}{list(getattr(found, 'shape', ()))}"
        raise ValueError(f"{each.__name__}.process must return float32{list(logits.shape)}, got {got}")
    return found


def _typed(words: jax.Array, dtype: str) -> jax.Array:
    """Return a column's values in `dtype`, from the int32 that hold their bits; "bool" is true above 0."""
    return words > 0 if dtype == "bool" else lax.bitcast_convert_type(words, np.dtype(dtype))


def _write_rows(state: DeviceState, slots: jax.Array, words: jax.Array) -> DeviceState:
    """Return the state with rows `words` i32[n, 1 + columns] written for slots i32[n], numbered over all replicas."""
    assert state.tokens is not None
    section, own = state.tokens.sections[NAME], own_slot(state, slots)
    columns = [write_slots(section[:, at], own, words[:, at]) for at in range(section.shape[1])]
    sections = {**state.tokens.sections, NAME: jnp.stack(columns, axis=1)}
    return state._replace(tokens=state.tokens._replace(sections=sections))
