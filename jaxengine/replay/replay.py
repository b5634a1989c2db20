"""Replays a recorded step: compares the weights, then each result, and names the first array that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.cache import State
from jaxengine.models.kernel_rows import INTERPRETED
from jaxengine.records.step_file import RecordedStep, RecordError
from jaxengine.records.step_pages import step_rows
from jaxengine.replay.backends import CPU, INTERPRET, NATIVE, Backend, choose_backend
from jaxengine.replay.compare import TOLERANCES, Difference, compared
from jaxengine.replay.record import read_engine, read_recorded
from jaxengine.replay.run import run_step
from jaxengine.replay.stage import open_stage
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.weights.weight_update import stage_checksums
from jaxengine.version import __version__

SAME, DIFFERS, CANNOT = 0, 1, 2
_MAX_NAMES = 5


class Report(NamedTuple):
    """Findings of a replay.

    Attributes:
      status: SAME or DIFFERS, the command's exit status.
      lines: readable text.
      first: name of the first array that differs; None if none does.
    """

    status: int
    lines: list[str]
    first: str | None = None


class _Ran(NamedTuple):
    """A step that was run again: its results by the record's names, names of the weights that differ from the record's,
    and the stage.
    """

    found: dict[str, np.ndarray]
    weights: list[str]
    stage: StageRunner


def replay(
    folder: Path,
    number: int | None = None,
    backend: str = NATIVE,
    *,
    model: str | None = None,
    kernels: str | None = None,
    tolerance: float | None = None,
    plugins: Sequence[str] = (),
    compile_cache_dir: str | None = None,
) -> Report:
    """Run a step that record_steps wrote again, and compare its weights and results with the recorded ones. If the file
    has been changed (digests), the step is not run and the report says so.

    Args:
      folder: folder of the recorded steps.
      number: number of the step; None for the last one.
      backend: one of BACKENDS. kernels: see `choose_backend`.
      model: model to load instead of the one that the record names.
      tolerance: share of an array's largest magnitude by which it may differ; None for 0 with the recorded kernels, and
        with others for TOLERANCES of the model's dtype.
      plugins, compile_cache_dir: as the engine's options; a record names none.

    Raises RecordError, ConfigError or ModelFileError for a step that cannot be run here.
    """
    about = read_engine(folder)
    step = read_recorded(folder, number)
    lines = [f"step {step.about['step']} of {folder}", _recorded(about)]
    if damaged := step.damaged():
        first = _damage(step, *damaged[0])
        return Report(DIFFERS, [*lines, f"first difference: {first}: the file has been changed"], first)
    chosen = choose_backend(backend, about["platform"], kernels)
    options = about["options"]
    if tolerance is None:
        tolerance = 0.0 if chosen.platform == about["platform"] else TOLERANCES[options["dtype"]]
    has_layers = "layers" in step.arrays
    own = {"model": model, "plugins": plugins, "compile_cache_dir": compile_cache_dir}
    ran = _run(about, step, chosen, layers=has_layers, **own)
    own_versions = f"jaxengine {__version__}, jax {jax.__version__}"
    lines.append(f"run here by {chosen.name}: the kernels of {chosen.platform}, with {own_versions}")
    if ran.weights:
        shown = ", ".join(ran.weights[:_MAX_NAMES])
        lines.append(f"{len(ran.weights)} weights differ from the recorded ones: {shown}")
    differences = _compare(step, step.arrays, ran, tolerance)
    lines += _summary(differences, tolerance)
    wrong = [each for each in differences if not each.is_within]
    first = f"weight {ran.weights[0]}" if ran.weights else wrong[0].name if wrong else None
    if wrong and not ran.weights and not has_layers and chosen.platform != about["platform"]:
        lines += _between(about, step, chosen, tolerance, **own)
    return Report(SAME if first is None else DIFFERS, lines, first)


def _run(about: Mapping[str, Any], step: RecordedStep, backend: Backend, *, layers: bool, **options: Any) -> _Ran:
    """Load the step's model for a backend, run the step, and return its results, the names of the weights that differ
    from the record (`_other_weights`) and the stage. about, layers, options: arguments of open_stage.

    Raises RecordError for a step that cannot be run here, and the errors of open_stage.
    """
    try:
        with backend.context():
            stage = open_stage(about, backend, layers=layers, **options)
            found = run_step(stage, step, about["platform"])
    except NotImplementedError as error:
        if backend.name != INTERPRET:
            raise
        raise RecordError(f"jax does not interpret an operation of {backend.platform}'s kernels: {error}") from None
    return _Ran(found, _other_weights(about, step, stage), stage)


def _compare(step: RecordedStep, wanted: Mapping[str, np.ndarray], ran: _Ran, tolerance: float) -> list[Difference]:
    """Return the Differences of all results of a replayed step, in the order of the forward pass.

    wanted: results to compare with, under the record's names. ran: the replay. tolerance: share of an array's largest
    magnitude. Raises RecordError for a record whose rows or sampled tokens have other shapes.
    """
    programs = ran.stage.programs
    layout, arrays = programs.packer.layouts[_bucket_of(ran.stage, step)], step.arrays
    messages = arrays["message"]
    known = arrays["state/num_computed"].reshape(len(messages), -1)
    rows = [row for own in zip(messages, known, strict=True) for row in step_rows(layout, *own)]
    if len(rows) != len(arrays["rows/rank"]):
        raise RecordError(f"the message has {len(rows)} rows, and rows/rank {len(arrays['rows/rank'])}")
    for name in (each for each in wanted if each.startswith("sampled/") and each in ran.found):
        if wanted[name].shape[:2] != ran.found[name].shape[:2]:
            raise RecordError(f"{name} is {[*wanted[name].shape]}; here it is {[*ran.found[name].shape]}")
    groups = [group for group in programs.groups if isinstance(group, State)]
    by_layer = {layer: len(group.arrays) for group in groups for layer in group.layers}
    return list(
        compared(
            arrays,
            wanted,
            ran.found,
            kv_dtype=jnp.dtype(programs.kv_shapes(2).spec.dtype),
            state_layers=[layer for layer in sorted(by_layer) for _ in range(by_layer[layer])],
            features=int(layout.view(messages[0], "header")[2]),
            is_sampled=np.array([row.is_sampled for row in rows], bool),
            tolerance=tolerance,
        )
    )


def _between(
    about: Mapping[str, Any], step: RecordedStep, chosen: Backend, tolerance: float, **options: Any
) -> list[str]:
    """Return lines of text about where the recorded platform's kernels and the chosen ones first differ, both run here.

    Hidden states of all layers are compared too. about: content of engine.json. tolerance: share of an array's largest
    magnitude. options: keyword arguments of `_run`. Returns [] if the recorded platform's kernels cannot run here.
    Raises the errors of `_run` and `_compare`.
    """
    own = CPU if about["platform"] == "cpu" else INTERPRET if about["platform"] in INTERPRETED else None
    if own is None:
        return []
    reference = _run(about, step, choose_backend(own, about["platform"]), layers=True, **options)
    other = _run(about, step, chosen, layers=True, **options)
    differences = _compare(step, reference.found, other, tolerance)
    first = next((each for each in differences if not each.is_within), None)
    title = f"both kernels on this machine, {about['platform']} and {chosen.platform}:"
    return [title, f"  {'no array differs by more than is tolerated' if first is None else first}"]


def _summary(differences: Sequence[Difference], tolerance: float) -> list[str]:
    """Return lines of text about all differences: how many arrays were compared, are the same and differ within the
    tolerance, and which are the first _MAX_NAMES beyond it.
    """
    same = sum(each.is_same for each in differences)
    lines = [f"{len(differences)} arrays compared, {same} with all bits equal"]
    wrong = [each for each in differences if not each.is_within]
    near = [each for each in differences if each.is_within and not each.is_same]
    if near:
        lines.append(f"{len(near)} differ within {tolerance:g} of their largest magnitude, first: {near[0]}")
    if wrong:
        lines.append(f"first difference: {wrong[0]}")
        lines += [f"  then: {each}" for each in wrong[1:_MAX_NAMES]]
    return lines


def _other_weights(about: Mapping[str, Any], step: RecordedStep, stage: StageRunner) -> list[str]:
    """Return the names of weights of `stage` whose checksums differ from the record's. If the stage and the record have
    different names, return only, sorted, the names that one of the two lacks.

    about: content of engine.json. Raises RecordError if it has no checksums of the step's weights.
    """
    try:
        wanted = about["weights"][step.about["weights"]]["checksums"]
    except (IndexError, KeyError, TypeError):
        raise RecordError("engine.json does not say which weights the step had") from None
    own = stage_checksums(stage)
    if own.keys() != wanted.keys():
        return sorted(own.keys() ^ wanted.keys())
    return [name for name, digest in own.items() if digest != wanted[name]]


def _bucket_of(stage: StageRunner, step: RecordedStep) -> Any:
    """Return the stage's bucket with the sizes of a recorded step. Raises StopIteration if it has none; `run_step`
    raises RecordError before.
    """
    tokens, seqs, width, sections = step.about["bucket"]
    buckets = stage.programs.packer.buckets
    key = (tokens, seqs, width, tuple(sections))
    return next(each for each in buckets if (each.num_tokens, each.num_seqs, each.width, each.sections) == key)


def _damage(step: RecordedStep, name: str, entries: Sequence[int]) -> str:
    """Describe a damaged array for the report: by its first damaged page if its entries are pages, otherwise by its
    name.

    entries: indices of damaged entries.
    """
    if not entries or not name.endswith("pages/data"):
        return name
    prefix = name.removesuffix("data")
    when = "after" if name.startswith("after") else "before"
    rank, layer, page = (step.arrays[f"{prefix}{field}"][entries[0]] for field in ("rank", "layer", "page"))
    return f"page {page} of layer {layer} of replica {rank} {when} the step"


def _recorded(about: Mapping[str, Any]) -> str:
    """Return a line about a record: its device, platform, model and versions."""
    model, versions = about["model"], about["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"recorded on {about['device']} ({about['platform']}): {model['architecture']}; {packages}"
