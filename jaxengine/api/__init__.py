"""Python interface for programs: LLM, AsyncLLM, and the engine that both run."""
