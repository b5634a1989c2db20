"""The server's options: each wrong one is named, and none is silently taken."""

from __future__ import annotations

import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.server.options import ServerConfig


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"port": -1}, "port"),
        ({"port": "80"}, "port"),
        ({"port": True}, "port"),
        ({"api_server_count": 0}, "api_server_count"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"engine_hang_timeout": 0.5}, "engine_hang_timeout"),
        ({"engine_hang_timeout": -1.0}, "engine_hang_timeout"),
        ({"api_hang_timeout": 0.5}, "api_hang_timeout"),
        ({"api_memory_limit_bytes": 1000}, "api_memory_limit_bytes"),
        ({"read_timeout": 0.0}, "read_timeout"),
        ({"max_connections": 0}, "max_connections"),
        ({"api_key": ("",)}, "api_key"),
        ({"ssl_certfile": "x.pem"}, "ssl_certfile"),
        ({"ssl_ca_certs": "x.pem"}, "ssl_ca_certs"),
        ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice"),
        ({"enable_admin": True}, "enable_admin"),
    ],
)
def test_a_wrong_option_is_named(options, param):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.param == param


def test_keys_come_from_options_and_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    config = ServerConfig(api_key="one", api_key_file=str(file))
    assert config.api_keys() == ("one", "two", "three")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="api_key_file"):
        config.api_keys()


def test_a_key_file_that_others_may_write_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n")
    for name, read in (("api_key_file", "api_keys"), ("admin_key_file", "admin_keys")):
        config = ServerConfig(**{name: str(file)})
        file.chmod(0o644)
        assert getattr(config, read)() == ("one",)
        file.chmod(0o602)
        with pytest.raises(ConfigError, match=f"{name}.*others may not write"):
            getattr(config, read)()
