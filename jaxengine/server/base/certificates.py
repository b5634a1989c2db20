"""TLS files of a server: their checks, and certificates of HTTPS that are renewed while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.server.base.options import ServerConfig

OPTIONS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


class RenewedContext(ssl.SSLContext):
    """TLS context of HTTPS that reads the files of `config` again at the first handshake after one of them has changed.
    Open connections keep the certificate that they began with.

    The constructor raises ConfigError for files that cannot be used.
    """

    def __new__(cls, config: ServerConfig) -> RenewedContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, config: ServerConfig):
        self._config, self._changed, self._current = config, file_times(config), read_context(config)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake: SSLContext.wrap_bio, which event loops call, with the current files. Files that cannot be
        used, as when only one of a pair has been replaced, leave the certificate as it was.
        """
        try:
            changed = file_times(self._config)
            if changed != self._changed:
                self._current, self._changed = read_context(self._config), changed
        except ConfigError:  # the files are being replaced
            pass
        return self._current.wrap_bio(*args, **options)


def read_context(config: ServerConfig) -> ssl.SSLContext:
    """Return a TLS context with the certificate of ssl_certfile. With ssl_ca_certs, clients must present a certificate.

    Raises ConfigError if a file is missing or not PEM, if the key has a password, or if it does not match the
    certificate. Options that are None are not read.
    """
    for name in OPTIONS:
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError.because(name, f"{name} {path!r} is not a file", "name a PEM file")
    context, certificate, key = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile
    try:
        if certificate is not None:  # an empty password, or OpenSSL would ask the terminal for that of an encrypted key
            context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # SSLError is one
        problem = f"ssl_certfile {certificate!r} and ssl_keyfile {key!r} cannot be used ({_reason(error)})"
        advice = "name PEM files of a certificate and of its key, which has no password"
        raise ConfigError.because("ssl_certfile", problem, advice) from None
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        problem = f"ssl_ca_certs {config.ssl_ca_certs!r} cannot be used ({_reason(error)})"
        raise ConfigError.because("ssl_ca_certs", problem, "name a PEM file of certificates") from None
    return context


def file_times(config: ServerConfig) -> list[int]:
    """Return the modification time of each file, in nanoseconds. Raises ConfigError for a file that is missing."""
    return [open_file(config, name, Path.stat).st_mtime_ns for name in OPTIONS if getattr(config, name) is not None]


def open_file(config: ServerConfig, name: str, read: Any) -> Any:
    """Return `read(path)` for the file of the option `name`. Raises ConfigError, naming it, for an OSError."""
    path = getattr(config, name)
    try:
        return read(Path(path))
    except OSError as error:
        problem = f"{name} {path!r} cannot be read ({error.strerror})"
        raise ConfigError.because(name, problem, "name a PEM file that this user may read") from None


def _reason(error: OSError) -> str:
    """Return in words why a file cannot be used: OpenSSL's reason, else the system's message, else the error's text."""
    return str(getattr(error, "reason", None) or error.strerror or error)
