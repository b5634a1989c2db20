"""A command with a plugin that cannot be imported."""

from __future__ import annotations

import subprocess
import sys


def test_a_plugin_that_cannot_be_imported_ends_the_command_with_its_reason(chat_model, tmp_path):
    file = tmp_path / "own_broken.py"
    file.write_text("import own_nothing\n")
    words = ["generate", chat_model, "Hello", "--plugin", str(file), "--load-format", "dummy"]
    done = subprocess.run([sys.executable, "-m", "jaxengine", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"the plugin {file} cannot be imported: ModuleNotFoundError: " in done.stderr
    assert f"({file}, line 1)" in done.stderr and "Traceback" not in done.stderr
