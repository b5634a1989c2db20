"""GGUF files kept as they are stored: what is multiplied with is what the file's blocks stand for."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.checkpoint.gguf_weights import is_gguf, open_gguf_weights
from jaxengine.checkpoint.model_source import ModelSource, open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.quantization.base.table import weight_rows
from jaxengine.models.registry import build_model
from jaxengine.models.weights.gguf.dequant import FORMATS
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.quantized import QuantizedSource
from tests.models.weights.gguf.gguf_conversion import converted
from tests.models.weights.gguf.gguf_conversion import tensor as plain_tensor
from tests.models.weights.gguf.gguf_writer import Tensor

TYPES = {form.name: number for number, form in FORMATS.items()}
QUANTISED = [form.name for form in FORMATS.values() if form.parts is not None]
# All that differ in the width of codes, the size of groups and in having zeros.
IN_TABLES = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K")
# Codes of four bits and of eight, with zeros and without, as heads and beside one.
TABLES = (("Q4_0", True), ("Q8_0", True), ("Q2_K", True), ("Q4_1", False))
# Where a block's float16 numbers are; MXFP4, NVFP4 and IQ1_M have scales of other kinds.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}


def shapes(config: dict[str, Any], tied: bool = False) -> dict[str, tuple[int, ...]]:
    hidden, wide, kv = config["hidden_size"], config["intermediate_size"], 128
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if tied:
        del found["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if "num_local_experts" in config:
            own["block_sparse_moe.gate"] = (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                names = {"w1": (wide, hidden), "w3": (wide, hidden), "w2": (hidden, wide)}
                own |= {f"block_sparse_moe.experts.{expert}.{name}": shape for name, shape in names.items()}
        else:
            own |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return found


def blocks(kind: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Random ones, whose scales are no larger than 1/8."""
    form, rng = FORMATS[TYPES[kind]], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (int(np.prod(shape)) // form.values, form.nbytes), np.uint8)
    for at in HALVES.get(kind, ()):
        halves = (rng.random(len(raw)) / 8).astype("<f2")
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(110, 130, len(raw))
    if kind == "NVFP4":
        raw[:, :4] = rng.integers(1, 48, (len(raw), 4))
    if kind == "IQ1_M":  # 0x2... in the high nibbles of four words: a float16 of about 1/100
        raw[:, 49:56:2] = raw[:, 49:56:2] & 0x0F
        raw[:, 55] |= 0x20
    return raw.tobytes()


def write(path, config: dict, kind_of, tied: bool = False) -> str:
    """A file whose matrices are of the types that `kind_of` says by llama.cpp's names; None for float32.

    tied: it has no head of its own.
    """

    def store(name: str, values: np.ndarray) -> Tensor:
        kind = kind_of(name) if values.ndim > 1 else None
        if kind is None:
            return plain_tensor(name, values)
        return name, values.shape[::-1], TYPES[kind], blocks(kind, values.shape, zlib.crc32(name.encode()))

    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes(config, tied).items()}
    path.write_bytes(converted(config, tensors, store))
    return str(path)


def opened(path: str, quantization: str | None, *, keep_tables: bool = True) -> ModelSource:
    config = EngineConfig(model=path, quantization=quantization, skip_tokenizer_init=True)
    return open_model(config, keep_tables=keep_tables)


def weights_of(source: ModelSource) -> WeightSource:
    assert source.weights is not None and not isinstance(source.weights, Path)
    return source.weights


def loaded(path: str, quantization: str | None, *, dtype: str = "float32", **options) -> Any:
    source = opened(path, quantization, **options)
    model = build_model(source.config, Build(dtype))
    nnx.update(model, load_params(model, weights_of(source)))
    source.close()
    return model


def matrix(linear) -> np.ndarray:
    """What rows are multiplied with: [in, out], or that of each expert."""
    weight = getattr(linear, "weight", linear)
    if hasattr(weight, "values"):
        return np.asarray(weight.values[...])
    codes = weight.codes[...]
    size = codes.shape[-2] * (2 if codes.dtype == jnp.uint8 else 1)
    rows = jnp.eye(size, dtype=jnp.float32)
    if codes.ndim == 2:
        return np.asarray(weight.matmul(rows))
    sizes = [jnp.array([size if n == each else 0 for n in range(len(codes))], jnp.int32) for each in range(len(codes))]
    return np.stack([np.asarray(weight.grouped_matmul(rows, each, None, jnp.float32)) for each in sizes])


def same_matrices(path: str, rtol: float) -> None:
    kept, plain = loaded(path, "gguf"), loaded(path, None)
    for ours, theirs in zip(kept.layers, plain.layers, strict=True):
        for block, names in (("attention", ("qkv", "out")), ("mlp", ("gate_up", "down"))):
            for name in names:
                held, expected = (matrix(getattr(getattr(layer, block), name)) for layer in (ours, theirs))
                np.testing.assert_allclose(held, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_format(tmp_path, kind):
    """Bit for bit, but for zeros of four-bit codes, whose sum with eight scales is rounded once."""
    config = {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 256}
    path = write(tmp_path / "model.gguf", config, lambda name: kind if name.startswith("blk") else None)
    form = FORMATS[TYPES[kind]]
    same_matrices(path, 2e-7 if form.four_bits and form.has_zeros else 0)


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL])
def test_formats_mixed_within_a_product_and_between_layers(tmp_path, config):
    kinds = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_0", "ffn_gate_inp": None}
    others = {"ffn_gate": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "Q8_0", "token_embd": "Q8_0", "output": "Q6_K"}

    def kind_of(name: str) -> str | None:
        layer, part = (name.split(".") + [""])[1:3] if name.startswith("blk") else ("", name.split(".")[0])
        part = part.removesuffix("_exps")
        return "Q8_0" if layer == "1" and part.startswith("attn") else {**kinds, **others}[part]

    path = write(tmp_path / "model.gguf", config, kind_of)
    same_matrices(path, 2e-7)
    source = opened(path, "gguf")
    rows = weight_rows([build_model(source.config, Build("float32"))], "cpu")
    source.close()
    held = {row["format"]: row["dtype"] for row in rows}
    of_eight_bits = dict.fromkeys(("Q4_K + Q6_K", "Q8_0", "Q5_0", "Q6_K"), "int8")
    routers = {"as it is": "float32"} if "num_local_experts" in config else {}
    assert held == {**routers, "Q4_0 + Q4_1": "int4", **of_eight_bits}


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        pytest.param(kind, tied, marks=[] if (kind, tied) in TABLES else pytest.mark.thorough("as others"))
        for kind in IN_TABLES
        for tied in (True, False)
    ],
)
def test_a_token_table(tmp_path, kind, tied):
    """Held as its head multiplies with it; its rows, in the model's dtype, are those that the file stands for."""
    path = write(tmp_path / "model.gguf", LLAMA, lambda name: kind if name == "token_embd.weight" else None, tied)
    form, ids = FORMATS[TYPES[kind]], jnp.array([5, 0, 47, 5], jnp.int32)
    rtol = 2e-7 if form.four_bits and form.has_zeros else 0
    kept, plain = loaded(path, "gguf"), loaded(path, None)
    size = kept.embed.weight.codes[...].size * (2 if form.four_bits else 1)
    assert size == 48 * 256 and not hasattr(kept.embed.weight, "values")
    expected = np.asarray(plain.embed(ids))
    for rows in (kept.embed(ids), jax.jit(kept.embed)(ids)):
        np.testing.assert_allclose(rows, expected, rtol=rtol, atol=rtol * np.abs(expected).max())
    others = kept.embed.weight.rows(jnp.array([-1, 47, 48], jnp.int32), of_others=True)
    np.testing.assert_array_equal(others, np.stack([np.zeros(256), np.asarray(kept.embed(ids))[2], np.zeros(256)]))
    half = loaded(path, "gguf", dtype="bfloat16").embed(ids)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, kept.embed(ids).astype(jnp.bfloat16))
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((3, 256)), jnp.float32)
    for count in (1, 3):
        logits = plain.embed.logits(hidden[:count])
        np.testing.assert_allclose(kept.embed.logits(hidden[:count]), logits, atol=3e-6 * np.abs(logits).max())
    with pytest.raises(ValueError, match="over its columns, axis 1"):
        kept.embed.weight.matmul(hidden)


def test_a_token_table_is_dequantised_where_a_platform_asks_for_it(tmp_path):
    path = write(tmp_path / "model.gguf", LLAMA, lambda name: "Q8_0", tied=True)
    ours, theirs = loaded(path, "gguf", keep_tables=False), loaded(path, None)
    np.testing.assert_array_equal(ours.embed.weight.values[...], theirs.embed.weight.values[...])
    assert [name for name, platform in PLATFORMS.items() if not platform.keeps_tables] == ["tpu"]
    for keep_tables, kept in ((True, ("Q8_0", "int8")), (False, ("as it is", "float32"))):
        source = opened(path, "gguf", keep_tables=keep_tables)
        table, *_ = weight_rows([build_model(source.config, Build("float32"))], "cpu")
        source.close()
        assert (table["modules"], table["format"], table["dtype"]) == ("embed", *kept)


def test_a_product_that_is_not_quantised_whole_is_not_kept(tmp_path):
    path = write(tmp_path / "model.gguf", LLAMA, lambda name: "Q8_0" if "attn_q" in name or "down" in name else None)
    same_matrices(path, 0)
    source = opened(path, "gguf")
    names = set(weights_of(source).names())
    source.close()
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.codes"} <= names


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q5_K"])
def test_parts_are_parts_of_the_whole(tmp_path, kind):
    """What devices read that share a matrix, rows of heads in Hugging Face's order among it."""
    source = opened(write(tmp_path / "model.gguf", LLAMA, lambda name: kind if "blk" in name else None), "gguf")
    model = build_model(source.config, Build("float32"))
    held = QuantizedSource(weights_of(source), declared_params(model), model.build.scheme)
    for name in (name for name in held.names() if name.startswith("model.layers.0.") and ":" in name):
        rows, columns = held.shape(name)
        whole = held.read(name)
        assert whole.shape == (rows, columns)
        for span in (slice(rows // 2, rows), slice(5, 77)):
            np.testing.assert_array_equal(held.read(name, span), whole[span])
        np.testing.assert_array_equal(
            held.read(name, slice(3, 9), slice(columns // 2, columns)), whole[3:9, columns // 2 :]
        )
    source.close()


def test_scales_that_are_no_numbers_are_named(tmp_path):
    path = write(tmp_path / "model.gguf", LLAMA, lambda name: "Q8_0" if "ffn" in name else None)
    raw = bytearray((tmp_path / "model.gguf").read_bytes())
    at = raw.find(blocks("Q8_0", (256, 512), zlib.crc32(b"blk.1.ffn_down.weight")))
    raw[at : at + 2] = b"\x00\x7e"
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match=r"1 of 4096 scales are not finite.*layers\.1\.mlp\.down_proj"):
        loaded(path, "gguf")


def test_a_file_as_new_weights_of_a_model(tmp_path):
    """As that model holds them, quantised or not; matrices of other formats than it holds are refused."""
    config = {**LLAMA, "num_hidden_layers": 1}
    path, other = (write(tmp_path / f"{kind}.gguf", config, lambda _, kind=kind: kind) for kind in ("Q4_0", "Q8_0"))
    assert is_gguf(Path(path)) and not is_gguf(tmp_path) and not is_gguf(Path("a\0b"))
    for quantization in (None, "gguf"):
        source = opened(path, quantization)
        model = build_model(source.config, Build("float32"))
        again = open_gguf_weights(Path(path), source.config)
        states = [load_params(model, each) for each in (weights_of(source), again)]
        for one, two in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(one, two)
        source.close()
        again.close()
    with pytest.raises(ModelFileError, match="stores matrices in other formats than the engine holds them"):
        open_gguf_weights(Path(other), source.config)
