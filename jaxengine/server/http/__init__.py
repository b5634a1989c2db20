"""HTTP server: OpenAI's API with vLLM's extra fields. `app.create_app` assembles it."""
