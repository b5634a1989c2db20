"""Drafts change no token, in numbers: every proposer, 1 to 7 drafts, three temperatures, and every way of serving.

    python -m tests.jaxengine.engine.draft_matrix [NAME ...] [--drafts 1,3,7] [--json benchmarks/results/FILE.json]

Each name is a model and what drafts for it. For each number of drafts there are two engines: one with pages for all of
24 requests (41 where grammars can be asked for), which gets them one by one, all at once, and again with known
prefixes; and one with so few that requests are preempted. With one, three and seven drafts two devices follow, by
tensor parallelism and, where the proposer is the host's, by pipeline parallelism. Tokens, texts, logprobs and ends of
each request must be those of an engine without drafts on one device; what is counted are requests compared. Results are
added to those that the JSON file has; the exit status is 1 when a request differs. `test_speculation.py` and its
neighbours hold samples of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import numpy as np

from jaxengine import LLM
from tests.fast_compile import fast_compile
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.jaxengine.engine.test_eagle3 import write
from tests.jaxengine.engine.test_speculation import assert_same, force, forced_workload, make_folder, workload
from tests.models.layers.drafts.test_dflash import method_of
from tests.models.layers.drafts.test_dflash import read as read_dflash
from tests.sharding.parallel_cases import OPTIONS

TEMPERATURES = (0.0, 0.7, 1.0)
MANY, FEW = 200, 60
PARALLEL = {"tp 2": {"tensor_parallel_size": 2}, "pp 2": {"pipeline_parallel_size": 2}}
# A model with each kind of recurrent state.
RECURRENT = (
    *("qwen3_next", "kimi_linear", "granite_hybrid", "falcon_h1", "jamba", "zamba", "lfm2", "minimax"),
    *("bailing_linear", "recurrent_gemma", "mamba2"),
)
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
RECORDED = {"load_format": "auto", "skip_tokenizer_init": True}


def _dummy(folder: Path, drafts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model with a tokenizer, and so with stop strings, bad words and grammars."""
    return {"model": make_folder(folder)}, drafts


def _family(name: str, drafts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return RECORDED | {"model": str(checkpoint(name))}, drafts


def _of_states(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return _family(name, NGRAM)


def _draft_model(target: str, draft: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return _family(target, {"method": "draft_model", "model": str(checkpoint(draft))})


def _own(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model = make_folder(folder)
    return {"model": model}, {"method": "draft_model", "model": model}


def _next_token(folder: Path, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    one = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    raw = json.loads((FOLDER / family / "config.json").read_text()) | one
    (folder / "config.json").write_text(json.dumps(raw))
    return {"model": str(folder), "skip_tokenizer_init": True}, {"method": "mtp"}


def _eagle(folder: Path, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    about = json.loads((FOLDER / family / "eagle.json").read_text())
    raw = about["config"] | {"architectures": ["LlamaForCausalLM"], "qkv_bias": family == "qwen3"}
    return _family(family, {"method": "eagle", "model": write(folder / "head", raw, draw_all(about["shapes"]))})


def _eagle3(folder: Path, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    about = json.loads((FOLDER / family / "eagle3.json").read_text())
    with np.load(FOLDER / family / "eagle3.npz") as golden:
        head = write(folder / "head", about["config"], draw_all(about["shapes"]) | {"d2t": golden["d2t"]})
    return _family(family, {"method": "eagle3", "model": head})


def _dflash(folder: Path, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    raw, tensors = read_dflash(family)
    return _family(family, {"method": method_of(raw), "model": write(folder / "head", raw, tensors)})


# Families whose checkpoints have a layer that predicts further tokens.
PREDICTING = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5", "mimo", "mimo_v2_flash"),
    *("exaone_moe", "hy_v3", "pangu_ultra", "bailing_hybrid", "nemotron_h_latent", "longcat_flash"),
)
# What is served and what drafts, by name; a function of an empty folder.
SETS = {
    "ngram": lambda folder: _dummy(folder, NGRAM),
    "grammar": lambda folder: _dummy(folder, {"method": "grammar"}),
    "ngram gemma2": lambda folder: _family("gemma2", NGRAM),
    "ngram gpt_oss": lambda folder: _family("gpt_oss", NGRAM),
    "ngram deepseek_v3": lambda folder: _family("deepseek_v3", NGRAM),
    "ngram glm_moe_dsa": lambda folder: _family("glm_moe_dsa", NGRAM),
    "ngram qwen3_moe": lambda folder: _family("qwen3_moe", NGRAM),
    **{f"ngram {name}": partial(_of_states, name) for name in RECURRENT},
    "draft_model itself": _own,
    "draft_model llama for qwen3_next": lambda folder: _draft_model("qwen3_next", "llama"),
    "draft_model llama for mamba2": lambda folder: _draft_model("mamba2", "llama"),
    "draft_model gemma2 for llama": lambda folder: _draft_model("llama", "gemma2"),
    **{f"mtp {family}": partial(_next_token, family=family) for family in PREDICTING},
    "eagle llama": lambda folder: _eagle(folder, "llama"),
    "eagle qwen3": lambda folder: _eagle(folder, "qwen3"),
    "eagle3 llama": lambda folder: _eagle3(folder, "llama"),
    "eagle3 qwen3": lambda folder: _eagle3(folder, "qwen3"),
    "dspark llama": lambda folder: _dflash(folder, "llama"),
    "dflash qwen3": lambda folder: _dflash(folder, "qwen3"),
    "dflash qwen3_bias": lambda folder: _dflash(folder, "qwen3_bias"),
}


class Counter:
    """Compares what an engine says with what it should."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.different: list[str] = []

    def compare(self, found: list, expected: list, what: str) -> None:
        for index, pair in enumerate(zip(found, expected, strict=True)):
            self.num_rows += 1
            try:
                assert_same([pair[0]], [pair[1]])
            except AssertionError as error:
                self.different.append(f"{what}, request {index}")
                print(f"\n{what}, request {index}: {error}", file=sys.stderr)


def run(name: str, counts: list[int], cache: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """All engines of a set; what was compared. parallel: of PARALLEL."""
    counter, started = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own, chosen = SETS[name](Path(folder))
        base = OPTIONS | {"compile_cache_dir": cache, "num_gpu_blocks_override": MANY} | own
        text = "skip_tokenizer_init" not in base
        plain, loads = LLM(**base), {}
        for temperature in TEMPERATURES:
            prompts, params = workload(temperature) if text else workload(temperature, 100, text=False)
            if text:
                more, of_grammars = forced_workload(257)
                prompts += more
                params += [replace(each, temperature=temperature) for each in of_grammars]
            loads[temperature] = prompts, params, plain.generate(prompts, params, use_tqdm=False)
        if plain.core.inputs.model_config.keeps_states:
            parallel = {way: more for way, more in parallel.items() if way == "tp 2"}
        del plain
        drafted = accepted = preempted = 0

        def serve(count: int, ways: tuple[str, ...], **more: Any) -> None:
            nonlocal drafted, accepted, preempted
            llm = LLM(**base | more, speculative_config=chosen | {"num_speculative_tokens": count})
            force(llm, 8)
            for temperature, (prompts, params, expected) in loads.items():
                what = f"{name}, {count} drafts, {more or 'one device'}, T {temperature}"
                llm.reset_prefix_cache()
                if "alone" in ways:
                    found = [llm.generate(*pair, use_tqdm=False)[0] for pair in zip(prompts, params, strict=True)]
                    counter.compare(found, expected, f"{what}, alone")
                    llm.reset_prefix_cache()
                for way in ("crowd", "known prefixes"):
                    if way in ways:
                        counter.compare(llm.generate(prompts, params, use_tqdm=False), expected, f"{what}, {way}")
            metrics = {each.name: each.value for each in llm.get_metrics()}
            drafted += metrics["vllm:spec_decode_num_draft_tokens"] + metrics["jaxengine:forced_tokens"]
            accepted += metrics["vllm:spec_decode_num_accepted_tokens"] + metrics["jaxengine:forced_tokens"]
            preempted += metrics["vllm:num_preemptions"]
            assert metrics["jaxengine:compilations_since_ready"] == 0, what

        for count in counts:
            serve(count, ("alone", "crowd", "known prefixes"))
            serve(count, ("crowd",), num_gpu_blocks_override=FEW)
            if count in (1, 3, 7):
                for way, more in parallel.items():
                    if way == "tp 2" or chosen["method"] in ("ngram", "grammar"):
                        serve(count, ("crowd",), **more)
            seconds = time.monotonic() - started
            print(f"{name}: {count} drafts, {counter.num_rows} requests, {seconds:.0f} s", flush=True)
    return {
        "drafts": counts,
        "parallel": [way for way in parallel if way == "tp 2" or chosen["method"] in ("ngram", "grammar")],
        "requests": counter.num_rows,
        "different": counter.different,
        "draft_tokens": int(drafted),
        "accepted": int(accepted),
        "preemptions": int(preempted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETS)}")
    parser.add_argument("--drafts", default="1,2,3,4,5,6,7", help="numbers of drafts")
    parser.add_argument("--one-device", action="store_true", help="no parallelism")
    parser.add_argument("--json", type=Path, help="add results to this file")
    chosen = parser.parse_args()
    if other := [name for name in chosen.names if name not in SETS]:
        parser.error(f"there is no {', '.join(other)}; there are {', '.join(SETS)}")
    counts, failed = [int(each) for each in chosen.drafts.split(",")], False
    cache = tempfile.mkdtemp()
    try:
        with fast_compile():
            for name in chosen.names or SETS:
                result = run(name, counts, cache, {} if chosen.one_device else PARALLEL)
                failed |= bool(result["different"])
                print(json.dumps({name: result}))
                if chosen.json:
                    known = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
                    chosen.json.write_text(json.dumps(known | {name: result}, indent=1) + "\n")
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
