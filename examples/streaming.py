"""Many requests as concurrent streams; the reader leaves one of them early.

    python examples/streaming.py [MODEL]

The engine steps on its own thread. A slow reader gets several pieces merged into one.
"""

import asyncio
import sys

from jaxengine import AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["The sea is", "A good breakfast is", "Mountains are"]

engine = AsyncLLM(*sys.argv[1:])
# DELTA: each output has only what is new since the last one; by default it has everything so far.
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, output_kind=RequestOutputKind.DELTA)


async def tell(prompt: str) -> tuple[str, int]:
    """Read a stream to its end; return (whole text, number of pieces in which it came). The request times out after 60
    s.
    """
    pieces = []
    # timeout: seconds after which the request is ended, with finish_reason "abort".
    async for output in engine.generate(prompt, PARAMS, timeout=60.0):
        pieces.append(output.outputs[0].text)
    return "".join(pieces), len(pieces)


async def first_piece(prompt: str) -> str:
    """Return the first piece of a stream, "" if there is none, and leave the stream.

    Leaving it aborts the request and frees its pages.
    """
    stream = engine.generate(prompt, PARAMS)
    async for output in stream:
        await stream.aclose()
        return output.outputs[0].text
    return ""


async def main() -> None:
    """Run all streams at once, and print their texts and numbers of pieces."""
    left, *told = await asyncio.gather(first_piece("Nobody reads this to its end:"), *map(tell, PROMPTS))
    for prompt, (text, count) in zip(PROMPTS, told, strict=True):
        print(f"{prompt}{text!r}  ({count} pieces)")
    print(f"left after {left!r}")


asyncio.run(main())
engine.shutdown()
