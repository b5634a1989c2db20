"""Generation over gRPC: complete, streamed, scored, and with an error.

    jaxengine serve --grpc-port 50051
    python examples/grpc_client.py [HOST:PORT]

The client is a thin layer over stubs generated from jaxengine/server/grpc/inference.proto, as in any other language.
"""

import sys

import grpc

from jaxengine.server.grpc.client import Client, bad_fields

with Client((sys.argv[1:] or ["127.0.0.1:50051"])[0]) as client:
    answer = client.generate("The capital of France is", temperature=0, max_new_tokens=8, timeout=60)
    print(f"whole: {answer.outputs[0].text!r}")

    # One chunk per step and sequence; together they equal the answer of `generate`.
    pieces = [chunk.outputs.text for chunk in client.generate_stream("The sea is", temperature=0, max_new_tokens=8)]
    print(f"streamed: {pieces}")

    ids = client.tokenize("The capital of France is Paris")
    print(f"token ids: {ids}, back: {client.detokenize(ids)!r}")

    try:
        client.generate("Hello", top_p=0)
    except grpc.RpcError as error:
        print(f"refused: {error.code().name}, {bad_fields(error)}: {error.details()}")
