"""A client for the Inference service.

  with Client("127.0.0.1:8001", key="...") as client:
    answer = client.generate("The capital of France is", max_new_tokens=8, temperature=0)
    print(answer.outputs[0].text)

Answers are messages of inference.proto. Errors are grpc.RpcError; `bad_fields` returns the fields that were invalid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.inference_pb2_grpc import InferenceStub

# A text, token ids, or the messages of a conversation, each with the fields of ChatMessage.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Fits all answers of a server whose max_captured_bytes is the default.
MAX_MESSAGE_BYTES = 128 << 20


class Client:
    """Client of one server. Thread-safe.

    Args:
      target: "host:port".
      key: API key, if the server requires one.
      root_certificates: PEM of the authorities for the server's certificate. With any of the three certificate
        arguments the connection uses TLS, otherwise it is not encrypted.
      certificate_chain, private_key: PEM of the client's own certificate, if the server requires one.
    """

    def __init__(
        self,
        target: str,
        *,
        key: str | None = None,
        root_certificates: bytes | None = None,
        certificate_chain: bytes | None = None,
        private_key: bytes | None = None,
    ):
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        if root_certificates is None and certificate_chain is None and private_key is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            credentials = grpc.ssl_channel_credentials(root_certificates, private_key, certificate_chain)
            self._channel = grpc.secure_channel(target, credentials, options)
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Open calls end."""
        self._channel.close()

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> pb.GenerateResponse:
        """Generate the complete answer, and return it when it is finished. Raises grpc.RpcError.

        Args:
          prompt: a text, token ids, or messages with the fields of ChatMessage.
          timeout: seconds after which the call ends with DEADLINE_EXCEEDED; None: only the server's limit applies.
          options: fields of GenerateRequest and of its groups, by their own names: temperature, top_p, num_sequences,
            max_new_tokens, stop_strings, output_token_ids, cache_salt, ...; with messages also those of ChatMessages.
            Another name raises TypeError; a value that the field cannot hold raises TypeError or ValueError.
        """
        request = generate_request(prompt, **options)
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    def generate_stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Any
    ) -> Iterator[pb.GenerateChunk]:
        """Start to generate, and return an iterator over the answer's chunks. Arguments are those of `generate`.

        Raises TypeError and ValueError at once; the iteration raises grpc.RpcError. The iterator's method cancel() ends
        the call.
        """
        request = generate_request(prompt, **options)
        return self._stub.GenerateStream(request, timeout=timeout, metadata=self._metadata)

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a text or of a conversation (messages with the fields of ChatMessage).

        options: other fields of TokenizeRequest. Raises ValueError for other options, TypeError if `prompt` is a list
        of token ids, TypeError or ValueError for a value that its field cannot hold, grpc.RpcError.
        """
        request = pb.TokenizeRequest(**options)
        _set_prompt(request, prompt)
        return list(self._stub.Tokenize(request, metadata=self._metadata).token_ids)

    def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of token ids. options: other fields of DetokenizeRequest.

        Raises ValueError for other options, TypeError or ValueError for a value that its field cannot hold,
        grpc.RpcError.
        """
        request = pb.DetokenizeRequest(token_ids=token_ids, **options)
        return self._stub.Detokenize(request, metadata=self._metadata).text

    def score(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> pb.ScoreResponse:
        """Return the log-probabilities of the prompt's tokens, which the server computes. options: other fields of
        ScoreRequest.

        timeout: seconds after which the call ends with DEADLINE_EXCEEDED; None: only the server's limit applies. Raises
        ValueError for other options, TypeError or ValueError for a value that its field cannot hold, grpc.RpcError.
        """
        request = pb.ScoreRequest(**options)
        _set_prompt(request, prompt)
        return self._stub.Score(request, timeout=timeout, metadata=self._metadata)


def generate_request(prompt: Prompt, **options: Any) -> pb.GenerateRequest:
    """Return the GenerateRequest for the arguments of `Client.generate`. Raises TypeError for an unknown option, and
    TypeError or ValueError for a value that its field cannot hold.
    """
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        group = _GROUP_OF.get(name)
        if name in _OF_MESSAGES and request.HasField("messages"):
            group = "messages"
        if group is None:
            raise TypeError(f"there is no option {name!r}; allowed: {', '.join(sorted(_GROUP_OF))}")
        part = getattr(request, group) if group else request
        part.MergeFrom(type(part)(**{name: value}))
    return request


def bad_fields(error: grpc.RpcError) -> list[str]:
    """Return the names, as spelt in the proto, of the fields for which a call was refused; [] if its error has none."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    found = []
    for detail in () if status is None else status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found.extend(violation.field for violation in bad.field_violations)
    return found


def _set_prompt(request: pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    """Set a request's prompt to a text, messages or token ids. An empty list counts as token ids.

    Raises TypeError for token ids in a TokenizeRequest, and TypeError or ValueError for a value that is not a prompt or
    has fields that ChatMessage lacks.
    """
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.messages.messages.extend(pb.ChatMessage(**message) for message in prompt)  # type: ignore[arg-type]
    elif isinstance(request, pb.TokenizeRequest):
        raise TypeError("prompt must be a text or messages")
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]


def _group_of() -> dict[str, str]:
    """Return, for the name of each option of GenerateRequest, the field of the group that contains it, or "" if the
    request itself does. The prompt's fields are left out.
    """
    groups: dict[str, str] = {}
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        if field.containing_oneof is not None and field.containing_oneof.name == "prompt":
            continue
        if field.message_type is None:
            groups[field.name] = ""
        else:
            groups.update((inner.name, field.name) for inner in field.message_type.fields)
    return groups


_GROUP_OF = _group_of()
_OF_MESSAGES = frozenset(pb.ChatMessages.DESCRIPTOR.fields_by_name) - {"messages"}
