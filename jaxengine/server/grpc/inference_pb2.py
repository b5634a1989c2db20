"""Messages of inference.proto."""

from __future__ import annotations

from jaxengine.server.grpc.protos import define

DESCRIPTOR = define("inference", globals())
