"""What a stored program's key counts as its sources: whatever it can have been traced from, and nothing else."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from jaxengine.models.cache import kernel_modules
from jaxengine.runner.executables import program_sources as program_sources_module
from jaxengine.runner.executables.program_sources import program_sources, source_digest

ROOT = Path(__file__).parents[4]
PACKAGES = ("jaxengine",)
FAMILY = "jaxengine/models/families/qwen2.py"
KERNELS = kernel_modules("cpu")


@pytest.fixture
def tree(tmp_path) -> Path:
    """The package in a folder of their own, for a test to change."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda _, names: {"__pycache__"} & set(names))
    return tmp_path


@pytest.fixture(scope="module")
def before() -> str:
    """The digest of a tree without a change; where a tree lies does not enter."""
    return source_digest(ROOT, KERNELS, ROOT / FAMILY)


def change_an_operator(path: Path) -> None:
    """The first sum, difference, product or comparison in the file becomes another one."""
    parsed = ast.parse(path.read_text())
    for node in ast.walk(parsed):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            break
        if isinstance(node, ast.Compare):
            node.ops[0] = ast.Eq() if isinstance(node.ops[0], ast.NotEq) else ast.NotEq()
            break
    else:
        pytest.fail(f"{path} has no operator to change")
    path.write_text(ast.unparse(parsed))


def test_a_change_of_what_is_traced_changes_the_digest(tree, before):
    """One file after the other."""
    digests = [before]
    for path in (
        "jaxengine/models/layers/base/norm.py",
        "jaxengine/models/layers/base/mlp.py",
        "jaxengine/models/families/llama.py",  # what the family is built on
        "jaxengine/pallas_kernels/attention/xla/attend.py",
        "jaxengine/pallas_kernels/attention/xla/schedule.py",
        "jaxengine/pallas_kernels/kv/update_xla.py",
        "jaxengine/pallas_kernels/matmul/cpu/grouped.py",
        "jaxengine/sharding/collectives.py",
        "jaxengine/sampling/sampler.py",
        "jaxengine/sampling/token_choice.py",
        "jaxengine/runner/programs/step.py",
        "jaxengine/runner/programs/step_programs.py",
    ):
        change_an_operator(tree / path)
        digests.append(source_digest(tree, KERNELS, tree / FAMILY))
        assert digests[-1] not in digests[:-1], path


def test_the_familys_own_file_and_the_compilers_options_change_the_digest(tree, before):
    for path in (FAMILY, "jaxengine/runner/executables/cache.py"):
        with (tree / path).open("a") as file:
            file.write("\n\nADDED = 1\n")
        before, last = source_digest(tree, KERNELS, tree / FAMILY), before
        assert before != last


def test_what_no_program_is_traced_from_leaves_the_digest(tree, before):
    for path in (
        "jaxengine/models/weights/formats/safetensors.py",
        "jaxengine/models/weights/load.py",
        "jaxengine/models/weights/gguf/header.py",
        "jaxengine/models/weights/gguf/file.py",
        "jaxengine/models/families/mixtral.py",
        "jaxengine/models/registry.py",
        "jaxengine/pallas_kernels/attention/tpu/kernel.py",
        "jaxengine/pallas_kernels/attention/hopper/decode.py",
        "jaxengine/scheduler/scheduler.py",
        "jaxengine/engine/engine.py",
        "jaxengine/check/compile.py",
        "jaxengine/server/http/app.py",
    ):
        with (tree / path).open("a") as file:
            file.write("\n\nADDED = 1\n")
    assert source_digest(tree, KERNELS, tree / FAMILY) == before


def test_docstrings_comments_and_lines_leave_the_digest(tree, before):
    for path in program_sources(tree, KERNELS, tree / FAMILY):
        parsed = ast.parse(path.read_text())
        for node in ast.walk(parsed):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                assert isinstance(node.body[0], ast.Expr)
                node.body[0].value = ast.Constant("Something else.")
        path.write_text("# A comment.\n\n\n" + ast.unparse(parsed))  # unparse lays out anew and drops comments
    assert source_digest(tree, KERNELS, tree / FAMILY) == before


def test_every_platform_has_its_own_kernels():
    def kernels(platform):
        found = program_sources(ROOT, kernel_modules(platform))
        return {str(path.relative_to(ROOT)) for path in found if "jaxengine/pallas_kernels/attention/" in str(path)}

    assert "jaxengine/pallas_kernels/attention/xla/attend.py" in kernels("cpu")
    assert "jaxengine/pallas_kernels/attention/tpu/kernel.py" in kernels("tpu")
    hopper = {
        "jaxengine/pallas_kernels/attention/hopper/prefill_load.py",
        "jaxengine/pallas_kernels/attention/xla/attend.py",
    }
    assert hopper <= kernels("gpu") == kernels("gpu_xla")
    assert not any("/tpu/" in path or "/hopper/" in path for path in kernels("cpu"))


def test_an_import_in_a_function_counts(tree, before):
    (tree / "jaxengine/models/layers/added.py").write_text('"""New."""\n\nSCALE = 2\n')
    with (tree / "jaxengine/models/layers/base/mlp.py").open("a") as file:
        file.write("\n\ndef scale():\n    from jaxengine.models.layers import added\n\n    return added.SCALE\n")
    with_import = source_digest(tree, KERNELS, tree / FAMILY)
    (tree / "jaxengine/models/layers/added.py").write_text('"""New."""\n\nSCALE = 3\n')
    assert len({before, with_import, source_digest(tree, KERNELS, tree / FAMILY)}) == 3


def test_a_users_own_family_counts_with_what_it_imports(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    family, helper, stranger = folder / "my_model.py", folder / "my_layers.py", folder / "other.py"
    family.write_text("import my_layers\nfrom jaxengine.models.families.llama import LlamaForCausalLM\n")
    helper.write_text("from jax import numpy\nSCALE = 1\n")
    stranger.write_text("X = 1\n")
    found = program_sources(tree, KERNELS, family)
    assert {family, helper, tree / "jaxengine/models/families/llama.py"} <= set(found) and stranger not in found
    before = source_digest(tree, KERNELS, family)
    helper.write_text("from jax import numpy\nSCALE = 2\n")
    assert source_digest(tree, KERNELS, family) != before


def test_among_other_packages_only_ours_are_followed(tree):
    for name in ("jax", "numpy", "flax"):
        (tree / name).mkdir()
        (tree / name / "__init__.py").write_text("X = 1\n")
    tops = {path.relative_to(tree).parts[0] for path in program_sources(tree, KERNELS, tree / FAMILY)}
    assert tops == set(PACKAGES)


def test_a_later_process_knows_what_an_earlier_one_parsed(before, monkeypatch):
    known = program_sources_module.known_sources()
    monkeypatch.setattr(program_sources_module, "_known", {})
    program_sources_module.learn_sources(b"{damaged")
    program_sources_module.learn_sources(known)
    monkeypatch.setattr(ast, "parse", None)
    assert source_digest(ROOT, KERNELS, ROOT / FAMILY) == before
