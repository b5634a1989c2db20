"""A pooling model served by `jaxengine serve`: the engine in a process of its own."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.fixtures.pooling_models import TEXTS
from tests.jaxengine.server.server_process import start_server

GOLDENS = np.load(Path(__file__).parents[2] / "fixtures" / "pooling.npz")


@pytest.fixture(scope="module")
def server(pooling_folder, pooling_options):
    # A key of the pooler goes with the engine's other options to the process that prepares requests.
    options = {"model": pooling_folder("mean"), "pooler_config": {"use_activation": True}, "grpc_port": 0}
    running = start_server({**pooling_options, **options})
    yield running
    running.remove()


def test_vectors_cross_from_the_engines_process(server):
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        answer = client.post("/v1/embeddings", json={"input": TEXTS}).json()
        found = np.array([entry["embedding"] for entry in answer["data"]])
        expected = GOLDENS["mean"] / np.linalg.norm(GOLDENS["mean"], axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        (score,) = client.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
        assert abs(score["score"] - expected[0] @ expected[1]) < 1e-4
        late = client.post("/v1/embeddings", json={"input": TEXTS[2], "timeout": 1e-6})
        assert late.status_code == 504
        refused = client.post("/v1/completions", json={"prompt": "w5"})
        assert refused.status_code == 400 and "this model pools" in refused.text
        metrics = client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        counted = [float(value) for name, value in lines.items() if name.startswith("vllm:generation_tokens_total")]
        assert counted == [0.0]
