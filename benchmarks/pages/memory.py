"""Memory that an engine on a CPU really holds, beside what its start log and `jaxengine plan` say of it.

Each engine runs in a process of its own. What is real is the process's resident anonymous memory (RssAnon of /proc),
when it is ready, and the most that it was during a full load: every slot taken twice, tokens drawn with penalties and
logprobs, prompts scored, and a picture in each prompt of a model that sees. Pages of the pool that no request has used,
which the system has not given yet, count as held; `unused` is their bytes. Pages of files, which Linux may drop and
read again, are reported separately. `planned` is the memory plan of the start log, of all devices, and `planned ready`
is without what only running steps need; `kept` says whether both are within 3 % of what the process holds. `estimated`
is what `jaxengine plan` says, which compiles nothing. Speed is not measured.

The default model is started with its own options and in several ways, the others with random weights and few steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drafts.first_layers import write_first
from benchmarks.harness import OptionError, shared
from benchmarks.pages.memory_cases import DEFAULT, FAMILIES, PICTURE, PICTURE_SIDE, devices_of, write_family
from benchmarks.processes import command, memory, unused_bytes
from benchmarks.recorder import Recorder, Row
from jaxengine.results import table

MIB = 2**20
# Largest difference between plan and process, as a share of the plan.
LIMIT = 0.03
OPTIONS = shared(only="", budget_s=1e9)


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure each case whose name contains args.only, and print a table of the rows in MiB. A run that was cut is
    resumed.

    Raises OptionError if no case has such a name.
    """
    names = [name for name in (*DEFAULT, *FAMILIES) if args.only in name]
    if not names:
        raise OptionError(f"only is {args.only!r}, which is in none of {', '.join((*DEFAULT, *FAMILIES))}")
    recorder.resume()
    recorder.rows = [row for row in recorder.rows if row.get("name") in (*DEFAULT, *FAMILIES)]  # not of earlier cases
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            recorder.measure(name, lambda name=name: measure(case_options(name, Path(folder))))
    print(table([_line(row) for row in recorder.rows if "planned ready" in row]))  # not of an earlier form


def case_options(name: str, folder: Path) -> dict[str, Any]:
    """Return the engine options of the case called `name`, a key of DEFAULT or FAMILIES.

    folder: where a model or draft that the case needs is written, and executables are stored.
    """
    own = {"disable_log_stats": True, "compile_cache_dir": str(folder / "executables")}
    if name in DEFAULT:
        options = dict(DEFAULT[name])
        if "model" in (draft := options.get("speculative_config", {})):
            write_first(folder / "draft", 2)
            options["speculative_config"] = {**draft, "model": str(folder / "draft")}
        return own | options
    return own | write_family(name, folder / name.replace(" ", "-"))


def measure(options: dict[str, Any]) -> Row:
    """Return the row of an engine with these options: its plan's bytes by purpose, the bytes held, their ratios to the
    plan's, rounded to four digits, and the numbers of compiled and loaded programs. "kept" is whether both ratios are 1
    within LIMIT.

    The engine starts in a process with as many devices as the options need. Raises CalledProcessError if it fails.
    """
    count = devices_of(options)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    variables = os.environ | {"JAX_PLATFORMS": "cpu", **({"XLA_FLAGS": flags} if count > 1 else {})}
    line = command(measure_here, options=options)
    done = subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True, env=variables)
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = {
        "ready / planned": round(found["ready"] / found["planned ready"], 4),
        "loaded / planned": round(found["loaded"] / found["planned"], 4),
    }
    return {**found, **ratios, "kept": all(abs(ratio - 1) <= LIMIT for ratio in ratios.values())}


def measure_here(options: dict[str, Any]) -> None:
    """Start an engine in this process, serve twice as many prompts as it runs at once, and print as JSON the bytes of
    all devices that are planned and that the process holds, when the engine is ready and at most under load, and the
    numbers of programs. options: of the engine.
    """
    from jaxengine import LLM, SamplingParams

    llm = LLM(**options)
    runner = llm.core.engine.runner
    ready, unused, peak = memory(kind="RssAnon"), _unused(runner), memory(kind="VmHWM")
    plan, config = runner.plan, runner.config
    # All pages are allocated at the start. Full steps of both kinds and every branch of the sampler allocate the rest.
    length = max(1, min(config.max_model_len // 2, 2 * config.max_num_batched_tokens // config.max_num_seqs))
    write = picture_prompt if "pictures" in runner.extensions else text_prompt
    prompts = [write(number, length) for number in range(2 * config.max_num_seqs)]
    params = [
        SamplingParams(
            max_tokens=min(8, config.max_model_len - length),
            temperature=1.0,
            top_p=0.9,
            presence_penalty=0.5,
            logprobs=2,
            prompt_logprobs=1 if number % 16 == 0 else None,
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    llm.generate(prompts, params, use_tqdm=False)
    files, count = memory(kind="RssFile"), devices_of(options)
    slots = max(stage.programs.slot_bytes for stage in runner.stages)  # in the workspace, and there before any step
    figures = {
        "devices": count,
        "parts": {purpose: count * size for purpose, size in plan.parts.items() if size},
        "planned": count * plan.planned,
        "planned ready": count * (plan.planned - plan.workspace - plan.heap + slots),
        "ready": ready + unused,
        "loaded": memory(kind="VmHWM") - files + _unused(runner),
        "unused": unused,
        "files": files,
        "peak": peak,
        "num_compiled": runner.num_compiled,
        "num_loaded": runner.num_loaded,
    }
    print(json.dumps({"estimated": estimated(options), **figures}))


def text_prompt(number: int, length: int) -> dict[str, Any]:
    """Return a prompt of `length` tokens. number: by which prompts differ."""
    return {"prompt_token_ids": [(number * 7 + place) % 100 + 3 for place in range(length)]}


def picture_prompt(number: int, length: int) -> dict[str, Any]:
    """Return a prompt with an image, as large as the processor lets it be, and a text of `length` tokens, for a model
    of memory_cases that sees. number: by which prompts and images differ.
    """
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (PICTURE_SIDE, PICTURE_SIDE, 3), np.uint8)
    text = "".join(chr(ord("a") + (number * 7 + place) % 26) for place in range(length))
    return {"prompt": PICTURE + text, "multi_modal_data": {"image": Image.fromarray(pixels)}}


def _unused(runner: Any) -> int:
    """Return the bytes of all stages' pools that the system has not given yet."""
    return sum(unused_bytes(stage._kv.data) for stage in runner.stages)


def estimated(options: dict[str, Any]) -> int:
    """Return the bytes of all devices that `jaxengine plan` estimates for an engine with these options."""
    from jaxengine.config.engine_config import EngineConfig
    from jaxengine.plan.chips import CHIPS, Chips
    from jaxengine.plan.model import open_planned
    from jaxengine.plan.plan import LEFT, Split, plan_split, platform_for

    split = Split(options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1))
    chips = Chips(CHIPS["cpu"], split.size)
    model = open_planned(EngineConfig.from_options(**options), platform_for(chips.chip))
    parts = plan_split(model, chips, split).parts()
    model.close()
    return chips.count * sum(size for purpose, size in parts.items() if purpose != LEFT)


def _line(row: Row) -> Row:
    """Return the printed columns of a row, bytes in MiB."""
    names = ("estimated", "planned ready", "ready", "planned", "loaded")
    held = {f"{name} MiB": row[name] / MIB for name in names}
    return {"name": row["name"], **held, **{name: row[name] for name in ("ready / planned", "loaded / planned")}}
