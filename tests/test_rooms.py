"""The rooms inside the packages: each folder's place, from the ground up, and what it may import.

A room may import only what its row names, and only rooms in rows above its own in the table: so there is no circle and
no arrow up. Imports count wherever they stand, in functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.test_architecture import imports, sources, where

# Files that stand apart from the others of their folder: above them, for they put the folder's parts together, or
# below, for the parts are made of them.
APART = {
    "jaxengine:base": ("jaxengine.version", "jaxengine.logs", "jaxengine._siblings"),
    "jaxengine:main": ("jaxengine.__main__",),
    "jaxengine.engine:loop": ("jaxengine.engine.engine", "jaxengine.engine.metrics", "jaxengine.engine.status"),
    "jaxengine.media:what": ("jaxengine.media.processor", "jaxengine.media.frames", "jaxengine.media.errors"),
    "jaxengine.media:registry": ("jaxengine.media.registry", "jaxengine.media.open"),
    "jaxengine.server:entries": ("jaxengine.server.command", "jaxengine.server.ray_serve"),
    "jaxengine.server.http:app": ("jaxengine.server.http.app", "jaxengine.server.http.tokenize"),
    "jaxengine.runner:base": (
        "jaxengine.runner.extension",
        "jaxengine.runner.memory",
        "jaxengine.runner.program",
        "jaxengine.runner.programs.device_state",
        "jaxengine.runner.programs.forward_pass",
    ),
    "jaxengine.runner.extensions:build": ("jaxengine.runner.extensions.build", "jaxengine.runner.extensions.settle"),
    "models:registry": ("models.registry",),
    "models.weights:declarations": (
        "models.weights.declare",
        "models.weights.source",
        "models.weights.errors",
        "models.weights.files",
    ),
    "pallas_kernels:base": (
        "pallas_kernels.registry",
        "pallas_kernels.tuning",
        "pallas_kernels.zeros",
        "pallas_kernels.mosaic_gpu",
        "pallas_kernels.tuned",
        "pallas_kernels.tuned_products",
    ),
    "scheduler:loop": (
        "scheduler.scheduler",
        "scheduler.scheduler_extension",
        "scheduler.rank",
        "scheduler.extension",
    ),
}
# Room -> the rooms it may import, set apart by blanks; the ground floor first.
ROOMS = {
    "sharding": "",
    "pallas_kernels": "",
    "pallas_kernels:base": "",
    "pallas_kernels.kv": "pallas_kernels:base",
    "pallas_kernels.matmul": "pallas_kernels:base",
    "pallas_kernels.matmul.tpu": "pallas_kernels:base pallas_kernels.matmul",
    "pallas_kernels.matmul.blackwell": "",
    "pallas_kernels.matmul.hopper": "pallas_kernels:base pallas_kernels.matmul pallas_kernels.matmul.blackwell",
    "pallas_kernels.state": "pallas_kernels:base",
    "pallas_kernels.attention": "pallas_kernels:base pallas_kernels.kv",
    "pallas_kernels.attention.tpu": "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention",
    "pallas_kernels.attention.xla": "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention",
    "pallas_kernels.attention.hopper": (
        "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention pallas_kernels.attention.xla"
    ),
    "models.weights:declarations": "sharding",
    "models.config": "models.weights:declarations",
    "models.quantization": (
        "sharding pallas_kernels:base pallas_kernels.matmul models.config models.weights:declarations"
    ),
    "models": (
        "sharding pallas_kernels:base pallas_kernels.kv pallas_kernels.matmul pallas_kernels.state "
        "pallas_kernels.attention models.config models.weights:declarations models.quantization"
    ),
    "models.layers": (
        "sharding pallas_kernels:base pallas_kernels.kv pallas_kernels.matmul pallas_kernels.state "
        "pallas_kernels.attention models.config models.weights:declarations models.quantization models"
    ),
    "models.vision": "sharding models.config models.weights:declarations models.quantization models models.layers",
    "models.families": "pallas_kernels.kv models.config models.weights:declarations models models.layers models.vision",
    "models:registry": (
        "sharding models.config models.weights:declarations models.quantization models models.layers models.families"
    ),
    "models.weights": "sharding models.config models.weights:declarations models.quantization models",
    "scheduler": "models",
    "scheduler.pages": "scheduler",
    "scheduler.policy": "scheduler",
    "scheduler:loop": "scheduler scheduler.pages scheduler.policy",
    "scheduler.extensions": "models scheduler scheduler.pages scheduler:loop",
    "jaxengine:base": "",
    "jaxengine.workers": "jaxengine:base",
    "jaxengine.grammars": "scheduler jaxengine.workers",
    "jaxengine.sampling": "sharding scheduler",
    "jaxengine.tokens": "models.weights:declarations scheduler jaxengine.workers",
    "jaxengine.config": "sharding models.config scheduler scheduler.extensions",
    "jaxengine.media:what": "scheduler jaxengine.config",
    "jaxengine.media.processors": "models.config models.weights:declarations scheduler jaxengine.media:what",
    "jaxengine.media": ("models.weights:declarations scheduler jaxengine:base jaxengine.config jaxengine.media:what"),
    "jaxengine.drafts": "jaxengine.config",
    "jaxengine.checkpoint": (
        "models.config models.weights:declarations models.quantization models:registry models.weights "
        "jaxengine.tokens jaxengine.config"
    ),
    "jaxengine.media:registry": "models.config jaxengine.media:what jaxengine.media.processors",
    "jaxengine.parsers": "jaxengine.config",
    "jaxengine.runner:base": "sharding models scheduler jaxengine.sampling jaxengine.config",
    "jaxengine.runner.executables": "models models.layers jaxengine.config",
    "jaxengine.runner.programs": (
        "sharding models models.layers scheduler jaxengine.sampling jaxengine.runner:base jaxengine.runner.executables"
    ),
    "jaxengine.runner.extensions": (
        "sharding models.config models models.layers scheduler scheduler.pages jaxengine.sampling "
        "jaxengine.runner:base jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.adapters": (
        "models.weights:declarations models models.layers models.weights scheduler scheduler.extensions "
        "jaxengine.runner:base jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.pictures": (
        "sharding models.config models models.layers scheduler scheduler.extensions jaxengine.runner:base "
        "jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.drafts": (
        "sharding models.weights:declarations models.config models models.layers models:registry models.weights "
        "scheduler jaxengine.sampling jaxengine.config jaxengine.drafts jaxengine.checkpoint jaxengine.runner:base "
        "jaxengine.runner.executables jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions:build": (
        "models jaxengine.config jaxengine.checkpoint jaxengine.media:registry jaxengine.runner:base "
        "jaxengine.runner.programs jaxengine.runner.extensions jaxengine.runner.extensions.adapters "
        "jaxengine.runner.extensions.pictures jaxengine.runner.extensions.drafts"
    ),
    "jaxengine.runner": (
        "sharding models.weights:declarations models.config models.quantization models models:registry models.weights "
        "scheduler scheduler:loop jaxengine.sampling jaxengine.config jaxengine.checkpoint jaxengine.runner:base "
        "jaxengine.runner.executables jaxengine.runner.programs jaxengine.runner.extensions.drafts "
        "jaxengine.runner.extensions:build"
    ),
    "jaxengine.cluster": "scheduler jaxengine:base jaxengine.config jaxengine.runner",
    "jaxengine.engine": "scheduler scheduler:loop jaxengine.sampling jaxengine.runner.programs jaxengine.runner",
    "jaxengine.engine.extensions": (
        "scheduler scheduler:loop scheduler.extensions jaxengine.grammars jaxengine.config jaxengine.drafts "
        "jaxengine.runner.extensions.adapters jaxengine.runner jaxengine.engine"
    ),
    "jaxengine.engine:loop": ("scheduler scheduler:loop jaxengine.runner jaxengine.engine jaxengine.engine.extensions"),
    "jaxengine.requests": (
        "models.config scheduler jaxengine.tokens jaxengine.config jaxengine.media:what jaxengine.media "
        "jaxengine.media:registry jaxengine.checkpoint jaxengine.engine"
    ),
    "jaxengine.api": (
        "models.config models.quantization models models:registry scheduler jaxengine.config jaxengine.runner "
        "jaxengine.cluster jaxengine.engine jaxengine.engine:loop jaxengine.requests"
    ),
    "jaxengine": (
        "models.config models.weights:declarations scheduler jaxengine:base jaxengine.config jaxengine.requests "
        "jaxengine.api"
    ),
    "jaxengine.server": "scheduler jaxengine.config jaxengine.parsers jaxengine.requests jaxengine.api",
    "jaxengine.bench": (
        "scheduler scheduler:loop scheduler.extensions jaxengine:base jaxengine.config jaxengine.checkpoint "
        "jaxengine.runner jaxengine.engine:loop jaxengine.requests jaxengine.api jaxengine"
    ),
    "jaxengine.server.link": (
        "scheduler jaxengine.config jaxengine.media:what jaxengine.checkpoint jaxengine.engine "
        "jaxengine.engine.extensions jaxengine.requests jaxengine.api jaxengine.server"
    ),
    "jaxengine.server.observe": (
        "jaxengine:base jaxengine.config jaxengine.engine:loop jaxengine.requests jaxengine.api jaxengine.server"
    ),
    "jaxengine.check": (
        "sharding models.weights:declarations models.config models.quantization models models.layers models:registry "
        "models.weights scheduler jaxengine:base jaxengine.sampling jaxengine.config jaxengine.checkpoint "
        "jaxengine.runner:base jaxengine.runner.executables jaxengine.runner.extensions "
        "jaxengine.runner.extensions.pictures jaxengine.runner.extensions.drafts jaxengine.runner.extensions:build "
        "jaxengine.runner jaxengine.bench"
    ),
    "jaxengine.server.grpc": (
        "scheduler jaxengine:base jaxengine.config jaxengine.media jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.observe"
    ),
    "jaxengine.server.stored": "scheduler jaxengine.workers jaxengine.api",
    "jaxengine.server.http": (
        "scheduler jaxengine:base jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.observe"
    ),
    "jaxengine.server.http.chat": (
        "scheduler jaxengine.tokens jaxengine.parsers jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.http"
    ),
    "jaxengine.server.http.completions": (
        "scheduler jaxengine.tokens jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.http"
    ),
    "jaxengine.server.http.responses": (
        "scheduler jaxengine.media jaxengine.parsers jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.stored jaxengine.server.http jaxengine.server.http.chat"
    ),
    "jaxengine.server.http.messages": (
        "scheduler jaxengine.tokens jaxengine.media jaxengine.parsers jaxengine.requests jaxengine.api "
        "jaxengine.server jaxengine.server.http jaxengine.server.http.chat"
    ),
    "jaxengine.server.http.pooling": (
        "scheduler jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.http"
    ),
    "jaxengine.server.http:app": (
        "scheduler jaxengine:base jaxengine.api jaxengine.server jaxengine.server.observe jaxengine.server.stored "
        "jaxengine.server.http jaxengine.server.http.chat jaxengine.server.http.completions "
        "jaxengine.server.http.responses jaxengine.server.http.messages jaxengine.server.http.pooling"
    ),
    "jaxengine.server.processes": (
        "models.config models.weights:declarations scheduler jaxengine:base jaxengine.config jaxengine.cluster "
        "jaxengine.engine jaxengine.api jaxengine.server jaxengine.server.link jaxengine.server.observe "
        "jaxengine.server.stored jaxengine.server.grpc jaxengine.server.http:app"
    ),
    "jaxengine.server:entries": (
        "scheduler jaxengine.config jaxengine.checkpoint jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.observe jaxengine.server.http:app jaxengine.server.processes"
    ),
    "jaxengine.commands": (
        "sharding models.weights:declarations models.config models.quantization models models:registry models.weights "
        "scheduler jaxengine:base jaxengine.config jaxengine.media jaxengine.checkpoint "
        "jaxengine.runner.extensions:build jaxengine.runner jaxengine.cluster jaxengine.requests jaxengine.api "
        "jaxengine.bench jaxengine.server.observe jaxengine.check jaxengine.server:entries"
    ),
    "jaxengine:main": "jaxengine.commands",
}


def room_of(module: str) -> str:
    """The row of a module: itself where it stands apart, else its folder."""
    for room, modules in APART.items():
        if module in modules:
            return room
    path, _ = sources()[module]
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


@cache
def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room it imports) -> the imports."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, (path, tree) in sources().items():
        for name, line in imports(tree):
            target = name if name in sources() else name.rpartition(".")[0]
            if target in sources() and (ends := (room_of(module), room_of(target)))[0] != ends[1]:
                found.setdefault(ends, []).append(f"{where(path, line)} imports {name}")
    return found


def test_every_row_imports_from_lower_floors_only():
    floors = list(ROOMS)
    for floor, (room, allowed) in enumerate(ROOMS.items()):
        assert not (wrong := [other for other in allowed.split() if other not in floors[:floor]]), (
            f"{room} may not import {wrong}: no rows above its own"
        )


def test_every_file_is_in_a_room():
    files = {module: room_of(module) for module, (_, tree) in sources().items() if len(tree.body) > 1}
    assert not (strangers := {module: room for module, room in files.items() if room not in ROOMS}), strangers
    assert not (empty := set(ROOMS) - set(files.values())), f"rows without a file: {sorted(empty)}"
    assert not (gone := [module for modules in APART.values() for module in modules if module not in files]), gone


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_row_names(room):
    allowed = set(ROOMS[room].split())
    used = {target: found for (source, target), found in arrows().items() if source == room}
    wrong = [line for target, found in used.items() if target not in allowed for line in found]
    assert not wrong, f"{room} must not import these:\n" + "\n".join(wrong)
    assert not (unused := allowed - used.keys()), f"{room} imports none of {sorted(unused)}: take them off its row"
