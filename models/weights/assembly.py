"""A weight put together from pieces of bounded size, in host memory as its devices will have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxengine.models.params.declare import DeclaredParam, Source
from jaxengine.models.quantization.base.quantized import CODES, INPUT_SCALE, ORDER, PAIRS, SCALES, VALUES, ZEROS
from jaxengine.models.weights.huge_pages import HugePages
from jaxengine.models.weights.views.parts import (
    Block,
    local_blocks,
    num_parts,
    put,
    sharding_of,
    source_row,
    tensor_name,
)

# Function that returns rows of a tensor: (name, numbers of the rows, () or (slice of the second axis,), dtype).
ReadRows = Callable[[str, np.ndarray, tuple[slice, ...], Any], np.ndarray]
# Arrays of a piece's size that are alive while it is written: as read, converted, transposed, and one for checks.
_COPIES, _ROW_NUMBER_BYTES = 4, 8
_OF_FORMATS = (VALUES, CODES, PAIRS, SCALES, ZEROS, ORDER, INPUT_SCALE)


class _Part(NamedTuple):
    """Part of a block that some devices get.

    columns: counted from the block's first. devices: those that get the part. buffer: host array in the shape of these
    devices' part of the weight.
    """

    columns: slice
    devices: list[Any]
    buffer: np.ndarray


class Assembly:
    """A weight to which tensors are added in any order, a piece of their rows at a time.

    A CPU's part is written where the weight will stay. Devices with memory of their own get their part in one transfer,
    until which host memory holds it (`finish`).
    """

    def __init__(self, param: DeclaredParam, mesh: Mesh | None, memory: HugePages | None, chunk_bytes: int):
        """Allocate zeros for this process's parts of the weight.

        mesh: the mesh that the weight is split over; None for the default device. memory: for weights of CPUs; None for
        other devices. chunk_bytes: size of all copies of a piece together; a piece has at least one row, and all rows
        of a device if they are stored in a format of their own. Raises ValueError for a mesh that does not split the
        weight evenly.
        """
        self._param, self._mesh, self._memory, self._chunk_bytes = param, mesh, memory, chunk_bytes
        self._sharding = sharding_of(param, mesh)
        self._num_parts = num_parts(param, mesh)[param.decl.joined_axis]
        shape = param.shape if self._sharding is None else self._sharding.shard_shape(param.shape)
        self._blocks: list[tuple[Block, list[_Part]]] = []
        for block in local_blocks(param, mesh):
            parts: dict[tuple[int, int], _Part] = {}
            for device, columns in block.devices:
                key = columns.start or 0, columns.stop or 0
                if key not in parts:
                    parts[key] = _Part(columns, [], self._zeros(shape))
                parts[key].devices.append(device)
            self._blocks.append((block, [*parts.values()]))

    def add(self, read: ReadRows, names: Collection[str] | None = None) -> None:
        """Copy the rows that the weight has of some tensors into it. read: function that returns these rows, whose
        errors are passed on. names: the tensors to add; None for all.
        """
        decl = self._param.decl
        for block, parts in self._blocks:
            for expert in block.numbers(decl):
                start = 0
                for source in decl.sources:
                    name, share = tensor_name(source, expert), source.num_contributed // self._num_parts
                    if names is None or name in names:
                        for first, numbers in self._pieces(source, block, share):
                            rows = read(name, numbers, block.columns, self._param.dtype)
                            rows = rows.astype(self._param.dtype, copy=False)
                            self._write(parts, expert - block.experts.start, start + first, rows)
                    start += share

    def finish(self) -> jax.Array:
        """Return the weight on its devices, after all transfers are complete. Rows that were not added are zeros. The
        buffers are released, so it can be called once.
        """
        arrays = []
        for _, parts in self._blocks:
            for part in parts:
                for number, device in enumerate(part.devices):
                    target = None if device is None else SingleDeviceSharding(device)
                    own = part.buffer if self._memory is None or number == 0 else self._memory.copy(part.buffer)
                    arrays.append(jax.block_until_ready(put(own, self._param.decl, target)))
        self._blocks = []
        if self._sharding is None:
            return arrays[0]
        param = self._param
        return jax.make_array_from_single_device_arrays(param.shape, self._sharding, arrays, dtype=param.dtype)

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return host zeros of the weight's dtype; on a CPU they become the weight's own memory."""
        dtype = jnp.dtype(self._param.dtype)
        return np.zeros(shape, dtype) if self._memory is None else self._memory.zeros(shape, dtype)

    def _pieces(self, source: Source, block: Block, share: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index of the piece's first row within the block's share, numbers of the tensor's rows) for each piece
        of the rows that a tensor contributes to a block.

        share: number of rows that it contributes to a block, padding included; padding is not yielded. What is
        read for a piece of a plain source, with its copies, takes at most `chunk_bytes`, or is of one row; the rows of
        any other source are one piece.
        """
        begin = block.part * share
        count = min(share, source.rows * source.repeat - begin)
        if is_plain(source):
            widths = [columns.stop - columns.start for columns in block.columns]
            widths += self._param.source_shape(source)[1 + len(widths) :]
            number_bytes = max(4, jnp.dtype(self._param.dtype).itemsize)
            run = source.run or source.group
            apart = -(-(source.stride or run) // run)  # rows that are read for one that is used
            row_bytes = math.prod(widths) * number_bytes * apart + _ROW_NUMBER_BYTES
            step = max(1, self._chunk_bytes // (row_bytes * _COPIES))
        else:
            step = max(1, count)
        for first in range(0, count, step):
            yield first, source_row(source, np.arange(begin + first, begin + min(first + step, count)))

    def _write(self, parts: list[_Part], expert: int, first: int, rows: np.ndarray) -> None:
        """Copy `rows` into the buffers of a block's parts, from index `first` of the joined axis on, transposed if the
        declaration is. expert: index of the expert within the block.
        """
        decl = self._param.decl
        for part in parts:
            target = part.buffer if decl.num_experts is None else part.buffer[expert]
            own = rows[:, part.columns] if rows.ndim > 1 else rows
            if decl.transposed:  # by XLA, which transposes a matrix in blocks; NumPy does it element by element
                turned = jax.device_put(own.swapaxes(-1, -2), jax.local_devices(backend="cpu")[0])
                target[..., first : first + len(rows)] = np.asarray(turned)
            else:
                target[first : first + len(rows)] = own


def is_plain(source: Source) -> bool:
    """Return whether each row of the weight is one row of a tensor, independent of other rows: False for tensors that
    are derived from a storage format, such as codes and scales.
    """
    return source.name.rpartition(".")[2] not in _OF_FORMATS
