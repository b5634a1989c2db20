"""Fields of a config.json, or of GGUF metadata, that the option hf_overrides replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxengine.models.config.fields import MAX_POSITIONS, ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import FULL

_MAPPINGS = ("rope_parameters", "rope_scaling")
_ROPE, _LENGTH, _ORIGINAL = (*_MAPPINGS, "rope_theta"), "max_position_embeddings", "original_max_position_embeddings"
# Fields that a rope keeps when it gets a new scaling.
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_KINDS = ("rope_type", "type")
_TEXT, _LAYERS = "text_config", "num_hidden_layers"
_NUMBERS = (int, float, np.number)
# Name in config.json -> GGUF key after the architecture's name.
_GGUF = {_LENGTH: "context_length", "rope_theta": "rope.freq_base"}
_GGUF_SCALING = {
    "factor": "rope.scaling.factor",
    _ORIGINAL: "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


class UnreadError(ValueError):
    """Error of a field of hf_overrides that has no effect on the model. The text says why; `name` is the field."""

    def __init__(self, name: str, why: str):
        super().__init__(why)
        self.name = name


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json with overridden fields.

    A nested configuration (`text_config`, `vision_config`) is changed field by field, any other mapping is replaced.
    Fields of the language model are set in `text_config` if there is one, and those that are present outside of it are
    set there, too. A lower number of layers cuts lists with an entry for each. A new scaling of rope keeps the base and
    the sections of the old one. Unless overrides set the context length, it becomes the one to which yarn or linear
    scaling stretches it. The same holds for a yarn scaling in the file itself that gives its original length, if the
    result is longer. Raises ModelConfigError for a rope that is not a mapping, or that overrides give twice.
    """
    merged, inner = _merged(raw, overrides), overrides.get(_TEXT)
    if _LENGTH in overrides or isinstance(inner, Mapping) and _LENGTH in inner:
        return merged
    text = merged.get(_TEXT)
    return {**merged, _TEXT: _as_long(text)} if isinstance(text, Mapping) else _as_long(merged)


def _as_long(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the fields with the context length to which a yarn scaling that gives its original length
    stretches it, if that is longer than the present one. Linear scaling is not applied, because some files have its
    length already.
    """
    rope = next((fields[name] for name in reversed(_MAPPINGS) if isinstance(fields.get(name), Mapping)), {})
    own = rope[FULL] if isinstance(rope.get(FULL), Mapping) else rope
    length, says = fields.get(_LENGTH), {_ORIGINAL} & {*own, *fields}
    longest = _stretched(own, fields) if says and own.get("rope_type", own.get("type")) == "yarn" else None
    if longest is None or type(length) is not int or not length < longest <= MAX_POSITIONS:
        return dict(fields)
    return {**fields, _LENGTH: longest}


def _merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json with overridden fields: nested configurations field by field, others in
    text_config if that has them, and outside of it if they are there or not in it; ropes in a text_config only. The
    context length follows new rope scalings, not the file's own. Raises ModelConfigError for a rope that is not a
    mapping, or that overrides give twice.
    """
    merged, text = dict(raw), raw.get(_TEXT)
    outer, inner = dict[str, Any](), dict[str, Any]()
    for name, value in overrides.items():
        if _is_inside(raw, name, value):
            merged[name] = _merged(raw[name], value)
        elif not isinstance(text, Mapping):
            outer[name] = value
        else:
            if name in _ROPE or name in text:
                inner[name] = value
            if name not in _ROPE and (name in raw or name not in text):
                outer[name] = value
    if inner:
        merged[_TEXT] = _changed(merged[_TEXT], inner)
        merged = {name: value for name, value in merged.items() if name not in _ROPE or not inner.keys() & {*_ROPE}}
    return _changed(merged, outer)


def check_read(raw: Mapping[str, Any], overrides: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> None:
    """Raise UnreadError for an overridden field that `read`, which reads a config.json, ignores.

    Each field is replaced by a value that no reader accepts; a reader that uses the field fails, or returns another
    result. Errors of `read` about the overrides themselves pass through.
    """
    expected = read(overridden(raw, overrides))
    for name, probe in _probes(raw, overrides):
        try:
            found = read(overridden(raw, probe))
        except Exception:
            continue
        if found == expected:
            raise UnreadError(name, "which this model's configuration does not have")


def _is_inside(raw: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether an override is a nested configuration that changes a nested configuration of the file."""
    return _is_inner(name, value) and isinstance(raw.get(name), Mapping)


def _is_inner(name: str, value: Any) -> bool:
    """Return whether a field is a nested configuration, such as text_config. quantization_config is none."""
    return name.endswith("_config") and name != "quantization_config" and isinstance(value, Mapping)


def _probes(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each overridden field, its dotted name and the overrides with an invalid value of that field. Fields
    of nested configurations are yielded one by one. A rope mapping is yielded as a whole and then field by field,
    without its kind and the fields of _KEPT. Other fields that equal the file's own are left out.
    """
    for name, value in overrides.items():
        if _is_inner(name, value):
            for inner, probe in _probes(raw[name] if _is_inside(raw, name, value) else {}, value):
                yield f"{name}.{inner}", {**overrides, name: probe}
        elif name in _MAPPINGS:
            yield name, {**overrides, name: {"rope_type": object()}}
            for key in value if isinstance(value, Mapping) else ():
                if key not in (*_KINDS, *_KEPT) and not isinstance(value[key], Mapping):
                    yield f"{name}.{key}", {**overrides, name: {**value, key: object()}}
        elif name not in raw or raw[name] != value:
            yield name, {**overrides, name: object()}


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one mapping of a config.json with `changes` applied. Lists with an entry per layer are cut if
    the number of layers is reduced. Rope fields keep the spelling of the mapping (rope_parameters or rope_scaling), and
    the context length follows a new scaling. Raises ModelConfigError for a rope that is not a mapping, or that is given
    twice.
    """
    merged = {**_shortened(fields, changes), **{name: value for name, value in changes.items() if name not in _ROPE}}
    if not changes.keys() & {*_ROPE}:
        return merged
    if all(changes.get(name) is not None for name in _MAPPINGS):
        raise ModelConfigError("rope_parameters and rope_scaling are given; allowed: one of both")
    asked = [name for name in _MAPPINGS if name in changes]
    new = next((changes[name] for name in asked if changes[name] is not None), {})
    if not isinstance(new, Mapping):
        raise ModelConfigError(f"{asked[0]} must be a mapping, got {repr(new)[:100]}")
    name = "rope_parameters" if merged.get("rope_parameters") or _by_kind(new) else "rope_scaling"
    old = next((merged[each] for each in _MAPPINGS if merged.get(each)), {})
    merged = {key: value for key, value in merged.items() if key not in _MAPPINGS}
    rope = _rescaled(old if isinstance(old, Mapping) else {}, new) if asked else old
    if (theta := changes.get("rope_theta")) is not None:
        merged["rope_theta"] = theta
        if new.get("rope_theta", theta) != theta:
            raise ModelConfigError(f"rope_theta is {theta!r}, and {new['rope_theta']!r} in {asked[0]}; give it once")
        rope = _with(rope, {"rope_theta": theta})
    if _ORIGINAL in new and _ORIGINAL in merged:
        merged[_ORIGINAL] = new[_ORIGINAL]  # outside of the mapping, where it takes precedence
    own = new[FULL] if isinstance(new.get(FULL), Mapping) else new
    longest = _stretched(own, merged) if _LENGTH not in changes else None
    if longest is not None:
        if not {_ORIGINAL} & {*own, *merged} and longest != merged[_LENGTH]:
            rope = _with(rope, {_ORIGINAL: merged[_LENGTH]})  # explicit, since the default is the context length
        merged[_LENGTH] = longest
    return merged | ({name: rope} if rope else {})


def _shortened(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the fields in which lists with an entry per layer are cut if `changes` reduce the number of
    layers: lists of that length whose names contain "layer", such as layer_types and no_rope_layers.
    """
    before, after = fields.get(_LAYERS), changes.get(_LAYERS)
    if type(before) is not int or type(after) is not int or not 0 < after < before:
        return dict(fields)
    return {
        name: value[:after] if "layer" in name and isinstance(value, list) and len(value) == before else value
        for name, value in fields.items()
    }


def _by_kind(rope: Mapping[str, Any]) -> bool:
    """Return whether a rope mapping contains a mapping for each kind of layers."""
    return any(isinstance(value, Mapping) for value in rope.values())


def _rescaled(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope mapping `new` with the fields _KEPT of `old` that it lacks. If either has a mapping for each kind
    of layers, kinds are treated separately, and a mapping without kinds is for FULL layers.
    """
    if _by_kind(new):
        kinds = {kind: value for kind, value in new.items() if isinstance(value, Mapping)}
        before = {kind: old[kind] if isinstance(old.get(kind), Mapping) else {} for kind in kinds}
        return {**old, **new, **{kind: _rescaled(before[kind], value) for kind, value in kinds.items()}}
    if isinstance(full := old.get(FULL), Mapping):
        return {**old, FULL: _rescaled(full, new)}
    return {name: old[name] for name in _KEPT if name in old} | dict(new)


def _with(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a rope mapping with these fields set, in the mapping for FULL layers if there is one. An empty
    mapping stays empty.
    """
    if isinstance(full := rope.get(FULL), Mapping):
        return {**rope, FULL: {**full, **fields}}
    return {**rope, **fields} if rope else {}


def _stretched(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> int | None:
    """Return the context length to which a rope scaling of type yarn or linear stretches the model, as vLLM derives
    max_model_len. Returns None for other types, and if the length or the factor is invalid, which is reported when the
    fields are read.
    """
    kind, factor, original = rope.get("rope_type", rope.get("type")), rope.get("factor"), fields.get(_LENGTH)
    if kind == "yarn":
        original = rope.get(_ORIGINAL, fields.get(_ORIGINAL, original))
    if kind not in ("yarn", "linear") or not isinstance(factor, (int, float)) or type(original) is not int:
        return None
    return int(original * factor) if 0 < factor < 1e6 and original <= MAX_POSITIONS else None


def overridden_metadata(metadata: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of GGUF metadata with an overridden rope or context length. A rope mapping replaces all settings of
    the file's own scaling. Raises UnreadError for other fields, also for those in a rope mapping that GGUF files lack,
    and ModelConfigError for a rope that is not a mapping or is given twice.
    """
    prefix, changed = f"{metadata.get('general.architecture')}.", dict(metadata)
    for name in overrides:
        if name not in (*_ROPE, _LENGTH):
            raise UnreadError(name, f"which is not read of a GGUF file; allowed: {', '.join((*_ROPE, _LENGTH))}")
    given = {name: metadata.get(prefix + key) for name, key in _GGUF.items()}
    raw = {name: np.asarray(value).item() for name, value in given.items() if isinstance(value, _NUMBERS)}
    found = _changed(raw, overrides)
    changed |= {prefix + key: found[name] for name, key in _GGUF.items() if found.get(name) != raw.get(name)}
    if not overrides.keys() & {*_MAPPINGS}:
        return changed
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    scaling = (f"{prefix}rope.scaling.", f"{prefix}rope.scale_")
    changed = {name: value for name, value in changed.items() if not name.startswith(scaling)}
    fields = ConfigFields(rope)
    kind = fields.text("rope_type", None) or fields.text("type", "default")
    changed[f"{prefix}rope.scaling.type"] = "none" if kind == "default" else kind
    for name, value in rope.items():
        if name not in (*_GGUF, *_GGUF_SCALING, *_KINDS):
            raise UnreadError(f"rope_scaling.{name}", "which is not read of a GGUF file")
        if name not in _KINDS:
            changed[prefix + (_GGUF_SCALING | _GGUF)[name]] = value
    return changed
