"""Build: the settings with which a model is built, such as its dtype, its devices and the storage of its weights.

Families pass a Build through to their layers. It is independent of the families (models/model_classes.py) and of the
sources of weights (models/weights). `build_abstract` constructs a model without allocating memory for its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flax import nnx

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.params.declare import Source, declared_params, numbered
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.rules import Everywhere, Quantization
from jaxengine.models.quantization.base.scheme import Scheme, Weight
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.models.quantization.schemes.four_bits import GPTQ
from jaxengine.sharding.layout import ONE_DEVICE, MeshLayout
from jaxengine.sharding.stages import Stage

Config = TypeVar("Config")
Model = TypeVar("Model")


@dataclass(frozen=True)
class Build:
    """Settings with which a model is built.

    Attributes:
      dtype: dtype of activations between layers, and of weights unless their scheme defines another.
      mesh: devices over which the model will be split.
      stage: pipeline stage, which has some of the layers; None for all layers.
      scheme: function from a checkpoint module's name ("model.layers.3.mlp.up_proj") to the Scheme that stores its
        matrix. It must be hashable and have a complete repr.
      layer: number of the layer that is being built; None outside of the layers.
      lora: room for adapters in the matrix products of layers; None for a model without adapters.
      whole_parts: names of parts of the model that are replicated: each device has all of their weights and computes
        them without the others.
      exact: whether a token's results have the same bits in any batch (jaxengine.models.layers.exact).
    """

    dtype: Any
    mesh: MeshLayout = ONE_DEVICE
    stage: Stage | None = None
    scheme: Callable[[str], Scheme] = PLAIN
    layer: int | None = None
    lora: LoraSpec | None = None
    whole_parts: tuple[str, ...] = ()
    exact: bool = False

    @property
    def of_pages(self) -> Build:
        """This build with only what decides the content of a replica's pages and their form: without the number of
        replicas, the parallelism of experts, and room for adapters.
        """
        return replace(self, mesh=MeshLayout(model=self.mesh.model), lora=None)

    def weight(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        axes: tuple[str | None, ...],
        *,
        num_experts: int | None = None,
        table: bool = False,
    ) -> Weight:
        """Declare a matrix of the model, stored by the scheme of its checkpoint modules, and return its Weight (see
        Scheme.declare).

        shape: [in, out], [num_experts, in, out], or [rows, D] of a `table`. axes: logical name of each axis, None for
        an axis that is not split. num_experts: None for a matrix that is not a stack of experts. sources: the
        checkpoint modules that form the matrix, joined along `out`, or along the rows of a table.

        Raises ModelConfigError if the modules are stored in different formats or cannot have this shape, and ValueError
        if the stored form cannot be split over the mesh.
        """
        chosen = self._schemes(sources)
        schemes = {*chosen.values()}
        if len(schemes) != 1:
            kept = ", ".join(f"{name} as {getattr(scheme, 'stored', 'it is')}" for name, scheme in chosen.items())
            raise ModelConfigError(f"quantization_config: modules of one product must be stored in one way, got {kept}")
        parts = 1 if table else self.mesh.num_shards(axes[-2])
        options: dict[str, Any] = {"num_experts": num_experts, "table": table, "input_parts": parts}
        return schemes.pop().declare(shape, sources, axes, dtype=self.dtype, **options)

    def stores_alike(self, sources: Sequence[Source]) -> bool:
        """Return whether the modules of these sources have the same storage format, so that they can be one matrix."""
        return len({*self._schemes(sources).values()}) == 1

    def _schemes(self, sources: Sequence[Source]) -> dict[str, Scheme]:
        """Return the Scheme of each module by its name in the checkpoint, with the number of the layer being built."""
        names = [numbered(source.name, self.layer) for source in sources]
        return {name: self.scheme(name) for name in names}

    def for_table(self) -> Build:
        """Return the build for a token table: this one if its scheme covers tables, otherwise a copy that stores plain
        weights.
        """
        kept = isinstance(self.scheme, Quantization | Everywhere) and self.scheme.with_tables
        return self if kept else replace(self, scheme=PLAIN)

    def as_named(self, quantization: Callable[[str], Any] | None) -> Build:
        """Return the build for a part of the model outside of its text layers: without adapters, and with each module
        stored as the checkpoint's quantization defines for the module's name.

        quantization: quantization of the model's configuration. The modules are plain if it is not a Quantization, if
        it is not the checkpoint's own because the text's matrices are quantised at load, and for AutoGPTQ, which only
        quantises the text layers and does not name modules.
        """
        if not isinstance(quantization, Quantization) or quantization.method == GPTQ:
            return replace(self, lora=None, scheme=PLAIN)
        rounded = any(isinstance(stored, Rounded) for _, stored in quantization.rules)
        return replace(self, lora=None, scheme=PLAIN if rounded else self.scheme)


def build_abstract(model_class: Callable[[Config, Build], Model], config: Config, build: Build) -> Model:
    """Return a `model_class` whose weights are ShapeDtypeStructs, without allocating memory. Raises ValueError for a
    mesh over which its weights cannot be split evenly, and ModelConfigError (a ValueError) for a config that the class
    does not support.
    """
    model = nnx.eval_shape(lambda: model_class(config, build))
    unsplit = next((param for param in declared_params(model) if not param.splits_over(build.mesh)), None)
    if unsplit is not None:
        raise ValueError(f"{unsplit.name} {list(unsplit.shape)} cannot be split evenly over {build.mesh}")
    return model
