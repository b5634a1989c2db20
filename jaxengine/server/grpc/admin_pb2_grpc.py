"""Client of admin.proto."""

from __future__ import annotations

from jaxengine.server.grpc.admin_pb2 import DESCRIPTOR
from jaxengine.server.grpc.protos import client

AdminStub = client(DESCRIPTOR.services_by_name["Admin"])
