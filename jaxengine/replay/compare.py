"""Compares the results of a step with the recorded ones, in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxengine.scheduler.base.token_params import LOGPROBS

# Allowed difference between kernels by the model's dtype, as a share of an array's largest magnitude.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
_PAGES = "after/pages"


class Difference(NamedTuple):
    """Result of comparing a recorded array with the one that the replay computed.

    Attributes:
      name: name of the array and of what computes it; `shape`, `dtype`: of the recorded array.
      is_same: all bits are equal.
      is_within: no number differs by more than the tolerance.
      largest: the largest difference; `where`: its index; `recorded`, `found`: the two values there.
      count: how many numbers differ. place: description of where `where` is, such as a page and its replica; "" if
        not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_same: bool
    is_within: bool
    largest: float = 0.0
    where: tuple[int, ...] = ()
    recorded: float = 0.0
    found: float = 0.0
    count: int = 0
    place: str = ""

    def __str__(self) -> str:
        """Return a readable line: that all bits are equal, or how many numbers differ, where the most, and by how
        much.
        """
        if self.is_same:
            return f"{self.name}, {self.dtype}{[*self.shape]}: all bits equal"
        at = f"at {[*self.where]}" + (f" ({self.place})" if self.place else "")
        return (
            f"{self.name}, {self.dtype}{[*self.shape]}: {self.count} numbers differ, by {self.largest:.6g} at most, "
            f"{at}: recorded {self.recorded:.8g}, here {self.found:.8g}"
        )


def compared(
    arrays: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    *,
    kv_dtype: Any,
    state_layers: Sequence[int],
    features: int,
    is_sampled: np.ndarray,
    tolerance: float,
) -> Iterator[Difference]:
    """Yield a Difference for each result of a step, in the order of the forward pass.

    Results that one side lacks are left out, except that missing logits raise KeyError.

    Args:
      arrays: the record's, which say which page, layer and row each result belongs to.
      wanted, found: results as recorded, and those of the replay.
      kv_dtype: dtype of the numbers in pages. state_layers: the layer of each array of recurrent states.
      features: feature bits of the step; without LOGPROBS the sampler's scores are not compared.
      is_sampled: bool[rows], which rows of the logits were sampled.
      tolerance: allowed difference, as a share of an array's largest magnitude.
    """
    layers, states = arrays[f"{_PAGES}/layer"], list(state_layers)
    both = {name: (wanted[name], found[name]) for name in wanted if name in found}
    if hidden := both.get("layers"):
        yield _difference("hidden states before layer 0 (embed)", [each[:, 0] for each in hidden], tolerance)
    last = 0 if hidden is None else hidden[0].shape[1] - 2
    for layer in range(max([last, *(1 + layers), *(1 + each for each in states)])):
        chosen = layers == layer
        if chosen.any() and f"{_PAGES}/data" in both:
            pages = [_numbers(each[chosen], kv_dtype) for each in both[f"{_PAGES}/data"]]
            own = _difference(f"layer {layer}: keys and values (kv_cache_update)", pages, tolerance)
            if own.where:
                rank, page = (arrays[f"{_PAGES}/{name}"][chosen][own.where[0]] for name in ("rank", "page"))
                own = own._replace(place=f"page {page} of replica {rank}")
            yield own
        for at in (at for at, own in enumerate(states) if own == layer):
            if pair := both.get(f"after/states/{at}"):
                yield _difference(f"layer {layer}: recurrent state (array {at})", pair, tolerance)
        if hidden is not None:
            name = f"layer {layer}: hidden states after it"
            yield _difference(name, [each[:, layer + 1] for each in hidden], tolerance)
    if hidden is not None:
        yield _difference("hidden states after the final norm", [each[:, -1] for each in hidden], tolerance)
    yield _difference("logits", both["logits"], tolerance)
    yield from _sampled(arrays, both, features, is_sampled, tolerance)


def _sampled(
    arrays: Mapping[str, np.ndarray], both: Mapping[str, Any], features: int, is_sampled: np.ndarray, tolerance: float
) -> Iterator[Difference]:
    """Yield a Difference for each of the sampler's results, in the order of `both`: of the token ids of rows that
    sample and, if a request asks for logprobs, of their scores.

    both: (recorded, found) by name; only names that begin with "sampled/" are used. is_sampled: bool[rows]. arrays: the
    record's arrays. features: feature bits of the step. tolerance: share of an array's largest magnitude.
    """
    rows = arrays["rows/rank"][is_sampled], arrays["rows/row"][is_sampled]
    for name, pair in both.items():
        field = name.removeprefix("sampled/")
        if field == name or (field != "token_ids" and not features & LOGPROBS):
            continue
        yield _difference(f"{field} (sampler)", [each[rows] for each in pair], tolerance)


def _difference(name: str, pair: Sequence[np.ndarray], tolerance: float) -> Difference:
    """Return the Difference between a recorded array and the one found.

    is_same: all bits are equal. is_within: they are, or no number differs by more than the tolerance; False for
    different shapes or dtypes. With equal bits, and with different shapes or dtypes, the fields about the largest
    difference keep their defaults. pair: (recorded, found). tolerance: share of the largest finite recorded magnitude.
    With 0, and for integers and booleans, only equal bits are within it.
    """
    recorded, found = pair
    shape, dtype = recorded.shape, str(recorded.dtype)
    if recorded.shape != found.shape or recorded.dtype != found.dtype:
        return Difference(f"{name}, here {found.dtype}{[*found.shape]}", shape, dtype, False, False)
    one, other = (np.asarray(each, order="C") for each in (recorded, found))
    if one.tobytes() == other.tobytes():
        return Difference(name, shape, dtype, True, True)
    is_number = dtype not in ("bool",) and "int" not in dtype
    wide, own = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(own - wide)
    # Equal infinities and two NaNs do not differ; a NaN on one side differs by infinity.
    apart = np.where((wide == own) | (np.isnan(wide) & np.isnan(own)), 0, np.where(np.isnan(apart), np.inf, apart))
    where = np.unravel_index(int(apart.argmax()), apart.shape)
    largest, finite = float(apart[where]), np.abs(wide[np.isfinite(wide)])
    is_within = is_number and tolerance > 0 and largest <= tolerance * float(finite.max(initial=0))
    at = tuple(map(int, where))
    count = int((one.view(np.uint8).reshape(*shape, -1) != other.view(np.uint8).reshape(*shape, -1)).any(-1).sum())
    return Difference(name, shape, dtype, False, is_within, largest, at, float(wide[where]), float(own[where]), count)


def _numbers(pages: np.ndarray, dtype: Any) -> np.ndarray:
    """Reinterpret stored pages as numbers of `dtype` if their items have its size; otherwise return them unchanged."""
    pages = np.ascontiguousarray(pages)
    return pages.view(dtype) if pages.dtype.itemsize == np.dtype(dtype).itemsize else pages
