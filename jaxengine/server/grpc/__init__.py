"""gRPC: the services of package `jaxengine.v1` in front of any EngineClient, and a client for them."""
