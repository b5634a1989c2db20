"""Names of adapters: those that look like a loaded one, or like nothing, are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxengine.runner.extensions.adapters.store import AdapterStore
from jaxengine.scheduler.base.errors import RequestError


def test_look_alikes_are_refused():
    config = SimpleNamespace(max_lora_rank=8, dtype="float32", num_cpu_loras=4)
    store = AdapterStore(SimpleNamespace(config=config, extension=lambda _: SimpleNamespace(targets=())))
    store._named["Straße 1"] = SimpleNamespace(  # pyright: ignore[reportArgumentType]
        adapter=SimpleNamespace(name="Straße 1"), number=1, path="/a"
    )
    assert store.known("Straße 1", "/a", 1)
    for name in ("straße 1", "STRASSE 1", "Straße  1", "Straße 1\ufe0f", "Straße \uff11"):
        with pytest.raises(RequestError, match="looks like the adapter 'Straße 1'") as caught:
            store.known(name, "/b", 2)
        assert caught.value.param == "lora_name"
    for name in (" m", "m ", "m\n", "\tm", "m\0", "\u200bm", "m\u00a0", "", " ", "\ufe0f\u2800", None, "m" * 300):
        with pytest.raises(RequestError, match="lora_name is .*without white space at its ends"):
            store.known(name, "/b", 2)
    assert not any(store.known(name, "/b", 2) for name in ("Straße 2", "m", "日本", "a b"))
