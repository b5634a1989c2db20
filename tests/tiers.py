"""Which tier a test belongs to: by the folder or file that it lies in, and by the fixtures that it asks for.

- unit: no engine, and no program compiled beyond trivial ones. `make quick` runs it.
- kernels: kernels, layers, models and shardings against their references, on arrays.
- engine: engines in this process.
- server: processes that serve, talk to each other or run commands.

The longest path of TIER_OF that a file begins with names its tier. A test of a unit file that asks for one of the
engine fixtures belongs to that fixture's tier all the same, so that no list names single tests.
"""

from __future__ import annotations

from collections.abc import Iterable

TIERS = ("unit", "kernels", "engine", "server")

TIER_OF = {
    "tests/": "unit",
    "tests/test_imports.py": "server",
    "tests/test_no_recompile.py": "engine",
    "tests/test_packaging.py": "server",
    "tests/test_request_path.py": "engine",
    "tests/test_workloads.py": "engine",
    "tests/examples/": "engine",
    "tests/benchmarks/test_expert_tiles.py": "kernels",
    "tests/docs/test_first_hour.py": "server",
    "tests/jaxengine/api/": "engine",
    "tests/jaxengine/bench/test_engine_run.py": "engine",
    "tests/jaxengine/bench/test_serve.py": "server",
    "tests/jaxengine/check/": "kernels",
    "tests/jaxengine/check/test_hlo.py": "unit",
    "tests/jaxengine/check/test_judgement.py": "unit",
    "tests/jaxengine/checkpoint/test_quantization.py": "engine",
    "tests/jaxengine/cluster/": "server",
    "tests/jaxengine/commands/": "server",
    "tests/jaxengine/commands/test_cli.py": "unit",
    "tests/jaxengine/engine/": "engine",
    "tests/jaxengine/grammars/": "server",
    "tests/jaxengine/grammars/test_client_schemas.py": "unit",
    "tests/jaxengine/plan/": "engine",
    "tests/jaxengine/replay/": "engine",
    "tests/jaxengine/rl/": "kernels",
    "tests/jaxengine/rl/test_maxtext.py": "unit",
    "tests/jaxengine/rl/test_tunix.py": "engine",
    "tests/jaxengine/rl/test_tunix_names.py": "unit",
    "tests/jaxengine/runner/": "engine",
    "tests/jaxengine/sampling/": "kernels",
    "tests/jaxengine/server/": "server",
    "tests/jaxengine/server/http/test_bounds.py": "unit",
    "tests/jaxengine/server/link/test_messages.py": "unit",
    "tests/jaxengine/server/test_options.py": "unit",
    "tests/jaxengine/test_logs.py": "engine",
    "tests/jaxengine/workers/": "server",
    "tests/models/": "kernels",
    "tests/models/config/": "unit",
    "tests/pallas_kernels/": "kernels",
    "tests/pallas_kernels/test_counts.py": "unit",
    "tests/pallas_kernels/test_coverage.py": "unit",
    "tests/pallas_kernels/test_registry.py": "unit",
    "tests/pallas_kernels/test_tuning.py": "unit",
    "tests/sharding/": "kernels",
}
FIXTURES = {
    "server": {"make_server", "make_smollm_server", "server"},
    "engine": {"chat_engine", "chat_llm", "make_llm", "make_pooling_llm", "smollm"},
}
# Programs that a unit file may compile: converting arrays and random numbers takes a few.
MAX_UNIT_PROGRAMS = 40


def tier_of_file(path: str) -> str:
    """The tier of a file, by its path from the repository's root."""
    return TIER_OF[max((prefix for prefix in TIER_OF if path.startswith(prefix)), key=len)]


def tier_of(path: str, fixtures: Iterable[str]) -> str:
    """The tier of a test that asks for `fixtures`, those of its fixtures among them."""
    tier, fixtures = tier_of_file(path), set(fixtures)
    if tier == "unit":
        return next((name for name, needed in FIXTURES.items() if needed & fixtures), tier)
    return tier


def may_hold(path: str, chosen: str) -> bool:
    """Whether a file, by its path from the repository's root, can have tests of a tier."""
    tier = tier_of_file(path)
    return tier == chosen or (tier == "unit" and chosen in FIXTURES)
