"""Build: what a model is built for (its dtype, its devices, how its weights are stored), and its abstract construction.

It is the one argument that families pass through to layers. It knows neither the families (models/model_classes.py) nor
where weights come from (models/weights).
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
    """Settings for which a model is built.

    Attributes:
      dtype: of activations between layers, and of weights whose scheme does not say otherwise.
      mesh: the devices it will be split over.
      stage: the layers to have; None for all of them.
      scheme: function from a checkpoint module's name ("model.layers.3.mlp.up_proj") to the Scheme that stores its
        matrix. Hashable, with a complete repr.
      layer: number of the layer that is being built, None outside the layers.
      lora: room for adapters in the products of layers; None for a model without.
      whole_parts: names of parts of the model whose weights each device has whole, and computes alone.
      exact: tokens get the same bits however they come (jaxengine.models.layers.exact).
    """

    dtype: Any
    mesh: MeshLayout = ONE_DEVICE
    stage: Stage | None = None
    scheme: Callable[[str], Scheme] = PLAIN
    layer: int | None = None
    lora: LoraSpec | None = None
    whole_parts: tuple[str, ...] = ()
    exact: bool = False

    def weight(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        axes: tuple[str | None, ...],
        *,
        num_experts: int | None = None,
        table: bool = False,
    ) -> Weight:
        """Declare a matrix of the model, stored by the scheme of its checkpoint modules (see Scheme.declare).

        shape, axes: [in, out], [num_experts, in, out], or [rows, D] of a `table`, and their logical axes, None for an
        axis that is not split. num_experts: None for no stack. sources: the modules that form it, joined along `out`,
        or along a table's rows.

        Raises ModelConfigError if one product is made of modules that are stored differently, or that cannot have this
        shape; ValueError if the stored form cannot be split over the mesh.
        """
        chosen = self._schemes(sources)
        schemes = {*chosen.values()}
        if len(schemes) != 1:
            kept = ", ".join(f"{name} as {getattr(scheme, 'stored', 'it is')}" for name, scheme in chosen.items())
            raise ModelConfigError(f"quantization_config: modules of one product must be stored in one way, got {kept}")
        parts = 1 if table or axes[-2] is None else self.mesh.num_shards(axes[-2])
        options: dict[str, Any] = {"num_experts": num_experts, "table": table, "input_parts": parts}
        return schemes.pop().declare(shape, sources, axes, dtype=self.dtype, **options)

    def stores_alike(self, sources: Sequence[Source]) -> bool:
        """Whether the modules of these sources have the same storage format, so that they can be one product."""
        return len({*self._schemes(sources).values()}) == 1

    def _schemes(self, sources: Sequence[Source]) -> dict[str, Scheme]:
        """Return the Scheme of each of the modules, by its name in the checkpoint.

        Names are `numbered` by the layer being built.
        """
        names = [numbered(source.name, self.layer) for source in sources]
        return {name: self.scheme(name) for name in names}

    def for_table(self) -> Build:
        """Return the build of a token table: with plain weights, unless the scheme also covers tables."""
        kept = isinstance(self.scheme, Quantization | Everywhere) and self.scheme.with_tables
        return self if kept else replace(self, scheme=PLAIN)

    def as_named(self, quantization: Callable[[str], Any] | None) -> Build:
        """Return the build of a part of the model outside of its text layers: without adapters, its modules stored as
        the checkpoint says by their names.

        quantization: of the model's configuration. The modules are plain if it is not a checkpoint's own, as when the
        text's matrices are rounded at load, and with AutoGPTQ, whose configurations name no modules and which changes
        no others.
        """
        if not isinstance(quantization, Quantization) or quantization.method == GPTQ:
            return replace(self, lora=None, scheme=PLAIN)
        rounded = any(isinstance(stored, Rounded) for _, stored in quantization.rules)
        return replace(self, lora=None, scheme=PLAIN if rounded else self.scheme)


def build_abstract(model_class: Callable[[Config, Build], Model], config: Config, build: Build) -> Model:
    """Build a `model_class` with ShapeDtypeStructs for weights; nothing is allocated.

    Raises ValueError for a mesh over which its weights cannot be split, and ModelConfigError (a ValueError) for a
    config that the class cannot have.
    """
    model = nnx.eval_shape(lambda: model_class(config, build))
    unsplit = next((param for param in declared_params(model) if not param.splits_over(build.mesh)), None)
    if unsplit is not None:
        raise ValueError(f"{unsplit.name} {list(unsplit.shape)} cannot be split evenly over {build.mesh}")
    return model
