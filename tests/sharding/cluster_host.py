"""Host 0 of an engine over several processes: test_several_processes runs it, and `jaxengine worker` beside it.

    python -m tests.sharding.cluster_host compare|serve FOLDER CACHE MODEL OPTIONS

compare: the answers to parallel_cases.requests as this engine and as an engine on one device gives them, and greedy
tokens while the weights of both are replaced.
serve: answers without an end, until the process is killed or the engine fails.
OPTIONS (JSON) are the engine's. What happens is printed, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxengine import LLM, EngineDeadError, SamplingParams
from jaxengine.cluster.channel import ClusterError
from jaxengine.config.engine_config import ConfigError
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.views.parts import tensor_name
from jaxengine.runner.weights.weight_names import WeightUpdateError
from tests.sharding.parallel_cases import NO_MASKS, OPTIONS, answers, differences, open_engine, write_tokenizer
from tests.sharding.parallel_models import MODELS

NORM = "model.norm.weight"
TAPS = ["residual:1", "mlp_output:*"]
PROMPTS = [{"prompt_token_ids": [*range(start, start + 9)]} for start in (3, 50)]


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def compare(folder: str, cache: str, model: str, options: dict[str, Any]) -> None:
    """Also log-probabilities, activations, with new weights, and after sleeps."""
    scored = {"enable_trace_replay": True, "enable_sampling_mass": True, "capture": TAPS, "capture_layers": [-1]}
    scored["return_sampling_mask"] = True
    if "pipeline_parallel_size" not in options:
        scored["steer"] = "residual:1"
    if model == "moe":
        scored["enable_return_routed_experts"] = True
    llm, alone = (open_engine(folder, cache, model, scored | chosen) for chosen in (options, {}))
    found = answers(llm)
    wrong = differences(found, answers(alone)) + wrong_scores(llm, alone) + wrong_activations(llm, alone)
    wrong += wrong_experts(llm, alone) if model == "moe" else []
    wrong += wrong_updates(llm, alone, folder, model)
    counted = {name: found[name] for name in ("preemptions", "prefix_hits")}
    say(**counted, compilations=llm.core.runner.compiles.count, wrong=wrong)


def wrong_scores(llm: LLM, alone: LLM) -> list[str]:
    """Kinds of log-probabilities that differ by more than rounding between both engines."""
    names = ("logprobs_raw", "logprobs_processed", "sampling_log_mass")
    asked = {"return_sampling_mass": True, "logprob_token_ids": [5], "prompt_logprob_token_ids": [7]}
    params = SamplingParams(
        temperature=0.7, top_k=60, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True, detokenize=False, **asked
    )

    def scores(each: LLM) -> dict[str, list[float]]:
        outputs = each.generate(PROMPTS, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        found = {name: [value for answer in answers for value in getattr(answer, name)] for name in names}
        found["masks"] = [token for answer in answers for row in answer.sampling_mask.token_ids for token in (-1, *row)]
        found["tokens"] = completions = [token for answer in answers for token in answer.token_ids]
        found["logprob_token_ids"] = [position[5].logprob for answer in answers for position in answer.logprobs]
        found["prompt"] = [position[7].logprob for output in outputs for position in output.prompt_logprobs[1:]]
        rows = [completions[:6], completions[6:]]
        for decode in (False, True):
            found[f"get_logprobs {decode}"] = [*each.get_logprobs(PROMPTS, rows, decode=decode).values]
        return found

    one, other = scores(llm), scores(alone)
    return [
        f"{name}: {one[name]}, not {other[name]}" for name in one if not np.allclose(one[name], other[name], atol=1e-4)
    ]


def wrong_activations(llm: LLM, alone: LLM) -> list[str]:
    """Names of activations that differ by more than rounding between both engines, with steering vectors and without,
    and "steered" if vectors change nothing.
    """
    size = llm.core.inputs.model_config.hidden_size
    vector = np.random.default_rng(0).standard_normal(size).astype(np.float32)

    def captured(each: LLM, **more: Any) -> dict[str, np.ndarray]:
        asked = {"capture": TAPS, "return_hidden_states": True, **NO_MASKS, **more}
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, **asked)
        found = [output.outputs[0] for output in each.generate(PROMPTS, params, use_tqdm=False)]
        arrays = {name: np.concatenate([answer.captured[name] for answer in found]) for name in found[0].captured}
        return arrays | {"hidden states": np.concatenate([answer.hidden_states for answer in found])}

    steer = [{"at": "residual:1", "vector": vector, "scale": 4.0}]
    kinds: list[dict[str, Any]] = [{}] + ([{"steer": steer}] if llm.core.runner.config.steer else [])
    found = [(captured(llm, **more), captured(alone, **more)) for more in kinds]
    wrong = [name for one, other in found for name in one if not np.allclose(one[name], other[name], atol=1e-3)]
    last = [one["hidden states"] for one, _ in found]
    return wrong + ["steered" for other in last[1:] if np.allclose(last[0], other)]


def wrong_experts(llm: LLM, alone: LLM) -> list[str]:
    """Prompts whose tokens, found in the prefix cache or not, have other experts in one engine than in the other."""
    prompts = [{"prompt_token_ids": [*range(start, start + 20)]} for start in range(3, 60, 8)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, **NO_MASKS)
    rounds = [[each.generate(prompts, params, use_tqdm=False) for each in (llm, alone)] for _ in range(2)]
    pairs = [pair for both in rounds for pair in zip(*both, strict=True)]
    found = [tuple(output.outputs[0].routed_experts for output in pair) for pair in pairs]
    wrong = [f"experts of prompt {n}" for n, (one, other) in enumerate(found) if not np.array_equal(one, other)]
    return wrong + ([] if found[0][0].shape == (27, 2, 2) else [f"experts: {found[0][0].shape}"])


def wrong_updates(llm: LLM, alone: LLM, folder: str, model: str) -> list[str]:
    """What differs between an engine over two processes and one on a device while both get the same weights, and what
    the first one did not refuse, or took in part."""
    first, second = (tensors_of(Path(folder, model), seed) for seed in (1, 2))
    stored, broken = Path(folder, "stored"), Path(folder, "broken")
    for path, tensors in ((stored, second), (broken, first | {NORM: first[NORM] * np.nan})):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
    wrong: list[str] = []

    def compare(what: str) -> None:
        one, other = (tokens(each) for each in (llm, alone))
        # Joined matrices have another order on every number of devices, and the vocabulary another padding.
        sums = [each.weight_info(checksum=True)["checksums"] for each in (llm, alone)]
        same = [name for name in sums[0] if "norm" in name or ".out." in name or ".down." in name]
        if one != other or one in seen:
            wrong.append(f"{what}: {one} instead of {other}, after {seen}")
        if not same or any(sums[0][name] != sums[1][name] for name in same):
            wrong.append(f"{what}: {[name for name in same if sums[0][name] != sums[1][name]]} of {[*sums[0]]}")
        seen.append(one)

    def refuse(params: Any, fault: str) -> None:
        before = llm.weight_info(checksum=True)
        try:
            llm.update_weights(params, chunk_bytes=1000)
            wrong.append(f"no error for {fault}")
        except WeightUpdateError as error:
            if fault not in str(error) or llm.weight_info(checksum=True) != before or tokens(llm) != seen[-1]:
                wrong.append(f"{error}, which is not {fault}, or what it left")

    seen = [tokens(llm)]
    llm.update_weights(iter(first.items()), chunk_bytes=1000)
    alone.update_weights(first)
    compare("tensors")
    refuse(first | {NORM: first[NORM] * np.nan}, "finite")
    refuse({name: each for name, each in first.items() if name != NORM}, "missing")
    refuse(str(broken), "finite")
    with open_folder(stored) as own:  # a folder that only this process has
        refuse(own, "node rank 1")
    for each in (llm, alone):
        each.update_weights(str(stored), version="stored")
    compare("a folder")
    for level in (1, 2):
        for part in ("kv_cache", "weights"):
            llm.sleep(level, tags=[part])
        if level == 2:
            for each in (llm, alone):
                each.update_weights(first)
        llm.wake_up()
        if level == 2:
            seen.clear()
            compare("asleep")
        elif tokens(llm) != seen[-1]:
            wrong.append("sleep changed tokens")
    return wrong


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[str]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def tensors_of(path: Path, seed: int) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, drawn at random."""
    rng = np.random.default_rng(seed)
    return {
        tensor_name(source, expert): 0.3 * rng.standard_normal(param.source_shape(source), np.float32)
        for param in declared_params(build_model(read_folder(path), Build("float32")))
        for source in param.decl.sources
        for expert in range(param.decl.num_experts or 1)
    }


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, **NO_MASKS)
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]


def serve(folder: str, cache: str, model: str, options: dict[str, Any]) -> None:
    path = Path(folder, model)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    write_tokenizer(path)
    llm = LLM(str(path), compile_cache_dir=cache, **OPTIONS, **options)
    params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    while True:
        llm.generate([{"prompt_token_ids": [number]} for number in range(16)], params, use_tqdm=False)
        say(answered=16)


def main(mode: str, folder: str, cache: str, model: str, options: str) -> None:
    logging.basicConfig(level=logging.INFO, format="host 0: %(message)s")
    start = time.monotonic()
    try:
        {"compare": compare, "serve": serve}[mode](folder, cache, model, json.loads(options))
    except (ClusterError, ConfigError) as error:
        say(failed=str(error), seconds=time.monotonic() - start)
    except EngineDeadError as error:
        say(failed=str(error.__cause__), seconds=time.monotonic() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
