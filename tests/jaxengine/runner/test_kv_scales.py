"""Caches of codes: where their scales come from, and that tokens still depend on nothing else in the batch."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxengine import LLM, ConfigError, ModelFileError, SamplingParams
from jaxengine.commands.calibrate import calibrate
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.kv.kv_cache import kv_dtype
from jaxengine.models.layers.attention import attention
from jaxengine.models.weights.views.kv_scales import KVScales, KVShape, scales_for
from jaxengine.pallas_kernels.kv.pages import export_pages, largest, pages_of
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.start import kv_scales
from jaxengine.runner.start.kv_scales import read_largest, write_largest
from jaxengine.runner.start.open import open_resolved
from tests.conftest import TINY_CHECKPOINT, use_scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def make(tiny_options):
    """Engines that differ in what their caches hold alone: those of equal caches share compiled steps."""
    return lambda **changes: LLM(**{**tiny_options, **changes})


@pytest.fixture(scope="module")
def plain(make_llm):
    return make_llm()


@pytest.fixture(scope="module")
def coded(make):
    """Engines with codes of each kind, made once."""
    made = {}
    return lambda dtype: made[dtype] if dtype in made else made.setdefault(dtype, make(kv_cache_dtype=dtype))


def scales(llm) -> list[np.ndarray]:
    kv = llm.core.runner.stages[0]._kv
    return [np.asarray(kv.k_scale), np.asarray(kv.v_scale)]


def prompts():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128, 12).tolist()
    return [shared[: 12 * (index % 2)] + rng.integers(0, 128, 1 + 3 * index).tolist() for index in range(10)]


def run(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt_logprobs(llm):
    """Of every prompt token, given those before it: keys and values of the prompt are read out of the cache."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompts()[-1]}], params, use_tqdm=False)
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


@pytest.mark.parametrize(
    "dtype",
    [
        "fp8",
        pytest.param("fp8_e5m2", marks=pytest.mark.thorough("as fp8")),
        pytest.param("int8", marks=pytest.mark.thorough("as fp8")),
    ],
)
def test_logprobs_are_those_of_rounded_keys_and_values(make, plain, monkeypatch, tmp_path, dtype):
    """Beside a cache of float32 that gets what codes stand for; one scale is for all layers, and some are beyond it."""
    file, shape = tmp_path / "scales", (2, 2)
    write_largest(file, KVScales(np.full(shape, 3.0, np.float32), np.full(shape, 0.75, np.float32)))
    llm = make(kv_cache_dtype=dtype, kv_cache_scales=str(file))
    name = kv_dtype(dtype, None, "float32", "cpu")
    k_scale, v_scale = (np.float32(np.unique(each)) for each in scales(llm))
    most = 127 if dtype == "int8" else float(jnp.finfo(name).max)
    update = attention.kv_cache_update

    def rounded(x, scale):
        codes = jnp.clip(x / scale, -most, most)
        return (jnp.round(codes) if dtype == "int8" else codes.astype(name).astype(jnp.float32)) * scale

    def rounding_update(kv, k, v, slots, *, schedule):
        return update(kv, rounded(k, k_scale), rounded(v, v_scale), slots, schedule=schedule)

    monkeypatch.setattr(attention, "kv_cache_update", rounding_update)
    expected = prompt_logprobs(make(compile_cache_dir=""))
    monkeypatch.undo()
    assert np.abs(expected - prompt_logprobs(plain)).max() > 0.1
    np.testing.assert_allclose(prompt_logprobs(llm), expected, atol=1e-3)
    assert 4 * llm.core.runner.plan.page_bytes == plain.core.runner.plan.page_bytes
    assert llm.core.runner.compiles.count == 0


PER_TOKEN = [
    "int8_per_token_head",
    pytest.param("fp8_per_token_head", marks=pytest.mark.thorough("as int8_per_token_head")),
]


@pytest.mark.parametrize("dtype", PER_TOKEN)
def test_logprobs_are_those_of_keys_and_values_rounded_token_by_token(make, plain, coded, monkeypatch, dtype):
    """Beside a cache of float32 that gets what plain float32 arithmetic says codes and scales stand for."""
    llm, update = coded(dtype), attention.kv_cache_update

    def rounded(x):
        most = 127.0 if dtype.startswith("int8") else 448.0
        scale = jnp.abs(x).max(-1, keepdims=True) / most
        codes = jnp.clip(x / scale, -most, most)
        return (jnp.round(codes) if most == 127.0 else codes.astype("float8_e4m3fn").astype(jnp.float32)) * scale

    def rounding_update(kv, k, v, slots, *, schedule):
        return update(kv, rounded(k), rounded(v), slots, schedule=schedule)

    monkeypatch.setattr(attention, "kv_cache_update", rounding_update)
    expected = prompt_logprobs(make(compile_cache_dir=""))
    monkeypatch.undo()
    use_scheduler(llm)
    exact, got = prompt_logprobs(plain), prompt_logprobs(llm)
    np.testing.assert_allclose(got, expected, atol=1e-3)
    assert np.abs(expected - exact).max() > 2e-3, "rounding shows"
    stage, plan = llm.core.runner.stages[0], llm.core.runner.plan
    assert stage._kv.k_scale is None and stage._kv.spec.token_scales
    # What was planned is what is there, scales included.
    held = [llm.core.runner.stages[0]._kv.data.nbytes for llm in (plain, llm)]
    assert held == [one.core.runner.plan.page_bytes * one.core.runner.plan.num_pages for one in (plain, llm)]
    head_dim = stage._kv.spec.head_dim
    assert plan.page_bytes * 4 * head_dim == (head_dim + 4) * plain.core.runner.plan.page_bytes
    assert llm.core.runner.compiles.count == 0


@pytest.mark.parametrize(
    "dtype", [*PER_TOKEN, *(pytest.param(each, marks=pytest.mark.thorough("as by token")) for each in ("fp8", "int8"))]
)
def test_tokens_are_the_same_alone_in_a_crowd_and_under_preemption(coded, dtype):
    llm = coded(dtype)
    use_scheduler(llm, enable_prefix_caching=False)
    expected = [run(llm, [prompt])[0] for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) > 5
    scheduler = use_scheduler(llm, num_pages=26)
    assert run(llm, prompts()) == expected and scheduler.num_preemptions > 0
    scheduler = use_scheduler(llm)
    assert run(llm, prompts()) == run(llm, prompts()) == expected and scheduler.num_prefix_hits > 0


def test_what_is_measured_is_what_the_cache_holds(make, plain, coded, tmp_path):
    """By the public form of pages, after the same tokens; and calibrate writes it."""
    vocab_size = plain.core.inputs.model_config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, 95)
    scheduler = use_scheduler(plain)
    plain.generate([{"prompt_token_ids": tokens.tolist()}], SamplingParams(max_tokens=1), use_tqdm=False)
    kv, num_pages = plain.core.runner.stages[0]._kv, scheduler.num_pages
    held = [export_pages(kv, layer * num_pages + jnp.arange(24)) for layer in range(kv.num_pages // num_pages)]
    for part, found in enumerate(scales(coded("fp8"))):
        largest = np.stack([np.abs(np.asarray(pages[:, :, part])).max(axis=(0, 1, 3)) for pages in held])
        np.testing.assert_allclose(found, scales_for(largest, "float8_e4m3fn"), rtol=1e-5)
        assert len(np.unique(found)) == found.size


@pytest.fixture(scope="module")
def with_words(tiny_model, tmp_path_factory) -> str:
    """The checkpoint with a tokenizer: w7 is the token 7."""
    folder = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(tiny_model, folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{index}": index for index in range(128)}, "w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_file(make, plain, tiny_options, tmp_path, with_words):
    texts, file = tmp_path / "texts", tmp_path / "scales"
    texts.write_text("w3 w9\n\nw5 w7 w11 w2\n")
    config = EngineConfig.from_options(**{**tiny_options, "model": with_words, "skip_tokenizer_init": False})
    assert calibrate(config, texts, file).startswith("2 prompts, 6 tokens")
    llm = make(model=with_words, kv_cache_dtype="fp8", kv_cache_scales=str(file))
    largest = read_largest(file, KVShape(2, (0, 1), 2, False))
    np.testing.assert_array_equal(scales(llm)[0], scales_for(largest.k, "float8_e4m3fn"))
    use_scheduler(plain)
    plain.generate([{"prompt_token_ids": [5, 7, 11, 2]}], SamplingParams(max_tokens=1), use_tqdm=False)
    longer = np.abs(np.asarray(export_pages(plain.core.runner.stages[0]._kv, jnp.arange(1))[:, :4, 0])).max(
        axis=(0, 1, 3)
    )
    assert (largest.k[0] >= longer * 0.999).all() and (largest.k[0] < longer * 3).all()
    with pytest.raises(ConfigError, match="kv_cache_scales .* is not of this model, which needs"):
        other = str(TINY_CHECKPOINT.parent / "qwen3")
        make(model=other, max_model_len=32, kv_cache_dtype="fp8", kv_cache_scales=str(file))
    with pytest.raises(ConfigError, match="kv_cache_scales .* cannot be read .*not JSON"):
        make(kv_cache_dtype="fp8", kv_cache_scales=str(texts))


@pytest.mark.thorough("a checkpoint that says more is read")
def test_those_of_a_checkpoint(make, tiny_model, tmp_path):
    folder = tmp_path / "with scales"
    shutil.copytree(tiny_model, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    stored = {f"model.layers.{layer}.self_attn.{kind}_scale": 0.03 for layer in range(2) for kind in "kv"}
    save = safetensors.numpy.save_file
    save(tensors | {name: np.float32(value).reshape(1) for name, value in stored.items()}, folder / "model.safetensors")
    model = str(folder)
    found = scales(make(model=model, kv_cache_dtype="fp8"))
    assert [np.unique(each).tolist() for each in found] == [[np.float32(0.03)]] * 2
    assert make(model=model).core.runner.stages[0]._kv.k_scale is None
    # They are of another kind of codes.
    assert np.unique(scales(make(model=model, kv_cache_dtype="int8"))[0]).size > 1
    unit = make(model=model, kv_cache_dtype="fp8", kv_cache_scales="unit")
    assert np.unique(scales(unit)[0]).tolist() == [1]
    save(tensors | {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="layers.1.self_attn.k_scale"):
        make(model=model, kv_cache_dtype="fp8")


def test_a_checkpoint_that_says_what_its_cache_is(tiny_options, tiny_model, tmp_path):
    """compressed-tensors with the matrices as they are, and scales of keys and values."""
    folder = tmp_path / "says so"
    shutil.copytree(tiny_model, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    stored = {f"model.layers.{layer}.self_attn.{kind}_scale": 0.03 for layer in range(2) for kind in "kv"}
    safetensors.numpy.save_file(
        tensors | {name: np.float32(value).reshape(1) for name, value in stored.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["re:nothing"], "weights": weights}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    llm_options = tiny_options | {"model": str(folder)}
    llm = LLM(**llm_options)
    assert llm.core.runner.config.kv_cache_dtype == "float8_e4m3fn"
    assert [np.unique(each).tolist() for each in scales(llm)] == [[np.float32(0.03)]] * 2
    source, resolved, *_ = open_resolved(EngineConfig.from_options(**llm_options | {"kv_cache_dtype": "float32"}))
    source.close()
    assert resolved.kv_cache_dtype == "float32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4'; allowed: auto, float32, bfloat16, fp8"),
        ({"kv_cache_scales": "unit"}, "kv_cache_scales is 'unit'; allowed: 'auto' where kv_cache_dtype is 'auto'"),
        (
            {"kv_cache_dtype": "int8_per_token_head", "kv_cache_scales": "calibrate"},
            "'auto' where kv_cache_dtype is 'int8_per_token_head', which takes them from each token",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_scales": "/no/file"},
            "kv_cache_scales '/no/file' cannot be read .there is no such file",
        ),
    ],
)
def test_refused(make, options, said):
    with pytest.raises(ConfigError, match=said):
        make(**options)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_scales_of_tokens_are_refused_where_kernels_read_none(platform):
    assert kv_dtype("int8_per_token_head", None, "bfloat16", "gpu_xla") == "int8_per_token_head"
    with pytest.raises(ConfigError, match=f"fp8_e5m2, int8, .* on {platform}, whose attention kernels read no scales"):
        kv_dtype("int8_per_token_head", None, "bfloat16", platform)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "a file with a prompt on each line"), ("w4 " * 99, "prompt 1 of .* has .* tokens"), (None, "cannot be read")],
)
def test_texts_that_cannot_be_used(with_words, tmp_path, content, said):
    texts = tmp_path / "texts"
    if content is not None:
        texts.write_text(content)
    config = EngineConfig(model=with_words, max_model_len=64)
    with pytest.raises(ConfigError, match=said):
        calibrate(config, texts, tmp_path / "scales")
    assert not (tmp_path / "scales").exists()


def test_a_folder_is_no_file_to_write(with_words, tmp_path, monkeypatch):
    (tmp_path / "texts").write_text("w3 w9\n")
    monkeypatch.setattr("jaxengine.commands.calibrate.open_stages", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="output is .*; allowed: a file in a folder that is there"):
        calibrate(EngineConfig(model=with_words, max_model_len=64), tmp_path / "texts", tmp_path)


def test_a_file_that_cannot_be_written(with_words, tmp_path, monkeypatch):
    """Known before weights are read, where it can be; a disk may be full all the same."""
    (tmp_path / "texts").write_text("w3 w9\n")
    monkeypatch.setattr("jaxengine.commands.calibrate.open_stages", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match="output is .*; allowed: a file that may be written"):
        calibrate(EngineConfig(model=with_words, max_model_len=64), tmp_path / "texts", tmp_path / "scales")
    with pytest.raises(ConfigError, match="output .* cannot be written .No such file"):
        write_largest(tmp_path / "gone" / "scales", KVScales(np.ones((1, 1), np.float32), None))


def test_nan_counts_as_infinite():
    """In rows so long that XLA's maximum on CPUs passes over it."""
    rows = np.ones((512, 2, 4), np.float32)
    rows[3, 0, 1] = rows[3, 1, 2] = np.nan
    keys, values = largest(pages_of(jnp.asarray(rows), 2, 256, "cpu"), jnp.int32(0), 2)
    assert keys.tolist() == [np.inf, 1] and values is not None and values.tolist() == [1, np.inf]


def test_a_model_whose_keys_are_not_finite(with_words, tmp_path, monkeypatch):
    (tmp_path / "texts").write_text("w3 w9\n")
    sizes = np.ones((2, 2), np.float32)
    monkeypatch.setattr(kv_scales, "ModelRunner", lambda *_: None)
    monkeypatch.setattr(kv_scales, "_run", lambda *_: None)
    monkeypatch.setattr(StageRunner, "largest", lambda _: (sizes, sizes * [[1], [np.inf]]))
    config = EngineConfig(model=with_words, max_model_len=64, disable_log_stats=True)
    with pytest.raises(ModelFileError, match="keys or values of layer 1 are not finite after prompt 1"):
        calibrate(config, tmp_path / "texts", tmp_path / "scales")
    assert not (tmp_path / "scales").exists()
