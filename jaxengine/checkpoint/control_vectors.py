"""Control vectors in llama.cpp's format: a GGUF file with a tensor direction.N for each layer that it steers.

llama.cpp adds direction.N to the output of layer N, counted from 0, which is the tap residual:(N+1) here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import numpy as np

from jaxengine.checkpoint.input_source import ControlVector
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.taps import RESIDUAL, Tap
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import open_regular
from jaxengine.models.weights.gguf.dequant import dequantize
from jaxengine.models.weights.gguf.header import TensorInfo, read_header

_DIRECTION = re.compile(r"direction\.(\d{1,6})")


def read_control_vector(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the vectors f32[D] of a control vector by the names of their taps, in order of layers: that of direction.N
    under "residual:(N+1)".

    Raises ModelFileError for a file that cannot be read or is not a GGUF file, one with other tensors than direction.N,
    N from 1 on, one without directions, and vectors that have several axes, are not finite or differ in length.
    """
    name = os.fspath(path)
    try:
        descriptor, size = open_regular(name)
    except (OSError, ValueError) as error:
        raise ModelFileError(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        tensors = read_header(name, descriptor, size).tensors
        found = {_layer(name, tensor): _values(name, tensor, descriptor) for tensor in tensors}
    finally:
        os.close(descriptor)
    if not found:
        raise ModelFileError(name, "has no tensor direction.1, direction.2, ...: it is not a control vector")
    if len({values.size for values in found.values()}) > 1:
        raise ModelFileError(name, f"has directions of {sorted({v.size for v in found.values()})} numbers")
    return {Tap(RESIDUAL, layer + 1).name: values for layer, values in sorted(found.items())}


def read_control_vectors(named: Mapping[str, str] | None, model: ModelConfig) -> dict[str, ControlVector]:
    """Return the vectors by tap of each file of an engine's option, by the option's names; {} for None.

    named: path of the file by name. Raises ModelFileError for an invalid file, and for one that is for a model of
    another shape.
    """
    return {name: _for_model(path, model) for name, path in (named or {}).items()}


def _for_model(path: str, model: ModelConfig) -> ControlVector:
    """Return the vectors of a file by tap. Raises ModelFileError for an invalid file, and for another size or other
    layers than the model's.
    """
    found = read_control_vector(path)
    size = next(iter(found.values())).size
    if size != model.hidden_size:
        raise ModelFileError(path, f"has directions of {size} numbers; those of this model have {model.hidden_size}")
    known = {Tap(RESIDUAL, layer).name for layer in range(model.num_layers + 1)}
    if further := [name for name in found if name not in known]:
        raise ModelFileError(path, f"steers {further[0]}; this model has residual:0-{model.num_layers}")
    return found


def _layer(path: str, tensor: TensorInfo) -> int:
    """Return the number N, at least 1, of a tensor direction.N. path: the file, for errors. Raises ModelFileError for
    another name.
    """
    match = _DIRECTION.fullmatch(tensor.name)
    if match is None or int(match[1]) == 0:
        raise ModelFileError(path, "is not direction.N of a layer N >= 1: this is not a control vector", tensor.name)
    return int(match[1])


def _values(path: str, tensor: TensorInfo, descriptor: int) -> np.ndarray:
    """Read a tensor of one axis, in any storage format, and return it as f32[D].

    descriptor: descriptor of the open file. path: the file, for errors. Raises ModelFileError for more axes, and for
    numbers that are not finite.
    """
    if len(tensor.shape) != 1:
        raise ModelFileError(path, f"must have one axis, got {list(tensor.shape)}", tensor.name)
    values = dequantize(tensor.format, os.pread(descriptor, tensor.num_bytes, tensor.start)).astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelFileError(path, "has numbers that are not finite", tensor.name)
    return values
