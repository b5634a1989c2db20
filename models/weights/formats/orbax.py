"""Checkpoints in our own layout: weights as the devices hold them, so that loading neither transposes nor joins them.

A folder holds layout.json (the arrangement of the weights), the configuration and tokenizer files of its origin,
weights/ (written and read with orbax-checkpoint, each process its own parts) and, if the checkpoint has scales of keys
and values, kv_cache_scales.json. The order inside joined weights depends on the number of devices that they are split
over (declare.ParamDecl), so another number is refused; nothing else about the devices matters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.models.weights.views.kv_scales import (
    STORED_FOR,
    KVScales,
    KVShape,
    largest_for,
    of_object,
    scales_for,
    to_object,
)
from jaxengine.models.weights.views.parts import num_parts, put, sharding_of

LAYOUT_FILE = "layout.json"
WEIGHTS_FOLDER = "weights"
# A file in the format of `jaxengine calibrate`. The layout says whether it belongs to the checkpoint: one of this name
# may have been copied from the folder that was converted.
SCALES_FILE, HAS_SCALES = "kv_cache_scales.json", "kv_cache_scales"
FORMAT = "jaxengine-weights-2"
MAX_LAYOUT_BYTES = 64 << 20
# Most host memory, in GB, for weights being copied between files and devices.
CONCURRENT_GB = 4


def save_checkpoint(
    folder: Path,
    params: nnx.State,
    model: CausalLM,
    *,
    mesh: Mesh | None = None,
    files: Iterable[Path] = (),
    kv_scales: KVScales | None = None,
) -> None:
    """Write a folder that load_checkpoint can read. Every process of the mesh must call it with the same folder.

    Args:
      folder: must not exist, or be empty.
      params: result of load_params for this model and mesh.
      model: abstract, of all stages.
      mesh: the mesh that the weights are split over; None for one device.
      files: configuration and tokenizer files, copied into the folder.
      kv_scales: the checkpoint's scales of keys and values, of all layers; None if it has none.

    Raises ValueError for a stage, ModelFileError for a folder that is not empty or cannot be written.
    """
    import orbax.checkpoint as ocp

    declared = list(declared_params(model))
    if len(model.stage.layers) != model.config.num_layers:
        raise ValueError(f"a checkpoint must hold the whole model, got {model.stage}")
    if folder.exists() and any(folder.iterdir()):
        raise ModelFileError(folder, "exists; a checkpoint is written to a new folder")
    ocp.multihost.sync_global_processes("all have looked for the folder")
    layout = {
        "format": FORMAT,
        "mesh": {} if mesh is None else dict(mesh.shape),
        "weights": {param.name: _arrangement(param, mesh) for param in declared},
    }
    if kv_scales is not None:
        layout[HAS_SCALES] = True
    held = dict(nnx.to_flat_state(params))
    arrays = {param.name: held[param.path].get_value() for param in declared}
    try:
        with (
            _reported_once(),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler(save_concurrent_gb=CONCURRENT_GB)) as checkpointer,
        ):
            checkpointer.save(folder.absolute() / WEIGHTS_FOLDER, args=ocp.args.PyTreeSave(arrays))
    except Exception as error:  # of orbax, tensorstore and all that they call: a full disk is no OSError
        raise ModelFileError(folder, f"cannot be written: {type(error).__name__}: {error}") from error
    try:
        if jax.process_index() == 0:
            for file in files:
                shutil.copyfile(file, folder / file.name)
            if kv_scales is not None:
                largest = kv_scales.each(lambda scales: largest_for(scales, STORED_FOR))
                (folder / SCALES_FILE).write_text(json.dumps(to_object(largest)) + "\n")
            # Last: a folder without it is not a checkpoint.
            (folder / LAYOUT_FILE).write_text(json.dumps(layout, indent=1))
        ocp.multihost.sync_global_processes("the folder is complete")
    except OSError as error:
        raise ModelFileError(folder, f"cannot be written: {error}") from error


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """Return a context manager that silences secondary reports of an error that is raised as well.

    They may come long after the error, so the silence ends with the block only if there was none.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook

    def is_news(record: logging.LogRecord) -> bool:
        return not re.search(r"run\(\) raised an exception|exception was never retrieved", record.getMessage())

    def unless_closed(report: Any) -> None:
        if str(report.exc_value) != "Event loop is closed":
            hook(report)

    for logger in loggers:
        logger.addFilter(is_news)
    sys.unraisablehook = unless_closed
    warned = warnings.catch_warnings()
    warned.__enter__()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    yield
    warned.__exit__(None, None, None)
    for logger in loggers:
        logger.removeFilter(is_news)
    sys.unraisablehook = hook


def load_checkpoint(folder: Path, model: CausalLM, *, mesh: Mesh | None = None) -> nnx.State:
    """Return the state of `model` (or of one of its stages) from a folder of save_checkpoint; each process reads its
    own parts.

    mesh: None for the first device. Raises ModelFileError for an invalid folder, for one of another model or dtype, or
    one arranged for another mesh, and ValueError for a mesh that does not split a weight evenly.
    """
    import orbax.checkpoint as ocp

    declared = list(declared_params(model))
    saved = read_layout(folder)
    names = [_name_in_whole(param) for param in declared]
    for name, param in zip(names, declared, strict=True):
        _check(folder, name, saved, _arrangement(param, mesh))
    if len(model.stage.layers) == model.config.num_layers and (extra := saved["weights"].keys() - set(names)):
        raise ModelFileError(folder, "the model has no use for this weight", sorted(extra)[0])
    shardings = [sharding_of(param, mesh) or SingleDeviceSharding(jax.devices()[0]) for param in declared]
    wanted = {
        name: jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)
        for name, param, sharding in zip(names, declared, shardings, strict=True)
    }
    restore = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    _check_files(folder / WEIGHTS_FOLDER)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=CONCURRENT_GB)) as checkpointer:
            arrays = checkpointer.restore(folder.absolute() / WEIGHTS_FOLDER, args=restore)
    except Exception as error:  # of orbax, tensorstore and all that they call, which have no base in common
        raise ModelFileError(folder / WEIGHTS_FOLDER, f"cannot be read: {type(error).__name__}: {error}") from error
    filled = []
    for name, param in zip(names, declared, strict=True):
        array = arrays.pop(name, None)
        # Where its own metadata is damaged, orbax omits weights that it does not find.
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (param.shape, param.dtype):
            raise ModelFileError(folder / WEIGHTS_FOLDER, "does not hold this weight as layout.json says", name)
        array = put(array, param.decl, array.sharding)
        filled.append((param.path, param.variable.replace(array)))
    return nnx.from_flat_state(filled)


def _check_files(weights: Path) -> None:
    """Raise ModelFileError if the folder `weights` holds anything but regular files and folders, at any depth: Orbax
    follows links and hangs on pipes.
    """
    for folder, folders, files in os.walk(weights):
        for name in (*folders, *files):
            mode = os.lstat(Path(folder) / name).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ModelFileError(Path(folder) / name, "must be a regular file or a folder")


def read_layout(folder: Path) -> dict[str, Any]:
    """Return the layout.json of a checkpoint folder: format, mesh (axis sizes), weights (arrangements by name) and,
    only if scales of keys and values are stored, HAS_SCALES.

    Raises ModelFileError for a missing or invalid file, and for another version of the format.
    """
    path = folder / LAYOUT_FILE
    layout = read_object(folder, LAYOUT_FILE, MAX_LAYOUT_BYTES)
    if layout is None:
        raise ModelFileError(path, "cannot be read: there is no such file")
    if layout.get("format") != FORMAT:
        text = f"format must be {FORMAT!r}, got {str(layout.get('format'))[:100]}; convert the model again"
        raise ModelFileError(path, text)
    if not isinstance(layout.get("weights"), dict) or not isinstance(layout.get("mesh"), dict):
        raise ModelFileError(path, "must hold objects mesh and weights")
    if not isinstance(layout.get(HAS_SCALES, False), bool):
        raise ModelFileError(path, f"{HAS_SCALES} must be true, false or absent")
    return layout


def load_scales(folder: Path, shape: KVShape) -> KVScales | None:
    """Return the scales of keys and values that save_checkpoint stored, for codes of STORED_FOR; None if it stored
    none.

    Raises ModelFileError for an invalid folder, and if its file of scales is missing or damaged.
    """
    if not read_layout(folder).get(HAS_SCALES, False):
        return None
    path, content = folder / SCALES_FILE, read_object(folder, SCALES_FILE)
    if content is None:
        raise ModelFileError(path, f"cannot be read: there is no such file, though {LAYOUT_FILE} says there is")
    try:
        largest = of_object(content, shape)
    except ValueError as error:
        raise ModelFileError(path, f"must hold {error}; convert the model again") from None
    return largest.each(lambda magnitudes: scales_for(magnitudes, STORED_FOR))


def _arrangement(param: DeclaredParam, mesh: Mesh | None) -> dict[str, Any]:
    """Return the properties that determine the bytes of a weight, as JSON values: "shape", "dtype", "sources" (without
    tensor names) and "parts" along the joined axis on `mesh`. The number of parts is 1 for a weight of a single source.
    Raises ValueError for a mesh that does not split it evenly.
    """
    sources = param.decl.sources
    return {
        "shape": list(param.shape),
        "dtype": str(param.dtype),
        "sources": [[*source[1:]] for source in sources],
        "parts": num_parts(param, mesh)[param.decl.joined_axis] if len(sources) > 1 else 1,
    }


def _check(folder: Path, name: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ModelFileError unless the weight `name` was saved with the wanted arrangement. saved: the folder's layout.
    wanted: a result of `_arrangement`.
    """
    found = saved["weights"].get(name)
    if found is None:
        raise ModelFileError(folder, "a weight that the model needs is missing", name)
    if found != wanted:
        was, mesh = str(found)[:300], str(saved["mesh"])[:100]
        text = f"was saved as {was} for the mesh {mesh}, but this engine needs {wanted}"
        what_to_do = "use the saved dtype and parallel sizes, or convert the model again for these"
        raise ModelFileError(folder, f"{text}: {what_to_do}", name)


def _name_in_whole(param: DeclaredParam) -> str:
    """Return the name that a stage's weight has in the full model."""
    path = param.path if param.layer is None else (param.path[0], param.layer, *param.path[2:])
    return ".".join(map(str, path))
