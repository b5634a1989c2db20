"""Models with a tower whose text model is any decoder of jaxengine.models.model_classes, as in transformers, where
their classes take what AutoModel takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.class_defaults import with_class_defaults
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.config.readers.part_defaults import with_text_sizes
from jaxengine.models.params.source import MODEL, CheckpointNames

# Beginnings of the types whose embedding_multiplier also applies to what towers give.
_MULTIPLIED = ("granite", "hyperclovax", "afmoe", "recurrent_gemma")
# What classes with the same layers may define differently.
_READING = ("read_hf", "read_gguf", "gguf_architecture")


class Wrapper:
    """Mixin of the class of a model with a tower, before the class with the layers of its usual text model.

    Attributes:
      text: model_type of a text part that names none.
      family: class that reads the text part and has its layers.
      multiplies: whether its embeddings are multiplied as the text model's are.
      has_own_head: whether transformers' class has a head of its own, which since 4.52 has no bias.
    """

    text: ClassVar[str] = "llama"
    family: ClassVar[Any]
    multiplies: ClassVar[bool] = True
    has_own_head: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "family" not in vars(cls):
            cls.family = next(each for each in cls.__mro__ if not issubclass(each, Wrapper))

    @classmethod
    def text_kind(cls, fields: ConfigFields) -> str:
        """Return the model_type of the text part of a config.json, `text_config` or else `llm_config`; the class's
        `text` if it names none. Raises ModelConfigError for wrong fields.
        """
        part = fields.mapping("text_config") or fields.mapping("llm_config") or {}
        return ConfigFields(part).text("model_type", cls.text)

    @classmethod
    def read_text(cls, fields: ConfigFields) -> dict[str, Any]:
        """Return arguments of ModelConfig from text_config. Raises ModelConfigError for wrong fields."""
        return cls.family.read_hf(of_kind(text_fields(fields), cls.text_kind(fields)))


@cache
def over_text(wrapper: Any, family: Any) -> Any:
    """Return the class of a Wrapper's models whose text part `family` reads, with its layers: Wrapper[Family], or by
    the wrapper's own name if its layers serve. Its read_hf sets the tower's multiplier if the wrapper `multiplies`,
    drops the LM head's bias as transformers 4.52 does, and raises ModelConfigError for layers that read token ids.
    """
    inner = type(wrapper.__name__, (wrapper,), {"family": family, "__module__": wrapper.__module__})

    def read_hf(cls: Any, fields: ConfigFields) -> dict[str, Any]:
        shape = inner.read_hf(fields)
        if shape.get("layer_input_size") or shape.get("ngrams"):
            raise fields.fail("text_config", "that of a decoder whose layers do not read token ids")
        factor, form = _multiplier(wrapper.text_kind(fields), fields, shape), shape.get("declared")
        if form is not None and form.head_bias and wrapper.has_own_head and not _is_older(fields, (4, 52)):
            shape |= {"declared": replace(form, head_bias=False)}
        if wrapper.multiplies and "tower" in shape:
            shape |= {"tower": replace(shape["tower"], multiplier=factor)}
        return shape

    members = {"read_hf": classmethod(read_hf), "__module__": wrapper.__module__, "__doc__": wrapper.__doc__}
    if _same_layers(wrapper.family, family):
        return type(wrapper.__name__, (wrapper,), members)
    members["checkpoint_names"] = _joined(wrapper.checkpoint_names, family.checkpoint_names)
    return type(f"{wrapper.__name__}[{family.__name__}]", (family,), members)


def of_kind(text: ConfigFields, kind: str) -> ConfigFields:
    """Return the fields of a text part as one with the model_type `kind`, with the sizes that it lacks."""
    return ConfigFields(with_class_defaults(with_text_sizes({**text.raw, "model_type": kind})))


def _multiplier(kind: str, fields: ConfigFields, shape: Mapping[str, Any]) -> float:
    """Return the factor of a tower's embeddings for a text of type `kind`. Before 5.4 transformers multiplied all of
    Gemma's embeddings by the root of the hidden size, as it still does RecurrentGemma's; now those of tokens. It is
    `embedding_multiplier` for types that begin with one of _MULTIPLIED, and 1 for others.
    """
    if kind in ("gemma", "gemma2", "vaultgemma") and _is_older(fields, (5, 4)):
        return shape["hidden_size"] ** 0.5
    return shape.get("embedding_multiplier", 1.0) if kind.startswith(_MULTIPLIED) else 1.0


def _is_older(fields: ConfigFields, version: tuple[int, int]) -> bool:
    """Return whether a transformers before `version` wrote a config.json (`transformers_version`); False if that names
    none.
    """
    found = re.match(r"(\d+)\.(\d+)", str(fields.value("transformers_version", "")))
    return found is not None and (int(found[1]), int(found[2])) < version


def _same_layers(one: Any, other: Any) -> bool:
    """Return whether two families differ in nothing but the reading of configurations."""
    names = {name for family in (one, other) for each in family.__mro__ for name in vars(each)}
    return all(
        inspect.getattr_static(one, name, None) is inspect.getattr_static(other, name, None)
        for name in names.difference(_READING)
        if not name.startswith("_") or name in ("__init__", "__call__")
    )


def _joined(outer: CheckpointNames, text: CheckpointNames) -> CheckpointNames:
    """Return the names of a wrapper's checkpoints from those of its own and of its text family. `outer` says where the
    text model is, by what MODEL replaces: "x.model." if its head is in "x.", others without their head.
    """
    starts = [old for old, new in outer.prefixes if new == MODEL]
    # transformers 5 writes the model inside of "x." as "x.model.", whatever its own class calls it.
    pairs = [(start, base) for start in starts for base in (text.base, "")]
    pairs += [(start.removesuffix(MODEL), "") for start in starts if start.endswith(f".{MODEL}")]
    prefixes = [
        (start + old.removeprefix(base), new)
        for start, base in pairs
        for old, new in text.prefixes
        if old.startswith(base)
    ]
    merged = CheckpointNames(*map(_merged, outer, text))
    towers = outer.parts if outer.tower_parts is None else outer.tower_parts
    return merged._replace(
        prefixes=(*prefixes, *outer.prefixes), parts=text.parts, tower_parts=towers, unused=outer.unused
    )


def _merged(outer: Any, text: Any) -> Any:
    """Return one field of two CheckpointNames together; that of the text family if it is no collection."""
    if isinstance(outer, Mapping):
        return {**outer, **text}
    return outer + text if type(outer) is type(text) is tuple else text
