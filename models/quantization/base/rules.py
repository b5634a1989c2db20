"""Rules that map a checkpoint's modules, by name, to storage formats.

Independent of tensor layouts and of the meaning of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.name_patterns import Effort, NamePattern, PatternError
from jaxengine.models.params.source import MODEL
from jaxengine.models.quantization.base.plain import Plain
from jaxengine.models.quantization.base.quantized import Quantized
from jaxengine.models.quantization.base.scheme import Scheme
from jaxengine.models.quantization.base.stored import Stored

LINEAR = "Linear"
# Modules that compute results from hidden states, in decoders and in encoders.
_OF_ENCODERS = ("classifier", "classifier.dense", "classifier.out_proj", "pooler.dense", "pre_classifier")
HEADS = ("lm_head", "score", "classifier", "head.dense", *(f"model.{name}" for name in _OF_ENCODERS))
_MAX_NAME, _MAX_NAMES = 512, 1 << 16
_PLAIN = Plain()
# Characters of regular expressions that wildcards do not have.
_REGULAR = re.compile(r"[\\(|^$+]")
_EXPERT = re.compile(r"(\.experts)\.\d+\.(gate_proj|up_proj|down_proj|w[123])$")
# An expert's module -> the stacks of all experts that may have it.
_STACKS = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", "gate_proj")),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", "up_proj")),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj",)),
}


@dataclass(frozen=True)
class Quantization:
    """Storage of a checkpoint's modules: the `scheme` of a jaxengine.models.build.Build. Called with a module's name,
    in which "{expert}" stands for expert 0, it returns the module's Scheme, and raises ModelConfigError as `_chosen`
    does.

    Attributes:
      method: vLLM's name for the kind of checkpoint, or the format to which a plain one is rounded.
      rules: pairs of names of modules and their format, None for plain; the first match counts. A name is that of a
        module or of all experts of a layer, LINEAR for every matrix, or "re:" and a regular expression that must match
        the beginning of a module's name.
      ignored: names, in the same form, of modules that are plain, whatever the rules contain.
      listed: names of further plain modules in transformers' form: a part of a name between dots, which may end in a
        dot, with "*" for anything, or a regular expression that must match the beginning of a name up to a dot or its
        end.
      unlisted: names of further plain modules, and of all experts of a layer, which only the weights tell.
      with_heads: whether LINEAR includes HEADS.
      with_tables: whether the rules apply to token tables, too, which then stay quantised.
      prefixes: pairs of a beginning of the checkpoint's names and the model's replacement.
      suffixes: such pairs for ends of the names of the checkpoint's modules. parts: such pairs for parts of names.
      kv_dtype: dtype of keys and values for which the checkpoint has scales; None if it has none.
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], Stored | None], ...]
    ignored: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    with_heads: bool = False
    with_tables: bool = False
    prefixes: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    kv_dtype: str | None = None

    def __call__(self, module: str) -> Scheme:
        return _chosen(self, module.replace("{expert}", "0"))

    def names_of(self, module: str) -> list[str]:
        """Return the names that the checkpoint's configuration may have for `module` of the model: this name, and those
        with prefixes, suffixes and parts changed back; of a tower's module also those after "model.", as transformers
        5 has all towers; for an expert's module also the name of the stack of all experts.
        """
        whole = f"{module}."  # a prefix may be all of a module's name
        renamed = [whole, *(old + whole[len(new) :] for old, new in self.prefixes if whole.startswith(new))]
        if module not in HEADS:
            renamed += [f"{MODEL}{name}" for name in renamed if not name.startswith(MODEL)]
        # Ends twice: before the parts, as a checkpoint may change both of a name, and for the stacks, which have ends.
        renamed += [f"{name}." for name in self._with_other_ends([name.removesuffix(".") for name in renamed])]
        renamed += [name.replace(new, old) for name in renamed for old, new in self.parts if new in name]
        names = [name.removesuffix(".") for name in renamed]
        names += [stack for name in names for stack in _stacks(name)]
        return [*names, *self._with_other_ends(names)]

    def _with_other_ends(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that end as the model's `suffixes` do, with the checkpoint's ends."""
        ends = ((name, old, new) for name in names for old, new in self.suffixes if name.endswith(new))
        return [name.removesuffix(new) + old for name, old, new in ends]


def _stacks(module: str) -> list[str]:
    """Return the names of the stacked tensors from which jaxengine.models.weights.views.stacked may take the matrix of
    an expert's module: gate and up are in a stack of both, or each in its own. [] for another module.
    """
    if (expert := _EXPERT.search(module)) is None:
        return []
    return [f"{module[: expert.start()]}{expert[1]}.{stack}" for stack in _STACKS[expert[2]]]


@dataclass(frozen=True)
class Everywhere:
    """One scheme for every checkpoint module, whatever its name.

    with_tables: whether token tables stay quantised, too.
    """

    scheme: Scheme
    with_tables: bool = False

    def __call__(self, module: str) -> Scheme:
        return self.scheme


@cache
def _chosen(quantization: Quantization, module: str) -> Scheme:
    """Return the scheme of the model's module `module`: that of the first rule that matches it; plain storage if none
    does, or if `ignored`, `listed` or `unlisted` matches it. LINEAR matches nothing in `ignored` and
    `unlisted`, and in rules all modules, but HEADS only if `with_heads`. Results are cached. Raises ModelConfigError
    for an invalid expression, and if matching the expressions of this quantization_config takes too many steps in all.
    """
    names, effort = quantization.names_of(module), _effort(quantization)
    ignored = (*quantization.ignored, *quantization.unlisted)
    if _any_fits(ignored, names, effort, linear=False):
        return _PLAIN
    if any(_is_listed(entry, name, effort) for entry in quantization.listed for name in names):
        return _PLAIN
    linear = quantization.with_heads or module not in HEADS
    for targets, stored in quantization.rules:
        if _any_fits(targets, names, effort, linear=linear):
            return _PLAIN if stored is None else Quantized(stored, quantization.with_tables)
    return _PLAIN


@cache
def _effort(quantization: Quantization) -> Effort:
    """Return the budget of steps for matching the expressions of one quantization_config, for all modules together. It
    is the same object for equal configurations, and matching uses it up.
    """
    return Effort()


def _any_fits(entries: tuple[str, ...], names: Sequence[str], effort: Effort, *, linear: bool) -> bool:
    """Return whether one of `entries`, names or expressions, matches one of a module's `names`. linear: whether LINEAR
    does. Raises ModelConfigError if an expression is invalid or the steps of `effort` do not suffice.
    """
    exact, others = _parted(entries)
    if not exact.isdisjoint(names) or (linear and LINEAR in others):
        return True
    return any(_fits(entry, name, effort) for entry in others if entry != LINEAR for name in names)


@cache
def _parted(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the entries that are exact module names, of which there may be tens of thousands, and the entries that
    must be tried one by one: LINEAR, expressions, and names of stacks of experts. Results are cached.
    """
    others = [entry for entry in entries if entry == LINEAR or entry.startswith("re:") or entry.endswith(".experts")]
    return frozenset(entries).difference(others), tuple(others)


def _fits(entry: str, name: str, effort: Effort) -> bool:
    """Return whether an entry of a rule matches a module's name: an expression that matches its beginning, the name
    itself, or the name of a module that contains it.

    Raises ModelConfigError if an expression is invalid or the steps of `effort` do not suffice.
    """
    if entry.startswith("re:"):
        return _begins(entry[3:], name, effort)
    return entry == name or name.startswith(f"{entry}.")


def _is_listed(entry: str, name: str, effort: Effort) -> bool:
    """Return whether an entry of Quantization.listed matches a module's name: "re:" and an expression that matches its
    beginning; an expression that matches its beginning up to a dot or its end; or one or more of its parts between
    dots, which may contain wildcards (`*`, `?`).

    Raises ModelConfigError if an expression is invalid or the steps of `effort` do not suffice.
    """
    if entry.startswith("re:"):
        return _fits(entry, name, effort)
    if _REGULAR.search(entry) and _begins(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name, effort):
        return True
    part = entry.strip(".")
    return any(fnmatchcase(name, pattern) for pattern in (part, f"{part}.*", f"*.{part}", f"*.{part}.*"))


def _begins(expression: str, name: str, effort: Effort) -> bool:
    """Return whether the regular expression matches a beginning of `name`. Uses up steps of `effort`.

    Raises ModelConfigError if they do not suffice, and for an expression that NamePattern refuses.
    """
    try:
        return _expression(expression).match(name, effort)
    except PatternError as error:
        raise bad("a name of modules", expression, str(error)) from None


@lru_cache(1 << 12)
def _expression(source: str) -> NamePattern:
    """Return the NamePattern of a regular expression; the latest ones are cached. Raises PatternError for one that it
    refuses.
    """
    return NamePattern(source)


def given(settings: Mapping[str, Any], field: str, default: Any) -> Any:
    """Return a field of a quantization_config, unchecked; `default` if it is missing or null. Other values that count
    as false, such as 0 and "", are returned: whether they are allowed is for the caller to say.
    """
    value = settings.get(field)
    return default if value is None else value


def names_in(settings: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the list of names in a field of a quantization_config, () if it is missing, null or empty. Order and
    repetitions stay.

    Raises ModelConfigError for anything but a list of at most _MAX_NAMES valid names.
    """
    entries = given(settings, field, [])
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) > _MAX_NAMES:
        raise bad(field, entries, f"a list of at most {_MAX_NAMES} names")
    for entry in entries:
        check_name(field, entry)
    return tuple(entries)


def check_name(field: str, entry: Any) -> None:
    """Raise ModelConfigError if `entry` is not a string, has more than _MAX_NAME characters, or is an expression
    ("re:...") that NamePattern refuses. Expressions may be longer if NamePattern allows it.
    """
    if isinstance(entry, str) and entry.startswith("re:"):
        try:
            _expression(entry[3:])
        except PatternError as error:
            raise bad(field, entry, str(error)) from None
    elif not isinstance(entry, str) or len(entry) > _MAX_NAME:
        raise bad(field, entry, f"names of at most {_MAX_NAME} characters")


def bad(field: str, value: Any, allowed: str) -> ModelConfigError:
    """Return, for the caller to raise, the error that a field of a quantization_config must be `allowed`. It shows the
    first 200 characters of the value.
    """
    return ModelConfigError(f"quantization_config: {field} must be {allowed}, got {repr(value)[:200]}")


def one_of(settings: Mapping[str, Any], field: str, allowed: Sequence[Any], default: Any = None) -> Any:
    """Return a field of a quantization_config that must have one of the `allowed` values, with the same type; `default`
    if it is missing or null.

    Raises ModelConfigError for any other value, also if that is the default.
    """
    value = given(settings, field, default)
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise bad(field, value, " or ".join(map(repr, allowed)))
    return value


def group_size(settings: Mapping[str, Any], field: str = "group_size", default: int | None = None) -> int | None:
    """Return the number of inputs per scale from a field of a quantization_config; None, which is stored as -1, for all
    inputs.

    default: value if the field is missing or null; None if it must be present. Raises ModelConfigError for anything but
    -1 and integers from 1 to 2^20.
    """
    value = given(settings, field, default)
    if type(value) is not int or not (value == -1 or 1 <= value <= 1 << 20):
        raise bad(field, value, "-1 or a whole number of 1 to 2^20")
    return None if value == -1 else value


def block_size(settings: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    """Return (rows, columns) of the blocks that share a scale from a field of a quantization_config; None if it is
    missing or null.

    Raises ModelConfigError for anything but a list of two integers from 1 to 2^20.
    """
    value = settings.get(field)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(type(n) is not int or not 1 <= n <= 1 << 20 for n in value)
    ):
        raise bad(field, value, "two whole numbers of 1 to 2^20")
    return value[0], value[1]


def refuse(settings: Mapping[str, Any], *fields: str) -> None:
    """Raise ModelConfigError if one of `fields`, which request unsupported features, is present and neither null,
    empty, false nor 0.
    """
    for field in fields:
        if settings.get(field):
            raise bad(field, settings[field], "absent or empty: it is not supported")
