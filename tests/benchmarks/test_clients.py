"""The table of clients: what ran is written, what did not stays, and what is wrong stands below."""

from __future__ import annotations

from benchmarks.server.clients import CASES, COLUMNS, SCRIPTS, markdown


def row(client: str, **cases: str) -> dict:
    """cases: why each failed; empty where it did not."""
    return {"client": client, "cases": {name: {"ok": not why, "why": why} for name, why in cases.items()}}


def test_a_run_of_some_leaves_the_rows_of_the_others():
    first = markdown(
        {"openai_python.py": row("openai 1", chat="", stream="a\nb"), "ai_sdk.mjs": row("ai 1", chat="")}, ""
    )
    second = markdown({"openai_python.py": row("openai 2", chat="", stream="")}, first)
    lines = {line.split("](")[0]: line for line in second.splitlines()}
    assert "| [openai 2" in lines and "| [ai 1" in lines and "| [openai 1" not in lines
    assert lines["| [ai 1"] == next(line for line in first.splitlines() if "[ai 1" in line)
    assert lines["| [openai 2"].count("| yes") == 2 and "a b" in first and "a b" not in second
    # A fault of a client that did not run again stays, too.
    third = markdown({"ai_sdk.mjs": row("ai 2", chat="")}, first)
    assert "stream: a b" in third and "| no |" in third and third.count("[ai 2]") == 1


def test_every_line_has_every_column_and_every_client_its_script():
    table = markdown({name: row(name, chat="") for name in SCRIPTS}, "").splitlines()
    assert {line.count("|") for line in table if line} == {len(COLUMNS) + 2}
    assert all((CASES / name).exists() for name in SCRIPTS)
