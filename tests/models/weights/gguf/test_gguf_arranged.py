"""Tensors of delta nets whose rows and columns GGUF files have in another order, quantised ones too; joined or divided
projections, and files that do not say all of their models.
"""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import FOLDER
from tests.models.weights.gguf import gguf_conversion, named_conversion, older_conversion
from tests.models.weights.gguf.gguf_conversion import tensor
from tests.models.weights.gguf.gguf_states_conversion import converted_states
from tests.models.weights.gguf.gguf_writer import ARRAY, F32, U32, gguf_bytes
from tests.models.weights.gguf.test_gguf_families import check_logits
from tests.models.weights.gguf.test_gguf_families import tensors_of as checkpoint_tensors
from tests.models.weights.test_load import ArraySource
from tests.tables import each_row

NET = "model.layers.0.linear_attn"
HIDDEN, KEYS, VALUES, K_SIZE = 64, 2, 6, 32
MATRICES = {"in_proj_z": 1, "in_proj_qkv": 1, "out_proj": 1, "in_proj_a": 0, "in_proj_b": 0}


def config_of(architecture: str, v_size: int) -> dict:
    return {
        "architectures": [architecture],
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "vocab_size": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": K_SIZE,
        "linear_num_key_heads": KEYS,
        "linear_num_value_heads": VALUES,
        "linear_value_head_dim": v_size,
    }


def tensors_of(architecture: str, v_size: int) -> dict[str, np.ndarray]:
    rng, keys, values = np.random.default_rng(5), KEYS * K_SIZE, VALUES * v_size
    apart = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_a": VALUES, "in_proj_b": VALUES}
    joined = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * VALUES}
    rows = apart if architecture == "Qwen3_5ForCausalLM" else joined
    shapes = {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    shapes |= {"out_proj.weight": (HIDDEN, values), "A_log": (VALUES,), "dt_bias": (VALUES,)}
    shapes["conv1d.weight"] = (2 * keys + values, 4)
    return {f"{NET}.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def in_blocks(name: str, values: np.ndarray):
    """Matrices as Q8_0, others as float32."""
    if values.ndim < 2 or values.shape[-1] % 32:
        return tensor(name, values)
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    raw = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return name, values.shape[::-1], 8, raw.tobytes()


@pytest.fixture
def opened(tmp_path):
    files = []

    def open_case(architecture: str, v_size: int, store=in_blocks, **changes: object):
        config, tensors = {**config_of(architecture, v_size), **changes}, tensors_of(architecture, v_size)
        path = tmp_path / f"{len(files)}.gguf"
        path.write_bytes(converted_states(config, tensors, store))
        files.append(GGUFFile(path))
        return files[-1], tensors

    yield open_case
    for file in files:
        file.close()


@each_row(
    ("architecture", "v_size", "kept"),
    [
        ("Qwen3_5ForCausalLM", 32, ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]),
        # Heads of 16 columns divide blocks, so this one is read as values only.
        ("Qwen3_5ForCausalLM", 16, ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"]),
        ("Qwen3NextForCausalLM", 32, ["in_proj_ba", "in_proj_qkvz", "out_proj"]),
    ],
)
def test_blocks_in_the_order_of_the_checkpoint(opened, architecture, v_size, kept):
    file, tensors = opened(architecture, v_size)
    assert sorted(file.names()) == sorted(tensors)
    for name, values in tensors.items():
        assert file.shape(name) == values.shape
        read = file.read(name)
        np.testing.assert_allclose(
            read, values, atol=0.03 if name.endswith("proj.weight") or "in_proj" in name else 1e-6
        )
        for rows in (slice(0, 0), slice(5, 6), slice(1, len(values) - 1)):
            np.testing.assert_array_equal(file.read(name, rows), read[rows])
        if values.ndim == 2 and values.shape[1] > 32:
            np.testing.assert_array_equal(file.read(name, slice(2, 5), slice(32, 64)), read[2:5, 32:64])
    assert sorted(file.formats()) == [f"{NET}.{name}" for name in kept]
    whole = {name: file.read(f"{NET}.{name}.weight") for name in kept}
    file.keep(f"{NET}.{name}" for name in kept)
    for name, values in whole.items():
        codes, scales = (file.read(f"{NET}.{name}.{kind}", slice(1, 5)) for kind in ("codes", "scales"))
        np.testing.assert_array_equal(codes * np.repeat(scales, 32, axis=1), values[1:5])


def test_parts_of_different_formats_are_read_as_values(opened):
    def store(name: str, values: np.ndarray):
        return tensor(name, values) if "attn_gate" in name else in_blocks(name, values)

    file, tensors = opened("Qwen3NextForCausalLM", 32, store)
    assert sorted(file.formats()) == [f"{NET}.in_proj_ba", f"{NET}.out_proj"]
    name = f"{NET}.in_proj_qkvz.weight"
    np.testing.assert_allclose(file.read(name), tensors[name], atol=0.03)


@each_row(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "ssm.time_step_rank must be a multiple of ssm.group_count"),
        ({"linear_num_key_heads": 0}, "must be a positive number, got 0 .*qwen35.ssm.group_count"),
        ({"linear_key_head_dim": 2**30}, "delta nets of more than 4194304 rows are not supported"),
        ({"linear_key_head_dim": 16}, "must have the rows and columns of .*in_proj_qkv.weight"),
    ],
)
def test_impossible_heads(tmp_path, changes, message):
    raw = converted_states(config_of("Qwen3_5ForCausalLM", 32), tensors_of("Qwen3_5ForCausalLM", 32))
    fields = {"linear_num_key_heads": "ssm.group_count", "linear_key_head_dim": "ssm.state_size"}
    for field, value in changes.items():
        key = f"qwen35.{fields[field]}".encode()
        at = raw.index(key) + len(key) + 4
        raw = raw[:at] + value.to_bytes(4, "little") + raw[at + 4 :]
    (path := tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match=message):
        GGUFFile(path)


def test_states_do_not_grow(opened):
    file, _ = opened("Qwen3_5ForCausalLM", 32, lambda name, values: tensor(name, -values))
    with pytest.raises(ModelFileError, match="must not hold numbers above 0"):
        file.read(f"{NET}.A_log")


@pytest.mark.parametrize(("name", "count"), [("baichuan", 40), ("baichuan_rope", 32)])
def test_baichuan(tmp_path, name, count):
    """Files do not say whether their layers have rope or ALiBi: their number says it."""
    config = {**read_config_json(FOLDER / name), "architectures": ["BaichuanForCausalLM"]}
    tensors = checkpoint_tensors(name, config)
    (path := tmp_path / "model.gguf").write_bytes(older_conversion.converted(config, tensors))
    engine = EngineConfig(model=str(path), skip_tokenizer_init=True)
    with pytest.raises(ModelFileError, match=r"baichuan\.block_count must be 32 \(rope\) or 40 \(ALiBi\), got 2"):
        open_model(engine)
    last = {each: values for each, values in tensors.items() if ".layers.1." in each}
    for layer in range(2, count):
        tensors |= {each.replace(".1.", f".{layer}.", 1): values for each, values in last.items()}
    config["num_hidden_layers"] = count
    path.write_bytes(older_conversion.converted(config, tensors))
    source, expected = open_model(engine), read_hf(config)
    assert source.config.attention == expected.attention
    assert all((each.rope is None) == (count == 40) for each in expected.attention)
    sides = ((source.config, source.weights), (expected, ArraySource(tensors)))
    loaded = [load_params(build_model(each, Build("float32")), weights) for each, weights in sides]
    found, wanted = (dict(nnx.to_flat_state(state)) for state in loaded)
    assert found.keys() == wanted.keys()
    for key, values in found.items():
        np.testing.assert_array_equal(values[...], wanted[key][...], err_msg=str(key))
    source.close()


def test_baichuan_2_is_refused(tmp_path):
    config = {**read_config_json(FOLDER / "baichuan"), "vocab_size": 125696}
    (path := tmp_path / "model.gguf").write_bytes(older_conversion.converted(config, {}))
    with pytest.raises(ModelFileError, match="Baichuan 2, with 125696 tokens, is not supported"):
        open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))


def test_jais_without_a_head_is_refused(tmp_path, monkeypatch):
    """Embeddings in a file have another scale than the head."""
    config, name = read_config_json(FOLDER / "jais"), "JAISLMHeadModel"
    own = older_conversion.CONVERSIONS[name]

    def headless(config, tensors):
        return {name: values for name, values in own.modified(config, tensors).items() if name != "lm_head.weight"}

    monkeypatch.setitem(older_conversion.CONVERSIONS, name, own._replace(modified=headless))
    (path := tmp_path / "model.gguf").write_bytes(
        older_conversion.converted(config, checkpoint_tensors("jais", config))
    )
    with pytest.raises(ModelFileError, match=r"a GGUF file of Jais must have output\.weight"):
        open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))


def test_numbers_of_apertus(tmp_path):
    """Weights of the activation are metadata, which must be those of each layer, or of all; beta and eps are fixed."""
    config = read_config_json(FOLDER / "apertus_tied")
    tensors, own = checkpoint_tensors("apertus_tied", config), older_conversion.CONVERSIONS["ApertusForCausalLM"]
    path = tmp_path / "model.gguf"

    def opened(**changes):
        listed = {f"xielu.{key}": value for key, value in changes.items()}
        rows = {"ApertusForCausalLM": own._replace(listed=lambda tensors: {**own.listed(tensors), **listed})}
        path.write_bytes(named_conversion.converted(config, tensors, rows=rows))
        return open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))

    source = opened(alpha_p=(F32, 0.5))
    assert all(source.weights.read(f"model.layers.{layer}.mlp.act_fn.alpha_p") == 0.5 for layer in range(2))
    assert source.weights.shape("model.layers.1.mlp.act_fn.alpha_n") == (1,)
    source.close()
    wrong = ([1.0] * 3, [1.0, float("nan")])
    for values in wrong:
        with pytest.raises(ModelFileError, match=r"must be a number for each of 2 layers \(at xielu\.alpha_n\)"):
            opened(alpha_n=(ARRAY, (F32, values)))
    with pytest.raises(ModelFileError, match=r"xielu\.beta must be 0\.5 in all layers, got"):
        opened(beta=(ARRAY, (F32, [0.5, 0.6])))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention.head_count_kv": [2, 0, 8, 0, 4]}, "must be a divisor of attention.head_count, or 0 for both"),
        ({"attention.head_count_kv": [2, 1, 1, 0, 4]}, "must be a divisor of attention.head_count, or 0 for both"),
        ({"attention.head_count": [0] * 5, "attention.head_count_kv": [0] * 5}, "must be a positive number, got"),
        ({"feed_forward_length": [80] * 4}, "feed_forward_length must be an integer >= 0, or a list of 5"),
    ],
)
def test_wrong_layers_of_deci(tmp_path, changes, reason):
    config = read_config_json(FOLDER / "decilm")
    own = older_conversion.CONVERSIONS["DeciLMForCausalLM"]
    listed = {key: (ARRAY, (U32, values)) for key, values in changes.items()}
    rows = {"DeciLMForCausalLM": own._replace(own=lambda config: {**own.own(config), **listed})}
    path = tmp_path / "model.gguf"
    path.write_bytes(named_conversion.converted(config, checkpoint_tensors("decilm", config), rows=rows))
    with pytest.raises(ModelFileError, match=reason):
        open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))


@pytest.mark.parametrize("name", ["llama_bias", "qwen2"])
def test_joined_rows_of_queries_keys_and_values(tmp_path, monkeypatch, name):
    """The converter's option --fuse-qkv joins matrices and biases, after it has permuted those of llama."""
    config = {"rope_theta": 10000.0, **read_config_json(FOLDER / name)}
    tensors = checkpoint_tensors(name, config)

    def joined(about, written):
        by_name, rest = {each[0]: each for each in written}, []
        for own, shape, kind, data in written:
            if ".attn_q." in own:
                parts = [by_name[own.replace("attn_q", f"attn_{part}")] for part in "qkv"]
                rows = (*shape[:-1], sum(part[1][-1] for part in parts))
                rest.append((own.replace("attn_q", "attn_qkv"), rows, kind, b"".join(part[3] for part in parts)))
            elif ".attn_k." not in own and ".attn_v." not in own:
                rest.append((own, shape, kind, data))
        return gguf_bytes(about, rest)

    monkeypatch.setattr(gguf_conversion, "gguf_bytes", joined)
    monkeypatch.setitem(gguf_conversion.ARCHITECTURES, "Qwen2ForCausalLM", "qwen2")
    (path := tmp_path / "model.gguf").write_bytes(gguf_conversion.converted(config, tensors))
    engine = EngineConfig(model=str(path), skip_tokenizer_init=True)
    source = open_model(engine)
    assert set(source.weights.names()) == tensors.keys()
    for each, values in tensors.items():
        np.testing.assert_array_equal(source.weights.read(each), values, err_msg=each)
    load_params(build_model(source.config, Build("float32")), source.weights)
    source.close()
    path.write_bytes(gguf_conversion.converted({**config, "num_key_value_heads": 4}, tensors))
    with pytest.raises(ModelFileError, match="must have the rows of queries, keys and values"):
        open_model(engine)


def test_kimi_k3_with_joined_scores(tmp_path, recorded, paged_run):
    """Files have the weights of scores multiplied by those of the norm before them."""
    config = read_config_json(FOLDER / "kimi_k3_odd")
    tensors = checkpoint_tensors("kimi_k3_odd", config)
    config |= {"architectures": ["KimiK3ForConditionalGeneration"], "head_dim": 16}
    (path := tmp_path / "model.gguf").write_bytes(older_conversion.converted(config, tensors))
    source = open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))
    check_logits(source, recorded("kimi_k3_odd"), paged_run)
    source.close()
