"""What a process that speaks with clients does with the memory of large bodies, and of what it imports."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxengine.server.processes import child, supervisor

# Large blocks, between which small ones are made that stay, as a log line or a route of the framework does.
BODIES = """
import json
from jaxengine.server.processes.memory import return_large_blocks

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

if {given_back}:
    return_large_blocks()
kept, before = [], held()
for _ in range(4):
    body = bytearray()
    for _ in range(20 << 4):
        body += b"x" * (1 << 16)
    kept.append(b"y" * 70_000)
    text = body.decode()
    del body
    kept.append(b"y" * 70_000)
    del text
print(json.dumps(held() - before))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_large_bodies_leave_nothing_in_the_heap():
    def left(given_back: bool) -> int:
        command = [sys.executable, "-c", BODIES.format(given_back=given_back)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert left(True) < 10 << 20
    assert left(False) > 20 << 20  # what it is for


def test_what_a_child_imports_is_left_out_of_collections(monkeypatch):
    found = []

    def main(_child):
        found.append((gc.isenabled(), any(each is role for each in gc.get_objects())))

    role = SimpleNamespace(main=main)
    monkeypatch.setitem(sys.modules, "jaxengine.server.processes.role", role)
    monkeypatch.setattr(child, "Child", object)
    exec(supervisor._START.format(home=str(supervisor.HOME), module="role"), {})  # noqa: S102
    assert found == [(True, False)]
