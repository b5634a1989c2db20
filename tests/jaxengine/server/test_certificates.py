"""Files of TLS that cannot be used are refused before any process starts."""

from __future__ import annotations

import subprocess

import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.command import check_certificates
from tests.jaxengine.server.grpc.grpc_rig import certificates


def test_certificates_that_cannot_be_used(tmp_path):
    files = {name: str(path) for name, path in certificates(tmp_path / "tls").items()}
    (tmp_path / "text.pem").write_text("no certificate")
    text = str(tmp_path / "text.pem")
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-in", files["server.key"], "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    good = {"ssl_certfile": files["server.pem"], "ssl_keyfile": files["server.key"], "ssl_ca_certs": files["ca.pem"]}
    check_certificates(ServerConfig(**good))
    check_certificates(ServerConfig())
    for changes, said in (
        ({"ssl_keyfile": files["client.key"]}, r"ssl_keyfile '.*client.key' cannot be used \(KEY_VALUES_MISMATCH\)"),
        ({"ssl_certfile": text}, r"ssl_certfile '.*text.pem' and .* cannot be used"),
        ({"ssl_keyfile": text}, "cannot be used"),
        ({"ssl_keyfile": locked}, "its key, which has no password"),
        ({"ssl_ca_certs": text}, r"ssl_ca_certs '.*text.pem' cannot be used"),
        ({"ssl_ca_certs": str(tmp_path)}, "ssl_ca_certs '.*' is not a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_certificates(ServerConfig(**good | changes))
