"""Replacement weights of an engine's MTP layer or draft head: finds its tensors by the checkpoint's names."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxengine.models.layers.drafts.draft_head import EMBEDDING, LM_HEAD
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.formats.arrays import ArraySource, on_host
from jaxengine.models.weights.views.renamed import NextTokenSource
from jaxengine.runner.extensions.drafts.open import HEAD_KINDS


class HeadTensors:
    """Selection and renaming of the tensors that belong to a draft head."""

    def __init__(self, method: str, head: Any, model: Any, params: list[Any], *, partial: bool):
        """Store the modules. method: one of HEADS, or "mtp"; head: the head's module; model: module of the first stage.

        params: leaves of the first stage. partial: whether tensors may be missing.
        """
        self._head, self._model, self._params, self._partial = head, model, params, partial
        self._kind = HEAD_KINDS.get(method)  # None for MTP
        self._layer = type(model).checkpoint_names.next_layer
        number = model.config.num_layers
        self._beginnings = *self._layer.places(number), *(old for old, _ in self._layer.placed(number))

    def wanted(self, name: str) -> bool:
        """Whether a tensor of this name may belong to the head: any name for a head with a checkpoint of its own, names
        of the layer after the model's last for MTP.
        """
        return self._kind is not None or name.startswith(self._beginnings)

    def view(self, source: WeightSource) -> WeightSource:
        """Return a source with the head's tensors of `source` under the names that the head declares.

        Raises ModelFileError if a head drafts other tokens than the loaded one, or has an LM head, or embeddings that
        differ from the model's or cannot be compared with them, although the engine's head has none of its own.
        """
        if self._kind is None:
            return NextTokenSource(source, self._model.config.num_layers, self._layer)
        config = self._head.sizes
        model = self._embedding(source)
        found = self._kind.source(source, config, model, partial=self._partial)
        if found.config.own_head != config.own_head:
            raise ModelFileError(source.path, "is new: the engine's head was started without one of its own", LM_HEAD)
        if found.config.own_embedding != config.own_embedding:
            text = "differs from the model's, and the engine's head was started without one of its own"
            if model is None:
                text = "cannot be compared with the model's, of which the sleeping engine has no copy: leave it out"
            raise ModelFileError(source.path, text, EMBEDDING)
        return found

    def _embedding(self, source: WeightSource) -> WeightSource | None:
        """Return a source of the model's current embedding in host memory, for comparison; None if the head has its own
        embedding, `source` has none, or the engine sleeps without a copy of it.
        """
        paths = [param.path for param in declared_params(self._model) if param.decl.sources[0].name == EMBEDDING]
        if self._head.sizes.own_embedding or not paths or not any(EMBEDDING.endswith(name) for name in source.names()):
            return None
        index = [path for path, _ in nnx.to_flat_state(nnx.state(self._model))].index(paths[0])
        array = self._params[index]
        whole = on_host(array) if isinstance(array, jax.Array) else array.whole()
        return None if whole is None else ArraySource({EMBEDDING: whole[: self._head.sizes.vocab_size]})
