"""Bundles that a compiled TPU kernel runs for a block of keys, read from libtpu's dump of its final bundles.

A bundle is an instruction word, which a core issues in one cycle unless it stalls, so the bundles that are run in order
measure time without a device. Loops, and code that a branch passes over, are found by the regions that the dump names.
Knows nothing of any kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(\w\w)?\s*: ?>* ?\{(.*)", re.M)
_BRANCH = re.compile(r"sbr\.rel .*?target = \$region(\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_MULTIPLICATION = re.compile(r"= vmatmul\.")
_FETCH = re.compile(r"dma\.(?:hbm_to_vmem|general)")  # the latter, of both directions, where rows are strided


class Pass(NamedTuple):
    """Numbers of bundles that one pass of a loop over blocks runs."""

    arithmetic: int  # in stretches without a branch that multiply matrices
    whole: int  # in all, including those that start the copies of a block, wait for copies, and branch


@dataclass
class Span:
    """Bundles [first, end) of a loop, or of code that a branch skips; `inner` has the spans inside, in order."""

    first: int
    end: int
    is_loop: bool
    inner: list[Span] = field(default_factory=list)

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield [first, end) of the bundles before, between and after the inner spans; a stretch may be empty."""
        at = self.first
        for span in self.inner:
            yield at, span.first
            at = span.end
        yield at, self.end


class Program:
    """Bundles of one kernel as a tree of spans, `root`."""

    def __init__(self, dump: str):
        """Parse the text of a file `*-final_bundles.txt`. A branch back to a region is a loop, one ahead code that it
        skips; these spans are nested in `root`, each cut off at the end of the one around it.
        """
        labels, self._texts = zip(*_BUNDLE.findall(dump), strict=True)
        starts = {region: at for at, text in enumerate(self._texts) for region in _START.findall(text)}
        branches = [
            (at, starts[region])
            for at, text in enumerate(self._texts)
            for region in _BRANCH.findall(text)
            if region in starts
        ]
        # Some bundles after a branch are run whether or not it is taken: at most as many as before the next label.
        labelled = [at for at, label in enumerate(labels) if label]
        after = min((label - at for at, _ in branches for label in labelled if label > at), default=1)
        spans = [
            Span(target, at + after, True) if target <= at else Span(at + after, target, False)
            for at, target in branches
        ]
        self.root = Span(0, len(labels), False)
        open_spans = [self.root]
        for span in sorted(spans, key=lambda span: (span.first, -span.end, span.is_loop)):
            while open_spans[-1].end <= span.first:
                open_spans.pop()
            span.end = min(span.end, open_spans[-1].end)
            open_spans[-1].inner.append(span)
            open_spans.append(span)

    def block_loops(self, within: Span | None = None) -> list[Span]:
        """Return the innermost loops in a span that fetch from HBM and multiply matrices, in order.

        within: None for the whole program; the result may be this span itself.
        """
        within = within or self.root
        found = [loop for span in within.inner for loop in self.block_loops(span)]
        both = all(self._count(kind, within.first, within.end) for kind in (_FETCH, _MULTIPLICATION))
        return found or [within] * (within.is_loop and both)

    def measure(self, span: Span, trips: int = 1) -> Pass:
        """Return the bundles that one pass of a loop runs for a block that is neither first, last nor masked.

        Of conditional code it counts what starts copies outside of a loop, for a full block, and the arithmetic: of
        several alternatives the one that multiplies most and, among equal ones, has the fewest bundles. trips: passes
        of an inner loop that multiplies, for each pass of `span`.
        """
        arithmetic = whole = 0
        for first, end in span.stretches():
            whole += end - first
            arithmetic += (end - first) * bool(self._count(_MULTIPLICATION, first, end))
        forms = [inner for inner in span.inner if self._multiplies(inner) and not inner.is_loop]
        chosen = min(forms, key=lambda form: (-self._multiplies(form), form.end - form.first), default=None)
        for inner in span.inner:
            if self._multiplies(inner):
                passes = trips if inner.is_loop else int(inner is chosen)
            else:
                passes = int(self._fetches(inner))
            if passes:
                part = self.measure(inner, trips)
                arithmetic, whole = arithmetic + passes * part.arithmetic, whole + passes * part.whole
        return Pass(arithmetic, whole)

    def _multiplies(self, span: Span) -> int:
        """Return the number of matrix multiplications in a span."""
        return self._count(_MULTIPLICATION, span.first, span.end)

    def _fetches(self, span: Span) -> bool:
        """Return whether a span that is not a loop starts copies from HBM, other than in a loop inside."""
        own = any(self._count(_FETCH, *stretch) for stretch in span.stretches())
        return not span.is_loop and (own or any(map(self._fetches, span.inner)))

    def _count(self, pattern: re.Pattern, first: int, end: int) -> int:
        """Return how often a pattern occurs in the bundles [first, end)."""
        return sum(len(pattern.findall(text)) for text in self._texts[first:end])
