"""One end of a transport, in a process that tests kill.

    python -m tests.jaxengine.tiers.transport_process TRANSPORT FOLDER offer|read [PORT]

`offer` has NUM_BLOCKS blocks, announces one that never comes, and prints its port. `read` reads from the port, again
and again, and prints the number of blocks that came. Both run until they are killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxengine.tiers.transport import FolderTransport, Source, Transport
from tests.jaxengine.tiers.test_disk import block, key

SECRET = b"of all engines, 32 bytes of them"
NUM_BLOCKS, BLOCK_BYTES = 16, 1 << 20
KEYS = [key(number) for number in range(NUM_BLOCKS)]
NEVER = key(NUM_BLOCKS)


def opened(transport: str, folder: Path, produces: bool) -> Transport:
    """A transport that offers pages, or not. folder: of a transport by folder."""
    if transport == "folder":
        return FolderTransport(folder, 30.0, produces)
    port = 0 if produces else None
    if transport == "jax":
        from jaxengine.tiers.jax_transfer import JaxTransport

        return JaxTransport(SECRET, "model", "127.0.0.1", port)
    from jaxengine.tiers.tcp import TcpTransport

    return TcpTransport(SECRET, "model", None if port is None else ("127.0.0.1", port))


def source_of(port: int) -> Source:
    """The process that offers at this port; 0: one by folder."""
    return Source("127.0.0.1", port, "a lease") if port else Source(None, None, "a lease")


@contextmanager
def process(*arguments: Any) -> Any:
    """A process with these arguments, and the first number that it prints; killed at the end."""
    command = [sys.executable, "-m", "tests.jaxengine.tiers.transport_process", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, int(running.stdout.readline())
        finally:
            running.kill()


def main() -> None:
    name, folder, does, *port = sys.argv[1:]
    transport = opened(name, Path(folder), does == "offer")
    if does == "offer":
        transport.offer(NEVER, None)
        for number, each in enumerate(KEYS):
            transport.offer(each, block(number, BLOCK_BYTES))
        print((transport.address or (None, 0))[1], flush=True)
        time.sleep(3600)
    while True:
        reader = transport.open(source_of(int(port[0])))
        print(len(reader.read(KEYS)), flush=True)


if __name__ == "__main__":
    main()
