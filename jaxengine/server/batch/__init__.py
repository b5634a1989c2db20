"""`jaxengine run-batch`: answers a file of requests, in OpenAI's batch form, with an engine and without a server."""
