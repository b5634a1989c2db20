"""The Python API: LLM, AsyncLLM and the engine core that both run on."""

from jaxengine.commands.process import main

main()
