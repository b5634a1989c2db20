"""View of checkpoints that number the experts of two modules of a layer one after the other, as ERNIE 4.5-VL has them.

NAME.experts.{e}.PART, e >= E     NAME.FURTHER.{e - E}.PART
"""

from __future__ import annotations

import re

from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.views.renamed import NamedSource

_EXPERT = re.compile(r"(.*\.)experts\.(\d{1,9})(\..*)")


class FurtherExpertsSource(NamedSource):
    """WeightSource of a checkpoint in which the experts from number `num_experts` on are those of another module.

    further: name of that module, in which they are numbered from 0, in place of `experts`. Raises ModelFileError for
    two tensors with one name.
    """

    def __init__(self, source: WeightSource, further: str, num_experts: int):
        def name_of(stored: str) -> str:
            match = _EXPERT.fullmatch(stored)
            if match is None or (number := int(match[2])) < num_experts:
                return stored
            return f"{match[1]}{further}.{number - num_experts}{match[3]}"

        super().__init__(source, name_of)
