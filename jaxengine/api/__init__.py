"""What a program touches: LLM, AsyncLLM, and the engine behind both."""
