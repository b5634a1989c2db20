"""Hidden states of chosen layers, for the prompt and for what is generated.

    python examples/hidden_states.py FOLDER [IDS]

FOLDER is a Hugging Face checkpoint of a supported architecture, IDS are comma-separated token ids.
Layers are counted as transformers counts `hidden_states`: 0 is the embeddings, and -1 is taken after the final norm.
A request that does not set return_hidden_states gets none, and nothing is fetched for it.
"""

import sys

import numpy as np

from jaxengine import LLM, SamplingParams

prompt = [int(word) for word in (sys.argv[2:] or ["5,6,7,8,9"])[0].split(",")]

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], capture_layers=[0, 1, -1])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, return_hidden_states=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    states = output.outputs[0].hidden_states
    assert states is not None
    print(f"{states.shape} {states.dtype}: tokens, layers, hidden size")
    # The last token was chosen and not fed to the model, so it has no row.
    for token, row in zip([*prompt, *output.outputs[0].token_ids[:-1]], states, strict=True):
        print(f"token {token}: |x| of each layer {[round(float(norm), 2) for norm in np.linalg.norm(row, axis=-1)]}")
