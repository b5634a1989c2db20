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
    "jaxengine:base": (
        "jaxengine.version",
        "jaxengine.logs",
        "jaxengine.paths",
        "jaxengine.results",
        "jaxengine.schema_references",
        "jaxengine.vllm_names",
        "jaxengine.turns",
    ),
    "jaxengine:main": ("jaxengine.__main__",),
    "jaxengine.engine:loop": (
        "jaxengine.engine.engine",
        "jaxengine.engine.metrics",
        "jaxengine.engine.prefixes",
        "jaxengine.engine.status",
    ),
    "jaxengine.media:what": (
        "jaxengine.media.base.processor",
        "jaxengine.media.base.frames",
        "jaxengine.media.base.samples",
        "jaxengine.media.base.errors",
    ),
    "jaxengine.media:registry": (
        "jaxengine.media.registry",
        "jaxengine.media.open",
    ),
    "jaxengine.server:entries": (
        "jaxengine.server.command",
        "jaxengine.server.ray_serve",
    ),
    "jaxengine.server.batch:base": (
        "jaxengine.server.batch.folder",
        "jaxengine.server.batch.lines",
        "jaxengine.server.batch.results",
        "jaxengine.server.batch.store",
    ),
    "jaxengine.server.http:app": (
        "jaxengine.server.http.app",
        "jaxengine.server.http.tokenize",
    ),
    "jaxengine.rl:bridges": ("jaxengine.rl.tunix", "jaxengine.rl.marin", "jaxengine.rl.marin_serving"),
    "jaxengine.runner:base": (
        "jaxengine.runner.base.card",
        "jaxengine.runner.base.extension",
        "jaxengine.runner.base.fetched",
        "jaxengine.runner.base.memory",
        "jaxengine.runner.base.program",
        "jaxengine.runner.base.device_state",
        "jaxengine.runner.base.forward_pass",
    ),
    "jaxengine.runner.extensions:build": (
        "jaxengine.runner.extensions.build",
        "jaxengine.runner.extensions.settle",
    ),
    "jaxengine.models:registry": ("jaxengine.models.registry",),
    "jaxengine.pallas_kernels:base": (
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
    "jaxengine.scheduler:loop": (
        "jaxengine.scheduler.scheduler",
        "jaxengine.scheduler.scheduler_extension",
        "jaxengine.scheduler.rank",
        "jaxengine.scheduler.extension",
    ),
}
# Room -> the rooms it may import, set apart by blanks; the ground floor first.
ROOMS = {
    "jaxengine.sharding": "",
    "jaxengine.pallas_kernels": "",
    "jaxengine.pallas_kernels:base": "",
    "jaxengine.pallas_kernels.kv": "jaxengine.pallas_kernels:base",
    "jaxengine.pallas_kernels.matmul": "jaxengine.pallas_kernels:base",
    "jaxengine.pallas_kernels.matmul.xla": "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul",
    "jaxengine.pallas_kernels.matmul.cpu": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.matmul.xla"
    ),
    "jaxengine.pallas_kernels.matmul.native": "jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.matmul.cpu",
    "jaxengine.pallas_kernels.matmul.tpu": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.matmul.xla"
    ),
    "jaxengine.pallas_kernels.matmul.blackwell": "",
    "jaxengine.pallas_kernels.matmul.hopper": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.matmul.xla "
        "jaxengine.pallas_kernels.matmul.blackwell"
    ),
    "jaxengine.pallas_kernels.matmul.triton": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.matmul.xla"
    ),
    "jaxengine.pallas_kernels.state": "jaxengine.pallas_kernels:base",
    "jaxengine.pallas_kernels.attention": "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv",
    "jaxengine.pallas_kernels.attention.xla": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv jaxengine.pallas_kernels.attention"
    ),
    "jaxengine.pallas_kernels.attention.tpu": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv jaxengine.pallas_kernels.attention "
        "jaxengine.pallas_kernels.attention.xla"
    ),
    "jaxengine.pallas_kernels.attention.hopper": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv jaxengine.pallas_kernels.attention "
        "jaxengine.pallas_kernels.attention.xla"
    ),
    "jaxengine.pallas_kernels.attention.blackwell": "jaxengine.pallas_kernels.attention.hopper",
    "jaxengine.pallas_kernels.attention.triton": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv jaxengine.pallas_kernels.attention "
        "jaxengine.pallas_kernels.attention.xla jaxengine.pallas_kernels.attention.hopper"
    ),
    "jaxengine.pallas_kernels.proof": (
        "jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv jaxengine.pallas_kernels.matmul "
        "jaxengine.pallas_kernels.attention"
    ),
    "jaxengine.models.params": "jaxengine.sharding",
    "jaxengine.models.config": "jaxengine.models.params",
    "jaxengine.models.quantization": (
        "jaxengine.sharding jaxengine.pallas_kernels:base jaxengine.pallas_kernels.matmul jaxengine.models.params "
        "jaxengine.models.config"
    ),
    "jaxengine.models": (
        "jaxengine.sharding jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv "
        "jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.state jaxengine.pallas_kernels.attention "
        "jaxengine.pallas_kernels.proof "
        "jaxengine.models.params jaxengine.models.config jaxengine.models.quantization"
    ),
    "jaxengine.models.layers": (
        "jaxengine.sharding jaxengine.pallas_kernels:base jaxengine.pallas_kernels.kv "
        "jaxengine.pallas_kernels.matmul jaxengine.pallas_kernels.state jaxengine.pallas_kernels.attention "
        "jaxengine.models.params jaxengine.models.config jaxengine.models.quantization jaxengine.models"
    ),
    "jaxengine.models.vision": (
        "jaxengine.models.params jaxengine.models.config jaxengine.models.quantization jaxengine.models "
        "jaxengine.models.layers"
    ),
    "jaxengine.models.sound": (
        "jaxengine.models.params jaxengine.models.config jaxengine.models jaxengine.models.layers "
        "jaxengine.models.vision"
    ),
    "jaxengine.models.families": (
        "jaxengine.pallas_kernels.kv jaxengine.models.params jaxengine.models.config jaxengine.models "
        "jaxengine.models.layers jaxengine.models.vision jaxengine.models.sound"
    ),
    "jaxengine.models:registry": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models.quantization "
        "jaxengine.models jaxengine.models.layers jaxengine.models.families"
    ),
    "jaxengine.models.weights.views": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.quantization jaxengine.models"
    ),
    "jaxengine.models.weights.formats": "jaxengine.models.params jaxengine.models jaxengine.models.weights.views",
    "jaxengine.models.weights.gguf": (
        "jaxengine.models.params jaxengine.models.quantization jaxengine.models jaxengine.models.weights.views"
    ),
    "jaxengine.models.weights.adapters": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config "
        "jaxengine.models jaxengine.models.weights.views jaxengine.models.weights.formats"
    ),
    "jaxengine.models.weights": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models.quantization "
        "jaxengine.models jaxengine.models.weights.views jaxengine.models.weights.formats"
    ),
    "jaxengine.scheduler": "jaxengine.models",
    "jaxengine.scheduler.pages": "jaxengine.scheduler",
    "jaxengine.scheduler.policy": "jaxengine.scheduler",
    "jaxengine.scheduler:loop": "jaxengine.scheduler jaxengine.scheduler.pages jaxengine.scheduler.policy",
    "jaxengine.scheduler.extensions": (
        "jaxengine.models jaxengine.scheduler jaxengine.scheduler.pages jaxengine.scheduler:loop"
    ),
    "jaxengine:base": "",
    "jaxengine.workers": "jaxengine:base",
    "jaxengine.grammars": "jaxengine.scheduler jaxengine.workers",
    "jaxengine.sampling": "jaxengine.sharding jaxengine.scheduler",
    "jaxengine.tokens.vocabularies": "jaxengine.models.params",
    "jaxengine.tokens": ("jaxengine.models.params jaxengine.scheduler jaxengine.workers jaxengine.tokens.vocabularies"),
    "jaxengine.config": (
        "jaxengine.sharding jaxengine.models.config jaxengine.models jaxengine.scheduler "
        "jaxengine.scheduler.extensions jaxengine:base"
    ),
    "jaxengine.media:what": "jaxengine.scheduler jaxengine.config",
    "jaxengine.media.processors": (
        "jaxengine.models.params jaxengine.models.config jaxengine.scheduler jaxengine.media:what"
    ),
    "jaxengine.media": (
        "jaxengine.models.params jaxengine.scheduler jaxengine:base jaxengine.config jaxengine.media:what"
    ),
    "jaxengine.drafts": "jaxengine.config",
    "jaxengine.checkpoint": (
        "jaxengine.models.params jaxengine.models.config jaxengine.models.quantization jaxengine.models "
        "jaxengine.models:registry jaxengine.models.weights.views jaxengine.models.weights.formats "
        "jaxengine.models.weights.adapters jaxengine.models.weights.gguf jaxengine.models.weights jaxengine.scheduler "
        "jaxengine.tokens jaxengine.config"
    ),
    "jaxengine.media:registry": "jaxengine.models.config jaxengine.media:what jaxengine.media.processors",
    "jaxengine.parsers": "jaxengine:base jaxengine.config",
    "jaxengine.records": "jaxengine.models",
    "jaxengine.tiers": "",
    "jaxengine.runner:base": (
        "jaxengine.sharding jaxengine.models jaxengine.scheduler jaxengine.scheduler.pages jaxengine.sampling "
        "jaxengine.config"
    ),
    "jaxengine.runner.executables": "jaxengine.models jaxengine.models.layers jaxengine.config",
    "jaxengine.runner.programs": (
        "jaxengine.sharding jaxengine.models jaxengine.models.layers jaxengine.scheduler jaxengine.sampling "
        "jaxengine.runner:base jaxengine.runner.executables"
    ),
    "jaxengine.runner.extensions": (
        "jaxengine.sharding jaxengine.models.config jaxengine.models jaxengine.models.layers jaxengine.scheduler "
        "jaxengine.scheduler.pages jaxengine.sampling jaxengine.config jaxengine.records jaxengine.runner:base "
        "jaxengine.runner.executables jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.adapters": (
        "jaxengine.models.params jaxengine.models jaxengine.models.layers jaxengine.models.weights.adapters "
        "jaxengine.scheduler jaxengine.scheduler.extensions jaxengine.checkpoint jaxengine.runner:base "
        "jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.pictures": (
        "jaxengine.sharding jaxengine.models.config jaxengine.models jaxengine.models.layers jaxengine.scheduler "
        "jaxengine.scheduler.extensions jaxengine.runner:base jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions.sounds": (
        "jaxengine.sharding jaxengine.models jaxengine.models.layers jaxengine.scheduler "
        "jaxengine.scheduler.extensions jaxengine.sampling jaxengine.runner:base jaxengine.runner.programs "
        "jaxengine.runner.extensions.pictures"
    ),
    "jaxengine.runner.extensions.drafts": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models jaxengine.models.layers "
        "jaxengine.models:registry jaxengine.models.weights.formats jaxengine.scheduler "
        "jaxengine.scheduler.extensions jaxengine.sampling jaxengine.config jaxengine.drafts jaxengine.checkpoint "
        "jaxengine.runner:base jaxengine.runner.executables jaxengine.runner.programs"
    ),
    "jaxengine.runner.extensions:build": (
        "jaxengine.models jaxengine.config jaxengine.checkpoint jaxengine.media:registry jaxengine.runner:base "
        "jaxengine.runner.programs jaxengine.runner.extensions jaxengine.runner.extensions.adapters "
        "jaxengine.runner.extensions.pictures jaxengine.runner.extensions.sounds jaxengine.runner.extensions.drafts"
    ),
    "jaxengine.runner": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models.quantization "
        "jaxengine.models jaxengine.models:registry jaxengine.models.weights.views jaxengine.models.weights.formats "
        "jaxengine.models.weights.adapters jaxengine.models.weights jaxengine.scheduler jaxengine.scheduler:loop "
        "jaxengine:base jaxengine.sampling jaxengine.config jaxengine.checkpoint jaxengine.runner:base "
        "jaxengine.runner.executables jaxengine.runner.programs jaxengine.runner.extensions.drafts "
        "jaxengine.runner.extensions:build"
    ),
    "jaxengine.cluster": "jaxengine.scheduler jaxengine:base jaxengine.config jaxengine.runner",
    "jaxengine.engine": "jaxengine.scheduler jaxengine.scheduler:loop jaxengine.runner.programs jaxengine.runner",
    "jaxengine.engine.extensions": (
        "jaxengine.models.config jaxengine.scheduler jaxengine.scheduler.pages jaxengine.scheduler:loop "
        "jaxengine.scheduler.extensions jaxengine.grammars jaxengine.config jaxengine.drafts jaxengine.records "
        "jaxengine.tiers jaxengine.runner.extensions jaxengine.runner.extensions.adapters "
        "jaxengine.runner.extensions.sounds jaxengine.runner jaxengine.engine"
    ),
    "jaxengine.engine:loop": (
        "jaxengine.scheduler jaxengine.scheduler:loop jaxengine.runner jaxengine.engine jaxengine.engine.extensions"
    ),
    "jaxengine.requests.structured": "jaxengine.scheduler jaxengine:base",
    "jaxengine.requests.media": (
        "jaxengine.models.config jaxengine.models.weights.formats jaxengine.scheduler jaxengine.config "
        "jaxengine.media:what jaxengine.media jaxengine.media.processors"
    ),
    "jaxengine.requests.pooling": "jaxengine.scheduler jaxengine.config",
    "jaxengine.requests": (
        "jaxengine.models.config jaxengine.scheduler jaxengine.tokens jaxengine.config jaxengine.media "
        "jaxengine.checkpoint jaxengine.media:registry jaxengine.parsers jaxengine.engine "
        "jaxengine.requests.structured jaxengine.requests.media jaxengine.requests.pooling"
    ),
    "jaxengine.rl": (
        "jaxengine.models jaxengine.models.layers jaxengine.models.weights.formats jaxengine.sampling jaxengine:base "
        "jaxengine.requests"
    ),
    "jaxengine.check": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models.quantization "
        "jaxengine.models jaxengine.models.layers jaxengine.models:registry jaxengine.models.weights.adapters "
        "jaxengine.scheduler jaxengine:base jaxengine.sampling jaxengine.config jaxengine.checkpoint "
        "jaxengine.runner:base jaxengine.runner.executables jaxengine.runner.extensions "
        "jaxengine.runner.extensions.pictures jaxengine.runner.extensions.drafts jaxengine.runner.extensions:build "
        "jaxengine.runner"
    ),
    "jaxengine.plan": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models jaxengine.models:registry "
        "jaxengine.models.weights jaxengine.scheduler jaxengine.scheduler.pages jaxengine:base "
        "jaxengine.sampling jaxengine.config jaxengine.checkpoint jaxengine.runner:base jaxengine.runner.executables "
        "jaxengine.runner.programs jaxengine.runner.extensions.pictures jaxengine.runner.extensions:build "
        "jaxengine.runner jaxengine.check"
    ),
    "jaxengine.api": (
        "jaxengine.models.config jaxengine.models.quantization jaxengine.models jaxengine.models:registry "
        "jaxengine.models.weights jaxengine.rl jaxengine.scheduler jaxengine.config jaxengine.checkpoint "
        "jaxengine.runner jaxengine.plan jaxengine.cluster jaxengine.engine jaxengine.engine:loop "
        "jaxengine.requests.pooling jaxengine.requests"
    ),
    "jaxengine.rl:bridges": (
        "jaxengine.models jaxengine.models.layers jaxengine.rl jaxengine.engine jaxengine.runner jaxengine.requests "
        "jaxengine.api"
    ),
    "jaxengine": (
        "jaxengine.models.params jaxengine.models.config jaxengine.scheduler jaxengine:base jaxengine.config "
        "jaxengine.checkpoint jaxengine.requests.structured jaxengine.requests.pooling jaxengine.requests jaxengine.api"
    ),
    "jaxengine.server": (
        "jaxengine.scheduler jaxengine.scheduler.pages jaxengine.config jaxengine.checkpoint jaxengine.parsers "
        "jaxengine.requests.structured jaxengine.requests jaxengine.api"
    ),
    "jaxengine.bench": (
        "jaxengine.scheduler jaxengine.scheduler:loop jaxengine.scheduler.extensions jaxengine:base jaxengine.config "
        "jaxengine.checkpoint jaxengine.runner jaxengine.engine:loop jaxengine.requests jaxengine.api jaxengine"
    ),
    "jaxengine.server.link": (
        "jaxengine.scheduler jaxengine.config jaxengine.media:what jaxengine.checkpoint jaxengine.engine "
        "jaxengine.engine.extensions jaxengine.requests.media jaxengine.requests.pooling jaxengine.requests "
        "jaxengine.api jaxengine.server"
    ),
    "jaxengine.server.observe": (
        "jaxengine:base jaxengine.config jaxengine.engine jaxengine.engine:loop jaxengine.requests.pooling "
        "jaxengine.requests jaxengine.api jaxengine.server"
    ),
    "jaxengine.simulate": (
        "jaxengine.models jaxengine.scheduler jaxengine.scheduler.pages jaxengine.scheduler:loop "
        "jaxengine:base jaxengine.config jaxengine.records jaxengine.runner jaxengine.engine jaxengine.engine:loop "
        "jaxengine.requests jaxengine.api jaxengine.check jaxengine.plan jaxengine.server"
    ),
    "jaxengine.replay": (
        "jaxengine.models jaxengine.scheduler jaxengine:base jaxengine.config jaxengine.checkpoint jaxengine.records "
        "jaxengine.runner:base jaxengine.runner.programs jaxengine.runner"
    ),
    "jaxengine.server.grpc": (
        "jaxengine.scheduler jaxengine:base jaxengine.config jaxengine.media jaxengine.requests jaxengine.api "
        "jaxengine.server jaxengine.server.observe"
    ),
    "jaxengine.server.stored": "jaxengine.scheduler jaxengine.workers jaxengine.api",
    "jaxengine.server.http": (
        "jaxengine.scheduler jaxengine:base jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.observe"
    ),
    "jaxengine.server.http.chat": (
        "jaxengine.scheduler jaxengine:base jaxengine.tokens jaxengine.parsers jaxengine.requests.structured "
        "jaxengine.requests.media jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.http"
    ),
    "jaxengine.server.http.completions": (
        "jaxengine.scheduler jaxengine.tokens jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.http"
    ),
    "jaxengine.server.http.responses": (
        "jaxengine.scheduler jaxengine.tokens jaxengine.media jaxengine.parsers jaxengine.requests jaxengine.api "
        "jaxengine.server jaxengine.server.stored jaxengine.server.http jaxengine.server.http.chat"
    ),
    "jaxengine.server.http.messages": (
        "jaxengine.scheduler jaxengine.tokens jaxengine.media jaxengine.parsers jaxengine.requests jaxengine.api "
        "jaxengine.server jaxengine.server.http jaxengine.server.http.chat"
    ),
    "jaxengine.server.http.audio": (
        "jaxengine.scheduler jaxengine.requests.media jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.http"
    ),
    "jaxengine.server.http.pooling": (
        "jaxengine.scheduler jaxengine.requests.pooling jaxengine.requests jaxengine.api jaxengine.server "
        "jaxengine.server.http"
    ),
    "jaxengine.server.batch:base": "jaxengine.scheduler jaxengine.config jaxengine.server jaxengine.server.http",
    "jaxengine.server.http.batches": (
        "jaxengine.scheduler jaxengine.api jaxengine.server jaxengine.server.http jaxengine.server.batch:base"
    ),
    "jaxengine.server.http:app": (
        "jaxengine.scheduler jaxengine:base jaxengine.engine jaxengine.api jaxengine.server jaxengine.server.observe "
        "jaxengine.server.stored jaxengine.server.http jaxengine.server.http.chat jaxengine.server.http.completions "
        "jaxengine.server.http.responses jaxengine.server.http.messages jaxengine.server.http.pooling "
        "jaxengine.server.http.audio jaxengine.server.http.batches"
    ),
    "jaxengine.server.batch": (
        "jaxengine.config jaxengine.requests jaxengine.api jaxengine.server jaxengine.server.batch:base "
        "jaxengine.server.http:app"
    ),
    "jaxengine.server.processes": (
        "jaxengine.models.params jaxengine.models.config jaxengine.scheduler jaxengine:base jaxengine.config "
        "jaxengine.cluster jaxengine.engine jaxengine.api jaxengine.server jaxengine.server.link "
        "jaxengine.server.observe jaxengine.server.grpc jaxengine.server.stored jaxengine.server.http:app "
        "jaxengine.server.batch"
    ),
    "jaxengine.server.ray": (
        "jaxengine.scheduler jaxengine.config jaxengine.checkpoint jaxengine.requests.media jaxengine.requests "
        "jaxengine.api jaxengine.server jaxengine.server.observe jaxengine.server.stored jaxengine.server.http "
        "jaxengine.server.http:app jaxengine.server.batch"
    ),
    "jaxengine.server:entries": (
        "jaxengine:base jaxengine.config jaxengine.server jaxengine.server.observe jaxengine.server.batch:base "
        "jaxengine.server.processes jaxengine.server.ray"
    ),
    "jaxengine.commands": (
        "jaxengine.sharding jaxengine.models.params jaxengine.models.config jaxengine.models.quantization "
        "jaxengine.models jaxengine.models:registry jaxengine.models.weights.formats "
        "jaxengine.models.weights.adapters jaxengine.models.weights jaxengine.scheduler jaxengine:base "
        "jaxengine.config jaxengine.media jaxengine.checkpoint jaxengine.records jaxengine.runner.executables "
        "jaxengine.runner.extensions:build jaxengine.runner "
        "jaxengine.cluster jaxengine.requests jaxengine.api jaxengine.bench jaxengine.server.observe jaxengine.check "
        "jaxengine.plan jaxengine.simulate jaxengine.replay jaxengine.server:entries jaxengine.server.batch"
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
