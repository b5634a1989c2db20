"""Program: one thing to compile, for the devices of a mesh, with its arguments as shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Program(NamedTuple):
    """A function to compile, with the shapes of its arguments and results.

    Attributes:
      name: for messages; with the description of its StepPrograms it says which program it is.
      arguments: as shapes with their shardings and layouts.
      results: a pytree of the structure of what it returns.
      donate: indices of donated arguments.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    results: Any
    donate: tuple[int, ...]


def program_on(
    mesh: Mesh, name: str, function: Callable, arguments: tuple[Any, ...], results: Any, donate: tuple[int, ...]
) -> Program:
    """The program that every device of the mesh runs on its own parts of the arguments.

    function: of one device's parts. arguments: whole shapes, which the mesh splits as their shardings say. results: a
    pytree of shapes of which only the shardings matter. donate: indices of arguments whose memory results may take.
    """
    function = on_devices(mesh, function, _partition(arguments), _partition(results))
    return Program(name, function, arguments, results, donate)


def on_devices(mesh: Mesh, function: Callable, arguments: Any, results: Any) -> Callable:
    """A function of the devices' own parts as one of whole arrays; on a mesh of one device the function itself.

    arguments, results: pytrees of the structure of these, with a PartitionSpec in the place of each array. What is not
    split must come out equal on all devices: nothing checks that.
    """
    if mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def shape_on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
    """An abstract array, which the mesh splits as `spec` says."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def abstract_params(params: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The model's leaves, arrays or shapes, as shapes with their shardings and layouts."""
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format) for leaf in params]


def _partition(shapes: Any) -> Any:
    """PartitionSpecs in the places of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
