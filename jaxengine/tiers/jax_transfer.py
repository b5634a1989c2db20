"""Transport of pages by `jax.experimental.transfer`, between the host memory of two processes.

Engines find each other, and say which pages they have, over TCP as in `TcpTransport`. An answer has no pages: it has
the number under which jax's transfer server offers them, and a digest of each. jax neither authenticates nor encrypts,
so anyone in the network can read pages, but a page that was changed there is a miss.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from jaxengine.tiers.tcp import TcpTransport, address_of
from jaxengine.tiers.transport import Source

# Frame of a page: bytes of its block, and their digest. The last frame of an answer: number of the offer, and then the
# address of the transfer server, as text. A request's remote_host may be any name, which may resolve to another address
# each time, and a transfer server at that address could end this process; the answer is from an engine with the key.
_PAGE, _OFFER = struct.Struct("<Q16s"), struct.Struct("<Q")
_DIGEST_BYTES = 16
# Period in seconds of checks whether the pages have come.
_LOOK_SECONDS = 0.001


class JaxTransport(TcpTransport):
    """Transport by jax's transfer servers: one in each engine, which sends and receives arrays of the CPU backend."""

    def __init__(self, key: bytes, identity: str, host: str, port: int | None):
        """Start the transfer server, and listen as TcpTransport does if the engine offers pages.

        key, identity: as in TcpTransport. host: name or address of this host as others reach it, at which the transfer
        server listens. port: for readers, 0 for any free one; None for an engine that offers no pages. Raises OSError
        if there is no CPU backend, as with JAX_PLATFORMS=tpu, or it cannot listen there.
        """
        try:
            self._device = jax.local_devices(backend="cpu")[0]
            address = address_of(host)
            at = f"[{address}]:0" if ":" in address else f"{address}:0"
            # Without an address for bulk data, a reader's pull would end the process (jaxlib 0.10.2).
            self._server = transfer.start_transfer_server(self._device.client, at, [at])
        except (RuntimeError, UnicodeError) as error:
            raise OSError(f"jax's transfer server cannot start at {host}: {error}") from None
        self._own_address = self._server.address().encode()
        # By address. A new one for each read would leave open sockets behind where pages do not come.
        self._connections: dict[str, transfer.TransferConnection] = {}
        # Another identity than over TCP alone, whose engines answer in another form.
        super().__init__(key, f"{identity} by jax", None if port is None else (host, port))

    def frames(self, blocks: Sequence[np.ndarray | None]) -> list[Any]:
        """Offer the blocks u8[n] that are not None for `patience` seconds, and return the frames of the answer that
        tells a reader how to get them: one for each block, empty for None, and one for the offer. If jax cannot offer
        them, all are empty.
        """
        # Random, because anyone who knows the number can pull the pages.
        number, own = secrets.randbits(63), [block for block in blocks if block is not None]
        if own:
            # A local time, because jaxlib ignores a datetime's zone.
            until = datetime.datetime.now() + datetime.timedelta(seconds=self.patience)
            try:
                self._server.await_pull(number, jax.device_put(own, self._device), timeout=until)
            except jax.errors.JaxRuntimeError:  # such as memory that is short; an error would end the thread
                blocks = [None] * len(blocks)
        about = [b"" if block is None else _PAGE.pack(len(block), _digest(block)) for block in blocks]
        return [*about, _OFFER.pack(number) + self._own_address]

    def blocks(
        self, keys: Sequence[bytes], frames: Sequence[Any], source: Source, is_over: Callable[[], bool]
    ) -> dict[bytes, np.ndarray]:
        """Pull the blocks that an answer of `source` offers from the address in it, and return those whose digest is
        the answer's, by key; {} soon after `is_over` has begun to return True. Raises ConnectionError, and records that
        the source failed, if they do not come within `patience` seconds.
        """
        *about, offer = [frame.bytes for frame in frames]
        pages = {key: _PAGE.unpack(own) for key, own in zip(keys, about, strict=False) if own}
        if not pages:
            return {}
        (number,), address = _OFFER.unpack_from(offer), offer[_OFFER.size :].decode()
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        shapes = [jax.ShapeDtypeStruct((size,), np.uint8, sharding=sharding) for size, _ in pages.values()]
        try:
            if (connection := self._connections.get(address)) is None:
                connection = self._connections[address] = self._server.connect(address)
            arrays = connection.pull(number, shapes)
            if not self._have_come(arrays, is_over):
                return {}
            found = [np.asarray(array) for array in arrays]
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            if not isinstance(error, TimeoutError):  # the connection is broken
                self._connections.pop(address, None)
            self.rest(source)
            raise ConnectionError(f"{address}: {error}{self._advice(address)}") from None
        own = zip(pages.items(), found, strict=True)
        return {key: block for (key, (_, digest)), block in own if _digest(block) == digest}

    def _advice(self, address: str) -> str:
        """Return text to append to the error about the transfer server at `address`: that it may be on another host,
        which cannot reach this engine's. "" if this engine's address is not a loopback address, or both are.
        """
        own, other = (ip_address(each.rpartition(":")[0].strip("[]")) for each in (self._server.address(), address))
        is_alone = own.is_loopback and not other.is_loopback
        return f"; if it is on another host, it cannot reach this engine's kv_ip, {own}" if is_alone else ""

    def _have_come(self, arrays: Sequence[Any], is_over: Callable[[], bool]) -> bool:
        """Wait until all jax arrays in `arrays` have come or failed, and return True; False if `is_over` returned True
        first. Raises TimeoutError after `patience` seconds. jax's own wait has no end if nothing listens at the
        address.
        """
        end = time.monotonic() + self.patience
        while not all(array.is_ready() for array in arrays):
            if time.monotonic() > end:
                raise TimeoutError("the pages that it offered did not come")
            if is_over():
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def _digest(block: np.ndarray) -> bytes:
    """Return the digest of a block u8[n]."""
    return hashlib.blake2b(block.data, digest_size=_DIGEST_BYTES).digest()
