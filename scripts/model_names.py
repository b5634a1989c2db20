"""Models of the hub by name: the fields of their config.json that decide the shape of the model.

Kept by hand in model_names.json, a row for each shape, from what the repositories publish.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_suffix(".json")


class NamedModels(NamedTuple):
    """Repositories whose models have the same shape.

    Attributes:
      names: of the repositories.
      parameters: in billions, as published; a tied LM head counts once, layers that predict further tokens do not.
      config: the fields of config.json that determine the shape.
    """

    names: tuple[str, ...]
    parameters: float
    config: dict[str, Any]


def read_names() -> list[NamedModels]:
    """Return all rows of model_names.json."""
    return [NamedModels(tuple(row["names"]), row["params"], row["config"]) for row in json.loads(FILE.read_text())]
