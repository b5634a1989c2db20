"""Token counts and rates for a progress bar over requests."""

from __future__ import annotations

from collections.abc import Iterable

from jaxengine.requests.output.outputs import AnyOutput, RequestOutput


def count_tokens(outputs: Iterable[AnyOutput], before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the counts `before` plus the tokens of `outputs`; both are (prompt tokens, generated tokens)."""
    prompt, generated = before
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            generated += sum(len(completion.token_ids) for completion in output.outputs)
    return prompt, generated


def speed_text(num_prompt_tokens: int, num_generated_tokens: int, seconds: float) -> str:
    """Format the rates of prompt tokens and of generated tokens in `seconds`, in the wording of vLLM's progress bar."""
    rates = num_prompt_tokens / max(seconds, 1e-6), num_generated_tokens / max(seconds, 1e-6)
    return f"est. speed input: {rates[0]:.2f} toks/s, output: {rates[1]:.2f} toks/s"
