"""What a checkpoint of tests.fixtures.quantized_models says, computed with NumPy alone: logits and greedy tokens.

Weights are those of `readings`. Rows that a product takes rounded are rounded here as the formats' publications have
it: fbgemm's and vLLM's kernels for scales of tokens and their bound, DeepSeek-V3's report (3.3.2) for groups of inputs,
compressed-tensors for static scales, int8, NVFP4 and MX formats. Products are float64 ones, all else is float32. Shares
no code with what it judges; that the decoder itself is right, transformers' recorded logits say (test_emulation).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from tests.fixtures.quantized_models import shapes_of
from tests.models.quantization import readings
from tests.models.quantization.readings import Tensors, algorithm_of


def _e4m3() -> tuple[np.ndarray, np.ndarray]:
    """All numbers >= 0 of four bits of exponent, bias 7, and three of mantissa, and whether their last bit is 0."""
    codes = np.arange(127)  # 127 stands for no number
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents == 0, mantissas * 2.0**-9, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))
    return values, codes % 2 == 0


# e2m1's, in the order of their codes.
NUMBERS = {"float": _e4m3(), "float4": (np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), np.arange(8) % 2 == 0)}


def to_float(values: np.ndarray, kind: str = "float") -> np.ndarray:
    """The nearest numbers of eight or four bits, ties to the even code; what is too large becomes the largest."""
    numbers, is_even = NUMBERS[kind]
    sizes = np.minimum(np.abs(values).astype(np.float64), numbers[-1])
    above = np.clip(np.searchsorted(numbers, sizes), 1, len(numbers) - 1)
    up, down = numbers[above] - sizes, sizes - numbers[above - 1]
    takes_up = (up < down) | ((up == down) & is_even[above])
    return np.copysign(np.where(takes_up, numbers[above], numbers[above - 1]), values)


def to_int8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values.astype(np.float64)), -128, 127)


def distances(values: np.ndarray, kind: str) -> np.ndarray:
    """How far values are from the nearest one that is between two codes, of the largest code."""
    sizes = np.abs(values).astype(np.float64)
    if kind == "int":
        return np.abs(sizes - np.floor(sizes) - 0.5) / 127
    numbers, _ = NUMBERS[kind]
    middles = (numbers[1:] + numbers[:-1]) / 2
    above = np.clip(np.searchsorted(middles, sizes), 1, len(middles) - 1)
    return np.minimum(np.abs(middles[above] - sizes), np.abs(sizes - middles[above - 1])) / numbers[-1]


# A float32 sum in another order moves a value by less than so much of the largest code; what lies closer to the middle
# between two codes may get the other one, and then the logits move by less than so much of the largest of them.
# 16 of 2600 tokens of five formats differed, by 2e-4 to 6e-2, all of rows with a value within 2.6e-7.
MIDDLE, FLIPPED = 4e-7, 0.1


class Rounding(NamedTuple):
    """How the rows of a module's product are rounded.

    Attributes:
      kind: "int" or "float", of eight bits, or "float4".
      group: inputs that share a scale; None for all of a row.
      static: the one scale of all rows.
      bound: values beyond it make no scale larger.
      scales: what they are rounded to: "" for nothing, "up" to powers of two (DeepGEMM's ceil_to_ue8m0), "near" ones
        (compressed-tensors' generate_mx_scales), or "e4m3", of scales that `whole` multiplies, which weights are
        divided by.
    """

    kind: str
    group: int | None = None
    static: np.float32 | None = None
    bound: float | None = None
    scales: str = ""
    whole: np.float32 | None = None

    def codes(self, x: np.ndarray, moved: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Of rows f32 [M, in]: codes of that shape, and the f32 scale of each.

        moved: so much of the largest code is added to each value before it is rounded, and of a scale to it.
        """
        codes, scales = np.zeros(x.shape), np.ones(x.shape, np.float32)
        for m, row in enumerate(x):
            for first in range(0, len(row), self.group or len(row)):
                own = slice(first, first + (self.group or len(row)))
                scale = self.static if self.static is not None else self._scale(row[own], moved)
                quotients = row[own] / scale + moved * self.largest
                codes[m, own] = to_int8(quotients) if self.kind == "int" else to_float(quotients, self.kind)
                scales[m, own] = scale
        return codes, scales

    def _scale(self, values: np.ndarray, moved: float) -> np.float32:
        largest = np.abs(values).max()
        if self.bound is not None and largest > self.bound:
            largest = np.float32(self.bound)
        # Zeros have the code 0 whatever their scale.
        if largest == 0:
            return np.float32(1)
        if self.scales == "near":
            # 1.75 of a power of two and more counts as the next; it is to be the largest number that is a power.
            fraction, exponent = np.frexp(np.float64(largest) * (1 + moved))
            power = int(exponent) - 1 + (fraction >= 1.75 / 2)
            return np.float32(2.0 ** (power - {"float": 8, "float4": 2}[self.kind]))
        scale = largest / np.float32(self.largest)
        if self.scales == "up":
            return np.float32(2.0 ** np.ceil(np.log2(np.float64(scale) * (1 + moved))))
        if self.scales == "e4m3":
            assert self.whole is not None
            scale = np.float32(to_float(np.array(scale * self.whole * (1 + moved)))) / self.whole
        return scale if scale else np.float32(1)

    @property
    def largest(self) -> int:
        return {"int": 127, "float": 448, "float4": 6}[self.kind]


def rounding_of(settings: dict[str, Any], module: str, tensors: Tensors) -> Rounding | None:
    """What a quantization_config says of the rows that a module takes; None for rows as they are."""
    method = settings["quant_method"]
    if method == "fbgemm_fp8":
        return Rounding("float", bound=settings["activation_scale_ub"])
    if method == "fp8":
        if settings["activation_scheme"] == "static":
            return Rounding("float", static=tensors[f"{module}.activation_scale"][0])
        group = (settings.get("weight_block_size") or [None, None])[1]
        return Rounding("float", group, scales="up" if settings.get("scale_fmt") == "ue8m0" else "")
    if method == "bitnet":
        return Rounding("int")
    if method == "mxfp8":
        return Rounding("float", 32, scales="up")
    if method == "modelopt":
        algorithm = algorithm_of(settings, module)
        if algorithm == "NVFP4":
            return Rounding("float4", 16, scales="e4m3", whole=np.float32(1) / tensors[f"{module}.input_scale"])
        if algorithm == "FP8":
            return Rounding("float", static=tensors[f"{module}.input_scale"].reshape(1)[0])
        return {"FP8_PER_CHANNEL_PER_TOKEN": Rounding("float"), "MXFP8": Rounding("float", 32, scales="up")}.get(
            algorithm
        )
    rows = settings.get("config_groups", {}).get("group_0", {}).get("input_activations")
    if rows is None:
        return None
    if rows["dynamic"] == "local":
        return Rounding("float4", 16, scales="e4m3", whole=tensors[f"{module}.input_global_scale"][0])
    if settings["format"].startswith("mxfp"):
        return Rounding({4: "float4", 8: "float"}[rows["num_bits"]], 32, scales="near")
    static = None if rows["dynamic"] else tensors[f"{module}.input_scale"][0]
    return Rounding(rows["type"], rows.get("group_size"), static)


class Decoder:
    """Llama, or Qwen3 with experts: what their configurations and papers say, a sequence at a time, without a cache.

    matrices: f32 [out, in] of modules, whatever `tensors` has of them. settings: a quantization_config, for the rows.
    """

    def __init__(self, config: dict[str, Any], tensors: Tensors, matrices: Tensors, settings: dict[str, Any] | None):
        self.config, self.tensors, self.matrices = config, tensors, matrices
        names = matrices if settings else {}
        self.roundings = {name: rounding_of(settings or {}, name, tensors) for name in names}
        self.near, self.moved = np.zeros(0), 0.0
        self.head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def logits(self, tokens: list[int]) -> np.ndarray:
        """f32 [T, V]. `near` is then f64 [T]: how close a value that went into a token's logits came to the middle
        between two codes, see `distances`."""
        self.near = np.full(len(tokens), np.inf)
        x = self._weight("model.embed_tokens")[np.asarray(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(f"{prefix}.self_attn", self._norm(f"{prefix}.input_layernorm", x))
            x = x + self._mlp(f"{prefix}.mlp", self._norm(f"{prefix}.post_attention_layernorm", x))
        self.near = np.minimum.accumulate(self.near)  # tokens see those before them
        tied = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return _product(self._norm("model.norm", x), self._weight(tied))

    def greedy(self, tokens: list[int], count: int, moved: float = 0.0) -> list[int]:
        """The likeliest tokens that follow. moved: see `Rounding.codes`."""
        found, self.moved = list(tokens), moved
        for _ in range(count):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(tokens) :]

    def _weight(self, module: str) -> np.ndarray:
        return self.matrices[module] if module in self.matrices else self.tensors[f"{module}.weight"]

    def _linear(self, module: str, x: np.ndarray, at: slice = slice(None)) -> np.ndarray:
        """at: the tokens whose rows these are."""
        if rounding := self.roundings.get(module):
            codes, scales = rounding.codes(x, self.moved)
            self.near[at] = np.minimum(self.near[at], distances(x / scales, rounding.kind).min(axis=1))
            x = codes * scales.astype(np.float64) * np.float64(1 if rounding.whole is None else rounding.whole)
        return _product(x, self._weight(module))

    def _norm(self, module: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.config["rms_norm_eps"])) * self.tensors[f"{module}.weight"]

    def _attention(self, module: str, x: np.ndarray) -> np.ndarray:
        count, size = len(x), self.head_size
        q, k, v = (self._linear(f"{module}.{name}_proj", x).reshape(count, -1, size) for name in "qkv")
        if f"{module}.q_norm.weight" in self.tensors:
            q, k = self._norm(f"{module}.q_norm", q), self._norm(f"{module}.k_norm", k)
        q, k = self._turned(q), self._turned(k)
        k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(size))
        scores[:, ~np.tri(count, dtype=bool)] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", _softmax(scores), v)
        return self._linear(f"{module}.o_proj", mixed.reshape(count, -1))

    def _turned(self, x: np.ndarray) -> np.ndarray:
        """Rotary embeddings of [T, heads, D], halves of a head together."""
        rope = self.config.get("rope_parameters") or {}
        half = self.head_size // 2
        frequencies = rope.get("rope_theta", 10000.0) ** (-np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * frequencies)[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, module: str, x: np.ndarray, at: slice = slice(None)) -> np.ndarray:
        if f"{module}.gate.weight" not in self.tensors:
            gate, up = (self._linear(f"{module}.{name}_proj", x, at) for name in ("gate", "up"))
            return self._linear(f"{module}.down_proj", gate / (1 + np.exp(-gate)) * up, at)
        shares, out = _softmax(_product(x, self._weight(f"{module}.gate"))), np.zeros_like(x)
        for token, own in enumerate(shares):
            best = np.argsort(-own)[: self.config["num_experts_per_tok"]]
            whole = own[best].sum() if self.config["norm_topk_prob"] else np.float32(1)
            for expert in best:
                one = slice(token, token + 1)
                y = self._mlp(f"{module}.experts.{expert}", x[one], one)
                out[token] += own[expert] / whole * y[0]
        return out


def decoder_of(folder: Path) -> Decoder:
    """Of a checkpoint that tests.fixtures.quantized_models wrote."""
    config, source = json.loads((folder / "config.json").read_text()), SafetensorsCheckpoint(folder)
    tensors = {name: np.asarray(source.read(name)) for name in source.names()}
    source.close()
    settings = config["quantization_config"]
    shapes = shapes_of(config).items()
    matrices = {module: readings.matrix(tensors, module, settings, shape) for module, shape in shapes}
    return Decoder(config, tensors, matrices, settings)


def settled(decoder: Decoder, rng: np.random.Generator, length: int, count: int) -> tuple[list[int], list[int]]:
    """A drawn prompt of so many tokens, and the `count` that follow it, whatever becomes of values that are MIDDLE away
    from the middle between two codes."""
    while True:
        prompt = rng.integers(0, decoder.config["vocab_size"], length).tolist()
        found = [decoder.greedy(prompt, count, moved) for moved in (-MIDDLE, MIDDLE, 0.0)]
        if found[0] == found[1] == found[2]:
            return prompt, found[2]


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
