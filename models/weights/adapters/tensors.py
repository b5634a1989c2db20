"""Tensors of an adapter's file, in pairs, by module."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.errors import Faults, ModelFileError
from jaxengine.models.params.source import WeightSource

PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# What PEFT saves of a token table or an LM head that an adapter changes, and of no other module.
_OF_TABLES = (".lora_embedding_A", ".lora_embedding_B", ".base_layer.weight", ".base_layer.bias")


class AdapterTensors:
    """Tensors of a file, or of a trainer's memory, by module, under the file's names without PREFIX, which transformers
    leaves out with `save_peft_format=False`.

    Attributes:
      path: path of the checkpoint, for errors.
      modules: for each module, the set of ENDS that are present.

    Raises ModelFileError for a file without such tensors.
    """

    def __init__(self, checkpoint: WeightSource, dtype: np.dtype, faults: Faults):
        """Sort the checkpoint's tensors by module, without reading them. dtype: that of the matrices that are returned.

        An error for each tensor whose name does not end in one of ENDS, or is another's with or without PREFIX, is
        added to `faults`. If no names are valid, the faults so far are raised as one ModelFileError; without any
        tensor, one that says so.
        """
        self.path, self.modules = checkpoint.path, dict[str, set[str]]()
        self._checkpoint, self._dtype = checkpoint, dtype
        self._stored: dict[str, str] = {}  # name without PREFIX -> name in the file
        for tensor in checkpoint.names():
            end = next((end for end in ENDS if tensor.endswith(end)), None)
            if end is None:
                with faults.collect():
                    raise ModelFileError(self.path, _why_not(tensor), tensor)
                continue
            name = tensor.removeprefix(PREFIX)
            if (other := self._stored.setdefault(name, tensor)) != tensor:
                with faults.collect():
                    raise ModelFileError(self.path, f"stands for {name}, as does {other}", tensor)
            self.modules.setdefault(name.removesuffix(end), set()).add(end)
        if not self.modules:
            faults.check()
            raise ModelFileError(self.path, "holds no matrices")

    def tensor(self, module: str, end: str) -> str:
        """Return the file's name of the matrix `end`, one of ENDS, of a module that has it."""
        return self._stored[f"{module}{end}"]

    def shapes(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B of a module that has both matrices."""
        a, b = (tuple(self._checkpoint.shape(self.tensor(module, end))) for end in ENDS)
        return a, b

    def read(self, module: str, a: tuple[int, ...], b: tuple[int, ...], scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return A, and B multiplied by `scale`, in the model's dtype.

        a, b: the shapes that they must have. Raises ModelFileError for others, and for numbers that are not finite.
        """
        names = [self.tensor(module, end) for end in ENDS]
        first, second = (self._read(name, shape) for name, shape in zip(names, (a, b), strict=True))
        return self._finite(names[0], first, 1.0), self._finite(names[1], second, scale)

    def _read(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor as float32. Raises ModelFileError for another shape, and for integers."""
        found = tuple(self._checkpoint.shape(tensor))
        if found != shape:
            raise ModelFileError(self.path, f"shape must be {shape}, got {found}", tensor)
        array = self._checkpoint.read(tensor)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ModelFileError(self.path, f"must hold floating-point numbers, got {array.dtype}", tensor)
        return array.astype(np.float32, copy=False)

    def _finite(self, tensor: str, matrix: np.ndarray, scale: float) -> np.ndarray:
        """Return `matrix`, the numbers of `tensor`, multiplied by `scale`, in the model's dtype. Raises ModelFileError
        if a number of the result is not finite.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = (matrix * np.float32(scale)).astype(self._dtype, copy=False)
        if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
            raise ModelFileError(self.path, f"must be finite in {self._dtype}, multiplied by {scale:g}", tensor)
        return rounded


def _why_not(tensor: str) -> str:
    """Return why no adapter's file may have a tensor of this name."""
    if tensor.endswith(_OF_TABLES):
        return "it is of an adapter of a token table or an LM head, which is not supported"
    return f"a tensor must be called {PREFIX}NAME{ENDS[0]} or {ENDS[1]}: nothing else is supported"
