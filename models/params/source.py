"""WeightSource: interface between the parameter loader and checkpoint formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

WHOLE = slice(None)
MODEL = "model."  # the beginning of the model's own names of layers, the token table and the final norm
INNER = "vlm."  # the beginning of the names of the model inside a retriever
# The number of a layer and the next part of a name.
_IN_LAYER = re.compile(r"\blayers\.(\d+)\.(\w+)")
_NONE: Mapping[str, float] = MappingProxyType({})


class StackedExperts(NamedTuple):
    """Storage of the matrices of all experts of a layer in one tensor (see jaxengine.models.weights.views.stacked).

    The default is that of transformers 5, which trainers send and some save.

    interleaved: rows of gate and up alternate; otherwise all of gate come first. out_first: a matrix is [out, in], like
    that of a linear layer; otherwise [in, out]. None if checkpoints differ, so that shapes decide; a square matrix then
    counts as [out, in]. modules: the model's names of an expert's gate, up and down.
    """

    interleaved: bool = False
    out_first: bool | None = True
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class ExpertRows(NamedTuple):
    """Names, within `experts.mlp`, of matrices whose rows are those of all experts (see
    jaxengine.models.weights.views.expert_rows).

    rows: matrices in which an expert's part is [out, in]. turned: matrices in which it is [in, out].
    """

    rows: tuple[str, ...]
    turned: tuple[str, ...]


class NextLayer(NamedTuple):
    """Names and parts of the layer that predicts the token after the next (jaxengine.models.layers.drafts.next_token).

    Attributes:
      names: pairs of the beginning of a stored name and what replaces it after "model.layers.{number}."; without any,
        the layer is stored as layer `number`, the one after the last. "{}" in a beginning is an index among `count`.
      norm: name of the norm after the layer.
      normed: whether further tokens are predicted from what this norm returns, rather than from what it gets.
      hidden_first: whether the projection reads the hidden state before the embedding.
      dense: whether it has an MLP although other layers have experts.
      windowed: whether its attention is that of the last layer with a window, rather than of the last with attention.
      count: number of layers: 2 if attention and experts are a layer each, of which the norm is in the second.
    """

    names: tuple[tuple[str, str], ...] = ()
    norm: str = "shared_head.norm"
    normed: bool = False
    hidden_first: bool = False
    dense: bool = False
    windowed: bool = False
    count: int = 1

    def places(self, number: int) -> list[str]:
        """Return the beginnings of its tensors' names in a model of `number` layers, one for each of `count`."""
        return [f"model.layers.{number + at}." for at in range(self.count)]

    def placed(self, number: int) -> list[tuple[str, str]]:
        """Return `names` with all that replaces a beginning, for a model of `number` layers."""
        places = enumerate(self.places(number))
        return [(old.format(at), place + new) for at, place in places for old, new in self.names]


# Of Qwen3-Next, Qwen3.5 and K-EXAONE.
MTP_LAYER = NextLayer(
    (
        ("mtp.fc", "eh_proj"),
        ("mtp.pre_fc_norm_embedding", "enorm"),
        ("mtp.pre_fc_norm_hidden", "hnorm"),
        ("mtp.norm", "norm"),
        ("mtp.layers.0.", ""),
    ),
    norm="norm",
    normed=True,
)


class CheckpointNames(NamedTuple):
    """Differences between the tensors of a family's checkpoints and those that its model declares.

    Attributes:
      prefixes: pairs of a beginning of names and the model's replacement; the first match counts.
      suffixes: such pairs for ends of names.
      unused: beginnings of the names of other parts, which are not read.
      unused_ends: ends of the names of other parts, which are not read.
      unused_parts: what the names of other parts contain, which are not read.
      tower: beginnings, in the model's names, of the vision tower: not read if the model is served without it.
      sound_tower: beginnings, in the model's names, of the tower of sounds in a family with both towers.
      heads: beginnings, in the model's names, of output heads: not read if the model does not declare them.
      constants: ends of the names of tensors that hold one number, which the model has in its code, and this number.
      filled: the same of tensors of any shape, whose entries all are this number.
      squeezed: ends of the names of tensors whose second axis, of one entry, the model leaves out.
      raveled: ends of the names of tensors that have one axis in the model, whatever axes they are stored with.
      transposed: ends of the stored names of matrices that are stored as [in, out].
      flattened: ends of the names of tensors of more than two axes whose axes after the first are one in the model.
      stacked_experts: storage of the experts of a layer if they are in one tensor.
      expert_rows: matrices with the rows of all experts; None for none.
      further_experts: name, in place of `experts`, of a module whose experts the checkpoint numbers after those of
        `experts`; "" for none.
      plain: modules that no checkpoint quantises, though its configuration does not list them; in transformers' form.
      parts: pairs of a part of names that other versions of transformers write, and the model's replacement. The first
        match counts; a name that has the replacement already is not changed.
      tower_parts: such pairs for the names of towers, to which `parts` then do not apply; None if `parts` are theirs,
        too.
      halves: the next part of names after a layer's number, and the model's replacement, for even and for odd numbers,
        if a checkpoint counts the two halves of each layer: with ({"mixer": "self_attn"}, {"mixer": "mlp"}),
        layers.4.mixer is layers.2.self_attn and layers.5.mixer is layers.2.mlp. Other names are unchanged.
      divided: ends of the names of modules whose matrices are rows of several of transformers' modules -> ends of the
        names of those, in order. Their tensors may be stored, too.
      joined: ends of the names of tensors that other versions of transformers join to one along their rows -> those of
        its parts, in order (see jaxengine.models.weights.views.joined_rows). Models declare either.
      alternating: ends of the names of matrices whose rows are in turn those of two of the model's -> their ends.
      frequencies: end of the names of tensors with the frequencies of rope, which replace the configuration's; "" for
        none.
      next_layer: the layer that predicts further tokens.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    unused_ends: tuple[str, ...] = ()
    unused_parts: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()
    sound_tower: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    constants: Mapping[str, float] = _NONE
    filled: Mapping[str, float] = _NONE
    squeezed: tuple[str, ...] = ()
    raveled: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    flattened: tuple[str, ...] = ()
    stacked_experts: StackedExperts = StackedExperts()
    expert_rows: ExpertRows | None = None
    further_experts: str = ""
    plain: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    tower_parts: tuple[tuple[str, str], ...] | None = None
    joined: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    alternating: Mapping[str, tuple[str, str]] = MappingProxyType({})
    frequencies: str = ""
    divided: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    halves: tuple[Mapping[str, str], Mapping[str, str]] | None = None
    next_layer: NextLayer = NextLayer()

    @property
    def base(self) -> str:
        """Common beginning of the checkpoint's names of layers, the token table and the final norm, which files saved
        without an output head omit: "model." unless `prefixes` have exactly one other.
        """
        firsts = {old.partition(".")[0] for old, new in self.prefixes if new.startswith(MODEL)}
        return f"{firsts.pop()}." if len(firsts) == 1 else MODEL

    def parts_of_rows(self, name: str) -> list[str]:
        """Return the names of the tensors whose rows a tensor with the model's name `name` joins; [] for others."""
        stems = {name.removesuffix(end): parts for end, parts in self.joined.items() if name.endswith(end)}
        found = [stem + part for stem, parts in stems.items() for part in parts]
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            divided = ((own, parts) for own, parts in self.divided.items() if module.endswith(own))
            found += [f"{module.removesuffix(own)}{part}.{kind}" for own, parts in divided for part in parts]
        return found

    def ends_of_modules(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of an end that a configuration's names of modules may have and the model's: `suffixes`, with
        ".weight" if they are of tensors; a joined matrix and each of its parts; and each part of a divided matrix and
        that matrix.
        """
        joined = ((whole, part) for whole, parts in self.joined.items() for part in parts if part.endswith(".weight"))
        divided = ((part, whole) for whole, parts in self.divided.items() for part in parts)
        return (*self.suffixes, *joined, *divided)

    def is_unused(self, stored: str) -> bool:
        """Return whether the checkpoint's tensor `stored` belongs to a part that is not read: those of the family, and
        modules named mtp or mtp_..., which predict further tokens, but for those of `next_layer`, whatever the family.
        """
        if stored.startswith(tuple(old for old, _ in self.next_layer.placed(0))):
            return False
        named = f".{stored}"
        return (
            stored.startswith(self.unused)
            or stored.endswith(self.unused_ends)
            or any(part in stored for part in self.unused_parts)
            or any(f".mtp{end}" in named for end in "._")
        )

    def renamed(self, stored: str) -> str:
        """Return the model's name of the checkpoint's tensor or module `stored`, by the first matching prefix, then the
        first matching suffix, the halves and the first matching part; unchanged if none matches.
        """
        name = renamed(stored, self.prefixes)
        name = next((name.removesuffix(old) + new for old, new in self.suffixes if name.endswith(old)), name)
        if self.halves is not None and (found := _IN_LAYER.search(name)) is not None:
            number, part = int(found[1]), self.halves[int(found[1]) % 2].get(found[2])
            name = name if part is None else f"{name[: found.start()]}layers.{number // 2}.{part}{name[found.end() :]}"
        parts = self.parts_of(name)
        return next((name.replace(old, new) for old, new in parts if old in name and new not in name), name)

    def stored_forms(self, name: str) -> tuple[str, ...]:
        """Return the names of tensors that a checkpoint may have for the model's tensor `name` outside of halves of
        layers: those that are read and that `renamed` turns into it, each once; () if there are none.
        """
        found = [name, *(name.replace(new, old) for old, new in self.parts_of(name) if new in name)]
        found += [each.removesuffix(new) + old for each in found for old, new in self.suffixes if each.endswith(new)]
        found += [old + each.removeprefix(new) for each in found for old, new in self.prefixes if each.startswith(new)]
        return tuple(each for each in dict.fromkeys(found) if self.renamed(each) == name and not self.is_unused(each))

    def parts_of(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the pairs that apply to a tensor or module, by its name with the model's beginning: `tower_parts` for
        those of towers if they are set, otherwise `parts`.
        """
        is_tower = self.tower_parts is not None and name.startswith((*self.tower, *self.sound_tower))
        return self.tower_parts or () if is_tower else self.parts


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Return `name` with its beginning replaced by the first matching one of the pairs (old, new); unchanged if none
    matches.
    """
    return next((new + name[len(old) :] for old, new in prefixes if name.startswith(old)), name)


class WeightSource(Protocol):
    """Named tensors that are read one at a time, entirely or in part.

    Names and orientation are those of Hugging Face checkpoints: linear weights are [out, in], whatever the file's own
    convention. Every method raises ModelFileError for an invalid file.
    """

    @property
    def path(self) -> str:
        """Path of the checkpoint."""
        ...

    def names(self) -> Iterable[str]:
        """Return the names of all tensors of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is known without reading it. Raises ModelFileError for an invalid
        file.
        """
        ...

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return the given rows (first axis) and columns (second axis) of a tensor, in its dtype. Steps of slices must
        be 1.

        The caller owns the array and must release it before the next read. Raises ModelFileError for an invalid file.
        """
        ...

    def close(self) -> None:
        """Close the files. Nothing may be read afterwards."""
        ...


class WrappedSource:
    """Base of WeightSources that are views of another one, with the same path, names and shapes unless a subclass
    overrides them. Subclasses define `read`, and `held_in` if their tensors are not those of the other source.
    """

    def __init__(self, source: WeightSource):
        self._source = source

    @property
    def path(self) -> str:
        return self._source.path

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def held_in(self, name: str) -> tuple[str, ...]:
        """Return the names of the wrapped source's tensors that have the numbers of the tensor `name`, at least one."""
        return (name,)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the checkpoint's own tensors that have the numbers of the tensor `name`, at least one;
        `name` itself if there is no such tensor.
        """
        found = (each for held in self.held_in(name) for each in stored_names(self._source, held))
        return tuple(dict.fromkeys(found))

    def absent_names(self, name: str) -> tuple[str, ...]:
        """Return the names that the checkpoint could have for the tensor `name`, which it lacks; () if no rule says."""
        return absent_names(self._source, name)

    def close(self) -> None:
        """Close the wrapped source."""
        self._source.close()


def stored_names(source: WeightSource, name: str) -> tuple[str, ...]:
    """Return the names that a checkpoint itself has for the tensor `name` of `source`, which may be a view of it: one,
    several if the view joins tensors, or `name` itself if there is no such tensor.
    """
    return source.stored_names(name) if isinstance(source, WrappedSource) else (name,)


def absent_names(source: WeightSource, name: str) -> tuple[str, ...]:
    """Return the names that a checkpoint could itself have for the tensor `name`, which `source`, possibly a view of
    it, lacks; () if no rule of the view says.
    """
    return source.absent_names(name) if isinstance(source, WrappedSource) else ()
