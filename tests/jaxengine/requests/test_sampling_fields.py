"""A sampling parameter that is a number is one row: everything else follows from it."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from jaxengine.checkpoint.model_source import GENERATION_FIELDS
from jaxengine.commands.sampling_options import SAMPLING_OPTIONS
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.sampling.state import NEUTRAL, RowParams
from jaxengine.scheduler.base.sampling_fields import ROWS
from jaxengine.scheduler.base.token_params import COLUMNS, TokenParams, row_words
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest

ROOT = Path(__file__).resolve().parents[3]
# The row, its function, and the interface of gRPC with what is generated from it.
NAMING = {
    "scheduler/base/sampling_fields.py",
    "jaxengine/sampling/row_functions.py",
    "jaxengine/server/grpc/inference.proto",
    "jaxengine/server/grpc/inference_pb2.py",
    "jaxengine/server/grpc/inference_pb2.pyi",
    # Answers of /v1/responses repeat the penalties.
    "jaxengine/server/http/responses/answers.py",
    "jaxengine/server/http/responses/head.py",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_everywhere(name):
    row = ROWS[name]
    for request in (CompletionRequest, ChatRequest):
        assert request.model_fields[name].annotation == type(row.neutral) | None
    for params in (SamplingParams, TokenParams):
        assert name in {field.name for field in dataclasses.fields(params)}
    assert name in RowParams._fields and name in SAMPLING_OPTIONS and name in GENERATION_FIELDS
    message: Any = pb.GenerateRequest.DESCRIPTOR
    *groups, field = row.grpc.split(".")
    for group in groups:
        message = message.fields_by_name[group].message_type
    assert message.fields_by_name[field].has_presence


@pytest.mark.parametrize("name", ["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_row_is_the_only_place_that_names_a_parameter(name):
    files = [path for each in ("jaxengine", "scheduler") for path in (ROOT / each).rglob("*") if path.is_file()]
    own = {path for path in files if path.suffix in (".py", ".pyi", ".proto") and "__pycache__" not in path.parts}
    found = {str(path.relative_to(ROOT)) for path in own if re.search(rf"\b{name}\b", path.read_text())}
    # Not through the links to the folders beside the package.
    assert {name for name in found if not name.startswith("jaxengine/scheduler/")} <= NAMING


def test_rows_of_devices_hold_what_is_asked():
    params = TokenParams(temperature=0.5, top_p=1e-40, min_p=0.25, repetition_penalty=1.5, top_k=-1)
    words = struct.pack(f"<{len(COLUMNS)}i", *row_words(params, -2))
    found = RowParams(*struct.unpack("<6fiII", words))
    assert found == RowParams(0.5, 2.0**-126, 0.25, 0.0, 0.0, 1.5, 0, 2**32 - 2, 2**32 - 1)
    assert [value.dtype.name for value in NEUTRAL] == ["float32"] * 6 + ["int32"] + ["uint32"] * 2


def test_features_follow_from_values():
    for name, row in ROWS.items():
        plain = TokenParams(temperature=0.0)
        assert plain.features == 0
        setattr(plain, name, row.neutral + 1)
        del plain.__dict__["features"]
        assert plain.features == row.feature, name
