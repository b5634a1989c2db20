"""Names that a checkpoint itself has for the tensors of a view of it, so that errors name what was written or given."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import MODEL, WeightSource, absent_names, stored_names

# The number of a layer, or of a block of a tower, in a tensor's name.
_NUMBER = re.compile(r"\.(\d+)\.")


def fault_in(source: WeightSource, name: str, text: str) -> ModelFileError:
    """Return the error of the tensor `name` of `source`, under the name that the checkpoint has for it. text: what is
    wrong, without the tensor's name; `name` is added if it is one part of several of a tensor.
    """
    ((stored, text),) = StoredNames(source).faults([(name, text)])
    return ModelFileError(source.path, text, stored)


class StoredNames:
    """Names of a checkpoint's tensors, given those of `source`, a view of it, whether they are there or missing. The
    names of `source` are read once, at the first call.
    """

    def __init__(self, source: WeightSource):
        self._source = source

    def of(self, name: str) -> tuple[str, ...]:
        """Return the names that the checkpoint has for the tensor `name` of the view, at least one. For a tensor that
        is not there they are those of the same tensor of another layer with this layer's number, or the one that
        resembles the checkpoint's other names most.
        """
        if name in self._present:
            return stored_names(self._source, name)
        number = _NUMBER.search(name)
        if number is not None and (other := self._by_layer.get(_of_any_layer(name))) is not None:
            return self._in_layer(stored_names(self._source, other), _NUMBER.search(other), number)
        return (self._absent(name),)

    def faults(self, found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return faults (tensor of the checkpoint, what is wrong), given those of the view's tensors. A tensor of which
        the view has several parts has one fault, that of the first in `found`, with this part's name.
        """
        faults: dict[str, str] = {}
        for name, text in found:
            first, *others = self.of(name)
            is_part = name in self._present and (others or self._num_parts.get(first, 1) > 1)
            shared = f", of which {' and '.join(others)} has a part, too" if others else ""
            faults.setdefault(first, f"{text}, as {name}{shared}" if is_part else text)
        return [*faults.items()]

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self._source.names())

    @cached_property
    def _num_parts(self) -> dict[str, int]:
        """Number of the view's tensors by the name of the checkpoint's tensor that has their numbers."""
        counts: dict[str, int] = {}
        for name in self._present:
            for stored in stored_names(self._source, name):
                counts[stored] = counts.get(stored, 0) + 1
        return counts

    @cached_property
    def _by_layer(self) -> dict[str, str]:
        """A tensor of the view for each name without the layer's number."""
        return {_of_any_layer(name): name for name in sorted(self._present, reverse=True) if _NUMBER.search(name)}

    @staticmethod
    def _in_layer(stored: tuple[str, ...], given: re.Match | None, wanted: re.Match) -> tuple[str, ...]:
        """Return the names `stored` of a tensor of one layer as those of another layer. given, wanted: matches of the
        two layers' numbers; the first occurrence of the former in a name is replaced.
        """
        assert given is not None
        return tuple(each.replace(given[0], wanted[0], 1) for each in stored)

    def _absent(self, name: str) -> str:
        """Return the name of a tensor that is not there: of those that the view's rules allow, the one whose first
        parts most agree with a name of the checkpoint; of several, the one that begins as its neighbours' do.
        """
        forms, guess = absent_names(self._source, name), self._with_beginning(name)
        if not forms:
            return guess
        first = name.partition(".")[0]
        has_neighbours = any(each.startswith(f"{first}.") for each in self._present)
        is_own = all(stored_names(self._source, each) == (each,) for each in self._present)

        def rank(form: str) -> tuple[int, bool, bool]:
            length = sum(begin in self._beginnings for begin in _beginnings(form))
            is_likely = (form == name) == (is_own if length else MODEL in self._beginnings)
            return length, has_neighbours and form == guess, is_likely

        return max(forms, key=rank)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """Beginnings of the checkpoint's names, each of whole parts with a dot."""
        names = {stored for name in self._present for stored in stored_names(self._source, name)}
        return frozenset(begin for stored in names for begin in _beginnings(stored))

    def _with_beginning(self, name: str) -> str:
        """Return the name of a tensor that is not there, with the beginning by which the checkpoint's names of tensors
        with the same first part differ from the view's.
        """
        first = name.partition(".")[0]
        for other in sorted(each for each in self._present if each.startswith(f"{first}.")):
            stored = stored_names(self._source, other)[0]
            own, its = other.split("."), stored.split(".")
            while own and its and own[-1] == its[-1]:
                own.pop()
                its.pop()
            if name.startswith(begin := "".join(f"{part}." for part in own)):
                return "".join(f"{part}." for part in its) + name.removeprefix(begin)
        return name


def _of_any_layer(name: str) -> str:
    """Return a tensor's name without the first number in it."""
    return _NUMBER.sub("..", name, count=1)


def _beginnings(name: str) -> list[str]:
    """Return the beginnings of a tensor's name, each of whole parts with a dot."""
    return [name[: found.end()] for found in re.finditer(r"\.", name)]
