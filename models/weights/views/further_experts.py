"""View of checkpoints that number the experts of two modules of a layer one after the other, as ERNIE 4.5-VL has them.

NAME.experts.{e}.PART, e >= E     NAME.FURTHER.{e - E}.PART
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource

_EXPERT = re.compile(r"(.*\.)experts\.(\d{1,9})(\..*)")


class FurtherExpertsSource(WrappedSource):
    """WeightSource of a checkpoint in which the experts from number `num_experts` on are those of another module.

    further: name of that module, in which they are numbered from 0, in place of `experts`. Raises ModelFileError for
    two tensors with one name.
    """

    def __init__(self, source: WeightSource, further: str, num_experts: int):
        super().__init__(source)
        self._stored: dict[str, str] = {}
        for name in source.names():
            match, own = _EXPERT.fullmatch(name), name
            if match and (number := int(match[2])) >= num_experts:
                own = f"{match[1]}{further}.{number - num_experts}{match[3]}"
            if own in self._stored:
                raise ModelFileError(source.path, f"stands for {own}, as does {self._stored[own]}", name)
            self._stored[own] = name

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(self._stored[name], rows, columns)
