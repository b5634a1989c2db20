"""Conversion of a trainer's tensor names and shapes to the names and shapes of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from jaxengine.models.weights.formats.arrays import as_array, fault_of, is_in_pieces, on_host, read_slice
from jaxengine.scheduler.base.errors import RequestError, show_value

# Model whose weights are replaced: the engine's model, or its draft model or head.
Target = Literal["model", "draft"]
# Largest number of faults that the text of an error names.
MAX_SHOWN = 10
_LONGEST_SHOWN = 200
_LAYER = "{layer}"


class WeightUpdateError(RequestError):
    """Error of new weights that do not fit. The engine continues with its present weights.

    Attributes:
      faults: (tensor, what is wrong) of every faulty tensor: missing, unknown, given twice, of a wrong shape or kind.
    """

    def __init__(self, message: str, faults: Sequence[tuple[str, str]] = ()):
        """Make an error about the parameter `params`, with a copy of the faults; `of` also makes the message."""
        super().__init__(message, param="params")
        self.faults = [*faults]

    @classmethod
    def of(cls, faults: Sequence[tuple[str, str]]) -> WeightUpdateError:
        """Return the error for at least one fault. Its message names at most MAX_SHOWN of them, chosen so that every
        kind of fault is represented about equally often, and says how many more there are.

        faults: (tensor's name, what is wrong).
        """
        seen = Counter[str]()
        numbers = [seen.update([text]) or seen[text] for _, text in faults]
        first = sorted(range(len(faults)), key=numbers.__getitem__)[:MAX_SHOWN]
        shown = "; ".join(f"{_shown(faults[index][0])}: {faults[index][1]}" for index in first)
        more = f"; and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        return cls(f"the weights stay as they are: {shown}{more}", faults)


@dataclass(frozen=True)
class ScannedLayers:
    """Rule for tensors of several layers in one array, as trainers that scan over layers store them.

    Attributes:
      name: Hugging Face name of a layer's tensor, with "{layer}" for the layer's number.
      axis: axis of the array that counts the layers.
      layers: layer number of each index along it; None for 0, 1, 2, ...
      axes: transposition of a layer's array, after `axis` has been removed; None to keep the order.
      function: applied to a layer's array after that; None for none.
    """

    name: str
    axis: int = 0
    layers: Sequence[int] | None = None
    axes: Sequence[int] | None = None
    function: Callable[[Any], Any] | None = None

    def split(self, source: str, array: Any) -> Iterator[tuple[str, Any]]:
        """Yield each layer's tensor name and its array, in host memory, after transposition and `function`.

        source: the array's name, for messages. Raises WeightUpdateError if `array` is not an array, the rule's name
        lacks "{layer}", or the number of layers differs; ValueError for `axes` that do not fit, and any error of
        `function`.
        """
        if _LAYER not in self.name:
            raise WeightUpdateError.of([(source, f"is split into {self.name}, which must have {_LAYER} in it")])
        if (fault := fault_of(array)) is not None:
            raise WeightUpdateError.of([(source, fault)])
        shape = tuple(array.shape)
        count = shape[self.axis] if -len(shape) <= self.axis < len(shape) else 0
        layers = range(count) if self.layers is None else self.layers
        if not count or len(layers) != count:
            text = f"must have {len(layers) or 'the'} layers along axis {self.axis}, got shape {shape}"
            raise WeightUpdateError.of([(source, text)])
        for number, layer in zip(layers, self._layers_of(array, count), strict=True):
            layer = layer if self.axes is None else np.transpose(layer, tuple(self.axes))
            yield self.name.replace(_LAYER, str(number)), layer if self.function is None else self.function(layer)

    def _layers_of(self, array: Any, count: int) -> Iterator[np.ndarray]:
        """Yield the array of each of `count` layers along `axis`, with this axis removed. If the array is split over
        devices, only one layer at a time is copied to host memory.
        """
        axis = self.axis % len(array.shape)
        if is_in_pieces(array):
            for number in range(count):
                layer = read_slice(array, (*(slice(None),) * axis, slice(number, number + 1)))
                yield np.squeeze(layer, axis)
        else:
            yield from np.moveaxis(on_host(array), axis, 0)


# Parts of names that module wrappers add (torch.compile, FSDP, activation checkpointing, PEFT); prefixes of names.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_PREFIXES = ("module.", "base_model.model.")  # DistributedDataParallel, PEFT
_SAVED = re.compile(r"\.modules_to_save\.\w+(?=\.)")  # a module that PEFT trains as a whole, by the adapter's name


def unwrapped(name: str) -> str:
    """Return a tensor's name without the parts and prefixes that PyTorch's and PEFT's module wrappers add to it."""
    name = _SAVED.sub("", ".".join(part for part in name.split(".") if part not in _WRAPPERS))
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


class GivenNames:
    """Names under which a trainer gave tensors, by their present names."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def add(self, name: str, before: str) -> None:
        """Store that the tensor `name` is the one that was called `before` until now."""
        self._given[name] = self._given.get(before, before)

    def following(self, name_of: Callable[[str], str]) -> Callable[[str], str]:
        """Return `name_of`, a function from names to new names, with each of its results added."""

        def followed(name: str) -> str:
            new = name_of(name)
            self.add(new, name)
            return new

        return followed

    def of(self, faults: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return faults (tensor, what is wrong) with the given names of their tensors. What is wrong with a tensor that
        the trainer's mapping renames or splits also says what it is for the model. Tensors that were not given keep
        their names.
        """
        found = []
        for name, what in faults:
            given = self._given.get(name, name)
            own = unwrapped(given)
            found.append((given, what if own.endswith(name) or name.endswith(own) else f"{what}, as {name}"))
        return found


def with_names(name_of: Callable[[str], str], tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each tensor under the name that `name_of` returns for its own name. Keeps no reference to the array."""
    for name, array in tensors:
        held = [array]
        del array  # the consumer may hold the only reference
        yield name_of(name), held.pop()


def _shown(name: str) -> str:
    """Return a tensor's name for a message, quoted and cut if it is longer than _LONGEST_SHOWN characters or has
    characters that cannot be printed.
    """
    return name if name.isprintable() and len(name) <= _LONGEST_SHOWN else show_value(name)


# Rule for a trainer's tensor: its Hugging Face name; or that name with an order of axes and a function of the array, of
# which either may be None; or a rule for an array of several layers.
Renamed = (
    str
    | tuple[str, Sequence[int] | None]
    | tuple[str, Sequence[int] | None, Callable[[Any], Any] | None]
    | ScannedLayers
)


def check_chunk_bytes(chunk_bytes: Any) -> None:
    """Raise RequestError unless chunk_bytes is None or an integer from 1."""
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 1):
        text = f"chunk_bytes is {show_value(chunk_bytes)}; allowed: None, and integers from 1"
        raise RequestError(text, param="chunk_bytes", value=chunk_bytes)


def check_target(target: Any) -> None:
    """Raise RequestError unless target is one of Target."""
    if target not in get_args(Target):
        text = f"target is {show_value(target)}; allowed: {', '.join(get_args(Target))}"
        raise RequestError(text, param="target", value=target)


def check_mapping(mapping: Any) -> None:
    """Raise RequestError unless `mapping` is None or a mapping whose values are all rules of the form `Renamed`."""
    allowed = "a mapping from names to a Hugging Face name, (name, axes or None, function or None) or ScannedLayers"
    if mapping is not None and not isinstance(mapping, Mapping):
        text = f"mapping must be {allowed}, got {show_value(mapping)}"
        raise RequestError(text, param="mapping", value=mapping)
    for name, rule in (mapping or {}).items():
        if not (isinstance(rule, str | ScannedLayers) or _is_changed(rule)):
            text = f"mapping has {show_value(rule)} for {show_value(name)}; allowed: {allowed}"
            raise RequestError(text, param="mapping", value=rule)


def pairs_of(params: Any) -> Iterable[Any]:
    """Return the items of a mapping, or any other iterable unchanged. Raises WeightUpdateError for other objects."""
    if not isinstance(params, Mapping | Iterable):
        raise WeightUpdateError(
            f"params must be a folder, tensors by name, an nnx.State or an nnx.Module, got {type(params).__name__}"
        )
    return params.items() if isinstance(params, Mapping) else params


def refuse_chunks(chunk_bytes: int | None) -> None:
    """Raise RequestError unless chunk_bytes is None: a folder in device layout cannot be read in chunks."""
    if chunk_bytes is not None:
        text = f"chunk_bytes is {chunk_bytes}; allowed for a folder in device layout, which orbax reads: None"
        raise RequestError(text, param="chunk_bytes", value=chunk_bytes)


def refuse_mapping(mapping: Any) -> None:
    """Raise WeightUpdateError for a non-empty mapping; called for forms of params whose names it cannot change."""
    if mapping:
        raise WeightUpdateError("mapping renames tensors that are given by name; this form of params has fixed names")


def _is_changed(rule: Any) -> bool:
    """Whether a rule is a tuple or list (name, axes or None) or (name, axes or None, function or None)."""
    if not (isinstance(rule, tuple | list) and len(rule) in (2, 3) and isinstance(rule[0], str)):
        return False
    axes = rule[1]
    listed = isinstance(axes, Sequence | np.ndarray) and all(isinstance(axis, int | np.integer) for axis in axes)
    ordered = axes is None or listed
    return ordered and (len(rule) == 2 or rule[2] is None or callable(rule[2]))


def renamed(
    pairs: Iterable[Any],
    mapping: Mapping[str, Renamed],
    *,
    donate: bool = False,
    lazily: bool = False,
    given: GivenNames | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (Hugging Face name, array) for pairs of a trainer's names and arrays.

    pairs: (name, array). A name that `mapping` lacks stays as it is. donate: delete a jax array once it has been
    converted to other arrays; one that is yielded itself is not deleted. lazily: split an array of several layers one
    layer at a time; with `donate` it is deleted after the last one. given: gets the names. Raises WeightUpdateError for
    an item that is not a pair, for axes that do not fit, for an array that ScannedLayers cannot split, and, after
    everything has been yielded, for names of `mapping` that did not occur. Errors of functions in `mapping` are raised.
    """
    unused, given = set(mapping), GivenNames() if given is None else given
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise WeightUpdateError(f"params must be pairs of a name and an array, got {str(pair)[:100]}")
        name, array = pair[0], as_array(pair[1])
        unused.discard(name)
        rule = mapping.get(name, name)
        if lazily and isinstance(rule, ScannedLayers):
            for target, layer in rule.split(name, array):
                given.add(target, name)
                yield target, layer
                del layer
            if donate and isinstance(array, jax.Array):
                array.delete()
            del array, pair
            continue
        if isinstance(rule, str):
            new = [(rule, array)]
        else:
            new = [*rule.split(name, array)] if isinstance(rule, ScannedLayers) else [_changed(rule, array)]
        if donate and isinstance(array, jax.Array) and all(each is not array for _, each in new):
            new = [(target, np.array(each) if isinstance(each, np.ndarray) else each) for target, each in new]
            jax.block_until_ready([each for _, each in new if isinstance(each, jax.Array)])
            array.delete()
        del array, pair  # the consumer may hold the only reference
        for target in [target for target, _ in new]:
            given.add(target, name)
        while new:
            yield new.pop(0)
    if unused:
        raise WeightUpdateError.of([(name, "is named by mapping and not in params") for name in sorted(unused)])


def _changed(rule: tuple[Any, ...], array: Any) -> tuple[str, Any]:
    """Return the name and the array that a rule (name, axes or None[, function or None]) gives: the array is transposed
    in host memory, then given to the function.

    Raises WeightUpdateError for axes that do not fit.
    """
    axes, function = rule[1], rule[2] if len(rule) == 3 else None
    if axes is not None:
        try:
            array = np.transpose(on_host(array), tuple(axes))
        except ValueError:
            text = f"mapping orders its axes {tuple(axes)}, and its shape is {np.shape(array)}"
            raise WeightUpdateError.of([(rule[0], text)]) from None
    return rule[0], array if function is None else function(array)
