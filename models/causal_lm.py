"""CausalLM: the interface of a model to the engine, the registry and the loaders."""

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

    Its weights are declared through Build.weight and jaxengine.models.params.declare.declare. Shape letters:
    models/layers/base/linear.py.

    Attributes:
      gguf_architecture: the family's general.architecture; None if the class does not read GGUF files.
      checkpoint_names: rules by which its checkpoints' tensor names differ from those that it declares.
      config: config of the full model.
      build: settings for which it was built, with a stage.
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
        """Return keyword arguments of ModelConfig, without the architecture, from the fields of a config.json. Raises
        ModelConfigError for a field that is missing, wrong or not supported.
        """
        ...

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig, without the architecture, from GGUF metadata. Raises
        ModelConfigError for a field that is missing, wrong or not supported.
        """
        ...

    def __call__(
        self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Compute hidden states [T, D] after the final norm, and return them with the pool, which then has the keys and
        values of this step.

        kv: a Cache if layers keep states, and the returned one is then a Cache too. hidden: [T, D] from the previous
        stage; None in the first stage, which begins with the tokens. A stage that is not the last returns hidden states
        without the norm.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V / n] of hidden states [R, D], where n is the number of devices that share the output
        head. Must only be called in the last stage.
        """
        ...

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged | State, ...]:
        """Return the cache groups of the whole model, each with those of its layers that are in this stage. Groups with
        pages come first. A group may have no layer here. Shapes are of one device.

        page_size: tokens of a page. kv_dtype: dtype of the pages. hybrid: see jaxengine.models.cache.group_layers.
        """
        ...
