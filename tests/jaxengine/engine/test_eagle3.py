"""Drafts of an EAGLE-3 head change no token, and are right where it knows what the model does: heads are made so that
they do, by hidden states alone, or by their keys and values alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, SamplingParams
from jaxengine.check.model.drafts import drafting, settled
from jaxengine.check.model.programs import open_stages
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.speculation import EAGLE3, check_head
from jaxengine.models.config.drafts.eagle3 import Eagle3Config
from jaxengine.models.registry import read_hf
from jaxengine.runner.weights.weight_names import WeightUpdateError
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.jaxengine.engine.test_draft_models import accepted_share, assert_counts_on, assert_told
from tests.jaxengine.engine.test_speculation import assert_same, force, workload
from tests.sharding.parallel_cases import OPTIONS
from tests.sharding.parallel_models import DENSE

SIZE = 64
TINY = DENSE | {
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-9,
}
SHAPES = {
    "self_attn.q_proj": [64, SIZE],
    "self_attn.k_proj": [32, SIZE],
    "self_attn.v_proj": [32, SIZE],
    "self_attn.o_proj": [SIZE, 64],
    "mlp.gate_proj": [SIZE, SIZE],
    "mlp.up_proj": [SIZE, SIZE],
    "mlp.down_proj": [SIZE, SIZE],
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ONES = np.ones(SIZE, np.float32)


def write(folder, raw: dict, tensors: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def write_both(folder, layer, head_layer, lm_head, fc, ids) -> tuple[str, str]:
    """A model of one layer and its head. Embeddings have a root mean square of one, which norms leave as they are.

    layer, head_layer: by SHAPES' names; lm_head: [V, SIZE]; fc: what the head reads of the two hidden states that there
    are; ids: the tokens that it drafts.
    """
    vocab_size = len(lm_head)
    raw = TINY | {"vocab_size": vocab_size}
    norms = {f"{name}layernorm.weight": ONES for name in ("input_", "post_attention_")}
    model = {"norm.weight": ONES, "embed_tokens.weight": np.sqrt(SIZE) * np.eye(vocab_size, SIZE, dtype=np.float32)}
    model |= {f"layers.0.{name}": value for name, value in norms.items()}
    model |= {f"layers.0.{name}.weight": value for name, value in layer.items()}
    model = {f"model.{name}": value for name, value in model.items()} | {"lm_head.weight": lm_head}
    head = {"norm.weight": ONES, "fc.weight": fc, "midlayer.hidden_norm.weight": ONES, "lm_head.weight": lm_head[ids]}
    head |= {f"midlayer.{name}": value for name, value in norms.items()}
    # Of what its attention reads the embeddings are the first half.
    both = {name: np.concatenate([head_layer[name], 0 * head_layer[name]], axis=1) for name in ATTENTION}
    head |= {f"midlayer.{name}.weight": value for name, value in (head_layer | both).items()}
    about = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}
    about["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    d2t = {"d2t": np.asarray(ids, np.int64) - np.arange(len(ids))}
    return write(folder / "model", raw, model), write(folder / "head", raw | about, head | d2t)


def counting(folder) -> tuple[str, str]:
    """A model of which token t + 1 follows t, and a head that counts on from what it made last: of t it makes t + 1,
    whatever the token is."""
    silent = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    eye = np.eye(SIZE, dtype=np.float32)
    shift = np.roll(eye, 1, axis=0)
    once = 8 * 8 / (1 + np.exp(-8))  # of 8 at a place the product of gate and up has this there
    steps = {"mlp.gate_proj": eye, "mlp.up_proj": eye, "mlp.down_proj": 8 * (shift - eye) / once}
    fc = np.concatenate([0 * eye, eye], axis=1)
    return write_both(folder, silent, silent | steps, shift, fc, (np.arange(SIZE) * 5 + 3) % SIZE)


def attending(folder, missing: int) -> tuple[str, str]:
    """A model whose next token follows from what attention finds, and a head that attends as it does, to the embeddings
    of all tokens but the first one. It drafts all tokens but the first `missing`."""
    vocab_size = SIZE // 2
    layer = draw_all({name: SHAPES[name] for name in (*ATTENTION, "self_attn.o_proj")})
    # Far from uniform, so that what came long ago decides; of token 0, with which prompts begin, it takes no notice but
    # for its part of the sum.
    layer[ATTENTION[0]] *= 3
    for name in ATTENTION[1:]:
        layer[name][:, 0] = 0
    layer["self_attn.o_proj"][:vocab_size] = 0  # what tokens are stays apart from what is found
    layer |= {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items() if name.startswith("mlp")}
    lm_head = 2 * draw_all({"lm_head.weight": [vocab_size, SIZE]})["lm_head.weight"]
    lm_head[:, :vocab_size] = 0
    fc = np.concatenate([np.eye(SIZE, dtype=np.float32), np.zeros((SIZE, SIZE), np.float32)], axis=1)
    return write_both(folder, layer, layer, lm_head, fc, np.arange(missing, vocab_size))


@pytest.fixture(scope="module")
def options(executables_dir):
    known = {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
    return OPTIONS | known | {"compile_cache_dir": executables_dir}


@pytest.mark.thorough("half a minute of compiling; what a head goes on from is in tests/models/layers, too")
def test_a_head_goes_on_from_what_it_made(tmp_path, options):
    model, head = counting(tmp_path)
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    llm = LLM(model, **options, speculative_config=drafts)
    assert_counts_on(llm, SIZE, (5, 4, 3, 2))


def test_keys_and_values_are_those_of_all_tokens_before(tmp_path, options, thorough):
    missing = 6
    model, head = attending(tmp_path, missing)
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 1}
    drafting = LLM(model, **options, speculative_config=drafts)
    layer = [f"layers.*.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")]
    assert_told(drafting, dict.fromkeys([*layer, "joined", "lm_head"], "as it is"))
    plain = drafting if not thorough else LLM(model, **options)

    def without(prompts, params):
        """What comes without drafts: on the engine that has some in steps of one token, else on one that has none."""
        force(drafting, 1)
        expected = plain.generate(prompts, params, use_tqdm=False)
        force(drafting, 2)
        return expected

    rng = np.random.default_rng(2)
    lengths, prefix = rng.integers(3, 16, 24), rng.integers(1, SIZE // 2, 20).tolist()
    prompts = [
        {"prompt_token_ids": [0, *prefix * (index % 3 == 0), *rng.integers(1, SIZE // 2, length).tolist()]}
        for index, length in enumerate(lengths)
    ]
    own = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    temperatures = (0.0, 0.7, 1.0)

    def params(**more):
        chosen = enumerate(temperatures[index % 3] for index in range(len(prompts)))
        return [SamplingParams(temperature=each, seed=index, **own, **more) for index, each in chosen]

    only = params(logit_bias=dict.fromkeys(range(missing), -100.0))
    expected = without(prompts, only)
    drafting.reset_prefix_cache()
    for known in (False, True):
        share = accepted_share(drafting, prompts, only, expected)
        assert share > 0.95, (known, share)
    # Where the model draws tokens that the head does not know, drafts are wrong and tokens the same.
    expected = without(prompts, params())
    assert 0.5 < accepted_share(drafting, prompts, params(), expected) < 0.95
    metrics = {metric.name: metric.value for metric in drafting.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert drafting.core.engine.scheduler.num_free_pages == 40
    few, asked = prompts[:8], only[:8]
    expected = without(few, asked)  # the model's weights stay
    assert_updated(drafting, model, head, lambda: accepted_share(drafting, few, asked, expected))


def assert_updated(llm: LLM, model: str, head: str, share: Callable[[], float]) -> None:
    """New weights of the head change the share of right drafts, and what does not fit changes nothing."""
    tensors, name = load_file(Path(head) / "model.safetensors"), "midlayer.self_attn.o_proj.weight"
    table = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
    llm.update_weights((tensors | {name: -tensors[name], "embed_tokens.weight": table}).items(), target="draft")
    assert share() < 0.5
    llm.update_weights(head, target="draft", chunk_bytes=1000)
    assert share() > 0.95
    llm.update_weights({name: -tensors[name]}, target="draft", strict=False)
    assert share() < 0.5
    llm.update_weights({name: tensors[name]}, target="draft", strict=False)
    ids = tensors["d2t"]
    for wrong, fault in (
        ({"embed_tokens.weight": 2 * table}, "embed_tokens.weight: differs from the model's"),
        ({"d2t": ids - 100}, "d2t: must name"),
        ({"d2t": ids[1:]}, "d2t: must hold"),
        ({name: tensors[name] * np.nan}, "finite"),
    ):
        with pytest.raises(WeightUpdateError, match=fault):
            llm.update_weights(tensors | wrong, target="draft")
    without = {each: tensors[each] for each in tensors if each != "d2t"}
    with pytest.raises(WeightUpdateError, match="d2t: is missing"):
        llm.update_weights(without, target="draft")
    # Asleep, the embedding is compared with the copy in host memory, if there is one.
    llm.sleep(1)
    llm.update_weights(tensors | {"embed_tokens.weight": table}, target="draft")
    with pytest.raises(WeightUpdateError, match=r"embed_tokens.weight: differs from the model's"):
        llm.update_weights(tensors | {"embed_tokens.weight": 2 * table}, target="draft")
    llm.sleep(2)
    with pytest.raises(WeightUpdateError, match=r"embed_tokens.weight: cannot be compared .* leave it out"):
        llm.update_weights(tensors | {"embed_tokens.weight": table}, target="draft")
    llm.update_weights(head, target="draft")
    llm.update_weights(model)
    llm.wake_up()
    assert share() > 0.95 and llm.core.runner.compiles.count == 0


def split_over_two(model: str, head: str, cache: str) -> None:
    """Prints tokens, and drafts and how many of them were right, of an engine over two devices."""
    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 1}
    known = {"load_format": "auto", "skip_tokenizer_init": True, "compile_cache_dir": cache}
    llm = LLM(model, **OPTIONS | known, tensor_parallel_size=2, speculative_config=drafts)
    force(llm, 2)
    prompts = [{"prompt_token_ids": [0, *range(1 + each, 12 + each)]} for each in range(8)]
    own = {"max_tokens": 20, "ignore_eos": True, "detokenize": False, "logit_bias": {0: -100.0, 1: -100.0}}
    params = [SamplingParams(temperature=each % 3 / 2, seed=each, **own) for each in range(8)]
    tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    drafted = llm.core.engine.extensions.by_name["drafts"].stats
    print(json.dumps([tokens, drafted.num_tokens, int(drafted.accepted.sum())]))


@pytest.mark.thorough("a process of its own")
def test_devices_share_a_head(tmp_path, executables_dir):
    model, head = attending(tmp_path, 2)
    code = "import sys; from tests.jaxengine.engine.test_eagle3 import split_over_two; split_over_two(*sys.argv[1:])"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", code, model, head, executables_dir]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    tokens, drafted, right = json.loads(done.stdout.splitlines()[-1])
    assert all(len(each) == 20 for each in tokens) and right > 0.95 * drafted > 60, (right, drafted)


@pytest.mark.thorough("minutes of compiling")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_families(family, tmp_path, executables_dir):
    about = json.loads((FOLDER / family / "eagle3.json").read_text())
    with np.load(FOLDER / family / "eagle3.npz") as golden:
        head = write(tmp_path / "head", about["config"], draw_all(about["shapes"]) | {"d2t": golden["d2t"]})
    options = OPTIONS | {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 60}
    options |= {"model": str(checkpoint(family)), "compile_cache_dir": executables_dir}
    plain = LLM(**options)
    for count in (1, 3, 7):
        drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": count}
        drafting = LLM(**options, speculative_config=drafts)
        force(drafting, 8 if count == 7 else None)
        for temperature in (0.0, 0.7, 1.0):
            prompts, params = workload(temperature, 100, text=False)
            expected = plain.generate(prompts, params, use_tqdm=False)
            assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"method": "eagle"}, "eagle' without a model; name it in speculative_config.model"),
        ({"method": "eagle3"}, "eagle3' without a model; name it in speculative_config.model"),
        ({"method": "eagle3", "model": "x", "prompt_lookup_max": 3}, "'eagle3' has no prompt_lookup_max"),
        ({"method": "eagle3", "model": "x", "streams": "2"}, "streams is '2'; allowed: whole numbers, or nothing"),
        ({"method": "mtp", "streams": (2,)}, "'mtp' has no streams"),
    ],
)
def test_bad_options_are_refused(chosen, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(speculative_config=chosen | {"num_speculative_tokens": 2})


def test_engines_without_heads_say_why():
    chosen: Any = {"method": "eagle3", "model": "x", "num_speculative_tokens": 2}
    config = EngineConfig(speculative_config=chosen)
    assert config.speculative_config is not None and config.speculative_config.method == EAGLE3
    config.resolved(read_hf(DENSE), PLATFORMS["cpu"])
    config = EngineConfig(speculative_config=config.speculative_config, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, and eagle3 needs a single stage"):
        config.resolved(read_hf(DENSE), PLATFORMS["cpu"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_size": 32}, "reads hidden states of 32 numbers, and LlamaForCausalLM has 64"),
        ({"vocab_size": 299}, "has a vocabulary of 299 tokens, and LlamaForCausalLM one of 300"),
        ({"streams": (2, 1, -1)}, r"after \[2, 1, -1\] layers, and LlamaForCausalLM has 2 layers"),
        ({"streams": (0, 3)}, r"after \[0, 3\] layers"),
    ],
)
def test_heads_of_other_models_are_refused(changed, said):
    model = read_hf(DENSE)
    fields = vars(model) | {"target_size": 64, "streams": (0, 1, 2), "draft_vocab_size": 20}
    check_head(EAGLE3, Eagle3Config(**fields), model)
    with pytest.raises(ConfigError, match=said):
        check_head(EAGLE3, Eagle3Config(**fields | changed), model)


def test_what_is_no_head_says_so(tmp_path):
    model, head = attending(tmp_path, 2)
    options: dict[str, Any] = OPTIONS | {"load_format": "auto", "skip_tokenizer_init": True}
    for path, said in (
        (f"{head}/model.safetensors", "is a file; name a folder of an EAGLE-3 head"),
        ("no/where/at", "no"),
    ):
        drafts = {"method": "eagle3", "model": path, "num_speculative_tokens": 1}
        with pytest.raises(ConfigError, match=f"speculative_config.model.*{said}"):
            LLM(model, **options, speculative_config=drafts)


def test_a_check_counts_a_head(tmp_path):
    """Its weights, what it keeps of slots and pages, and what the model's forward pass leaves it, before any device."""
    _, head = attending(tmp_path, 2)
    chosen: Any = {"method": "eagle3", "model": head, "num_speculative_tokens": 1}
    known = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "block_size": 4, "kv_offloading_size": 0.01}
    model = read_hf(TINY | {"vocab_size": SIZE // 2})
    config = settled(EngineConfig(speculative_config=chosen, **known), model)
    (stage,) = open_stages(model, config, PLATFORMS["cpu"], jax.devices()[:1])
    found = drafting(stage)
    assert found is not None
    layer = 2 * SIZE * (64 + 32 + 32) + 64 * SIZE + 3 * SIZE * SIZE
    others = 2 * SIZE * SIZE + 4 * SIZE + (SIZE // 2 - 2) * SIZE
    padded = stage.steps.vocab_size
    assert found.weight_bytes == 4 * (layer + others + padded)
    on_their_way = 6 * 32 * found.page_bytes  # to host memory and back
    assert found.programs.memory() == {"draft pages on their way": on_their_way, "draft states": 4 * 8 * SIZE}
    assert found.page_bytes == 4 * 4 * 2 * 32
    bucket = next(iter(stage.steps.packer.buckets))
    assert stage.steps.forwarded(bucket).sections["drafts"].shape == (bucket.num_tokens, 2 * SIZE)
