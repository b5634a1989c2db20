"""Solar's layers: which hidden states they keep and mix, whatever is in them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxengine.models.families.llama import LlamaLayer
from jaxengine.models.families.solar import SolarLayer


def test_a_layer_keeps_its_input_first_and_then_mixes(monkeypatch):
    """The layer's own part adds 100 here."""
    monkeypatch.setattr(LlamaLayer, "__call__", lambda self, x, kv, pages, step: (x + 100, kv))
    monkeypatch.setattr(LlamaLayer, "__init__", lambda self: None)
    hidden = jnp.array([[1.0, 10.0, 20.0], [2.0, 30.0, 50.0]])  # current, first kept, second kept
    for kept, mixed, expected in (
        ((False, False), (False, False), [[101, 10, 20], [102, 30, 50]]),
        ((True, False), (False, False), [[101, 1, 20], [102, 2, 50]]),
        ((False, False), (True, False), [[0.25 * 10 + 0.75 + 100, 10, 20], [0.25 * 30 + 1.5 + 100, 30, 50]]),
        ((False, False), (False, True), [[0.25 * 20 + 0.75 + 100, 10, 20], [0.25 * 50 + 1.5 + 100, 30, 50]]),
        ((True, True), (False, True), [[101, 1, 1], [102, 2, 2]]),  # with itself
        ((False, True), (True, False), [[0.25 * 10 + 0.75 + 100, 10, 1], [0.25 * 30 + 1.5 + 100, 30, 2]]),
    ):
        layer = SolarLayer(kept=kept, mixed=mixed, share=0.25)
        found, kv = layer(hidden, "kv", None, None)
        np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6, err_msg=f"{kept} {mixed}")
        assert kv == "kv"
