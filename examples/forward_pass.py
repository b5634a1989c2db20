"""A forward pass without the engine: logits, and what goes from layer to layer.

    python examples/forward_pass.py FOLDER [IDS]

FOLDER is a Hugging Face checkpoint of a supported architecture, IDS are comma-separated token ids.
"""

import sys

import numpy as np

import jaxengine

token_ids = [int(word) for word in (sys.argv[2:] or ["5,6,7,8,9"])[0].split(",")]
model = jaxengine.open_model(sys.argv[1])
logits, states = model.forward(token_ids), model.hidden_states(token_ids)  # [T, V] and [T, layers + 1, D]
print(f"states {states.shape}, logits {logits.shape}, best next token {int(logits[-1].argmax())}")
for layer, norms in enumerate(np.linalg.norm(states, axis=-1).T):
    print(f"layer {layer}: |x| of each token {[round(float(norm), 2) for norm in norms]}")
