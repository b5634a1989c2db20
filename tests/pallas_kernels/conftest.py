"""Interpreted checks run in workers of their own, two at a time, started by the first test that asks for one.

Not before: where pytest itself runs in several processes, only one of them has these tests.
"""

from __future__ import annotations

import sys

import pytest

from jaxengine.pallas_kernels.native import library
from jaxengine.pallas_kernels.registry import NATIVE_ROOMS
from tests.pallas_kernels.worker import Job, run_all

SECONDS = 120  # of processor time for one job, compiling included


@pytest.fixture(scope="session")
def outcomes(request):
    """Futures of the interpreted jobs that were selected, by job."""
    groups: dict[int, list[Job]] = {}
    for item in request.session.items:
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        if _is_interpreted(item) and not skipped:
            groups.setdefault(item.callspec.params["group"], []).append(item.callspec.params["job"])
    return run_all(list(groups.values()), SECONDS)


def _is_interpreted(item) -> bool:
    return {"group", "job"} <= set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="module")
def machine_code():
    """Description of the machine code, which is built here. Other tests of this process have none, as their tokens are
    plain XLA's.
    """
    own = sys.modules.pop("llvmlite", None)
    pytest.importorskip("llvmlite", reason="pip install 'jaxengine[cpu]'")
    if not (about := library._load(NATIVE_ROOMS)):
        pytest.skip("machine code is for x86-64 with AVX2")
    yield about
    sys.modules["llvmlite"] = own  # type: ignore[assignment]
