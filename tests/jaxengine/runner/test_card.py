"""gpu_memory_utilization is a share of the card: by the environment that jax's client would start in."""

from __future__ import annotations

import os

import pytest
from jaxlib import xla_client

from jaxengine.check.model.shapes import SHAPES
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.runner.base import card
from jaxengine.runner.base.memory import budget_of
from jaxengine.runner.start.open import open_resolved
from tests.conftest import TINY_CHECKPOINT

CARD = 84_942_979_072  # bytes of an H100


@pytest.fixture
def fresh(monkeypatch):
    """A process with the plugin for CUDA cards, in which nothing has asked jax for devices."""
    for name in (card.FRACTION, card.OLD_FRACTION):
        monkeypatch.setenv(name, "")  # so that the test's end takes away what is set in it
        monkeypatch.delenv(name)
    monkeypatch.setattr(card, "_is_installed", lambda module: True)
    monkeypatch.setattr(card, "_has_devices", lambda: False)


def client_fraction() -> float:
    """The share of a card that jax's client takes in this environment."""
    return xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction", card.JAX_SHARE)


@pytest.mark.parametrize("utilization", [0.3, 0.75, 0.92, 1.0])
def test_the_client_has_what_the_engine_plans_for(fresh, utilization):
    config = EngineConfig(model=str(TINY_CHECKPOINT), gpu_memory_utilization=utilization, skip_tokenizer_init=True)
    open_resolved(config).source.close()
    limit = int(CARD * client_fraction())
    assert utilization <= client_fraction() <= min(1, 1.04 * utilization)
    assert card.card_bytes(limit) == pytest.approx(CARD, abs=2)
    resolved = config.resolved(SHAPES["llama-3.1-8b"], PLATFORMS["gpu"])
    wanted = CARD * min(utilization, 31 / 32)  # something is left for holes
    assert budget_of(resolved, card.card_bytes(limit), limit) == pytest.approx(wanted, rel=2e-4)


def test_by_default_it_is_the_platforms(fresh):
    open_resolved(EngineConfig(model=str(TINY_CHECKPOINT), skip_tokenizer_init=True)).source.close()
    assert client_fraction() == pytest.approx(0.92 * 32 / 31, abs=1e-4)


@pytest.mark.parametrize("name", [card.FRACTION, card.OLD_FRACTION])
def test_what_the_environment_says_stays(fresh, monkeypatch, name):
    """The engine then plans for no more than what there is."""
    monkeypatch.setenv(name, "0.5")
    card.claim_card(0.92)
    assert client_fraction() == 0.5 and sum(key in os.environ for key in (card.FRACTION, card.OLD_FRACTION)) == 1
    limit = CARD // 2
    resolved = EngineConfig(gpu_memory_utilization=0.92).resolved(SHAPES["llama-3.1-8b"], PLATFORMS["gpu"])
    assert card.card_bytes(limit) == CARD
    assert budget_of(resolved, CARD, limit) == limit - limit // 32


def test_where_jax_was_in_use_the_log_says_what_there_is(fresh, monkeypatch, caplog):
    monkeypatch.setattr(card, "_has_devices", lambda: True)
    monkeypatch.setattr(card.jax, "default_backend", lambda: "gpu")
    card.claim_card(0.92)
    assert client_fraction() == card.JAX_SHARE and "jax was in use before this engine and has 75 %" in caplog.text
    caplog.clear()
    card.claim_card(0.5)
    assert not caplog.text


def test_nothing_is_set_without_a_plugin(fresh, monkeypatch):
    monkeypatch.setattr(card, "_is_installed", lambda module: False)
    card.claim_card(0.92)
    assert card.FRACTION not in os.environ


def test_whether_jax_has_looked_for_devices():
    card.jax.devices()
    before = card.jax.config.jax_num_cpu_devices
    assert card._has_devices() and card.jax.config.jax_num_cpu_devices == before
