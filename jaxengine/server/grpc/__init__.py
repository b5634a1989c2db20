"""The gRPC server: services of package `jaxengine.v1` over any EngineClient, and a client for them."""
