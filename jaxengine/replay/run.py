"""Runs one recorded step: puts its arrays on the devices, runs forward pass and sampler, and returns their results.

Pages are renumbered, so that the pool only needs to hold the step's own; page 0 stands for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxengine.models.cache import paged_groups, rows_per_page
from jaxengine.models.kernel_rows import layout_of
from jaxengine.records.step_file import RecordedStep, RecordError
from jaxengine.replay.page_layouts import converted
from jaxengine.runner.base.device_state import DeviceState
from jaxengine.runner.programs.epilogues import SAMPLE
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.scheduler.batches.buckets import Bucket

_RECORDING, _STATES = "recording", "states"
_ALWAYS = ("pages/rank", "after/pages/rank", "rows/rank")
# Arrays of replica indices, and for each the arrays that must have as many entries.
_BY_PLACE = {
    "pages/rank": ("pages/layer", "pages/page", "pages/data"),
    "after/pages/rank": ("after/pages/layer", "after/pages/page", "after/pages/data"),
    "rows/rank": (
        "rows/row",
        "rows/slot",
        "logits",
        *(f"sampling/{each}" for each in ("token_counts", "logit_bias", "token_mask")),
    ),
    "tokens/rank": ("tokens/token",),
    "states/rank": ("states/row",),
}


def run_step(stage: StageRunner, step: RecordedStep, platform: str) -> dict[str, np.ndarray]:
    """Run a step on the devices, and return its results under the names that the record uses.

    platform: platform in whose layout pages were recorded. Raises RecordError for a step whose bucket or shapes this
    engine does not have, and for arrays that are missing or do not fit together.
    """
    try:
        _check_lengths(step.arrays)
        return _Run(stage, step, platform).results()
    except KeyError as error:
        raise RecordError(f"step {step.about.get('step')} lacks {error}") from None
    except IndexError as error:
        raise RecordError(f"step {step.about.get('step')} names a place that is not there: {error}") from None


def _check_lengths(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise RecordError if arrays that belong together (_BY_PLACE) have different lengths, KeyError if one is
    missing.
    """
    for place, others in _BY_PLACE.items():
        if place not in arrays and place not in _ALWAYS:
            continue
        for name in (place, *others):
            if arrays[name].ndim == 0 or len(arrays[name]) != len(arrays[place]):
                shown = f"{name} is {[*arrays[name].shape]}, and {place} {[*arrays[place].shape]}"
                raise RecordError(f"{shown}; they must be of equal length")


class _Run:
    """One run of a recorded step on a stage."""

    def __init__(self, stage: StageRunner, step: RecordedStep, platform: str):
        """Prepare the run of `step` on `stage`: find its bucket, and number its pages anew.

        platform: platform in whose layout pages were recorded. Raises RecordError if the stage has no such bucket,
        KeyError for missing arrays.
        """
        self._stage, self._programs, self._arrays = stage, stage.programs, step.arrays
        self._layout = layout_of(platform)
        tokens, seqs, width, sections = step.about["bucket"]
        self._bucket = Bucket(tokens, seqs, width, tuple(sections))
        shape = self._programs.shape
        self._num_ranks, self._num_slots = shape.num_ranks, shape.num_slots
        if self._bucket not in self._programs.packer.buckets:
            raise RecordError(f"this engine has no steps of {self._bucket}: the options differ from the recorded ones")
        self._pages = self._page_numbers()
        # A power of two, so that most steps of a folder find their program compiled.
        self._kv_shapes = self._programs.kv_shapes(max(2, 1 << max(map(len, self._pages)).bit_length()))

    def results(self) -> dict[str, np.ndarray]:
        """Run forward pass and sampler; return their results on the host under the record's names: written pages,
        states, logits of the rows, sampled results and, if the stage records them, hidden states of layers.

        Raises RecordError for arrays whose shapes or dtypes differ from this engine's, KeyError for missing ones.
        """
        stage, programs, bucket = self._stage, self._programs, self._bucket
        state, pool = self._state(), self._pool()
        forward = stage.compiled(programs.forward(bucket, stage.params, self._kv_shapes))
        assert state.tokens is not None and state.sampling is not None
        last_token = state.tokens.last_token
        pool, slots, forwarded = forward(stage.params, pool, state.slots, last_token, self._message(), {})
        found = {"after/pages/data": self._written(pool), **self._states_after(slots)}
        rows = self._arrays["rows/rank"], self._arrays["rows/row"]
        found["logits"] = self._by_rank(forwarded.logits)[rows]
        if _RECORDING in forwarded.sections:
            tokens = self._arrays["tokens/rank"], self._arrays["tokens/token"]
            hidden = self._by_rank(forwarded.sections[_RECORDING])[tokens]
            found["layers"] = hidden.reshape(len(hidden), -1, programs.model.config.hidden_size)
        epilogue = programs.epilogues[SAMPLE]
        size = epilogue.size_of(programs.packer.buckets, bucket)
        assert size is not None
        values = {"tokens": state.tokens, "sampling": state.sampling, "rows": forwarded.rows}
        values["logits"] = forwarded.logits
        sample = stage.compiled(programs.epilogue(SAMPLE, size, stage.params))
        _, sampled = sample(*[values[name] for name in epilogue.arguments])
        results = {name: array for name, array in sampled._asdict().items() if array is not None}
        return found | {f"sampled/{name}": np.asarray(array) for name, array in results.items()}

    def _page_numbers(self) -> list[dict[int, int]]:
        """Return, for each replica, a dict from recorded page numbers to new ones, which count from 1 in the order of
        the record.
        """
        found: list[dict[int, int]] = [{} for _ in range(self._num_ranks)]
        for rank, page in zip(self._arrays["pages/rank"].tolist(), self._arrays["pages/page"].tolist(), strict=True):
            found[rank].setdefault(page, 1 + len(found[rank]))
        return found

    def _message(self) -> np.ndarray:
        """Return the message i32[replicas, size] with the pages of paged cache groups renumbered, 0 for those that are
        not in the record.

        Raises RecordError for a recorded message of another shape.
        """
        layout, message = self._programs.packer.layouts[self._bucket], self._arrays["message"].copy()
        if message.shape != (self._num_ranks, layout.size):
            raise RecordError(f"the message has the shape {message.shape}; here it is {(self._num_ranks, layout.size)}")
        paged = len(paged_groups(self._programs.groups)) * self._num_slots
        for own, numbers in zip(message, self._pages, strict=True):
            rows, _, pages = layout.view(own, "deltas")
            pages[rows < paged] = [numbers.get(page, 0) for page in pages[rows < paged].tolist()]
        return message

    def _state(self) -> DeviceState:
        """Return the device state that the step starts from: page tables, token counts, recurrent states, and the
        sampling state as it was just before sampling. Raises RecordError for arrays of other shapes or dtypes, KeyError
        for missing ones.
        """
        shapes, arrays = self._programs.state_shapes, self._arrays
        assert shapes.tokens is not None and shapes.sampling is not None
        sections = {
            name: self._states() if name == _STATES else self._section(f"state/sections/{name}", own)
            for name, own in shapes.slots.sections.items()
        }
        slots = shapes.slots._replace(
            page_table=_put(self._page_table(), shapes.slots.page_table),
            num_computed=_put(arrays["state/num_computed"], shapes.slots.num_computed),
            sections=sections,
        )
        token_sections = shapes.tokens.sections.items()
        tokens = shapes.tokens._replace(
            last_token=_put(arrays["state/last_token"], shapes.tokens.last_token),
            token_counts=self._long("token_counts", shapes.tokens.token_counts, 0),
            sections={name: self._section(f"sampling/sections/{name}", own) for name, own in token_sections},
        )
        params = shapes.sampling.params
        columns = {name: _put(arrays[f"sampling/params/{name}"], column) for name, column in params._asdict().items()}
        sampling = shapes.sampling._replace(
            params=params._replace(**columns),
            logit_bias=self._long("logit_bias", shapes.sampling.logit_bias, 0),
            token_mask=self._long("token_mask", shapes.sampling.token_mask, -1),
            logprob_ids=_put(arrays["sampling/logprob_ids"], shapes.sampling.logprob_ids),
        )
        return DeviceState(slots, tokens, sampling)

    def _section(self, name: str, shapes: Any) -> Any:
        """Return the recorded arrays `name`/0, 1, ... as a tree of device arrays like `shapes`. Raises KeyError for a
        missing one, RecordError for another shape or dtype.
        """
        leaves, tree = jax.tree.flatten(shapes)
        own = [_put(self._arrays[f"{name}/{at}"], leaf) for at, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, own)

    def _page_table(self) -> np.ndarray:
        """Return a copy of the recorded page table with the pages of paged cache groups renumbered, 0 for those that
        are not in the record. Raises RecordError for another shape or dtype.
        """
        table = self._arrays["state/page_table"].copy()
        _check(table, self._programs.state_shapes.slots.page_table)
        paged = len(paged_groups(self._programs.groups)) * self._num_slots
        for own, numbers in zip(table.reshape(self._num_ranks, -1, table.shape[-1]), self._pages, strict=True):
            pages, index = np.unique(own[:paged], return_inverse=True)
            new = np.array([numbers.get(page, 0) for page in pages.tolist()], np.int32)
            own[:paged] = new[index].reshape(own[:paged].shape)
        return table

    def _long(self, name: str, shape: Any, fill: int) -> jax.Array:
        """Return a device array with the recorded rows of `sampling/<name>` in the slots of the step, and `fill` in all
        others.

        shape: shape, dtype and sharding of the whole array. Raises KeyError for a missing array.
        """
        whole = np.full(shape.shape, fill, shape.dtype)
        own = whole.reshape(self._num_ranks, -1, shape.shape[-1])
        own[self._arrays["rows/rank"], self._arrays["rows/slot"]] = self._arrays[f"sampling/{name}"]
        return _put(whole, shape)

    def _states(self) -> Any:
        """Return the recurrent states as a tree of device arrays: the recorded rows, and zeros in all others. Raises
        KeyError for a missing array, RecordError for one of another shape.
        """
        leaves, tree = jax.tree.flatten(self._programs.state_shapes.slots.sections[_STATES])
        found = []
        for at, leaf in enumerate(leaves):
            whole = np.zeros(leaf.shape, leaf.dtype)
            own = whole.reshape(self._num_ranks, -1, *leaf.shape[1:])
            own[self._arrays["states/rank"], self._arrays["states/row"]] = self._arrays[f"states/{at}"]
            found.append(_put(whole, leaf))
        return jax.tree.unflatten(tree, found)

    def _states_after(self, slots: Any) -> dict[str, np.ndarray]:
        """Return the rows of recurrent states that the record has, as they are after the step, by the record's names.
        slots: the slots' state after the step. {} for a model without recurrent states.
        """
        if _STATES not in slots.sections:
            return {}
        places = self._arrays["states/rank"], self._arrays["states/row"]
        leaves = jax.tree.leaves(slots.sections[_STATES])
        return {f"after/states/{at}": self._by_rank(leaf)[places] for at, leaf in enumerate(leaves)}

    def _pool(self) -> Any:
        """Return a pool with the recorded pages, converted to this platform's layout, at their new numbers.

        Pages that are not recorded are zeros. Raises RecordError for pages or scales of another shape or dtype,
        KeyError for missing arrays and for a layer that the model does not have.
        """
        shapes = self._kv_shapes
        whole = np.zeros(shapes.data.shape, shapes.data.dtype)
        own = whole.reshape(self._num_ranks, -1, *whole.shape[1:])
        pages = converted(self._arrays["pages/data"], self._layout, shapes.layout, shapes.spec, whole)
        if pages.shape[1:] != whole.shape[1:]:
            raise RecordError(f"pages have the shape {pages.shape[1:]}; here it is {whole.shape[1:]}")
        own[self._pool_rows("pages")] = pages
        scales = {
            name: None if (shape := getattr(shapes, name)) is None else _put(self._arrays[f"pages/{name}"], shape)
            for name in ("k_scale", "v_scale")
        }
        return replace(shapes, data=_put(whole, shapes.data), **scales)

    def _written(self, pool: Any) -> np.ndarray:
        """Return the pages of `pool` that the step has written, in the record's layout."""
        pages = self._by_rank(pool.data)[self._pool_rows("after/pages")]
        recorded = self._arrays["after/pages/data"]
        return converted(pages, pool.layout, self._layout, pool.spec, recorded)

    def _pool_rows(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (replica, row in its pool) of recorded pages, each i64[n]. name: "pages" or "after/pages".

        Raises KeyError for a layer or a page that the step does not have.
        """
        ranks = self._arrays[f"{name}/rank"]
        groups = paged_groups(self._programs.groups)
        index = {layer: at for group in groups for at, layer in enumerate(group.layers)}
        num_pages = self._kv_shapes.num_pages // rows_per_page(self._programs.groups)
        places = zip(ranks, self._arrays[f"{name}/layer"], self._arrays[f"{name}/page"], strict=True)
        rows = [index[int(layer)] * num_pages + self._pages[rank][int(page)] for rank, layer, page in places]
        return ranks, np.array(rows, np.int64)

    def _by_rank(self, array: Any) -> np.ndarray:
        """Return an array of all replicas [replicas * N, ...] on the host, as [replicas, N, ...]."""
        host = np.asarray(array)
        return host.reshape(self._num_ranks, len(host) // self._num_ranks, *host.shape[1:])


def _put(array: np.ndarray, like: Any) -> jax.Array:
    """Put an array on the devices with the sharding of `like`. Raises RecordError if it has another shape or dtype."""
    _check(array, like)
    return jax.device_put(array, like.sharding)


def _check(array: np.ndarray, like: Any) -> None:
    """Raise RecordError for an array of another shape or dtype than that of `like`."""
    if array.shape != like.shape or array.dtype != like.dtype:
        raise RecordError(
            f"an array of the step is {array.dtype}{[*array.shape]}; here it is {like.dtype}{[*like.shape]}: the "
            "options differ from the recorded ones"
        )
