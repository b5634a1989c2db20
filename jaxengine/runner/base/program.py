"""Program: a function to compile for the devices of a mesh, with the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Program(NamedTuple):
    """Function to compile, with the shapes of its arguments and results.

    Attributes:
      name: name for messages; together with the description of its StepPrograms it identifies the program.
      function: function of whole arrays, to be compiled for the mesh.
      arguments: shapes with shardings and layouts.
      results: pytree with the structure of the result.
      donate: indices of donated arguments.
      of_model: whether the program depends on the model. Otherwise it depends only on its shapes and the stage's
        extensions.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    results: Any
    donate: tuple[int, ...]
    of_model: bool = True

    def given_to(self, call: Callable[..., Any], description: str, **more: Any) -> Any:
        """Return the result of `call`, a method ExecutableCache.get or begin, for this program. description: as there.
        more: further arguments by name.
        """
        own = {"donate": self.donate, "description": description, **more}
        return call(self.name, self.function, self.arguments, self.results, **own)


def program_on(
    mesh: Mesh, name: str, function: Callable, arguments: tuple[Any, ...], results: Any, donate: tuple[int, ...]
) -> Program:
    """Return a Program in which every device of the mesh runs `function` on its own parts of the arguments.

    function: takes one device's parts. arguments: whole shapes, sharded over the mesh. results: pytree of shapes, of
    which only the shardings matter. donate: indices of arguments whose memory the results may reuse.
    """
    function = on_devices(mesh, function, _partition(arguments), _partition(results))
    return Program(name, function, arguments, results, donate)


def on_devices(mesh: Mesh, function: Callable, arguments: Any, results: Any) -> Callable:
    """Return a function of whole arrays that runs `function` on each device's parts. On a mesh of one device it is
    `function` itself.

    arguments, results: pytrees of the function's arguments and results, with a PartitionSpec in place of each array.
    Results that are not sharded must be equal on all devices, which is not checked.
    """
    if mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def shape_on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
    """Return an abstract array that is sharded over the mesh by `spec`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def abstract_params(params: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return a ShapeDtypeStruct, with sharding and layout, for each of a model's leaves, which are arrays or shapes."""
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format) for leaf in params]


def _partition(shapes: Any) -> Any:
    """Return the pytree with each shape replaced by its PartitionSpec."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
