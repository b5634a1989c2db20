"""Every recorded checkpoint through whole engines: what transformers says, however requests are served.

    python -m tests.models.families.matrix [NAME ...] [--only MODE ...] [--fast-compile] [--json FILE]

First the logits, of whole prompts and in chunks: the largest difference, of the largest logit. With `--only logits`
nothing else. Then the engines, of models that see or hear without their towers; images are in
tests/jaxengine/engine/test_pictures.py and test_pictures_parallel.py.

Each engine serves the two recorded prompts, greedily, whose tokens must be those that transformers goes on with, and
twenty others, greedy and seeded, whose tokens must be those of the first engine serving them one by one. Modes: alone,
a crowd in a pool so small that requests are preempted all the time, the same again with prefix hits, chunks of 5, 16
and 512 tokens, and two devices by each kind of parallelism that splits the model. It forces eight devices on the CPU.
A refusal counts as "not split" where it is of what the mode asks for and says why the model cannot be split so; any
other fails the row. Results are added to those that the JSON file has (benchmarks/results/families.json is kept); the
exit status is 1 when a token differs or a row failed. `--fast-compile` compiles as tests do (tests/fast_compile.py), in
half the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np

from jaxengine import LLM, ConfigError, SamplingParams
from jaxengine.models.build import Build
from jaxengine.models.cache import paged_groups
from jaxengine.models.registry import build_model, read_folder
from jaxengine.scheduler.pages.groups import most_pages
from tests.fast_compile import fast_compile
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.models.conftest import WEIGHTS_OF, PagedRun, load_recorded

NUM_OTHERS = 20
PAGE_SIZE = 4
TOLERANCE = 1e-4


def options(length: int, windows: list[int | None], chunk: int = 32, *, requests: float = 1) -> dict[str, Any]:
    """Room for one request of any length, or several, in every cache group, and little more."""
    pages = int(requests * most_pages(length, windows, page_size=PAGE_SIZE, chunk=chunk)) + 4
    return {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": length,
        "max_num_seqs": 8,
        "max_num_batched_tokens": chunk,
        "block_size": PAGE_SIZE,
        "num_gpu_blocks_override": pages,
        "compilation_config": {"cudagraph_capture_sizes": [8], "prefill_sizes": [chunk]},
        "disable_log_stats": True,
    }


EQUAL, NOTHING, NEVER = "equal", "did not happen", "never: its windows give back what they take"
FIRST = "compared with by the others"  # where nothing else is known
MODES: dict[str, dict[str, Any]] = {
    "chunks of 5": {"long_prefill_token_threshold": 5},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "chunks of 512": {"chunk": 512},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "ep 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}

# Why a model cannot be split, by the option that asks for it, as the engine says it.
NOT_SPLIT = {
    "tensor_parallel_size": r"allowed: \d.* for this model \(.* cannot be split evenly over ",
    "pipeline_parallel_size": r"at most \d+ layers$|^the first \d+ layers add parts "
    r"|^layer \d+ attends to keys (and values|as selected by the indexer) of layer ",
    "enable_expert_parallel": r"allowed: False: \w+ has no experts$",
}


def is_not_split(error: ValueError, changes: dict[str, Any]) -> bool:
    """Whether an engine says with it that the model cannot be split as a mode's options ask."""
    param = error.param if isinstance(error, ConfigError) else ""
    return param in changes and re.search(NOT_SPLIT.get(param, "$^"), str(error)) is not None


class Workload:
    """Prompts with the tokens that are known to follow greedily, then others, of which some begin as the first does."""

    def __init__(self, prompts: list[list[int]], greedy: list[list[int]], length: int, vocab_size: int):
        self.prompts, self.greedy = list(prompts), greedy
        self.params = [self._params(max(1, len(tokens))) for tokens in greedy]
        rng, most = np.random.default_rng(1), length - 13
        for index in range(NUM_OTHERS):
            own = rng.integers(0, vocab_size, int(rng.integers(1, 24))).tolist()
            shared = self.prompts[0][:20] if index % 3 == 0 else []
            self.prompts.append((shared + own)[:most])
            self.params.append(self._params(12, temperature=0.9 * (index % 2), seed=index))
        asked = zip(self.prompts, self.params, strict=True)
        self.longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in asked)

    @classmethod
    def recorded(cls, folder: Path, length: int, vocab_size: int) -> Workload:
        """With the prompts of a folder's goldens."""
        with np.load(folder / "golden.npz", allow_pickle=False) as golden:
            prompts, greedy = (
                [golden[f"{kind}_{index}"].tolist() for index in range(2)] for kind in ("token_ids", "greedy")
            )
        return cls(prompts, greedy, length, vocab_size)

    @staticmethod
    def _params(count: int, temperature: float = 0.0, seed: int | None = None) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True, detokenize=False)

    def run(self, llm: LLM, *, alone: bool = False) -> list[list[int]]:
        given: Any = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        if alone:
            done = [
                llm.generate([each], [params], use_tqdm=False)[0]
                for each, params in zip(given, self.params, strict=True)
            ]
        else:
            done = llm.generate(given, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    def wrong(self, tokens: list[list[int]]) -> list[int]:
        """Prompts that went on otherwise than is known."""
        return [
            index
            for index, expected in enumerate(self.greedy)
            if expected and tokens[index][: len(expected)] != expected
        ]


def logits_error(name: str) -> float:
    """The largest difference to the recorded logits, of the largest of them: whole prompts, chunks, single tokens."""
    case, worst = load_recorded(name), 0.0
    for prompt, golden in zip(case.prompts, case.logits, strict=True):
        num_tokens, cut = -(-len(prompt) // 40) * 40, max(1, len(prompt) // 3)
        whole = PagedRun(case.model).step({"a": prompt}, num_tokens=num_tokens)["a"]
        run, parts = PagedRun(case.model), [prompt[:cut], prompt[cut:-4], *np.split(prompt[-4:], 4)]
        pieces = np.concatenate([run.step({"a": part}, num_tokens=num_tokens)["a"] for part in parts])
        worst = max(worst, *(float(np.abs(each - golden).max() / np.abs(golden).max()) for each in (whole, pieces)))
    return worst


def examine(name: str, cache: str, only: list[str]) -> dict[str, str]:
    """What came out in each mode: "equal", "not split" and why, "refused" and why, or what differs."""
    raw, config = json.loads((FOLDER / name / "config.json").read_text()), read_folder(FOLDER / name)
    length = min(256, config.max_position_embeddings)
    folder = checkpoint(WEIGHTS_OF.get(name, name))
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)  # the recorded configuration over weights that may be another case's
        (model / "config.json").write_text(json.dumps(raw))
        for file in folder.glob("model*.safetensors*"):
            shutil.copy(file, model)
        return serve(model, Workload.recorded(FOLDER / name, length, config.vocab_size), length, cache, only)


def serve(model: Path, workload: Workload, length: int, cache: str, only: list[str]) -> dict[str, str]:
    """What came out of a checkpoint in each mode: see `examine`."""
    longest = min(length, workload.longest + 1)
    shared: dict[str, Any] = {"model": str(model), "compile_cache_dir": cache}
    config = read_folder(model)
    if config.tower is not None and not config.tower.crosses:  # its processor has no settings here
        shared["language_model_only"] = True
    if config.keeps_states:
        shared["num_state_snapshots"] = 24
    model_groups = build_model(config, Build("float32")).cache_groups(PAGE_SIZE, "float32")
    windows = [group.window for group in paged_groups(model_groups)]
    first = LLM(**options(length, windows), **shared)
    expected = workload.run(first, alone=True)
    rows = {"alone": _verdict(workload.wrong(expected)) if any(workload.greedy) else FIRST}
    # What makes requests give way depends on how much of them windows and states give back.
    pools = [
        options(length, windows),
        *(options(longest, windows, requests=count) for count in (1.5, 2, 1, 1.25, 3)),
    ]
    if not only or "preempted" in only:
        for pool in pools:
            found = _crowded(LLM(**pool, **shared), workload, expected)
            # What is wrong in any pool stays.
            for mode, each in found.items():
                if rows.get(mode, NOTHING) == NOTHING or not each.endswith((NOTHING, EQUAL)):
                    rows[mode] = each
            if NOTHING not in rows.values():
                break
        if rows["preempted"] == NOTHING and windows and None not in windows:
            rows["preempted"] = NEVER
    for mode, changes in MODES.items():
        if only and mode not in only:
            continue
        changes = dict(changes)
        chosen = options(length, windows, changes.pop("chunk", 32))
        try:
            llm = LLM(**chosen, **shared, **changes)
        except ValueError as error:  # a ConfigError is one, and any refusal is a row
            rows[mode] = f"{'not split' if is_not_split(error, changes) else 'refused'}: {error}"[:200]
            continue
        rows[mode] = _ended(llm, _verdict(_differing(workload.run(llm), expected)))
    rows["alone"] = _ended(first, rows["alone"])
    return rows


def _crowded(llm: LLM, workload: Workload, expected: list[list[int]]) -> dict[str, str]:
    """The workload in a small pool, and once more with what is left there of the first time."""
    scheduler = llm.core.engine.scheduler
    preempted = _verdict(_differing(workload.run(llm), expected))
    if preempted == EQUAL and not scheduler.num_preemptions:
        preempted = NOTHING
    again = _verdict(_differing(workload.run(llm), expected))
    if again == EQUAL and scheduler.config.enable_prefix_caching and not scheduler.num_prefix_hits:
        again = NOTHING
    if not scheduler.config.enable_prefix_caching:
        again = f"not cached, {again}"
    return {"preempted": preempted, "prefix hits": _ended(llm, again)}


def _ended(llm: LLM, verdict: str) -> str:
    """The verdict on an engine that has served, which ends here."""
    compilations = llm.core.engine.runner.compiles.count
    llm.shutdown()
    return f"{compilations} compilations while serving" if compilations else verdict


def _differing(found: list[list[int]], expected: list[list[int]]) -> list[int]:
    return [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]


def _verdict(wrong: list[int]) -> str:
    return f"requests {wrong} differ" if wrong else EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", nargs="+", default=[], choices=["logits", "preempted", *MODES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--executables", default=str(Path(".cache") / "executables"))
    parser.add_argument("--fast-compile", action="store_true")
    args = parser.parse_args()
    with fast_compile() if args.fast_compile else contextlib.nullcontext():
        return int(_run(args))


def _run(args: argparse.Namespace) -> bool:
    """Whether anything was not as it should be."""
    names = args.names or sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
    bad = False
    for name in names:
        error = logits_error(name)
        modes = examine(name, args.executables, args.only) if args.only != ["logits"] else {}
        bad |= error > TOLERANCE
        bad |= any(
            found not in (EQUAL, f"not cached, {EQUAL}", NEVER) and not found.startswith("not split")
            for found in modes.values()
        )
        print(f"{name}: logits {error:.1e}" + "".join(f", {mode} {found}" for mode, found in modes.items()), flush=True)
        if args.json:
            known = json.loads(args.json.read_text()) if args.json.exists() else {}
            row = known.setdefault(name, {"modes": {}})
            row["architecture"], row["error"] = load_recorded(name).config.architecture, float(f"{error:.1e}")
            row["modes"] |= modes
            args.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(main())
