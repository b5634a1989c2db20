"""The HTTP face of an engine: OpenAI's API with vLLM's extra fields. `app.create_app` puts it together."""
