"""Tokens of two engines on one folder of pages, which are killed while bytes of its files are flipped and files cut.

Both keep few pages in host memory, so that most come from the folder, whose limit makes files go all the time; free
pages on the devices are NaN. Each is killed (SIGKILL) soon after its first answers, and started again. The row says how
many requests the engines answered, how many of them got other tokens than an engine without tiers computed, the tokens
found in host memory and files, the most damaged files that an engine noticed, the attacks, and `kept`: none differed,
nothing was compiled, and there were hits, kills and damaged files.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.processes import ROOT, command
from benchmarks.recorder import Recorder
from jaxengine import LLM
from tests.fast_compile import fast_compile
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.offload_cases import Poisoned, params_of, prompts_of

OPTIONS = {
    "seconds": Option(300.0, "how long the engines are attacked"),
    "kill_seconds": Option(5.0, "from an engine's first answered prompts to its end, at most"),
    **shared(tiny=False),
}
_PROMPTS, _AT_ONCE = 24, 4
_TIERS = {"kv_offloading_size": 0.0005, "kv_offloading_disk_size": 0.0015}


def _options() -> dict[str, Any]:
    """Return the options of an engine of a tiny Llama in float32, without tiers and tokenizer: _AT_ONCE sequences of at
    most 64 tokens, steps of 32, pages of 4.
    """
    few: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": _AT_ONCE, "max_num_batched_tokens": 32, "block_size": 4}
    return engine_options(dtype="float32", skip_tokenizer_init=True, **few) | {"model": str(checkpoint("llama"))}


def serve(folder: str, expected: str) -> None:
    """Answer the prompts again and again with an engine whose tiers end in `folder`. After each round print a JSON line
    of counts ("requests", "different" answers, "hits", "bad files", "compilations") and clear the prefix cache. Returns
    never; its process is killed. expected: file with the tokens of each prompt, JSON.
    """
    wanted = json.loads(Path(expected).read_text())
    tiers: dict[str, Any] = {**_TIERS, "kv_offloading_path": folder, "num_gpu_blocks_override": 40}
    with fast_compile(), LLM(**_options() | tiers) as llm:
        engine, offload = Poisoned(llm), llm.core.engine.scheduler.extension("offload")
        status = llm.core.engine.extensions.by_name["offload"].status
        while True:
            hits = offload.num_hits
            found = engine.run(prompts_of(_PROMPTS), _AT_ONCE)
            row = {
                "requests": _PROMPTS,
                "different": sum(own != other for own, other in zip(found, wanted, strict=True)),
                "hits": offload.num_hits - hits,
                "bad files": status()["kv_offload"]["disk_bad_files"],
                "compilations": llm.core.runner.compiles.count,
            }
            print(json.dumps(row), flush=True)
            llm.reset_prefix_cache()


class _Attacker:
    """Kills of the engines, and damage to their folder."""

    def __init__(self, folder: Path, expected: Path, logs: list[Path], kill_seconds: float):
        """Start an engine for each of `logs`, the file that takes what it prints. kill_seconds: as the option."""
        self._folder, self._logs, self._rng, self._seconds = folder, logs, random.Random(0), kill_seconds
        self._command = command(serve, folder=str(folder), expected=str(expected))
        self.counts = {"kills": 0, "flips": 0, "cuts": 0}
        self._engines = [self._started(log) for log in logs]
        # Of each engine the size of its log when it was started, and when it is killed.
        self._begins, self._due = [0] * len(logs), [math.inf] * len(logs)

    def _started(self, log: Path) -> subprocess.Popen[bytes]:
        """Start an engine and return its process."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            return subprocess.Popen(self._command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.DEVNULL)

    def damage(self) -> None:
        """Flip a bit of a random file other than ".total", or, once in five times, cut it, and count that; a file that
        is gone meanwhile is left.
        """
        files = [each for each in self._folder.rglob("*") if each.is_file() and each.name != ".total"]
        if not files:
            return
        path, is_cut = self._rng.choice(files), self._rng.random() < 0.2
        try:
            at = self._rng.randrange(path.stat().st_size)
            if is_cut:
                os.truncate(path, at)
            else:
                with path.open("r+b") as file:
                    file.seek(at)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))
        except (OSError, ValueError):
            return
        self.counts["cuts" if is_cut else "flips"] += 1

    def kill(self) -> None:
        """Kill the engines whose time has come, and start them again. An engine's time is a random number of seconds,
        at most kill_seconds, after it has printed a line.
        """
        for index, log in enumerate(self._logs):
            now, size = time.monotonic(), log.stat().st_size
            if now > self._due[index]:
                self._engines[index].kill()
                self._engines[index].wait()
                self._engines[index], self._begins[index] = self._started(log), log.stat().st_size
                self._due[index] = math.inf
                self.counts["kills"] += 1
            elif math.isinf(self._due[index]) and size > self._begins[index]:
                self._due[index] = now + self._rng.uniform(0, self._seconds)

    def end(self) -> int:
        """Kill the engines; return how many had ended by themselves."""
        ended = sum(each.poll() is not None for each in self._engines)
        for each in self._engines:
            each.kill()
            each.wait()
        return ended


def run(args: Namespace, recorder: Recorder) -> None:
    """Attack two engines that share a folder for args.seconds (60 if args.tiny), and add the row of their counts and of
    the attacks. "kept" is whether there were hits, bad files and kills, all tokens equal those of an engine without
    tiers, nothing was compiled and no engine ended by itself.
    """
    if args.tiny:
        args.seconds = 60.0
    plain: dict[str, Any] = {**_options(), "num_gpu_blocks_override": 400}
    with fast_compile(), LLM(**plain) as llm:
        params = [params_of(index) for index in range(_PROMPTS)]
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts_of(_PROMPTS)], params, use_tqdm=False)
    with tempfile.TemporaryDirectory() as name:
        expected, folder, logs = Path(name) / "expected", Path(name) / "pages", [Path(name) / each for each in "ab"]
        expected.write_text(json.dumps([list(each.outputs[0].token_ids) for each in outputs]))
        folder.mkdir(mode=0o700)
        attacker = _Attacker(folder, expected, logs, args.kill_seconds)
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            attacker.damage()
            attacker.kill()
        ended = attacker.end()
        lines = [line for log in logs for line in log.read_bytes().splitlines(keepends=True)]
    rounds = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
    row: dict[str, Any] = {key: sum(each[key] for each in rounds) for key in ("requests", "different", "hits")}
    row |= {key: max((each[key] for each in rounds), default=0) for key in ("bad files", "compilations")}
    row |= attacker.counts | {"ended": ended}
    is_attacked = row["hits"] and row["bad files"] and row["kills"]
    row["kept"] = bool(is_attacked) and not (row["different"] or row["compilations"] or ended)
    recorder.add(row)
