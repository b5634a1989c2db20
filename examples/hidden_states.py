"""Activations of chosen places, for the prompt and for what is generated.

    python examples/hidden_states.py FOLDER [IDS]

FOLDER is a Hugging Face checkpoint of a supported architecture, IDS are comma-separated token ids.
"""

import sys

import numpy as np

from jaxengine import LLM, SamplingParams

PLACES = ["residual:0", "residual:1", "final_norm"]

if __name__ == "__main__":
    prompt = [int(word) for word in (sys.argv[2:] or ["5,6,7,8,9"])[0].split(",")]
    llm = LLM(sys.argv[1], capture=PLACES)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, capture=PLACES)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    for place, rows in (output.outputs[0].captured or {}).items():  # the last token is no input, so it has no row
        norms = [round(float(norm), 2) for norm in np.linalg.norm(rows, axis=-1)]
        print(f"{place} {rows.shape} {rows.dtype}: |x| of each token {norms}")
