"""The server's options: each wrong one is named, and none is silently taken."""

from __future__ import annotations

import contextlib
import os

import pytest

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.command import check_together
from jaxengine.server.processes.sockets import listen, reserve_port
from tests.tables import each_row


@each_row(
    ("options", "param"),
    [
        ({"port": -1}, "port"),
        ({"port": "80"}, "port"),
        ({"port": True}, "port"),
        ({"api_server_count": 0}, "api_server_count"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"request_timeout": 10**400}, "request_timeout"),
        ({"served_model_name": ["a", "b\udcff"]}, "served_model_name"),
        ({"response_role": "a\nb"}, "response_role"),
        ({"response_role": "b\udcff"}, "response_role"),
        ({"root_path": "/\0"}, "root_path"),
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
        ({"max_stored_responses": 1}, "max_stored_responses"),
        ({"max_stored_responses_per_client": 2001}, "max_stored_responses_per_client"),
        ({"max_stored_bytes": 64 << 20, "max_stored_bytes_per_client": 65 << 20}, "max_stored_bytes_per_client"),
        ({"max_stored_conversation_bytes": 129 << 20}, "max_stored_conversation_bytes"),
        ({"max_log_len": 5}, "max_log_len"),
        ({"max_log_len": -1, "enable_log_requests": True}, "max_log_len"),
    ],
)
def test_a_wrong_option_is_named(options, param):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.param == param


def test_forms_of_vllms_command_line():
    config = ServerConfig(
        reasoning_parser="None", lora_modules=("",), allowed_origins=('["http://a.example", "null"]',)
    )
    assert (config.reasoning_parser, config.lora_modules) == (None, ())
    assert config.allowed_origins == ("http://a.example", "null")
    for wrong in ('["*"', "[3]", '["a/b"]'):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(allowed_origins=(wrong,))
        assert caught.value.param == "allowed_origins"


def test_bounds_of_the_store_follow_from_each_other():
    for options, bounds in (
        ({}, (2000, 256, 1000, 128, 64)),
        ({"api_memory_limit_bytes": 256 << 20}, (2000, 64, 1000, 32, 16)),
        ({"api_memory_limit_bytes": 0, "max_stored_responses": 3}, (3, 256, 2, 128, 64)),
        ({"max_stored_bytes": 1024 << 20, "max_stored_bytes_per_client": 900 << 20}, (2000, 1024, 1000, 900, 256)),
    ):
        found = list(ServerConfig(**options).store_bounds().items())
        assert tuple(value >> 20 if "bytes" in name else value for name, value in found) == bounds
    assert ServerConfig(max_stored_conversation_bytes=128 << 20).store_bounds()["conversation_bytes"] == 128 << 20


def test_keys_come_from_options_and_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    config = ServerConfig(api_key="one", api_key_file=str(file))
    assert config.api_keys() == ("one", "two", "three")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="api_key_file '.*keys' contains no key; write one per line into it"):
        config.api_keys()
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read .No such file.*; name a file with one key a line"):
        config.api_keys()
    os.mkfifo(file)  # which nobody writes
    with pytest.raises(ConfigError, match="cannot be read .it is not a regular file.; name a file with one key a line"):
        config.api_keys()
    file.unlink()
    file.write_bytes(b"\xef\xbb\xbfone\n" + b"\n" * (1 << 20))
    with pytest.raises(ConfigError, match="cannot be read .it has more than 1048576 bytes."):
        config.api_keys()
    file.write_bytes(b"\xef\xbb\xbfone\n")  # as editors of Windows begin it
    assert config.api_keys() == ("one", "one")


def test_no_key_is_shown():
    for wrong in (["secret", 1], {"secret": 1}, ["secret", ""]):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(api_key=wrong)
        assert "secret" not in str(caught.value)
    assert "secret" not in repr(ServerConfig(api_key="secret"))


def test_an_option_that_needs_another_names_its_flag():
    with pytest.raises(ConfigError, match="needs tool_call_parser, which is not given; give --tool-call-parser too"):
        ServerConfig(enable_auto_tool_choice=True)


def test_a_port_that_is_taken_and_a_host_that_is_not_here():
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"port {port} of 127.0.0.1 cannot be bound .Address already in use.; stop the program that listens there"
        with pytest.raises(ConfigError, match=said) as error:
            listen("127.0.0.1", port)
        assert error.value.param == "port"
        with pytest.raises(ConfigError, match="grpc_port .* give another --grpc-port, 0 for any that is free"):
            reserve_port("grpc_port", "127.0.0.1", port)
    with pytest.raises(ConfigError, match="host 'no.such.host.invalid' is not an address .*; give 127.0.0.1 for"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="give --host an address that this machine has; 192.0.2.1 is not one"):
        listen("192.0.2.1", 0)


def test_a_key_file_that_others_may_write_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n")
    for name, read in (("api_key_file", "api_keys"), ("admin_key_file", "admin_keys")):
        config = ServerConfig(**{name: str(file)})
        file.chmod(0o644)
        assert getattr(config, read)() == ("one",)
        file.chmod(0o602)
        with pytest.raises(ConfigError, match=f"{name}.*others may write.*chmod o-w"):
            getattr(config, read)()


def test_folders_and_adapters_are_checked_before_any_process_starts(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    lora = EngineConfig(enable_lora=True)
    for name, *wrong in (
        ("lora_root", "", "file", "none", "circle", "a\0"),
        ("weight_upload_dir", "", "file", "none", "circle", "a\0"),
        ("lora_dirs", "file", "none", "circle", "a\0"),
        ("lora_modules", "file"),
    ):
        keys = {"enable_admin": True, "admin_key_file": "keys"} if name == "weight_upload_dir" else {}
        for value in wrong:
            value = value if value == "" or name == "lora_modules" else f"{tmp_path}/{value}"
            with pytest.raises(ConfigError, match=f"^{name} ") as error:
                check_together(ServerConfig(**keys, **{name: value}), lora)
            assert error.value.param == name
        right = f"a={tmp_path}" if name == "lora_modules" else str(tmp_path)
        check_together(ServerConfig(**keys, **{name: right}), lora)
        if name != "weight_upload_dir":
            with pytest.raises(ConfigError, match=f"{name} is given without enable_lora"):
                check_together(ServerConfig(**{name: right}), EngineConfig())
