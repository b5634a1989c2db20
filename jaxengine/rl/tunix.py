"""jaxengine as the rollout engine of Tunix, and its models as models that Tunix trains.

    ClusterConfig(rollout_engine=functools.partial(JaxengineRollout, llm=llm), ...)

Needs google-tunix, of which 0.1.7 is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.api.llm import LLM
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.layers.base.section import Recompute
from jaxengine.models.unpaged import check_unpaged, run_unpaged
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.rl.rollouts import check_logprobs, check_whole, chosen
from jaxengine.rl.trees import named_arrays
from jaxengine.rl.tunix_names import named_tensors
from jaxengine.runner.weights.weight_names import Renamed

# Imported by name: it is in no extra, as it requires an older safetensors than jaxengine (and works with this one).
try:
    _tunix: Any = import_module("tunix.rl.rollout.base_rollout")
except ImportError as error:
    raise ImportError(
        "jaxengine.rl.tunix needs Tunix: pip install 'jaxengine[tunix]', then pip install --no-deps google-tunix==0.1.7"
    ) from error

_INT63, _UINT64 = 2**63 - 1, 2**64 - 1


class Frozen(nnx.Variable[jax.Array]):
    """Weight that Tunix's optimizer does not change."""


class TunixModel(nnx.Module):
    """Model of jaxengine with Tunix's calling convention: the engine's own modules, over whole rows of tokens.

    Attributes:
      module: the family's own module, as `jaxengine.open_model` returns it.
      remat: compute each layer again for its gradient.
    """

    def __init__(
        self, module: CausalLM, *, is_trained: Callable[[tuple[Any, ...]], bool] | None = None, remat: bool = False
    ):
        """Wrap a module. is_trained: returns whether the weight at a path, such as ("layers", 3, "mlp", ...), is
        trained; None trains all. Weights that are not trained become Frozen in a copy of the module's structure.

        remat: compute each layer again for its gradient. Raises ValueError for a model without such a forward pass, and
        if no weight is trained.
        """
        check_unpaged(module)
        graph, state = nnx.split(module)
        kept = nnx.to_flat_state(state)
        trained = [is_trained is None or is_trained(path) for path, _ in kept]
        if not any(trained):
            raise ValueError("is_trained must be true of some weight, and is of none")
        self.module: Any = nnx.merge(graph, state)
        self.remat = remat
        for (path, variable), own in zip(kept, trained, strict=True):
            if not own:
                _put(self.module, path, Frozen(variable.get_value(), **variable.get_metadata()))

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Return logits float32[B, T, V] of tokens int32[B, T], and no cache.

        positions: int32[B, T], for rope; None to count from 0. segment_ids: int32[B, T], with 0 for padding. Without
        them a token that does not attend to itself, by the diagonal of attention_mask [B, T, T], is padding; the rest
        of the mask is ignored: attention is causal. Raises ValueError for a cache.
        """
        if cache is not None:
            raise ValueError("cache must be None: the engine generates, and this model only trains")
        if segment_ids is None and attention_mask is not None:
            segment_ids = jnp.diagonal(attention_mask, axis1=-2, axis2=-1)
        segments = None if segment_ids is None else jnp.where(segment_ids == 0, -1, segment_ids).astype(jnp.int32)
        sections = {"recompute": Recompute()} if self.remat else {}
        return run_unpaged(self.module, input_tokens, segments, positions, sections)[1], None


class JaxengineRollout(_tunix.BaseRollout):
    """Tunix's interface of a rollout engine, over an `LLM`.

    Give Tunix `functools.partial(JaxengineRollout, llm=llm)` as `ClusterConfig.rollout_engine`.

    Attributes:
      mesh: the mesh that Tunix's `with` statements use; None for none.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module | None = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: Any = None,
        *,
        llm: LLM,
        mapping: Mapping[str, Renamed] | None = None,
    ):
        """Store the engine, and replace its weights by those of `rollout_actor`.

        Args:
          rollout_actor: a TunixModel; or a model whose parameters have the names of Tunix's own Llama 3, Qwen and Gemma
            models, or those of `mapping`. None leaves the engine's weights as they are.
          tokenizer: with encode, decode, bos_id, eos_id and pad_id, as Tunix's TokenizerAdapter.
          mesh: the mesh that Tunix's `with` statements use; None for none.
          rollout_config: a RolloutConfig, which is only checked here; `generate` gets its own.
          llm: the engine.
          mapping: from parameters' paths, joined by dots, to Hugging Face names, as in `LLM.update_weights`.

        Raises ValueError for a RolloutConfig that the engine does not support, WeightUpdateError for weights that it
        lacks or that do not fit.
        """
        self._llm, self._tokenizer, self._mapping = llm, tokenizer, mapping
        self.mesh = mesh
        self._own = isinstance(rollout_actor, TunixModel)
        self._temperature: float | None = None
        self._calls = itertools.count()
        if rollout_config is not None:
            self._check(rollout_config)
        self._trained: frozenset[tuple[Any, ...]] = frozenset()
        if isinstance(rollout_actor, TunixModel):
            self._trained = frozenset(path for path, _ in nnx.to_flat_state(nnx.state(rollout_actor, nnx.Param)))
            self._update(nnx.state(rollout_actor.module), strict=True)
        elif rollout_actor is not None:
            self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: str | list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Answer each prompt once, with a RolloutConfig's parameters; return a RolloutOutput when all answers are
        complete.

        prompts: texts or token ids; a text is one prompt. kwargs: fields of SamplingParams, which override those of the
        config. With a seed, each prompt of each call has its own seed, and repeating the same calls on a new object
        gives the same answers. Tokens of answers have no padding, and end with the token that ended the answer; their
        texts leave it out. Prompts are padded with pad_id on the left to max_prompt_length, or to a power of two that
        holds a longer one. `logits` is None, and so is `logprobs` unless the config asks for them. Stores the
        temperature for `get_per_token_logps`. Raises ValueError for a config that the engine does not support,
        RuntimeError for an answer that was aborted or failed, and the errors of `LLM.generate`.
        """
        self._check(rollout_config)
        call = next(self._calls)
        ids = [self._prompt_ids(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        params = [self._params(rollout_config, kwargs, call, index) for index in range(len(ids))]
        outputs = self._llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        check_whole(answers)
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [chosen(each) for each in answers]
        tokens = [np.array(each.token_ids, np.int32) for each in answers]
        text = [self._tokenizer.decode(self._without_end(each, rollout_config)) for each in answers]
        padded = _left_padded(ids, rollout_config.max_prompt_length, self.pad_id())
        return _tunix.RolloutOutput(
            text=text, logits=None, tokens=tokens, left_padded_prompt_tokens=padded, logprobs=logprobs
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array, **_: Any) -> jax.Array:
        """Return the log-probabilities float32[B, C] of completions [B, C], computed by the engine; 0 for padding.

        Blocks until they are computed. prompt_tokens: [B, P], padded on the left; completions are padded on the right.
        If pad_id also ends answers, their last token counts as padding. Raises ValueError if the temperature of the
        last rollout is neither 0 nor 1, and the errors of `LLM.get_logprobs`.
        """
        if self._temperature not in (None, 0.0, 1.0):
            text = "log-probabilities of completions are of temperature 1: set it to 1, or num_iterations to 1"
            raise ValueError(f"{text}; got a rollout at {self._temperature}")
        pad, completions = self.pad_id(), np.asarray(completion_tokens)
        starts = [int(np.argmax(row != pad)) for row in np.asarray(prompt_tokens)]
        prompts = [row[start:].tolist() for row, start in zip(np.asarray(prompt_tokens), starts, strict=True)]
        rows = [row[: _length(row, pad)].tolist() for row in completions]
        found = np.zeros(completions.shape, np.float32)
        values = self._llm.get_logprobs([{"prompt_token_ids": each} for each in prompts], rows)
        for row, each in enumerate(values):
            found[row, : len(each)] = each
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace the engine's weights by the trained ones, all of them or, with WeightUpdateError, none.

        params: an nnx.State of the kind of model that `__init__` was given. The arrays of a TunixModel are copied, as a
        trainer may donate them later. Raises ValueError for LoRA parameters (`filter_types` has their type), and for a
        TunixModel if `params` has other weights than the trained ones.
        """
        if any(isinstance(kind, type) and issubclass(kind, nnx.LoRAParam) for kind in filter_types or ()):
            raise ValueError("LoRA parameters are not taken: merge them into the weights, or train all weights")
        if not self._own:
            self._update(params, strict=True)
            return
        params = nnx.filter_state(params, nnx.Param)
        flat = nnx.to_flat_state(params)
        if (paths := frozenset(path for path, _ in flat)) != self._trained:
            wrong = sorted(".".join(map(str, path)) for path in paths ^ self._trained)
            raise ValueError(f"params must have the {len(self._trained)} trained weights; differs by {wrong[:10]}")
        self._update(params["module"], strict=False)

    def pad_id(self) -> int:
        """Return the id of the padding token; eos_id if the tokenizer has none, as in Tunix's adapter. Raises
        ValueError if it has neither.
        """
        pad = _token(self._tokenizer, "pad_id")
        return self.eos_id() if pad < 0 else pad

    def eos_id(self) -> int:
        """Return the id of the token that ends an answer. Raises ValueError if the tokenizer has none."""
        if (end := _token(self._tokenizer, "eos_id")) < 0:
            raise ValueError("tokenizer must have an eos_id, got one without")
        return end

    def model(self) -> None:
        """Return None: the engine's weights are its own, so Tunix updates them.

        ClusterConfig.offload_to_cpu, which moves this model, must be False; `LLM.sleep` frees an engine's devices.
        """

    def _update(self, params: Any, strict: bool) -> None:
        """Replace the engine's weights by those of `params`, an nnx.State; those of a TunixModel are copied first.
        strict: whether all weights must be present; only used for a TunixModel, as other models must always be
        complete. Raises the errors of `LLM.update_weights`.
        """
        if self._own:
            self._llm.update_weights(jax.tree.map(jnp.copy, params), strict=strict)
        elif self._mapping is not None:
            self._llm.update_weights(named_arrays(params), mapping=self._mapping)
        else:
            self._llm.update_weights(named_tensors(params))

    def _check(self, config: Any) -> None:
        """Store the temperature of `config`, a RolloutConfig. Raises ValueError, and stores nothing, for settings that
        the engine does not support.

        These are options of vLLM's engine, log-probabilities that the engine does not report at this temperature,
        parallel sizes other than -1 and the engine's, a mapping, and max_tokens_to_generate of at least max_model_len.
        """
        engine = self._llm.core.config
        for name in ("rollout_vllm_lora_config", "rollout_vllm_sampling_kwargs"):
            if given := getattr(config, name, None):
                raise ValueError(f"{name} must be empty, got {given!r}: it is for vLLM's engine")
        if config.return_logprobs:
            check_logprobs(engine.logprobs_mode, config.temperature)
        for name in ("tensor_parallel_size", "data_parallel_size"):
            given, own = getattr(config, name), getattr(engine, name)
            if given not in (-1, own):
                raise ValueError(f"{name} must be -1 or the engine's, {own}, got {given}")
        if config.rollout_mapping_config is not None:
            raise ValueError("rollout_mapping_config has names of other engines: give JaxengineRollout a mapping")
        longest = engine.max_model_len
        if longest is not None and config.max_tokens_to_generate >= longest:
            text = f"max_tokens_to_generate must be below the engine's max_model_len, {longest}"
            raise ValueError(f"{text}, got {config.max_tokens_to_generate}")
        self._temperature = float(config.temperature)

    def _params(self, config: Any, more: Mapping[str, Any], call: int, index: int) -> SamplingParams:
        """Return the sampling parameters of the prompt with the number `index` in the call with the number `call`;
        their seed is a hash of these and `config.seed`, None without one.

        more: fields that replace those of the config. Raises RequestError for an invalid one.
        """
        seed = None
        if config.seed is not None:
            words = np.asarray(_key_data(config.seed)).ravel().tolist()
            drawn = np.random.SeedSequence([*(int(word) & _UINT64 for word in words), call, index])
            seed = int(drawn.generate_state(1, np.uint64)[0]) & _INT63
        fields: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": -1 if config.top_k is None else config.top_k,
            "seed": seed,
            "stop_token_ids": self._ends(config),
            "logprobs": 0 if config.return_logprobs else None,
            "detokenize": False,
        }
        return SamplingParams(**fields | dict(more))

    def _ends(self, config: Any) -> list[int]:
        """Return the ids of the tokens that end an answer: eos_tokens of `config`, a RolloutConfig, or else the
        tokenizer's eos_id.

        Raises ValueError if there is neither.
        """
        return [int(token) for token in config.eos_tokens or [self.eos_id()]]

    def _without_end(self, answer: Any, config: Any) -> list[int]:
        """Return the token ids of an answer without a last token that ended it. config: a RolloutConfig, which
        determines these tokens.
        """
        ids = [*answer.token_ids]
        return ids[:-1] if ids and answer.finish_reason == "stop" and ids[-1] in self._ends(config) else ids

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Return the token ids of `prompt`, a text, with exactly one begin-of-text token in front if the tokenizer has
        one, as Tunix's samplers do; a sequence of ids is returned as a list, unchanged.
        """
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        ids = [int(token) for token in self._tokenizer.encode(prompt)]
        begin = _token(self._tokenizer, "bos_id") if hasattr(self._tokenizer, "bos_id") else -1
        if begin < 0:
            return ids
        rest = itertools.dropwhile(lambda token: token == begin, ids)
        return [begin, *rest]


def _put(module: nnx.Module, path: tuple[Any, ...], variable: nnx.Variable) -> None:
    """Replace the variable at `path` of a module, in place. path: attribute names and, as ints, indices."""
    *outer, last = path
    owner: Any = module
    for key in outer:
        owner = owner[key] if isinstance(key, int) else getattr(owner, key)
    if isinstance(last, int):
        owner[last] = variable
    else:
        setattr(owner, last, variable)


def _token(tokenizer: Any, name: str) -> int:
    """Return the id of a tokenizer's special token. name: name of the tokenizer's method or attribute that has it.
    Returns -1 if its value is None. Raises AttributeError if there is no such attribute.
    """
    value: Any = getattr(tokenizer, name)
    found: Any = value() if callable(value) else value
    return -1 if found is None else int(found)


def _length(row: np.ndarray, pad: int) -> int:
    """Return the number of tokens of a row without the padding tokens `pad` at its end; 0 if all are padding."""
    used = np.flatnonzero(row != pad)
    return int(used[-1]) + 1 if used.size else 0


def _left_padded(prompts: Sequence[Sequence[int]], width: int, pad: int) -> np.ndarray:
    """Return prompts int32[B, width], padded with `pad` on the left. If a prompt is longer than `width`, the width is
    the smallest power of two that the longest fits, as in Tunix's own engines.
    """
    longest = max(map(len, prompts), default=0)
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    rows = np.full((len(prompts), width), pad, np.int32)
    for row, ids in zip(rows, prompts, strict=True):
        row[width - len(ids) :] = ids
    return rows


def _key_data(seed: Any) -> Any:
    """Return the numbers of a seed: an int or array unchanged, the data of a jax.random key."""
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(seed) if is_key else seed
