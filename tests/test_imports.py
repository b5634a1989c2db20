"""Every module of the packages can be imported with every extra installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.conftest import WITHOUT_LLVMLITE
from tests.test_architecture import ROOT, files

SCRIPT = """
import gc, importlib, json, sys
gc.disable()  # it takes a third of the time
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def test_every_module_can_be_imported():
    """In a process of its own: tests of what is not installed see nothing of it."""
    names = [name for name in files() if not name.endswith("__main__")]  # which would run the command line
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(WITHOUT_LLVMLITE)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(own)},
        check=True,
    )
    failed = json.loads(done.stdout.splitlines()[-1])
    # No extra brings these programs: see pyproject.toml.
    for name, program in {"rl.tunix": "Tunix", "rl.marin": "marin", "server.dynamo": "Dynamo"}.items():
        said = f"needs {program}: pip install"
        assert said in failed.pop(f"jaxengine.{name}", said)
    assert failed == {}
    assert len(names) > 500
