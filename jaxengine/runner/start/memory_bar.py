"""The memory of one device as an image: a stacked bar with a legend, in SVG and in text.

`jaxengine plan` draws the memory that it expects; the status page and the log of a start draw the memory that an engine
has.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from jaxengine.runner.base.memory import MemoryPlan

_WIDTH, _BAR, _ROW, _LEFT, _TOP = 900, 64, 24, 20, 60
_COLOURS = (
    "#1f5a99",
    "#2f9e6e",
    "#c7811f",
    "#8a5bb5",
    "#c2453d",
    "#3fa7b8",
    "#7b7f86",
    "#b0a01f",
    "#d07fa8",
    "#5c7a2e",
)
_FREE = "#e6e8eb"
_LETTERS, _COLUMNS = "abcdefghijklmnopqrstuvwxyz", 72
LEFT = "left of the budget"


def parts_of(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of a running engine's memory plan by purpose, without zeros, and under the key LEFT the rest of
    its budget, which is negative if the plan exceeds the budget.
    """
    return {purpose: size for purpose, size in plan.parts.items() if size} | {LEFT: plan.budget - plan.planned}


def text_bar(parts: Mapping[str, int], total: int) -> str:
    """Return two lines of text: a bar for `total` bytes, in which each part is drawn by its letter, and the meanings of
    the letters with percentages.

    A part has a column for each 72nd of the total, rounded, and at least one, so that the bar may be longer than 72
    columns. LEFT is drawn as dots; the rest of the total is blank. If the parts exceed the total, the bar and the
    percentages are of their sum. parts: bytes by purpose; parts of 0 or fewer bytes are not drawn, and those for which
    no letter is left are drawn as "?".
    """
    drawn = {purpose: size for purpose, size in parts.items() if size > 0}
    letters = dict(zip((each for each in drawn if each != LEFT), _LETTERS, strict=False)) | {LEFT: "."}
    whole = max(total, sum(drawn.values()), 1)
    bar = "".join(letters.get(each, "?") * max(1, round(_COLUMNS * size / whole)) for each, size in drawn.items())
    meant = ", ".join(f"{letters.get(each, '?')} {each} {100 * size / whole:.1f} %" for each, size in drawn.items())
    return f"  [{bar:<{_COLUMNS}}]\n  {meant}"


def svg(title: str, parts: Mapping[str, int], total: int) -> str:
    """Return the text of an SVG image: a bar for `total` bytes with the parts side by side, and a legend with sizes and
    percentages.

    parts: bytes by purpose; a negative part has no width, and is in the legend. LEFT is grey; colours recur after ten
    parts. The rest of the total, which the engine does not use, is empty. Percentages are of the total, also if the
    parts exceed it; the bar is then longer than its frame.
    """
    scale = (_WIDTH - 2 * _LEFT) / max(total, sum(max(0, size) for size in parts.values()), 1)
    shapes, legend, at = [], [], float(_LEFT)
    for index, (purpose, size) in enumerate(parts.items()):
        colour = _FREE if purpose == LEFT else _COLOURS[index % len(_COLOURS)]
        width, text = max(0, size) * scale, f"{purpose}: {size / 2**30:,.3f} GiB ({100 * size / max(1, total):.1f} %)"
        shapes.append(
            f'<rect x="{at:.2f}" y="{_TOP}" width="{width:.2f}" height="{_BAR}" fill="{colour}" data-bytes="{size}">'
            f"<title>{escape(text)}</title></rect>"
        )
        row = _TOP + _BAR + 36 + index * _ROW
        legend.append(
            f'<rect x="{_LEFT}" y="{row - 12}" width="14" height="14" fill="{colour}" stroke="#999"/>'
            f'<text x="{_LEFT + 24}" y="{row}">{escape(text)}</text>'
        )
        at += width
    height = _TOP + _BAR + 36 + len(parts) * _ROW
    frame = f'<rect x="{_LEFT}" y="{_TOP}" width="{total * scale:.2f}" height="{_BAR}" fill="none" stroke="#333"/>'
    heading = f'<text x="{_LEFT}" y="36" font-size="18" font-weight="bold">{escape(title)}</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="14">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            heading,
            *shapes,
            frame,
            *legend,
            "</svg>",
            "",
        ]
    )
