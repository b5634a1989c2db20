"""Parameter declarations: shape, dtype, logical axes and checkpoint names of a weight, said once where it is used.

Sharding, loading, random initialisation and the memory plan all read this and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class ParamDecl:
    """What a weight is, beside its shape and dtype. Equal for equal layers, so that one trace serves all of them.

    `sources` are checkpoint names (Hugging Face spelling) with the number of rows each contributes: they are joined
    along their first axis, in this order, and then transposed if `transposed`. A checkpoint keeps a linear weight as
    [out, in]; ours is [in, out]. "{layer}" in a name stands for the index under which the weight's layer is listed.
    `init_std` is the scale of dummy weights; None means ones.
    """

    axes: tuple[str | None, ...]
    sources: tuple[tuple[str, int], ...]
    transposed: bool = False
    init_std: float | None = None


@dataclass(frozen=True)
class DeclaredParam:
    """One weight of a built model: its path in the module tree and its declaration with all names resolved."""

    path: tuple[Any, ...]
    variable: nnx.Param
    decl: ParamDecl

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variable.get_value().shape

    @property
    def dtype(self) -> Any:
        return self.variable.get_value().dtype

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.path)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def source_shape(self, rows: int) -> tuple[int, ...]:
        """Shape in the checkpoint of a source that contributes `rows` rows."""
        joined = self.shape[::-1] if self.decl.transposed else self.shape
        return (rows, *joined[1:])


def declare(shape: tuple[int, ...], dtype: Any, decl: ParamDecl) -> nnx.Param:
    """A weight of a module. Zeros: real values come from models.loading."""
    rows = shape[-1] if decl.transposed else shape[0]
    if len(decl.axes) != len(shape) or sum(n for _, n in decl.sources) != rows:
        raise ValueError(f"declaration {decl} does not fit a weight of shape {shape}")
    return nnx.Param(jnp.zeros(shape, dtype), decl=decl)


def declared_params(model: Any) -> Iterator[DeclaredParam]:
    """Every weight of a model (abstract or real), in module order."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        decl: ParamDecl = param.get_metadata()["decl"]
        layer = next((part for part in path if isinstance(part, int)), None)
        sources = tuple((name.replace("{layer}", str(layer)), rows) for name, rows in decl.sources)
        yield DeclaredParam(path, param, replace(decl, sources=sources))
