"""Model for inspection: its module, its weights, and a forward pass over plain token ids, without an engine.

`jaxengine.checkpoint.model_source.open_model`, which this uses, opens the files of a model for an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.checkpoint import model_source
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import load_params
from jaxengine.rl import forward, hidden_states

DTYPES = ("float32", "bfloat16")
# Token ids of a sequence, or of several of equal length: i32[T] or i32[B, T].
Tokens = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model in memory, on the default device.

    Attributes:
      module: the family's `flax.nnx` module; it holds `params`.
      params: weights, an `nnx.State`: what `jaxengine.rl.forward` takes, and what gradients are of.
      config: shape of the model.
      path: its file or folder, which also has its tokenizer (`transformers.AutoTokenizer.from_pretrained(path)`).
    """

    module: CausalLM
    params: nnx.State
    config: ModelConfig
    path: Path

    def forward(self, tokens: Tokens) -> jax.Array:
        """Return logits f32[T, V] of token ids [T], or f32[B, T, V] of [B, T]: at each position those of the next
        token.

        Raises ValueError for ids outside the vocabulary, no tokens, other shapes, and numbers that are not integers.
        """
        rows, is_one = self._rows(tokens)
        logits = forward(self.module, self.params, rows)
        return logits[0] if is_one else logits

    def hidden_states(self, tokens: Tokens) -> jax.Array:
        """Return the hidden states [T, layers + 1, D] of token ids [T], or [B, T, layers + 1, D] of [B, T], in the
        model's dtype.

        Numbered as in transformers: 0 is the embeddings, n is the output of layer n, and the last is taken after the
        final norm. Raises ValueError for ids outside the vocabulary, no tokens, other shapes, numbers that are no
        integers, and a model with several hidden states per token.
        """
        rows, is_one = self._rows(tokens)
        states = hidden_states(self.module, self.params, rows)
        return states[0] if is_one else states

    def _rows(self, tokens: Tokens) -> tuple[jax.Array, bool]:
        """Return tokens as i32[B, T], and whether they were given as one sequence, [T]. Raises ValueError for ids
        outside the vocabulary, no tokens, other shapes, and numbers that are not integers.
        """
        found = np.asarray(tokens)
        if found.ndim not in (1, 2) or found.size == 0 or not np.issubdtype(found.dtype, np.integer):
            raise ValueError(f"tokens must be integers [T] or [B, T], got {found.dtype}{list(found.shape)}")
        if found.min() < 0 or found.max() >= self.config.vocab_size:
            wrong = found[(found < 0) | (found >= self.config.vocab_size)][0]
            raise ValueError(f"tokens must be at least 0 and below {self.config.vocab_size}, got {wrong}")
        return jnp.asarray(np.atleast_2d(found), jnp.int32), found.ndim == 1


def open_model(model: str | PathLike[str] | None = None, *, dtype: str = "float32") -> OpenModel:
    """Open a model with its weights, which are then on the default device.

    model: a Hugging Face folder, a GGUF file or a hub id; None for the embedded one. dtype: type of weights and
    activations, "float32" or "bfloat16". Raises ConfigError, DefaultModelMissing, ModelConfigError and ModelFileError
    as an engine does for a model that it cannot load; ConfigError also for another dtype, and for a folder in device
    layout, whose weights are cut for an engine's devices.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, " or ".join(DTYPES))
    name = None if model is None else fspath(model)
    source = model_source.open_model(EngineConfig(model=name, dtype=dtype, skip_tokenizer_init=True))
    if source.weights is None or isinstance(source.weights, Path):
        problem = f"model {name!r} is in device layout"
        raise ConfigError.because("model", problem, "name the folder that it was converted from")
    try:
        module = build_model(source.config, Build(dtype))
        nnx.update(module, load_params(module, source.weights))
    finally:
        source.close()
    return OpenModel(module, nnx.state(module), source.config, source.path)
