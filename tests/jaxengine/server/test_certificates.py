"""Files of TLS that cannot be used are refused before any process starts; those that change are read again."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess

import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.server.base.certificates import RenewedContext, read_context
from jaxengine.server.base.options import ServerConfig
from tests.jaxengine.server.grpc.grpc_rig import certificates


def test_certificates_that_cannot_be_used(tmp_path):
    files = {name: str(path) for name, path in certificates(tmp_path / "tls").items()}
    (tmp_path / "text.pem").write_text("no certificate")
    text = str(tmp_path / "text.pem")
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-in", files["server.key"], "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    good = {"ssl_certfile": files["server.pem"], "ssl_keyfile": files["server.key"], "ssl_ca_certs": files["ca.pem"]}
    read_context(ServerConfig(**good))
    read_context(ServerConfig())
    for changes, said in (
        ({"ssl_keyfile": files["client.key"]}, r"ssl_keyfile '.*client.key' cannot be used \(KEY_VALUES_MISMATCH\)"),
        ({"ssl_certfile": text}, r"ssl_certfile '.*text.pem' and .* cannot be used"),
        ({"ssl_keyfile": text}, "cannot be used"),
        ({"ssl_keyfile": locked}, "its key, which has no password"),
        ({"ssl_ca_certs": text}, r"ssl_ca_certs '.*text.pem' cannot be used"),
        ({"ssl_ca_certs": str(tmp_path)}, "ssl_ca_certs '.*' is not a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_context(ServerConfig(**good | changes))


def test_https_takes_new_certificates_and_authorities(tmp_path):
    files, renewed = certificates(tmp_path / "old"), certificates(tmp_path / "new")
    options = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", "ssl_ca_certs": "ca.pem"}
    context = RenewedContext(ServerConfig(**{option: str(files[name]) for option, name in options.items()}))
    shutil.copytree(tmp_path / "old", tmp_path / "kept")
    old = {name: tmp_path / "kept" / path.name for name, path in files.items()}
    assert shakes_hands(context, old, old)
    assert not shakes_hands(context, renewed, old)
    # Half of a pair changes nothing.
    replace(files["server.pem"], renewed["server.pem"])
    assert shakes_hands(context, old, old)
    replace(files["server.key"], renewed["server.key"])
    assert shakes_hands(context, renewed, old)
    assert not shakes_hands(context, old, old)
    # Clients of an authority that is not known any more are refused.
    replace(files["ca.pem"], renewed["ca.pem"])
    assert shakes_hands(context, renewed, renewed)
    assert not shakes_hands(context, renewed, old)
    files["server.key"].unlink()
    assert shakes_hands(context, renewed, renewed)


def replace(path, source):
    """Copy a file over `path`, with a modification time that `path` did not have."""
    later = path.stat().st_mtime_ns + 10**9
    shutil.copy(source, path)
    os.utime(path, ns=(later, later))


def shakes_hands(server_context, trusted, own):
    """Return whether a client with the certificate of `own` and a server agree; the client trusts the authority of
    `trusted`. Both are dicts of paths by name.
    """
    context = ssl.create_default_context(cafile=str(trusted["ca.pem"]))
    context.load_cert_chain(own["client.pem"], own["client.key"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return not waiting
