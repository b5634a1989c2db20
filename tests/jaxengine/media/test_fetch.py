"""Addresses: what is read from each kind, and what is never asked, however it is spelt."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import socket
import ssl
import subprocess
import threading

import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.fetching import fetch as module
from jaxengine.media.fetching.fetch import check_source, fetch
from tests.jaxengine.media.pictures import PNG, data_url
from tests.jaxengine.media.web_server import web_server
from tests.tables import each_row

CLOSED = MediaOptions()
OPEN = MediaOptions(allowed_media_domains=("127.0.0.1", "media.example", "::1"), media_fetch_timeout=0.5)


@pytest.fixture(scope="module")
def server():
    with web_server() as server:
        yield server


@pytest.fixture
def names(monkeypatch):
    """name -> addresses; and what was connected to."""
    table: dict[str, list[str]] = {}
    connected: list[tuple] = []
    real = socket.socket.connect

    def look_up(host, port, **_):
        if host not in table:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]

    def connect(sock, address):
        connected.append(address)
        return real(sock, address)

    monkeypatch.setattr(module.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(module._Socket, "connect", connect, raising=False)
    return table, connected


BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:;BASE64,{BASE64}",
        f"data:image/png;name=a.png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{BASE64[:40]}\n {BASE64[40:]}",
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
def test_data_urls(url):
    check_source(url, CLOSED)
    assert fetch(url, CLOSED) == PNG


@each_row(
    ("url", "message"),
    [
        ("data:image/png;base64", "is not a data URL; allowed: data:image/png;base64,"),
        ("data:" + "x" * 300 + ",a", "is not a data URL"),
        ("data:image/png;base64,@@@@", "is not valid base64"),
        ("data:image/png;base64,AAAAA", "is not valid base64"),
        ("data:image/png;base64,äöü", "is not valid base64"),
        ("data:image/png;base64,AA==AA==", "is not valid base64"),
        ("data:image/png;base64,-_-_", "is not valid base64"),
        ("", "begins with ''; allowed: addresses of data:, http:, https: and file:"),
        ("a.png", "begins with 'a.png'"),
        ("/etc/passwd", "begins with '/etc/passwd'"),
        ("ftp://host/a.png", "has the scheme 'ftp'"),
        ("gopher://host/", "has the scheme 'gopher'"),
        ("javascript:alert(1)", "has the scheme 'javascript'"),
        ("concat:/etc/passwd", "has the scheme 'concat'"),
        ("https://media.example/a.png", "none may be fetched, for allowed_media_domains is not set"),
        ("file:///etc/passwd", "none may be read, for allowed_local_media_path is not set"),
    ],
)
def test_addresses_that_are_refused_where_nothing_is_open(url, message):
    with pytest.raises(MediaError, match=message):
        fetch(url, CLOSED)


def test_base64_is_decoded_in_pieces(monkeypatch):
    """Between which other threads run. A piece that ends as only the last one may is not taken."""
    data, real, sizes = PNG * 4000, base64.b64decode, []
    monkeypatch.setattr(base64, "b64decode", lambda text, **how: sizes.append(len(text)) or real(text, **how))
    text = base64.b64encode(data).decode()
    options = MediaOptions(max_media_bytes=1 << 24)
    assert fetch(f"data:;base64,{text[:70001]}\n{text[70001:]}", options) == data
    assert len(sizes) > 4 and max(sizes) == 1 << 16
    for wrong in ("A" * 65534 + "==AAAA", "A" * 65536 + "A===", "A" * 65533 + "=AAA" + "AA=="):
        with pytest.raises(MediaError, match="is not valid base64"):
            fetch(f"data:;base64,{wrong}", options)


@pytest.mark.parametrize("form", ["data:;base64," + "A" * 4000, "data:,AAAA" + "A" * 4000, "data:," + "%41" * 4000])
def test_a_data_url_is_measured_before_it_is_decoded(form, monkeypatch):
    monkeypatch.setattr(base64, "b64decode", None)
    monkeypatch.setattr(module.urllib.parse, "unquote_to_bytes", lambda text: b"x" * len(text))
    with pytest.raises(MediaError, match=r"bytes or more; allowed: 999 \(max_media_bytes\)"):
        fetch(form, MediaOptions(max_media_bytes=999))


def test_files_of_the_folder_that_is_open(tmp_path):
    folder, outside = tmp_path / "open", tmp_path / "secret.png"
    folder.mkdir()
    outside.write_bytes(PNG)
    (folder / "a b.png").write_bytes(PNG)
    (folder / "in").symlink_to(folder / "a b.png")
    (folder / "out").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    (folder / "round").symlink_to(folder / "round")
    (tmp_path / "open2").mkdir()
    (tmp_path / "open2" / "a.png").write_bytes(PNG)
    options = MediaOptions(allowed_local_media_path=str(folder))
    for name in ("a%20b.png", "in", "../open/in"):
        assert fetch(f"file://{folder}/{name}", options) == PNG
    assert fetch(f"file://localhost{folder}/in", options) == PNG
    for url in (
        f"file://{outside}",
        f"file://{folder}/out",
        f"file://{folder}/up/secret.png",
        f"file://{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        f"file://{tmp_path}/open2/a.png",
        "file:///etc/passwd",
        f"file://{folder}/a%00b",
        "file:etc/passwd",
    ):
        with pytest.raises(MediaError, match="leads out of the folder"):
            fetch(url, options)
    for url in (f"file://elsewhere{folder}/in", f"file://{folder}/in?x", f"file://{folder}/in#x"):
        with pytest.raises(MediaError, match="is not a local file"):
            fetch(url, options)
    for name in ("missing", "", "round"):
        with pytest.raises(MediaError, match="cannot be read|leads out"):
            fetch(f"file://{folder}/{name}", options)
    with pytest.raises(MediaError, match="allowed: 9"):
        fetch(f"file://{folder}/in", MediaOptions(allowed_local_media_path=str(folder), max_media_bytes=9))


@pytest.mark.parametrize("path", ["/png", "/png?size=1&x=%20y", "/chunked", "/png/ä b"])
def test_a_file_from_the_web(server, path):
    check_source(server.url + path, OPEN)
    assert fetch(server.url + path, OPEN) == PNG
    assert server.paths[-1] == path.replace("ä b", "%C3%A4%20b")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing", "is answered with status 404"),
        ("/elsewhere", r"is a redirect \(status 302\); give the address of the file itself"),
        ("/here", "is a redirect"),
        ("/large", "has 1099511627776 bytes or more; allowed:"),
        ("/endless", "bytes or more; allowed:"),
        ("/short", "ends after 40 of"),
        ("/packed", "is sent compressed"),
        ("/dripping", r"takes longer than 0.5 seconds \(media_fetch_timeout\)"),
        ("/dripping-body", "takes longer than 0.5 seconds"),
        ("/silent", "takes longer than 0.5 seconds"),
        ("/nonsense", r"cannot be fetched \(BadStatusLine\)"),
    ],
)
@pytest.mark.timeout(60)
def test_a_server_that_answers_as_it_should_not(server, path, message):
    # Reading up to the limit of bytes takes a busy machine longer than the half second of those that must time out.
    options = OPEN if "takes longer" in message else dataclasses.replace(OPEN, media_fetch_timeout=30.0)
    with pytest.raises(MediaError, match=message):
        fetch(server.url + path, options)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.example/a", "on a host from which nothing may be fetched"),
        ("http://media.example.evil.org/a", "on a host from which nothing may be fetched"),
        ("http://notmedia.example/a", "on a host from which nothing may be fetched"),
        ("http://media.example@evil.org/a", "is not a valid web address"),
        ("http://evil.org#@media.example/a", "on a host from which nothing may be fetched"),
        ("http://evil.org\\@media.example/a", "is not a valid web address|on a host from which"),
        ("http://user:word@media.example/a", "is not a valid web address"),
        ("http:///a", "is not a valid web address"),
        ("http://media.example:99999/a", "is not a valid web address"),
        ("http://[::1/a", "is not a valid web address"),
        ("http://localhost/a", "on a host from which nothing may be fetched"),
        ("http://2130706433/a", "on a host from which nothing may be fetched"),
        ("http://0x7f.1/a", "on a host from which nothing may be fetched"),
        ("https://media.example/" + "a" * 9000, "characters; allowed: 8192"),
    ],
)
def test_hosts_that_are_not_asked(url, message, names):
    for ask in (check_source, fetch):
        with pytest.raises(MediaError, match=message):
            ask(url, OPEN)
    assert names[1] == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.1.2.3"], ["8.8.8.8", "169.254.169.254"]])
def test_a_name_that_leads_to_a_private_address_is_not_followed(names, addresses):
    """However it is allowed, by its name or by all names."""
    table, connected = names
    table["media.example"] = addresses
    for domains in (("media.example",), ("*",)):
        with pytest.raises(MediaError, match="is on a host with a private address"):
            fetch("http://media.example/a", MediaOptions(allowed_media_domains=domains))
    table["127.0.0.1"] = ["127.0.0.1"]
    with pytest.raises(MediaError, match="is on a host with a private address"):
        fetch("http://127.0.0.1/a", MediaOptions(allowed_media_domains=("*",)))
    with pytest.raises(MediaError, match="is on an unknown host"):
        fetch("http://unknown.example/a", MediaOptions(allowed_media_domains=("*",)))
    assert connected == []


def test_what_was_looked_up_is_what_is_connected_to(names, server, monkeypatch):
    """A second look might say otherwise, to another machine."""
    table, connected = names
    table["media.example"] = ["127.0.0.1"]
    looks = []
    monkeypatch.setattr(module, "is_public", lambda address: looks.append(address) or True)
    port = server.server_address[1]
    assert fetch(f"http://MEDIA.example.:{port}/png", OPEN) == PNG
    assert looks == ["127.0.0.1"] and connected == [("127.0.0.1", port)]


def test_an_address_whose_family_has_no_sockets_is_skipped(server, monkeypatch):
    """As of IPv6 on a machine without it."""
    found = module.look_up("127.0.0.1", server.server_address[1], math.inf)
    monkeypatch.setattr(module, "look_up", lambda *_: [(999, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1)), *found])
    assert fetch(f"{server.url}/png", OPEN) == PNG


class Slow:
    """Base of a socket that receives `size` bytes in each second."""

    size = 1

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv_into(self) -> int:
        CLOCK[0] += 1
        return self.size


CLOCK = [0.0]


@each_row(
    ("size", "until", "seconds"),
    [
        (1, 100, 6),  # the grace, and what it takes to see that it is over
        (100, 3, 3),  # the deadline comes first
        (2048, 100, 10),  # half as fast as it must be
        (4096, 100, 100),
        (1 << 20, 100, 100),
    ],
)
def test_a_body_must_keep_a_rate(monkeypatch, size, until, seconds):
    class Socket(module._Timed, Slow):
        pass

    monkeypatch.setattr(module.time, "monotonic", lambda: CLOCK[0])
    CLOCK[0] = 0
    sock = Socket()
    sock.size, sock.until = size, until
    sock.hurry()
    with pytest.raises(TimeoutError):
        for _ in range(200):
            sock.recv_into()
    assert CLOCK[0] - 1 <= seconds <= CLOCK[0]


def test_a_drip_ends_before_the_deadline(server, monkeypatch):
    monkeypatch.setattr(module, "_GRACE", 0.1)
    patient = MediaOptions(allowed_media_domains=("127.0.0.1",), media_fetch_timeout=3600)
    with pytest.raises(MediaError, match="arrives too slowly; allowed: 4096 bytes a second and more"):
        fetch(server.url + "/dripping-body", patient)
    assert fetch(server.url + "/png", patient) == PNG


def test_nobody_listens(names):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    names[0]["127.0.0.1"] = ["127.0.0.1"]
    with pytest.raises(MediaError, match=r"cannot be fetched \(ConnectionRefusedError\)"):
        fetch(f"http://127.0.0.1:{port}/a", OPEN)


def test_tls_needs_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    how = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=a", "-days", "2"]
    how += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "own.pem"]
    subprocess.run(["openssl", "req", "-x509", *how], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    with web_server() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        with pytest.raises(MediaError, match=r"cannot be fetched \(SSLCertVerificationError\)"):
            fetch(url + "/png", OPEN)
        trusting = ssl.create_default_context(cafile=str(tmp_path / "own.pem"))
        monkeypatch.setattr(module.ssl, "create_default_context", lambda: trusting)
        assert fetch(url + "/png", OPEN) == PNG
        with pytest.raises(MediaError, match="takes longer than 0.5 seconds"):
            fetch(url + "/dripping", OPEN)


def test_a_data_url_of_a_picture_is_that_picture():
    assert fetch(data_url(PNG), CLOSED) == PNG


@contextlib.contextmanager
def proxy_server(answer: bytes):
    """A proxy's port, and the heads of requests to it. It connects where the answer is 200."""
    heads: list[bytes] = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(4096)
                heads.append(head)
                client.sendall(answer)
                if b" 200 " not in answer:
                    client.close()
                    continue
                host, _, port = head.split()[1].decode().rpartition(":")
                with client, socket.create_connection((host, int(port))) as target:
                    target.sendall(client.recv(65536))
                    while piece := target.recv(65536):
                        client.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], heads


def test_a_proxy_connects_to_the_address_that_was_checked(server, monkeypatch):
    named = {"allowed_media_domains": ("127.0.0.1",), "media_fetch_timeout": 5.0}
    with proxy_server(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n") as (port, heads):
        options = MediaOptions(media_proxy=f"http://127.0.0.1:{port}/", **named)
        assert fetch(f"{server.url}/png", options) == PNG
        target = server.url.removeprefix("http://").encode()
        assert heads == [b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, target)]
        with pytest.raises(MediaError, match="private address"):
            fetch("http://localhost/png", MediaOptions(media_proxy=options.media_proxy, allowed_media_domains=("*",)))
        assert len(heads) == 1
    for answer, problem in ((b"HTTP/1.1 403 No\r\n\r\n", "refuses to connect"), (b"no", "no answer of HTTP")):
        with proxy_server(answer) as (port, _), pytest.raises(MediaError, match=problem):
            fetch(f"{server.url}/png", MediaOptions(media_proxy=f"http://127.0.0.1:{port}", **named))
    with proxy_server(b"HTTP/1.1 200 OK\r\n\r\n") as (port, heads):
        options = MediaOptions(media_proxy="environment", **named)
        monkeypatch.setenv("http_proxy", f"http://us%20er:secret@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        assert fetch(f"{server.url}/png", options) == PNG
        assert heads[0].endswith(b"\r\nProxy-Authorization: Basic dXMgZXI6c2VjcmV0\r\n\r\n")
        monkeypatch.setenv("no_proxy", "elsewhere,127.0.0.1")
        assert fetch(f"{server.url}/png", options) == PNG and len(heads) == 1
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", "socks5://us:secret@127.0.0.1")
        with pytest.raises(MediaError, match="proxy .media_proxy. that is not http://HOST:PORT") as refused:
            fetch(f"{server.url}/png", options)
        assert "secret" not in str(refused.value)
        assert fetch(f"{server.url}/png", MediaOptions(**named)) == PNG  # which only the option has read
    for wrong in ("http://key:secret@proxy:80", "https://proxy:80", "http://proxy", "http://proxy:99999", 7):
        with pytest.raises(ConfigError, match="media_proxy is .*; allowed: http://HOST:PORT") as error:
            EngineConfig(media_proxy=wrong)
        assert "secret" not in str(error.value)
