"""The memory of one device as a picture: a stacked bar in SVG, with a legend."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

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


def svg(title: str, parts: Mapping[str, int], free: str, total: int) -> str:
    """SVG text of a bar of `total` bytes, whose parts follow each other.

    parts: bytes by purpose. free: the purpose that is drawn as empty. What the parts leave of the total, the share of
    the device that the engine does not use, stays empty too.
    """
    scale = (_WIDTH - 2 * _LEFT) / max(total, sum(max(0, size) for size in parts.values()), 1)
    shapes, legend, at = [], [], float(_LEFT)
    for index, (purpose, size) in enumerate(parts.items()):
        colour = _FREE if purpose == free else _COLOURS[index % len(_COLOURS)]
        width, text = max(0, size) * scale, f"{purpose}: {size / 2**30:,.3f} GiB ({100 * size / max(1, total):.1f} %)"
        shapes.append(
            f'<rect x="{at:.2f}" y="{_TOP}" width="{width:.2f}" height="{_BAR}" fill="{colour}">'
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
