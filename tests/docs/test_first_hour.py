"""The table of a vLLM user's first hour is what its rows give when they are run."""

from __future__ import annotations

from pathlib import Path

from scripts import first_hour

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "coming_from_vllm.md"


def test_the_table_is_what_happens(make_llm, tmp_path):
    written = DOCUMENT.read_text()
    found = first_hour.table(make_llm(), tmp_path)
    assert first_hour.placed(written, found) == written, "run python -m scripts.write_docs"
    rows = found.splitlines()[2:]
    assert len(rows) == len(first_hour.ROWS) >= 60
    refused = [row for row in rows if "Error`: " in row]
    assert 15 <= len(refused) <= 40
    assert not [row for row in refused if "there is no option" in row and "did you mean" not in row]
