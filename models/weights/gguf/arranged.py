"""Tensors of a checkpoint whose rows or columns llama.cpp's converter reorders or divides among several tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.schemes.gguf import CODES
from jaxengine.models.weights.gguf.dequant import BlockFormat
from jaxengine.models.weights.gguf.header import TensorInfo

# Rows of one tensor, several times as many as known models have.
_MOST_ROWS = 1 << 22


class Arrangement(NamedTuple):
    """Where a checkpoint's tensor is in a file.

    Attributes:
      parts: ends of the checkpoint's names of the file's tensors whose rows, one after the other, are its rows.
      rows: index among these of each of its rows; None for the same order.
      columns: index of each of its columns in the file; None for the same order.
    """

    parts: tuple[str, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    def columns_of(self, group: int) -> np.ndarray | None:
        """Return the index of each run of `group` columns, by which blocks have scales; None if the arrangement divides
        such runs or the columns are no multiple of `group`. `columns` must not be None.
        """
        assert self.columns is not None
        if len(self.columns) % group:
            return None
        first = self.columns.reshape(-1, group)
        return first[:, 0] // group if np.array_equal(first, first[:, :1] // group * group + np.arange(group)) else None


class Arranged(NamedTuple):
    """Tensor of a checkpoint that consists of tensors of a file.

    Attributes:
      order: where its rows and columns are in these.
      parts: the file's tensors.
      factors: the factor of each as a whole; None for none.
    """

    order: Arrangement
    parts: tuple[TensorInfo, ...]
    factors: tuple[TensorInfo | None, ...]

    def has_blocks(self, form: BlockFormat) -> bool:
        """Return whether the tensor can be read as codes and scales: all parts have this block format, and columns that
        share a scale stay together.
        """
        divided = self.order.columns is not None and self.order.columns_of(form.group) is None
        return not divided and all(part.format == form for part in self.parts)

    def columns(self, kind: str | None) -> np.ndarray | None:
        """Return the index of each column in the file, or of each group if `kind` is that of scales or zeros."""
        return self.order.columns_of(1 if kind in (None, CODES) else self.parts[0].format.group)

    def runs(self, rows: slice) -> Iterator[tuple[TensorInfo, TensorInfo | None, int, int]]:
        """Yield (part, its factor, first, last) for each run of these rows of the tensor whose rows in the part are
        first to last - 1, in order: at least one run, which may be empty.
        """
        ends = np.cumsum([part.shape[0] for part in self.parts])
        index = (np.arange(ends[-1]) if self.order.rows is None else self.order.rows)[rows]
        cuts = (np.diff(index) != 1) | np.isin(index[1:], ends)
        for run in np.split(index, np.flatnonzero(cuts) + 1):
            at = int(np.searchsorted(ends, run[0], "right")) if len(run) else 0
            start = int(ends[at]) - self.parts[at].shape[0]
            first, last = (int(run[0]) - start, int(run[-1]) + 1 - start) if len(run) else (0, 0)
            yield self.parts[at], self.factors[at], first, last


def arrange(
    path: str, tensors: dict[str, TensorInfo], factors: dict[str, TensorInfo], orders: Mapping[str, Arrangement]
) -> dict[str, Arranged]:
    """Return the arranged tensors by the checkpoint's names. In `tensors` they replace those of the file that they
    consist of, whose factors are taken out of `factors`; both have the checkpoint's names.

    orders: from `arrangements`; those whose parts `tensors` lacks are left out. Raises ModelFileError for shapes that
    do not fit, and for a tensor that the file has as well.
    """
    arranged: dict[str, Arranged] = {}
    for end, order in orders.items():
        for name in [name for name in tensors if name.endswith(order.parts[0])]:
            stem = name.removesuffix(order.parts[0])
            names = [stem + part for part in order.parts]
            if any(part not in tensors for part in names):
                continue
            parts = tuple(tensors.pop(part) for part in names)
            if stem + end in tensors:
                raise ModelFileError(path, f"stands for {stem}{end}, as does {parts[0].name}", tensors[stem + end].name)
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            wanted = (None if axis is None else len(axis) for axis in (order.rows, order.columns))
            fits = all(size in (None, given) for size, given in zip(wanted, shape, strict=False))
            if not fits or len(shape) > 2 or any(part.shape[1:] != shape[1:] for part in parts):
                text = f"must have the rows and columns of {stem}{end}, got {[part.shape for part in parts]}"
                raise ModelFileError(path, text, parts[0].name)
            tensors[stem + end] = replace(parts[0], shape=shape)
            arranged[stem + end] = Arranged(order, parts, tuple(factors.pop(part, None) for part in names))
    return arranged


class _DeltaHeads(NamedTuple):
    """Heads of a gated delta net: numbers of heads, and elements of all keys and of all values of a token."""

    num_keys: int
    num_values: int
    key_size: int
    value_size: int

    @classmethod
    def read(cls, number: Callable[[str], int]) -> _DeltaHeads:
        """Return the heads of a file. number: see `arrangements`. Raises ValueError for numbers that contradict each
        other or are too large.
        """
        keys, values, size = number("ssm.group_count"), number("ssm.time_step_rank"), number("ssm.inner_size")
        if values % keys or size % values:
            text = "a multiple of ssm.group_count, and a divisor of ssm.inner_size"
            raise ValueError(f"ssm.time_step_rank must be {text}, got {values}, {keys} and {size}")
        heads = cls(keys, values, keys * number("ssm.state_size"), size)
        if 2 * (heads.key_size + size) > _MOST_ROWS:
            raise ValueError(f"delta nets of more than {_MOST_ROWS} rows are not supported")
        return heads

    def grouped(self, size: int, first: int = 0) -> np.ndarray:
        """Return the index of each row of value heads of `size` rows, after `first` rows that stay. Checkpoints group
        the heads by their key head; files have the first of each group, then the second of each, and so on.
        """
        heads = np.arange(self.num_values).reshape(-1, self.num_keys).T.reshape(-1, 1)
        return np.concatenate([np.arange(first), first + (heads * size + np.arange(size)).ravel()])


def arrangements(architecture: str, number: Callable[[str], int]) -> Mapping[str, Arrangement]:
    """Return the arrangements of an architecture by the ends of the checkpoint's names of tensors; tensors without one
    are stored as they are.

    number: returns a positive number of the metadata, given its name without the architecture. Its errors are passed
    on. Raises ValueError for numbers that contradict each other or are too large.
    """
    make = _ARCHITECTURES.get(architecture)
    return _NONE if make is None else make(number)


def _separate_delta(number: Callable[[str], int]) -> Mapping[str, Arrangement]:
    """Return the arrangements of Qwen3.5's delta nets; none if they have as many value heads as key heads. Raises the
    errors of `_DeltaHeads.read`, as does `_joined_delta`.
    """
    net, of_file = ".linear_attn.", _DeltaHeads.read(number)
    if of_file.num_values == of_file.num_keys:
        return _NONE
    size = of_file.value_size // of_file.num_values
    values, heads = of_file.grouped(size), of_file.grouped(1)
    orders = {
        **dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), of_file.grouped(size, 2 * of_file.key_size)),
        "in_proj_z.weight": values,
        **dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), heads),
    }
    out = f"{net}out_proj.weight"
    arranged = {f"{net}{name}": Arrangement((f"{net}{name}",), rows) for name, rows in orders.items()}
    return {**arranged, out: Arrangement((out,), columns=values)}


def _joined_delta(number: Callable[[str], int]) -> Mapping[str, Arrangement]:
    """Return the arrangement of Qwen3-Next's delta nets: checkpoints have q, k, v and z of a key head together, files
    q, k and v of all heads in one tensor, z in another.
    """
    net, of_file = ".linear_attn.", _DeltaHeads.read(number)
    q = np.arange(of_file.key_size).reshape(of_file.num_keys, -1)
    v = 2 * of_file.key_size + np.arange(of_file.value_size).reshape(of_file.num_keys, -1)
    rows = np.concatenate([q, q + of_file.key_size, v, v + of_file.value_size], axis=1).ravel()
    parts = f"{net}in_proj_qkv.weight", f"{net}in_proj_z.weight"
    return {f"{net}in_proj_qkvz.weight": Arrangement(parts, rows)}


def _joined_mlp(number: Callable[[str], int]) -> Mapping[str, Arrangement]:
    """Return the arrangement of the gate and up projections of Granite's shared MLPs."""
    mlp = ".shared_mlp."
    return {f"{mlp}input_linear.weight": Arrangement((f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"))}


_NONE: Mapping[str, Arrangement] = MappingProxyType({})
_ARCHITECTURES: Mapping[str, Callable[[Callable[[str], int]], Mapping[str, Arrangement]]] = {
    **dict.fromkeys(("granitehybrid", "granitemoe"), _joined_mlp),
    "qwen3next": _joined_delta,
    **dict.fromkeys(("qwen35", "qwen35moe"), _separate_delta),
}
