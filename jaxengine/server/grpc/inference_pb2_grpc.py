"""Client of inference.proto."""

from __future__ import annotations

from jaxengine.server.grpc.inference_pb2 import DESCRIPTOR
from jaxengine.server.grpc.protos import client

InferenceStub = client(DESCRIPTOR.services_by_name["Inference"])
