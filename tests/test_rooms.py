"""The rooms inside the packages: each folder's place, from the ground up, and what it may import.

A room may import only what its row names, and only rooms in rows above its own in the table: so there is no circle and
no arrow up. Imports count wherever they stand, in functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.test_architecture import imports, sources, where

# Rooms are written without "jaxengine.". Files that stand apart from the others of their folder: above them, for they
# put the folder's parts together, or below, for the parts are made of them.
APART = {
    "jaxengine:base": (
        "jaxengine.version",
        "jaxengine.logs",
        "jaxengine.marker_words",
        "jaxengine.paths",
        "jaxengine.results",
        "jaxengine.schema_references",
        "jaxengine.vllm_names",
        "jaxengine.turns",
    ),
    "jaxengine:main": ("jaxengine.__main__",),
    "engine:loop": (
        "jaxengine.engine.engine",
        "jaxengine.engine.metrics",
        "jaxengine.engine.prefixes",
        "jaxengine.engine.status",
    ),
    "server.batch:base": (
        "jaxengine.server.batch.folder",
        "jaxengine.server.batch.lines",
        "jaxengine.server.batch.results",
        "jaxengine.server.batch.store",
    ),
    "server.http:app": (
        "jaxengine.server.http.app",
        "jaxengine.server.http.render",
        "jaxengine.server.http.tokenize",
    ),
    "rl:bridges": (
        "jaxengine.rl.tunix",
        "jaxengine.rl.marin",
        "jaxengine.rl.marin_serving",
    ),
    "runner.extensions:build": (
        "jaxengine.runner.extensions.build",
        "jaxengine.runner.extensions.settle",
    ),
    "check.model:roofline": ("jaxengine.check.model.roofline",),
    "models:registry": ("jaxengine.models.registry", "jaxengine.models.model_classes"),
    "pallas_kernels:base": (
        "jaxengine.pallas_kernels.cards",
        "jaxengine.pallas_kernels.registry",
        "jaxengine.pallas_kernels.tuning",
        "jaxengine.pallas_kernels.runs",
        "jaxengine.pallas_kernels.zeros",
        "jaxengine.pallas_kernels.mosaic_gpu",
        "jaxengine.pallas_kernels.mosaic_tpu",
        "jaxengine.pallas_kernels.triton",
        "jaxengine.pallas_kernels.interpreted",
        "jaxengine.pallas_kernels.tuned",
        "jaxengine.pallas_kernels.tuned_products",
    ),
}
# Room -> the rooms it may import, set apart by blanks; the ground floor first.
ROOMS = {
    "sharding": "",
    "pallas_kernels": "",
    "pallas_kernels:base": "",
    "pallas_kernels.native": "",
    "pallas_kernels.kv": "pallas_kernels:base",
    "pallas_kernels.matmul": "pallas_kernels:base",
    "pallas_kernels.matmul.xla": "pallas_kernels:base pallas_kernels.matmul",
    "pallas_kernels.matmul.cpu": "pallas_kernels:base pallas_kernels.matmul pallas_kernels.matmul.xla",
    "pallas_kernels.matmul.native": "pallas_kernels.native pallas_kernels.matmul pallas_kernels.matmul.cpu",
    "pallas_kernels.matmul.native_rows": "pallas_kernels.native",
    "pallas_kernels.matmul.tpu": "pallas_kernels:base pallas_kernels.matmul pallas_kernels.matmul.xla",
    "pallas_kernels.matmul.blackwell": "",
    "pallas_kernels.matmul.hopper": (
        "pallas_kernels:base pallas_kernels.matmul pallas_kernels.matmul.xla pallas_kernels.matmul.blackwell"
    ),
    "pallas_kernels.matmul.triton": "pallas_kernels:base pallas_kernels.matmul pallas_kernels.matmul.xla",
    "pallas_kernels.state": "pallas_kernels:base",
    "pallas_kernels.attention": "pallas_kernels:base pallas_kernels.kv",
    "pallas_kernels.attention.xla": "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention",
    "pallas_kernels.attention.native": (
        "pallas_kernels:base pallas_kernels.native pallas_kernels.kv pallas_kernels.attention "
        "pallas_kernels.attention.xla"
    ),
    "pallas_kernels.attention.tpu": (
        "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention pallas_kernels.attention.xla"
    ),
    "pallas_kernels.attention.hopper": (
        "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention pallas_kernels.attention.xla"
    ),
    "pallas_kernels.attention.blackwell": "pallas_kernels.attention.hopper",
    "pallas_kernels.attention.triton": (
        "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention pallas_kernels.attention.xla "
        "pallas_kernels.attention.hopper pallas_kernels.attention.blackwell"
    ),
    "pallas_kernels.proof": "pallas_kernels:base pallas_kernels.kv pallas_kernels.matmul pallas_kernels.attention",
    "models.params": "sharding",
    "models.config": "",
    "models.config.readers": "models.params models.config",
    "models.config.drafts": "models.config models.config.readers",
    "models.quantization.base": (
        "sharding pallas_kernels:base pallas_kernels.matmul models.params models.config models.config.readers"
    ),
    "models.quantization.schemes": "pallas_kernels.matmul models.params models.config models.quantization.base",
    "models.quantization": "models.quantization.base models.quantization.schemes",
    "models": (
        "sharding pallas_kernels:base pallas_kernels.kv pallas_kernels.matmul pallas_kernels.state "
        "pallas_kernels.attention pallas_kernels.proof models.params models.config models.config.readers "
        "models.quantization.base models.quantization.schemes models.quantization"
    ),
    "models.layers.base": "sharding pallas_kernels.kv pallas_kernels.matmul models.params models.config models",
    "models.layers.attention": (
        "sharding pallas_kernels:base pallas_kernels.kv pallas_kernels.attention models.params models.config "
        "models.quantization.base models.quantization models models.layers.base"
    ),
    "models.layers.attention.blocks": (
        "pallas_kernels:base pallas_kernels.kv pallas_kernels.attention models.params models.config "
        "models.quantization models models.layers.base models.layers.attention"
    ),
    "models.layers.streams": (
        "pallas_kernels.kv models.params models.config models.quantization models models.layers.base "
        "models.layers.attention"
    ),
    "models.layers.experts": (
        "sharding pallas_kernels:base pallas_kernels.matmul models.params models.config models.quantization.base "
        "models.quantization models models.layers.base"
    ),
    "models.layers.states": (
        "sharding pallas_kernels.kv pallas_kernels.state models.params models.config models models.layers.base "
        "models.layers.attention models.layers.attention.blocks"
    ),
    "models.layers": (
        "sharding pallas_kernels:base pallas_kernels.kv pallas_kernels.attention models.params models.config "
        "models.config.readers models.quantization models models.layers.base models.layers.attention "
        "models.layers.attention.blocks models.layers.experts"
    ),
    "models.layers.drafts": (
        "sharding pallas_kernels.kv models.params models.config models.config.drafts models.quantization models "
        "models.layers.base models.layers.attention models.layers"
    ),
    "models.vision.base": "models.params models.config models.quantization models models.layers.base",
    "models.vision": "models.params models.config models models.layers.base models.vision.base",
    "models.sound": ("models.params models.config models models.layers.base models.vision.base models.vision"),
    "models.families": (
        "pallas_kernels.kv models.params models.config models.config.readers models models.layers.base "
        "models.layers.attention models.layers.attention.blocks models.layers.streams models.layers.experts "
        "models.layers.states models.layers models.vision models.sound"
    ),
    "models:registry": (
        "sharding models.params models.config models.config.readers models.config.drafts models.quantization.base "
        "models.quantization models models.layers models.layers.drafts models.families"
    ),
    "models.weights.views": "sharding models.params models.config models.quantization.base models",
    "models.weights.formats": "models.params models models.weights.views",
    "models.weights.gguf": (
        "models.params models.quantization.base models.quantization.schemes models models.weights.views"
    ),
    "models.weights.adapters": (
        "sharding models.params models.config models.config.readers models models.weights.views models.weights.formats"
    ),
    "models.weights": (
        "sharding models.params models.config models.quantization.base models models.weights.views "
        "models.weights.formats models.weights.adapters"
    ),
    "scheduler.base": "",
    "scheduler.batches": "models scheduler.base",
    "scheduler.pages": "scheduler.base",
    "scheduler.policy": "scheduler.base",
    "scheduler": "scheduler.base scheduler.batches scheduler.pages scheduler.policy",
    "scheduler.extensions": "models models.config scheduler.base scheduler.batches scheduler.pages scheduler",
    "jaxengine:base": "",
    "workers": "jaxengine:base",
    "grammars": "scheduler.base jaxengine:base workers",
    "sampling": "sharding scheduler.base",
    "tokens.vocabularies": "models.params",
    "tokens.mistral": "models.params tokens.vocabularies",
    "tokens": "models.params scheduler.base workers tokens.vocabularies tokens.mistral",
    "tokens.usual_templates": "tokens.mistral tokens",
    "config.base": "models",
    "config.execution": "sharding models.config scheduler.batches config.base",
    "config.features": "models.config models.config.drafts scheduler.base config.base",
    "config.inputs": "models.config config.base",
    "config.kv": "models.config models config.base",
    "config": (
        "sharding models.params models.config scheduler.base scheduler.batches scheduler.extensions jaxengine:base "
        "config.base "
        "config.execution config.features config.inputs config.kv"
    ),
    "media.base": "scheduler.base config.inputs",
    "media.processors": "models.params models.config models.config.readers scheduler.base media.base",
    "media.decoding": "models.params config.inputs media.base",
    "media.fetching": "jaxengine:base config.inputs config media.base media.decoding",
    "drafts": "config.features",
    "checkpoint": (
        "models.params models.config models.config.readers models.quantization.base models.quantization.schemes "
        "models.quantization models models:registry models.weights.views models.weights.formats "
        "models.weights.gguf models.weights scheduler.base tokens.vocabularies tokens tokens.usual_templates "
        "config.base config.execution config.features config.inputs config"
    ),
    "media": (
        "models.params models.config models.config.readers scheduler.base jaxengine:base config.inputs media.base "
        "media.decoding media.fetching"
    ),
    "parsers.scan": "jaxengine:base",
    "parsers.reasoning": "parsers.scan",
    "parsers.tools": "jaxengine:base parsers.scan",
    "parsers": "config parsers.scan parsers.reasoning parsers.tools",
    "records": "models",
    "tiers": "",
    "runner.base": "sharding models scheduler.batches scheduler.pages sampling config.base config",
    "runner.executables": "models models.layers config.base",
    "runner.programs": (
        "sharding models models.layers.attention scheduler.base scheduler.batches sampling runner.base "
        "runner.executables"
    ),
    "runner.extensions.pooling": (
        "sharding models.config models models.layers.attention models.layers runner.base runner.programs"
    ),
    "runner.extensions": (
        "sharding models.config models models.layers.base models.layers scheduler.base scheduler.batches "
        "scheduler.pages sampling config.features config records runner.base runner.executables runner.programs"
    ),
    "runner.extensions.states": (
        "sharding models.config models models.layers.attention models.layers models.layers.states scheduler.batches "
        "scheduler.pages runner.base"
    ),
    "runner.extensions.adapters": (
        "models.params models models.layers.base models.weights.adapters scheduler.base scheduler.batches "
        "scheduler.extensions config.base config.features config checkpoint runner.base runner.programs"
    ),
    "runner.extensions.pictures": (
        "sharding models.config models models.layers.attention models.layers scheduler.base scheduler.batches "
        "scheduler.extensions runner.base runner.programs"
    ),
    "runner.extensions.sounds": (
        "sharding models models.layers.attention scheduler.base scheduler.extensions sampling "
        "runner.base runner.programs runner.extensions.pictures"
    ),
    "runner.extensions.drafts": (
        "sharding models.params models.config models.config.drafts models models.layers.base "
        "models.layers.attention models.layers models.layers.drafts models:registry models.weights.formats "
        "models.weights.views "
        "scheduler.batches scheduler.extensions sampling config.base config.features config drafts checkpoint "
        "runner.base runner.executables runner.programs runner.extensions"
    ),
    "runner.extensions:build": (
        "models config.base config checkpoint media runner.base runner.programs runner.extensions.pooling "
        "runner.extensions runner.extensions.states runner.extensions.adapters runner.extensions.pictures "
        "runner.extensions.sounds runner.extensions.drafts"
    ),
    "runner": (
        "sharding models.quantization.base models models.weights.views scheduler.base scheduler.batches "
        "jaxengine:base sampling config.execution config runner.base runner.executables runner.programs"
    ),
    "runner.start": (
        "sharding models.params models.config models models:registry models.weights.views models.weights.formats "
        "models.weights.adapters models.weights scheduler.base scheduler config.base config.execution "
        "config.features config.kv config checkpoint runner.base runner.executables runner.programs "
        "runner.extensions.drafts runner.extensions:build runner"
    ),
    "runner.weights": (
        "sharding models.params models.config models models.weights.views models.weights.formats "
        "models.weights.adapters models.weights scheduler.base config.features checkpoint runner.base "
        "runner.extensions.drafts runner"
    ),
    "cluster": ("scheduler.batches jaxengine:base config.base config runner runner.start runner.weights"),
    "check.model:roofline": (
        "models.params models.config models models.layers.attention models.layers.experts sampling "
        "scheduler.batches runner.extensions"
    ),
    "engine.stats": "scheduler.base scheduler.batches scheduler",
    "engine": "scheduler.base scheduler.batches scheduler runner.programs runner engine.stats",
    "engine.extensions.offload": (
        "scheduler.base scheduler.batches scheduler.pages scheduler scheduler.extensions jaxengine:base config.base "
        "config.kv config tiers runner.base runner.extensions runner runner.weights engine.stats engine"
    ),
    "engine.extensions.pooling": "scheduler.base scheduler.batches engine",
    "engine.extensions.weights": "scheduler.base scheduler scheduler.extensions runner.weights engine.stats engine",
    "engine.extensions": (
        "models.config scheduler.base scheduler.batches scheduler.pages scheduler scheduler.extensions grammars "
        "config.base config.features config.kv drafts records tiers runner.extensions.adapters "
        "runner.extensions.sounds runner runner.weights engine.stats engine engine.extensions.offload "
        "engine.extensions.pooling engine.extensions.weights check.model:roofline"
    ),
    "engine:loop": "scheduler.base scheduler runner runner.start engine.stats engine engine.extensions",
    "requests.structured": "scheduler.base jaxengine:base",
    "requests.media": (
        "models.config models.weights.formats scheduler.base config.inputs config media.base media.processors media"
    ),
    "requests.pooling": "scheduler.base config.features",
    "requests.params": (
        "models.config scheduler.base config.kv config checkpoint parsers.scan requests.structured requests.pooling"
    ),
    "requests.output": "scheduler.base tokens engine requests.pooling requests.params",
    "requests": (
        "models.config scheduler.base tokens config.features config checkpoint media parsers requests.structured "
        "requests.media requests.pooling requests.params requests.output"
    ),
    "rl": (
        "models.config models models.layers.base models.layers models:registry models.weights.formats "
        "models.weights jaxengine:base sampling config checkpoint requests.params requests.output"
    ),
    "check.compiled": (
        "sharding models.config models.quantization.base models.layers.base models.layers.states scheduler.batches "
        "sampling"
    ),
    "check.model": (
        "sharding models.params models.config models.config.readers models models.layers.base "
        "models.layers.attention models.layers.attention.blocks models.layers.experts models.layers models:registry "
        "models.weights.adapters scheduler.batches config.base config.features config.inputs config checkpoint "
        "runner.extensions.states runner.extensions.pictures runner.extensions.drafts runner.extensions:build "
        "runner.start check.compiled check.model:roofline"
    ),
    "check": (
        "sharding models.config models.quantization.base models jaxengine:base config.base config runner.base "
        "runner.executables check.compiled check.model"
    ),
    "plan": (
        "sharding models.params models.config models models:registry models.weights scheduler.batches "
        "scheduler.pages jaxengine:base sampling config.base config.execution config checkpoint runner.base "
        "runner.executables runner.programs runner.extensions.pictures runner.extensions:build runner runner.start "
        "check.model:roofline check.model check"
    ),
    "api": (
        "models.config models.quantization.base scheduler.base config.execution config.features config media runner "
        "runner.start runner.weights cluster engine.stats engine engine:loop requests.media requests.pooling "
        "requests.params requests.output requests plan"
    ),
    "rl:bridges": ("models models.layers.base runner.weights engine.stats requests.params requests.output rl api"),
    "jaxengine": (
        "models.params models.config scheduler.base jaxengine:base config.base config.execution config.features "
        "config checkpoint requests.structured requests.pooling requests.params requests.output requests rl api"
    ),
    "server.base": (
        "scheduler.base scheduler.pages config.base config parsers requests.params requests.output requests api"
    ),
    "server.adapters": "models.params scheduler.base config.base checkpoint requests.params api server.base",
    "server.weights": "scheduler.base api server.base",
    "bench": (
        "scheduler.base scheduler.batches scheduler scheduler.extensions jaxengine:base config.base "
        "config.features config checkpoint runner engine:loop requests.params requests.output api jaxengine"
    ),
    "server.link": (
        "scheduler.base scheduler.batches config.inputs config media.base checkpoint engine engine.extensions "
        "requests.media requests.pooling requests.params requests.output requests api server.base"
    ),
    "server.observe": (
        "jaxengine:base config.base config engine.stats engine:loop requests.pooling requests.params "
        "requests.output api server.base server.adapters"
    ),
    "simulate": (
        "models scheduler.base scheduler.batches scheduler.pages scheduler jaxengine:base config.base "
        "config.execution config records runner engine.stats engine engine:loop requests.params "
        "check.model:roofline plan api server.base"
    ),
    "replay": (
        "models scheduler.base scheduler.batches jaxengine:base config.base config checkpoint records runner.base "
        "runner.programs runner runner.start runner.weights"
    ),
    "server.grpc": (
        "scheduler.base jaxengine:base config media requests.params requests.output requests api server.base "
        "server.adapters server.weights server.observe"
    ),
    "server.stored": "scheduler.base workers api",
    "server.http.request": (
        "scheduler.base jaxengine:base requests.params requests.output requests api server.base server.observe"
    ),
    "server.http.answer": "requests.output server.base server.http.request",
    "server.http": (
        "scheduler.base jaxengine:base requests.params requests.output requests api server.base server.adapters "
        "server.weights server.http.request server.http.answer"
    ),
    "server.http.chat": (
        "scheduler.base config.base jaxengine:base tokens parsers.scan parsers.tools parsers requests.structured "
        "requests.media requests.params requests.output requests api server.base server.http.request "
        "server.http.answer server.http"
    ),
    "server.http.completions": (
        "scheduler.base tokens requests.params requests.output requests api server.base server.http.request "
        "server.http.answer server.http"
    ),
    "server.http.derender": (
        "scheduler.base requests.params requests.output requests api server.base server.http.request "
        "server.http.answer server.http server.http.chat server.http.completions"
    ),
    "server.http.responses": (
        "scheduler.base tokens media.fetching media parsers.scan parsers.tools requests.params requests.output api "
        "server.base server.stored server.http.request server.http.answer server.http server.http.chat"
    ),
    "server.http.messages": (
        "scheduler.base tokens media parsers.scan requests.params requests.output api server.base "
        "server.http.request server.http.answer server.http server.http.chat"
    ),
    "server.http.audio": (
        "scheduler.base requests.media requests.params requests.output requests api server.base server.http.request "
        "server.http.answer server.http"
    ),
    "server.http.pooling": (
        "scheduler.base media requests.media requests.pooling requests.params requests api server.base "
        "server.http.request server.http.answer server.http server.http.chat"
    ),
    "server.batch:base": "scheduler.base config.base server.base server.http.request",
    "server.http.batches": (
        "scheduler.base api server.base server.http.request server.http.answer server.http server.batch:base"
    ),
    "server.http:app": (
        "scheduler.base jaxengine:base engine.stats requests.media requests.params api server.base server.adapters "
        "server.observe server.stored server.http.request server.http.answer server.http server.http.chat "
        "server.http.completions server.http.responses server.http.messages server.http.audio server.http.pooling "
        "server.http.batches server.http.derender"
    ),
    "server.batch": (
        "config.base config requests.params api server.base server.adapters server.batch:base server.http:app"
    ),
    "server.processes": (
        "models.params models.config scheduler.base jaxengine:base config.inputs config cluster engine api "
        "server.base server.adapters server.link server.observe server.grpc server.stored server.http:app "
        "server.batch"
    ),
    "server.ray": (
        "scheduler.base config.base config checkpoint requests.media requests.params requests api server.base "
        "server.adapters server.observe server.stored server.http.request server.http.answer server.http:app "
        "server.batch server.link"
    ),
    "server": (
        "scheduler.base jaxengine:base config.base config.kv config requests.structured requests.params "
        "requests.output api server.base server.adapters server.observe server.batch:base server.processes server.ray"
    ),
    "commands": (
        "sharding models.params models.config models.config.readers models.quantization.base models.quantization "
        "models models:registry models.weights.views models.weights.formats models.weights.adapters models.weights "
        "scheduler.base jaxengine:base config.base config media.fetching checkpoint records runner.executables "
        "runner.extensions:build runner.start cluster requests.params requests.output check plan api bench "
        "server.observe simulate replay server.batch server"
    ),
    "jaxengine:main": "commands",
}


def room_of(module: str) -> str:
    """The row of a module: itself where it stands apart, else its folder."""
    for room, modules in APART.items():
        if module in modules:
            return room
    path, _ = sources()[module]
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return folder.removeprefix("jaxengine.")


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
