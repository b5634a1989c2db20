"""`jaxengine run-batch`: a file of requests, OpenAI's batch form, answered by an engine without a server."""
