"""Draws the rewards that training scripts print as an image in SVG.

    python examples/grpo.py > own.log
    python -m scripts.draw_curves docs/grpo.svg "own loop=own.log" ...

A log's lines are those of examples/grpo.py: "step 3: reward 0.2130, ...".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 320, 56, 44, 24
COLOURS = ("#1f6feb", "#d1590b", "#2c8a3f", "#8250df")
_LINE = re.compile(r"^step (\d+): reward (\d+\.\d+)", re.MULTILINE)


def rewards(log: str) -> list[float]:
    """Return the rewards of a log, by step. Raises ValueError unless it has a reward for each step from 0, in order."""
    found = [(int(step), float(reward)) for step, reward in _LINE.findall(log)]
    if not found or [step for step, _ in found] != [*range(len(found))]:
        raise ValueError(f"the log must have a reward for each step from 0, got {len(found)} lines")
    return [reward for _, reward in found]


def svg(curves: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG image of the rewards by step, from 0 to the largest one (at least 0.1). curves: rewards by the name
    in the legend.
    """
    steps = max(2, *map(len, curves.values()))
    most = max(0.1, *(max(each) for each in curves.values()))

    def place(step: int, reward: float) -> str:
        """Return "x,y", the position of a reward in the image, in SVG units."""
        x = LEFT + (WIDTH - LEFT - 16) * step / (steps - 1)
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * reward / most:.1f}"

    font = 'font-family="sans-serif" font-size="13"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for part in range(5):
        reward = most * part / 4
        x, y = place(0, reward).split(",")
        lines.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - 16}" y2="{y}" stroke="#d0d7de"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{reward:.2f}</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(step, value) for step, value in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{LEFT + 12}" y="{TOP + 14 + 18 * number}" fill="{colour}">{escape(name)}</text>')
    lines.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 10}" text-anchor="middle">step (0 to {steps - 1})</text>')
    lines.append(f'<text x="{LEFT - 44}" y="{TOP - 8}">mean reward</text>')
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: Sequence[str]) -> None:
    """Write the SVG image of the curves. arguments: its path, then NAME=LOG for each curve."""
    path, *pairs = arguments
    logs = [pair.partition("=")[::2] for pair in pairs]
    Path(path).write_text(svg({name: rewards(Path(log).read_text(errors="replace")) for name, log in logs}))


if __name__ == "__main__":
    main(sys.argv[1:])
