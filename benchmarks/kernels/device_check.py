"""The checks of `scripts/gpu_check` and `scripts/tpu_check`: predictions beside what is measured, the engine,
conformance on the device, attention, torch's attentions; one JSON file.

Before any of them, the packages that each section needs are imported: a section that lacks some is named and left out.
Each section runs in a process of its own; one whose results do not grow for a while hangs: it is ended, its row is
named, and the section continues after that row. A later run with the same folder continues where this one was cut. The
exit status is 1 if something failed, 3 if nothing did but a section was left out or cut, else 0. Imports no jax: a
device serves one process at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Option, shared
from benchmarks.kernels import conformance
from benchmarks.processes import ROOT, command, watch
from benchmarks.recorder import BEGUN, Recorder, write
from jaxengine.results import table


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
      weight: its share of the time that is left when it begins, relative to the weights of the sections still to come.
      stall_s: seconds without a new row after which it counts as hung; the longest compile takes much less.
      needs: modules that it imports. Those of this project come last and are tried only if no other is missing.
      words: of the command after `python`; none for conformance.
    """

    weight: int
    stall_s: float
    needs: tuple[str, ...]
    words: tuple[str, ...] = ()


JAX = ("jax", "numpy", "ml_dtypes")
ENGINE = ("flax", "PIL", "h11", "jinja2", "msgspec", "safetensors", "tokenizers", "tqdm", "yaml")
ATTENTION = ("-m", "benchmarks", "attention")
BOTH = {
    "engine": Section(
        4,
        300.0,
        (*JAX, *ENGINE, "jaxengine.api.llm", "benchmarks.engine.engine_gpu"),
        ("-m", "benchmarks", "engine_gpu"),
    ),
    "predictions": Section(
        3,
        300.0,
        (*JAX, *ENGINE, "jaxengine.api.llm", "benchmarks.engine.predictions"),
        ("-m", "benchmarks", "predictions"),
    ),
    "conformance": Section(3, 60.0, (*JAX, "flax", "pytest")),
}
SECTIONS = {
    **BOTH,
    "attention": Section(2, 90.0, (*JAX, "benchmarks.kernels.attention"), ATTENTION),
    "torch": Section(1, 90.0, (*JAX, "torch"), (*ATTENTION, "--of", "flashinfer", "sdpa", "flex")),
}
OWN = ("jaxengine.", "benchmarks.")
IMPORT_S = 120.0
# Names of packages that are not those of their modules.
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}
OPTIONS = {
    "only": Option(None, "one section", choices=tuple(SECTIONS)),
    "out": Option(str(RESULTS), "folder of the results"),
    "resume": Option(None, "folder with results of an earlier call, to go on after them", metavar="FOLDER"),
    "lacking": Option(False, "print the packages that sections lack, and do nothing else"),
    **shared(budget_s=7200.0, tiny=False),
}


def run(args: Namespace, recorder: Recorder) -> None:
    run_check("gpu_check", SECTIONS, args, recorder)


def run_check(check: str, sections: dict[str, Section], args: Namespace, recorder: Recorder) -> None:
    """Run the chosen sections of a check one after the other, and record a row with each status.

    check: name that the result files begin with. args: values of OPTIONS. Writes the files into `args.out`. With
    --lacking it only prints the packages to install. Raises SystemExit(3) if nothing failed but a section was left out
    or cut.
    """
    variables = {"JAX_PLATFORMS": args.platform} if args.platform else {}
    deadline = time.monotonic() + args.budget_s
    chosen = [name for name in sections if args.only in (None, name)]
    lacks = {name: lacking(sections[name].needs, **variables) for name in chosen}
    if args.lacking:
        print("\n".join(sorted({requirement(each) for errors in lacks.values() for each in errors if wanted(each)})))
        return
    print(lacking_table(lacks), flush=True)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    take_over(check, args.resume, folder)
    statuses = []
    for at, name in enumerate(chosen):
        if lacks[name]:
            status, about = "left out", {"lacks": lacks[name]}
        else:
            weights = [sections[each].weight for each in chosen[at:] if not lacks[each]]
            seconds = (deadline - time.monotonic()) * weights[0] / sum(weights)
            print(f"\n=== {name}, {seconds:.0f} s", flush=True)
            file = folder / f"{check}_{name}.json"
            status, about = begin(sections[name], name, file, seconds, args.tiny, **variables), {}
        merge(folder, check, name, status, **about)
        recorder.add({"section": name, "status": status, "kept": status != "failed"})
        statuses.append(status)
    if "predictions" in chosen:
        print(predictions_table(folder / f"{check}_predictions.json"))
    print(f"\n{folder / f'{check}.json'}")
    if not recorder.failed and {"left out", "cut"} & {*statuses}:
        recorder.finish()
        raise SystemExit(3)


def predictions_table(path: Path) -> str:
    """Return the text table of predictions and measurements in the result file `path`; of no rows if there is none."""
    found = [{"name": name, **row} for name, row in rows(path).items() if "predicted" in row]
    return table([{key: "-" if value is None else value for key, value in row.items()} for row in found])


def take_over(check: str, earlier: str | None, folder: Path) -> None:
    """Copy the result files of an earlier run's folder that `folder` does not have yet. earlier: None to copy
    nothing.
    """
    for file in Path(earlier).glob(f"{check}*.json") if earlier else ():
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def import_errors(names: list[str]) -> None:
    """Import modules and print, as a line of JSON, those that fail, with the errors, of at most 300 characters.

    The project's own modules are skipped once an import has failed.
    """
    errors: dict[str, str] = {}
    for name in names:
        if errors and name.startswith(OWN):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library raises anything
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    print("\n" + json.dumps(errors))


def lacking(needs: tuple[str, ...], **variables: str) -> dict[str, str]:
    """Return the modules that cannot be imported in a new process, with the reason for each.

    If the process crashes or takes more than IMPORT_S seconds, the last module is named. variables: of its environment.
    """
    line = command("benchmarks.kernels.device_check:import_errors", names=needs)
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return {needs[-1]: f"its imports take more than {IMPORT_S:.0f} s"}
    if done.returncode:
        return {needs[-1]: f"its imports end the process with {done.returncode}: {done.stderr[-300:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def wanted(module: str) -> bool:
    """Return whether a module's package should be installed for the check: neither the project itself nor torch, which
    takes gigabytes.
    """
    return module != "torch" and not module.startswith(OWN)


def requirement(module: str) -> str:
    """Return the requirement for pip that installs a module, with the versions of pyproject.toml if it lists the
    package.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    package = PACKAGES.get(module, module)
    return next((each for each in known if re.split(r"[\[<>=!~]", each)[0] == package), package)


def lacking_table(lacks: dict[str, dict[str, str]]) -> str:
    """Return a text table of which sections run and which lack modules, with pip commands that install the packages.

    lacks: by section, the missing modules with the reasons.
    """
    rows = [{"section": name, "": f"lacks {', '.join(each)}" if each else "runs"} for name, each in lacks.items()]
    errors = {name: why for each in lacks.values() for name, why in each.items()}
    lines = [table(rows), "", *(f"{name}: {why}" for name, why in errors.items() if "No module named" not in why)]
    missing = sorted({requirement(name) for name in errors if wanted(name)})
    if missing:
        words = " ".join(f"'{each}'" for each in missing)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        lines += [f"Install them with: pip install {words}", "Without a network, run elsewhere and carry wheels/ here:"]
        lines += [f"  pip download --only-binary :all: --python-version {python} --dest wheels {words}"]
    return "\n".join(lines)


def begin(section: Section, name: str, out: Path, seconds: float, tiny: bool, **variables: str) -> str:
    """Run a section, conformance or a benchmark; return "complete", "failed" or "cut".

    out: file for the results, which are merged into the check's file after every update. seconds: that it may take.
    tiny: small cases, for a test. variables: of the environment.
    """

    def each() -> None:
        merge(out.parent, out.stem.removesuffix(f"_{name}"), name, "running")

    if not section.words:
        selection = conformance.TINY if tiny else conformance.DEVICE
        return conformance.run(out, seconds, section.stall_s, selection, each, **variables)
    return benchmark(section, name, out, seconds, tiny, each, **variables)


def benchmark(section: Section, name: str, out: Path, seconds: float, tiny: bool, each: Any, **variables: str) -> str:
    """Run a section that is a benchmark until it ends or its time is over; return "complete", "failed" or "cut".

    If it hangs or crashes in a row that is new, it is started again and continues after that row. out: its result file.
    each: called after every update of the file. Prints the end of the log and the failed rows.
    """
    deadline = time.monotonic() + seconds
    line = [sys.executable, *section.words, "--save", str(out), *["--tiny"] * tiny]
    settle(out, "cut", 0.0)  # removes the row in which an earlier run was interrupted
    while True:
        before = rows(out)
        left = deadline - time.monotonic()
        ended = watch(line, out.with_suffix(".log"), out, left, section.stall_s, each, **variables)
        begun = settle(out, ended, section.stall_s)
        if ended in (0, "cut") or begun is None or begun in before:
            break
        print(f"{begun}: {rows(out)[begun]['status']}; {name} goes on behind it", flush=True)
    print(out.with_suffix(".log").read_text()[-2000:], flush=True)
    bad = [row for row, about in rows(out).items() if is_bad(name, row, about)]
    print("".join(f"failed: {row}\n" for row in bad), end="", flush=True)
    if bad or ended not in (0, "cut"):
        return "failed"
    return "complete" if ended == 0 else "cut"


def settle(out: Path, ended: int | str, stall_s: float) -> str | None:
    """Record how its process ended in the row that had begun; if the process was cut, remove the row so that it is
    measured again.

    out: result file, rewritten. ended: exit status, "hung" or "cut". Returns the row's name, None if no row had begun.
    """
    whole = json.loads(out.read_text()) if out.exists() else {"rows": []}
    begun = next((row for row in whole["rows"] if row.get("status") == BEGUN), None)
    if begun is None:
        return None
    if ended == "cut":
        whole["rows"].remove(begun)
    else:
        begun["status"] = f"hung for {stall_s:.0f} s" if ended == "hung" else f"its process ended with {ended}"
    write(out, whole)
    return begun["name"]


def is_bad(section: str, name: str, row: dict[str, Any]) -> bool:
    """Return whether a row is a failure of this engine. Errors of other implementations (torch's, jax's) are none;
    hangs always are.
    """
    return "status" in row or ("error" in row and section != "torch" and not name.endswith(", jax"))


def rows(path: Path) -> dict[str, Any]:
    """Return the rows of a benchmark's result file by name, without their names; {} if there is no file."""
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: {key: value for key, value in row.items() if key != "name"} for row in found}


def merge(folder: Path, check: str, section: str, status: str, **about: Any) -> None:
    """Put a section's status and its rows so far into the check's file of all sections, and its machine into "machine".

    about: further entries of the section.
    """
    path, part = folder / f"{check}.json", folder / f"{check}_{section}.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    if part.exists():
        whole["machine"] = {**whole.get("machine", {}), **json.loads(part.read_text())["machine"]}
    whole[section] = {"status": status, **about, "rows": rows(part)}
    write(path, whole)
