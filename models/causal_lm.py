"""CausalLM: the interface that a model has for the engine, the registry and the loaders."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax

from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, Paged, State
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage


class CausalLM(Protocol):
    """Interface of a model: a flax.nnx module that maps a ragged batch and a KV pool to hidden states and the updated
    pool.

    Weights are declared by Build.weight and jaxengine.models.params.declare.declare. The letters in shapes are
    explained in models/layers/base/linear.py.

    Attributes:
      gguf_architecture: the family's general.architecture; None if the class itself names none.
      checkpoint_names: rules that map the tensor names of its checkpoints to those that it declares.
      config: config of the whole model.
      build: settings with which it was built, with a stage.
      mesh, stage: those of the build.
      layers: layers of the stage, in order.
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
        """Return keyword arguments for ModelConfig, without the architecture, from the fields of a config.json. Raises
        ModelConfigError for a field that is missing, invalid or not supported.
        """
        ...

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments for ModelConfig, without the architecture, from GGUF metadata. Raises
        ModelConfigError for a field that is missing, invalid or not supported.
        """
        ...

    def __call__(
        self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Return hidden states [T, D] after the final norm, and the pool with the keys and values of this step.

        kv: the pool; if layers keep states, a Cache, and the result is then a Cache as well. hidden: [T, D] from the
        previous stage; None in the first stage, which begins with the tokens. A stage that is not the last returns
        hidden states without the norm.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V / n] of hidden states [R, D], where n is the number of devices that share the rows.
        Must only be called in the last stage.
        """
        ...

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged | State, ...]:
        """Return the cache groups of the whole model. Each lists only those of its layers that are in this stage, which
        may be none. Groups with pages come first. Shapes are those of one device.

        page_size: tokens of a page. kv_dtype: dtype of the pages. hybrid: see jaxengine.models.cache.group_layers.
        """
        ...
