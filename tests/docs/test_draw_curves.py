"""scripts/draw_curves.py, and the picture that it drew."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import draw_curves
from tests.tables import each_row

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "grpo.svg"
SVG = "{http://www.w3.org/2000/svg}"


def points(picture: str) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in lines]


def test_a_log_becomes_a_curve(tmp_path):
    log = "Loading\nstep 0: reward 0.1000, 'a'\nstep 1: reward 0.5000, 'b'\n\nstep 2: reward 1.0000, 'c'\n"
    (tmp_path / "one.log").write_text(log)
    draw_curves.main([str(tmp_path / "out.svg"), f"a < b={tmp_path / 'one.log'}"])
    ((first, second, third),) = points(picture := (tmp_path / "out.svg").read_text())
    assert first[0] < second[0] < third[0] and first[1] > second[1] > third[1] == draw_curves.TOP
    assert "a &lt; b" in picture


@each_row("log", ["", "reward 0.1", "step 1: reward 0.1000", "step 0: reward 0.1000\nstep 2: reward 0.1000"])
def test_a_log_without_each_step_is_refused(log):
    with pytest.raises(ValueError, match="a reward for each step from 0"):
        draw_curves.rewards(log)


def test_the_documents_picture_shows_that_both_loops_learn():
    curves = points(PICTURE.read_text())
    assert len(curves) == 2
    for curve in curves:
        assert curve[-1][1] < curve[0][1] - 100  # up is less
