"""Trains an EAGLE-3 head for the default model in minutes, to show what a head brings on a real model.

    python -m benchmarks train_head FOLDER
    python -m benchmarks drafts --draft FOLDER --method eagle3 --drafts 2

The default model answers about a hundred questions, and its hidden states at every token are recorded. The head begins
as a copy of the model's last layer and learns, as in EAGLE-3 (Li et al. 2025, arXiv:2503.01840), to predict the token
after the next one: once from the model's hidden states, once from its own hidden state at the previous position. Its
LM head has the model's rows of the most frequent tokens of the answers. A tenth of the answers is held out, to measure
how often the most likely draft is right. Heads for real use are trained on a thousand times more text.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.drafts.first_layers import FOLDER, write_checkpoint
from benchmarks.harness import Option
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.cache import pool_spec
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.section import Capture
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc

# Numbers of layers after which the head's input hidden states are taken. The last ones predict the next token best.
STREAMS = (2, 15, 30)
DRAFTED = 8192
PAGE_SIZE = 16
TOPICS = (
    *("the sea", "a bicycle", "bread", "the moon", "a small village", "rivers", "trade between cities", "a library"),
    *("winter", "the history of clocks", "bees", "a train journey", "gardens", "music", "an old bridge", "the desert"),
    *("a school day", "glass", "mountains", "a lost letter", "ships", "coffee", "maps", "a quiet evening"),
)
QUESTIONS = (
    "Tell me a short story about {}.",
    "Explain to a child what is interesting about {}.",
    "List five facts about {}, one on each line.",
    "Write a letter to a friend about {}.",
)
OPTIONS = {
    "folder": FOLDER,
    "tokens": Option(128, "of an answer"),
    "rows": Option(8, "texts a step learns from"),
    "steps": Option(120),
}
Params = dict[str, jax.Array]


def answers(num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Have the default model answer every question about every topic; return (question's token ids, answer's token ids)
    of each.

    Starts an engine. Half of the answers are sampled at temperature 0.7, the others greedy. num_tokens: most tokens of
    an answer.
    """
    llm = LLM(
        dtype="float32", max_model_len=512, max_num_seqs=32, kv_cache_memory_bytes=1 << 29, disable_log_stats=True
    )
    chats = [[{"role": "user", "content": text.format(topic)}] for topic in TOPICS for text in QUESTIONS]
    params = [SamplingParams(temperature=0.7 * (at % 2), seed=at, max_tokens=num_tokens) for at in range(len(chats))]
    outputs = llm.chat(chats, params)
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]


class Target:
    """The default model in float32: its config, its weights by name, and its hidden states."""

    def __init__(self, length: int):
        """Open the default model, whose files stay open, and load its weights onto the default device; `hidden` is
        compiled at its first call. length: tokens of its argument.
        """
        self._source = open_model(EngineConfig())
        self.config, self.weights = self._source.config, self._source.weights
        assert self.weights is not None and not isinstance(self.weights, Path)
        model = build_model(self.config, Build(jnp.float32))
        nnx.update(model, load_params(model, self.weights))
        graph, state = nnx.split(model)
        num_pages = -(-length // PAGE_SIZE)
        spec = pool_spec(model.cache_groups(PAGE_SIZE, "float32", hybrid=False), num_pages)

        @jax.jit
        def hidden(state: nnx.State, token_ids: jax.Array) -> jax.Array:
            own, ends = nnx.merge(graph, state), jnp.array([0, length], jnp.int32)
            places, one = jnp.arange(length, dtype=jnp.int32), jnp.int32(1)
            table = jnp.arange(num_pages, dtype=jnp.int32)[None]
            ragged = RaggedBatch(ends, ends[1:], table, places, one, one * 0)
            capture = Capture(STREAMS)
            own(ForwardBatch(token_ids, places, ends[1:] - 1, (ragged,), {"capture": capture}), alloc(spec))
            return capture.joined()

        self._hidden, self._state = hidden, state

    def hidden(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the hidden states f32[length, streams * D] after the layers STREAMS, of token ids i32[length].

        `length` is the one that Target was made with.
        """
        return np.asarray(self._hidden(self._state, token_ids))

    def read(self, name: str) -> np.ndarray:
        """Return a weight as f32, by its name in the Hugging Face checkpoint."""
        assert self.weights is not None and not isinstance(self.weights, Path)
        return np.asarray(self.weights.read(name), np.float32)


def first_params(target: Target) -> Params:
    """Return the initial parameters, f32 by name, of an EAGLE-3 head: a copy of the model's last layer and final norm.

    The columns of q, k and v that multiply embeddings are zeros, and `fc` passes on the last of the three hidden
    states.
    """
    size, last = target.config.hidden_size, f"model.layers.{target.config.num_layers - 1}"
    params = {name: target.read(f"{last}.{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")}
    params |= {
        f"mlp.{name}": target.read(f"{last}.mlp.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        own = target.read(f"{last}.self_attn.{name}.weight")
        params[f"self_attn.{name}"] = np.concatenate([0 * own, own], axis=1)
    params["self_attn.o_proj"] = target.read(f"{last}.self_attn.o_proj.weight")
    params["hidden_norm"], params["norm"] = params["input_layernorm"], target.read("model.norm.weight")
    params["fc"] = np.concatenate([np.zeros((size, 2 * size)), np.eye(size)], axis=1).astype(np.float32)
    return {name: jnp.asarray(value) for name, value in params.items()}


class Head:
    """EAGLE-3 head over whole sequences, for training. models/layers/drafts/eagle3.py has the one for serving."""

    def __init__(self, target: Target):
        """Take the sizes of the target's first layer, which must have RoPE without scaling (asserted)."""
        attention = target.config.attention[0]
        assert attention.rope is not None and attention.rope.scaling is None
        self.heads, self.kv_heads, self.dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.eps, self.theta = target.config.rms_norm_eps, attention.rope.theta

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return RMSNorm of x[..., D] with weight[D]."""
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def turn(self, x: jax.Array) -> jax.Array:
        """Return x[B, T, heads, dim] rotated by RoPE with positions 0 to T - 1."""
        frequencies = self.theta ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)
        angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def layer(self, params: Params, embeddings: jax.Array, hidden: jax.Array, before: Any = None) -> tuple[Any, Any]:
        """Run the head's layer over embeddings and hidden states, both [B, T, D]; return its hidden states [B, T, D]
        and its (keys, values), each [B, T, KV heads, dim].

        before: keys and values of the earlier positions, from the pass that computed `hidden`; None to use those of
        this pass. A token's own position always uses those of this pass.
        """
        normed = self.norm(hidden, params["hidden_norm"])
        x = jnp.concatenate([self.norm(embeddings, params["input_layernorm"]), normed], axis=-1)
        q, k, v = (
            (x @ params[f"self_attn.{name}_proj"].T).reshape(*x.shape[:2], heads, self.dim)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q = self.turn(q).reshape(*x.shape[:2], self.kv_heads, -1, self.dim) / self.dim**0.5
        k = self.turn(k)
        keys, values = (k, v) if before is None else before
        scores = jnp.einsum("btkgd,bskd->bkgts", q, keys)
        own = jnp.einsum("btkgd,btkd->bkgt", q, k)
        places = jnp.arange(x.shape[1])
        scores = jnp.where(places[:, None] > places, scores, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([scores, own[..., None]], axis=-1), axis=-1)
        attended = jnp.einsum("bkgts,bskd->btkgd", weights[..., :-1], values)
        attended += jnp.einsum("bkgt,btkd->btkgd", weights[..., -1], v)
        x = hidden + attended.reshape(*x.shape[:2], -1) @ params["self_attn.o_proj"].T
        inner = self.norm(x, params["post_attention_layernorm"])
        gate, up = (inner @ params[f"mlp.{name}_proj"].T for name in ("gate", "up"))
        return x + (jax.nn.silu(gate) * up) @ params["mlp.down_proj"].T, (k, v)

    def logits(self, params: Params, lm_head: jax.Array, batch: dict[str, jax.Array]) -> list[jax.Array]:
        """Return two arrays of logits f32[B, T, DRAFTED] of the token after the next one.

        The first is computed from the model's hidden states at a position, the second from the head's own hidden state
        at the previous position. lm_head: f32[DRAFTED, D]. batch: some rows of the arrays that `prepare` returns.
        """
        hidden = batch["hidden"] @ params["fc"].T
        made, seen = self.layer(params, batch["embeddings"], hidden)
        # The first position has no previous one, and uses the model's hidden state.
        shifted = jnp.concatenate([hidden[:, :1], made[:, :-1]], axis=1)
        again, _ = self.layer(params, batch["embeddings"], shifted, seen)
        return [self.norm(x, params["norm"]) @ lm_head.T for x in (made, again)]


def prepare(
    target: Target, texts: list[tuple[list[int], list[int]]], length: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (training data of all texts, i64[DRAFTED] ids of the drafted tokens: the most frequent in answers,
    ascending).

    texts: (question's token ids, answer's token ids) of each, truncated to `length` tokens T. The data are `hidden`
    f32[N, T, streams * D] at each token, `embeddings` f32[N, T, D] of the next tokens, and `targets` i32[N, T]: the
    index among the drafted tokens of the token after the next one, or -1 where that token is not drafted, belongs to
    the question or lies after the text.
    """
    table = target.read("model.embed_tokens.weight")
    counts = np.bincount(np.concatenate([answer for _, answer in texts]), minlength=len(table))
    drafted = np.sort(np.argsort(-counts, kind="stable")[:DRAFTED])
    place = np.full(len(table), -1, np.int32)
    place[drafted] = np.arange(DRAFTED)
    rows: dict[str, list[np.ndarray]] = {"hidden": [], "embeddings": [], "targets": []}
    for question, answer in texts:
        known = np.array([*question, *answer][:length])
        padded = np.zeros(length + 2, np.int32)
        padded[: len(known)] = known
        targets = place[padded[2:]]
        targets[: len(question) - 2] = targets[len(known) - 2 :] = -1
        rows["hidden"].append(target.hidden(padded[:length]))
        rows["embeddings"].append(table[padded[1:-1]])
        rows["targets"].append(targets)
    return {name: np.stack(own) for name, own in rows.items()}, drafted


def train(
    head: Head,
    params: Params,
    lm_head: np.ndarray,
    data: dict[str, np.ndarray],
    rows: int,
    steps: int,
    recorder: Recorder,
) -> Params:
    """Train the head with AdamW on `rows` texts a step; return the trained parameters.

    The learning rate rises linearly and falls to 0. lm_head: f32[DRAFTED, D]. data: from `prepare`; its last tenth is
    held out. The loss is the cross-entropy of the head's two passes (`Head.logits`), the second weighted by half. Every
    25 steps, and after the last, a row with the loss and both passes' accuracy on the held-out texts goes to
    `recorder`. Numbers are rounded.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-4, max(steps // 10, 1), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    known, own_head = len(data["targets"]) * 9 // 10, jnp.asarray(lm_head)

    def losses(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return (mean cross-entropy of the first pass plus half of the second's; f32[2] share of right most likely
        tokens in each), over targets that are not negative.
        """
        targets, found, right = batch["targets"], [], []
        for logits in head.logits(params, own_head, batch):
            wanted = jnp.maximum(targets, 0)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=-1)[..., 0]
            count = jnp.maximum(jnp.sum(targets >= 0), 1)
            found.append(-jnp.sum(jnp.where(targets >= 0, chosen, 0)) / count)
            right.append(jnp.sum((logits.argmax(-1) == wanted) & (targets >= 0)) / count)
        return found[0] + 0.5 * found[1], jnp.stack(right)

    @jax.jit
    def update(params: Params, state: Any, batch: dict[str, jax.Array]) -> Any:
        (loss, right), gradients = jax.value_and_grad(losses, has_aux=True)(params, batch)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss, right

    state, generator, start = optimizer.init(params), np.random.default_rng(0), time.monotonic()
    kept_back = {name: jnp.asarray(own[known:]) for name, own in data.items()}
    judge = jax.jit(lambda params: losses(params, kept_back)[1])
    for step in range(steps):
        chosen = generator.choice(known, rows, replace=False)
        params, state, loss, _ = update(params, state, {name: own[chosen] for name, own in data.items()})
        if step % 25 == 24 or step == steps - 1:
            first, second = (round(float(each), 3) for each in judge(params))
            row = {"step": step + 1, "loss": round(float(loss), 2), "kept back right": first, "and second": second}
            recorder.add(row | {"seconds": round(time.monotonic() - start)})
    return params


def write(folder: Path, target: Target, params: Params, lm_head: np.ndarray, drafted: np.ndarray) -> None:
    """Write the head to `folder` as a checkpoint, under the tensor names of EAGLE-3's authors.

    target: the model that it drafts for. drafted: int[DRAFTED], the token of each row of lm_head f32[DRAFTED, D].
    """
    own = {"norm": "norm.weight", "fc": "fc.weight"}
    tensors = {own.get(name, f"midlayer.{name}.weight"): np.asarray(value) for name, value in params.items()}
    tensors |= {"lm_head.weight": lm_head, "d2t": drafted.astype(np.int64) - np.arange(len(drafted))}
    more = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(drafted)}
    more |= {"eagle_aux_hidden_state_layer_ids": list(STREAMS)}
    write_checkpoint(
        folder, {name: np.ascontiguousarray(value) for name, value in tensors.items()}, target.config, 1, **more
    )


def run(args: Namespace, recorder: Recorder) -> None:
    texts, length = answers(args.tokens), args.tokens + 64
    np.random.default_rng(1).shuffle(texts)
    target = Target(length)
    data, drafted = prepare(target, texts, length)
    print(f"{len(texts)} texts, {(data['targets'] >= 0).sum()} places", flush=True)
    lm_head = target.read("model.embed_tokens.weight")[drafted]
    params = train(Head(target), first_params(target), lm_head, data, args.rows, args.steps, recorder)
    write(args.folder, target, params, lm_head, drafted)
