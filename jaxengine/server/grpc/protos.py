"""Messages and clients of the .proto files in this folder, which are read when they are imported. protoc is only needed
for the types of the messages (*.pyi).
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.internal import builder

_SCALARS = dict(FieldDescriptorProto.Type.items())
_TOKEN = re.compile(r'//.*|"[^"]*"|[\w.]+|\S')


class ProtoReader:
    """Reader of a file in the part of proto3 that these files use, which has no options. Names of types stay as they
    are written, and the pool of descriptors finds what they stand for.
    """

    def __init__(self, text: str):
        self._tokens = [token for token in _TOKEN.findall(text) if not token.startswith("//")][::-1]

    def read(self, name: str) -> FileDescriptorProto:
        """Return the file's descriptor. name: its path. Raises ValueError for a token that does not fit."""
        file = FileDescriptorProto(name=name)
        while self._tokens:
            kind = self._take("syntax", "package", "import", "message", "enum", "service")
            if kind == "message":
                self._message(file.message_type.add())
            elif kind == "enum":
                self._enum(file.enum_type.add())
            elif kind == "service":
                self._service(file.service.add())
            else:
                value = self._assigned() if kind == "syntax" else self._take()
                if kind == "import":
                    file.dependency.append(value.strip('"'))
                else:
                    setattr(file, kind, value.strip('"'))
                self._take(";")
        return file

    def _take(self, *allowed: str) -> str:
        """Return the next token, "" at the end. Raises ValueError if it is not one of `allowed`, unless that is
        empty.
        """
        token = self._tokens.pop() if self._tokens else ""
        if allowed and token not in allowed:
            raise ValueError(f"{token!r} before {self._tokens[:-9:-1]}; allowed: {allowed}")
        return token

    def _assigned(self) -> str:
        """Return the token after an equals sign."""
        self._take("=")
        return self._take()

    def _service(self, service: ServiceDescriptorProto) -> None:
        """Read a service after its keyword."""
        service.name = self._take()
        self._take("{")
        while self._take("rpc", "}") == "rpc":
            method = service.method.add(name=self._take())
            method.input_type = self._argument(method, "client_streaming")
            self._take("returns")
            method.output_type = self._argument(method, "server_streaming")
            self._take(";")

    def _argument(self, method: Any, streaming: str) -> str:
        """Return the type in parentheses; set the method's field `streaming` if it is a stream."""
        self._take("(")
        if (kind := self._take()) == "stream":
            setattr(method, streaming, True)
            kind = self._take()
        self._take(")")
        return kind

    def _enum(self, enum: EnumDescriptorProto) -> None:
        """Read an enum after its keyword."""
        enum.name = self._take()
        self._take("{")
        while (name := self._take()) != "}":
            enum.value.add(name=name, number=int(self._assigned()))
            self._take(";")

    def _message(self, message: DescriptorProto) -> None:
        """Read a message after its keyword."""
        message.name = self._take()
        self._take("{")
        while (word := self._take()) != "}":
            if word == "message":
                self._message(message.nested_type.add())
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "reserved":
                self._reserved(message)
            elif word == "oneof":
                message.oneof_decl.add(name=self._take())
                self._take("{")
                while (kind := self._take()) != "}":
                    self._field(message, kind).oneof_index = len(message.oneof_decl) - 1
            elif word == "map":
                self._map(message)
            elif word in ("optional", "repeated"):
                field = self._field(message, self._take())
                field.proto3_optional = word == "optional"
                field.label = FieldDescriptorProto.Label.Value(f"LABEL_{word.upper()}")
            else:
                self._field(message, word)
        # An optional field is a oneof of its own, after all others.
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def _field(self, message: DescriptorProto, kind: str) -> FieldDescriptorProto:
        """Read a field after its type, `kind`, and return it."""
        field = _added(message, kind, self._take(), int(self._assigned()))
        self._take(";")
        return field

    def _map(self, message: DescriptorProto) -> None:
        """Read a field that is a map, after its keyword: repeated entries, whose type it defines."""
        self._take("<")
        entry = DescriptorProto()
        entry.options.map_entry = True
        _added(entry, self._take(), "key", 1)
        self._take(",")
        _added(entry, self._take(), "value", 2)
        self._take(">")
        entry.name = "".join(part.title() for part in self._tokens[-1].split("_")) + "Entry"
        self._field(message, entry.name).label = FieldDescriptorProto.LABEL_REPEATED
        message.nested_type.append(entry)

    def _reserved(self, message: DescriptorProto) -> None:
        """Read reserved numbers, single ones and spans, after their keyword."""
        separator = ","
        while separator != ";":
            first = last = int(self._take())
            if (separator := self._take(",", ";", "to")) == "to":
                last, separator = int(self._take()), self._take(",", ";")
            message.reserved_range.add(start=first, end=last + 1)


def _added(message: DescriptorProto, kind: str, name: str, number: int) -> FieldDescriptorProto:
    """Return a new field of the message. kind: a scalar type, or the name of another."""
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if (scalar := _SCALARS.get(f"TYPE_{kind.upper()}")) is not None:
        field.type = scalar
    else:
        field.type_name = kind
    return field


def define(name: str, module: dict[str, Any]) -> FileDescriptor:
    """Return the descriptor of `name`.proto, and put its messages and enums into `module`, the globals of a module.
    Raises ValueError for a file that cannot be read.
    """
    text = files("jaxengine.server.grpc").joinpath(f"{name}.proto").read_text()
    described = ProtoReader(text).read(f"jaxengine/server/grpc/{name}.proto")
    for path in described.dependency:  # must be in the pool first
        import_module(path.removesuffix(".proto").replace("/", ".") + "_pb2")
    found = descriptor_pool.Default().AddSerializedFile(described.SerializeToString())
    builder.BuildMessageAndEnumDescriptors(found, module)
    builder.BuildTopDescriptorsAndMessages(found, module["__name__"], module)
    return found


def client(service: ServiceDescriptor) -> Any:
    """Return a new class of clients of a service: `Client(channel)` has a callable for each of its methods."""

    def connect(self: Any, channel: Any) -> None:
        for method in service.methods:
            sides = method.client_streaming, method.server_streaming
            call = getattr(channel, "_".join("stream" if side else "unary" for side in sides))(
                f"/{service.full_name}/{method.name}",
                request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
                _registered_method=True,
            )
            setattr(self, method.name, call)

    return type(f"{service.name}Stub", (), {"__init__": connect})
