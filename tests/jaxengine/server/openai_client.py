"""The OpenAI client of an application."""

from __future__ import annotations

from typing import Any

import httpx2
import openai


def openai_client(app: Any, **options: Any) -> openai.AsyncOpenAI:
    """The real client, its requests handed to `app` without a socket."""
    transport = httpx2.ASGITransport(app=app)
    http_client = openai.DefaultAsyncHttpxClient(transport=transport)
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http_client, max_retries=0, **options
    )
