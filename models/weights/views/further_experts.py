"""View of checkpoints that number the experts of two modules of a layer one after the other, as ERNIE 4.5-VL has them.

NAME.experts.{e}.PART, e >= E     NAME.FURTHER.{e - E}.PART
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource

_EXPERT = re.compile(r"(.*\.)experts\.(\d+)(\..*)")


class FurtherExpertsSource(WrappedSource):
    """WeightSource of a checkpoint in which the experts from number `num_experts` on are those of another module.

    further: name of that module, in which they are numbered from 0, in place of `experts`.
    """

    def __init__(self, source: WeightSource, further: str, num_experts: int):
        super().__init__(source)
        self._stored: dict[str, str] = {}
        for name in source.names():
            match = _EXPERT.fullmatch(name)
            if match and (number := int(match[2])) >= num_experts:
                self._stored[f"{match[1]}{further}.{number - num_experts}{match[3]}"] = name
            else:
                self._stored[name] = name

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(self._stored[name], rows, columns)
