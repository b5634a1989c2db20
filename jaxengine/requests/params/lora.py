"""LoRARequest: the LoRA adapter of a request, in the Python API. Fields are vLLM's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from jaxengine.scheduler.base.errors import RequestError, refuse


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter that a request uses: loaded at first use, and identified by its name afterwards.

    Attributes:
      lora_name: unique name.
      lora_int_id: unique whole number, at least 1.
      lora_path: folder saved by PEFT, on the engine's machine.
      base_model_name: without effect, as in vLLM's engine.
      load_inplace: each call reads the adapter, now at lora_path, again; running requests keep their matrices.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
    base_model_name: str | None = None
    load_inplace: bool = False

    @property
    def path(self) -> str:
        """lora_path as text; "." for an empty path. Raises RequestError if it is not a path, also for one in bytes."""
        path: Any = self.lora_path
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str):
            raise refuse("lora_path", self.lora_path, "a path as text or pathlib.Path")
        return path or "."


def one_for_each(count: int, given: Any) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts, None for no adapter. given: one for all prompts, or a list or
    tuple of that length. Raises RequestError for other values.
    """
    each = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count or not all(one is None or isinstance(one, LoRARequest) for one in each):
        text = f"lora_request must be one LoRARequest, or one or None for each of the {count} prompts"
        raise RequestError(text, param="lora_request", value=given)
    return each
