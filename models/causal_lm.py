"""CausalLM: what the engine, the registry and the loaders ask of a model, and all they may ask."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax

from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, Paged, State
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.gguf import GGUFConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage


class CausalLM(Protocol):
    """A flax.nnx module that turns a ragged batch and a KV pool into hidden states and the updated pool.

    Its weights are declared through Build.weight and jaxengine.models.params.declare.declare. Shape letters:
    models/layers/linear.py.

    Attributes:
      gguf_architecture: the family's general.architecture; None where another class reads it.
      checkpoint_names: what its checkpoints have beside the tensors that it declares.
      build: what it was built for, with a stage.
      layers: of the stage, in order.
    """

    gguf_architecture: ClassVar[str | None]
    checkpoint_names: ClassVar[CheckpointNames]
    config: ModelConfig
    build: Build
    layers: Any

    def __init__(self, config: ModelConfig, build: Build): ...

    @property
    def mesh(self) -> MeshLayout: ...

    @property
    def stage(self) -> Stage: ...

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        """Keyword arguments of ModelConfig, but for its architecture, from a config.json. Raises ModelConfigError."""
        ...

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """The same from GGUF metadata."""
        ...

    def __call__(
        self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Hidden states [T, D] after the final norm, and the pool holding the KV of this step's tokens.

        kv: a Cache where layers keep states, and then so is what is returned.
        hidden: those of the stage before; None for the first stage, which begins with the tokens. A stage that is not
        the last gives hidden states without the norm.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute logits: [R, D] -> f32[R, V / n] where n devices share the rows. Of the last stage only."""
        ...

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged | State, ...]:
        """The cache groups of the whole model with the layers that are here, `page_size` tokens a page.

        Those with pages come first; a group may have no layer here. Shapes are of one device. kv_dtype: of what pages
        hold. hybrid: as jaxengine.models.cache.group_layers.
        """
        ...
