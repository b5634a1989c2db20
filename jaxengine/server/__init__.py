"""The HTTP and gRPC server: endpoints, the processes that run it, and what it exports."""
