"""An HTTP server on this machine that answers as it should not: slowly, elsewhere, endlessly."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator

from tests.jaxengine.media.pictures import PNG


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            getattr(self, "answer_" + self.path.partition("?")[0].strip("/").replace("-", "_").partition("/")[0])()

    def log_message(self, format, *args):
        """Nobody reads it."""

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer_png(self):
        self.say(200, PNG)

    def answer_chunked(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(PNG), 50):
            piece = PNG[at : at + 50]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def answer_missing(self):
        self.say(404, b"no")

    def answer_elsewhere(self):
        self.say(302, Location="http://127.0.0.1:1/latest/meta-data")

    def answer_here(self):
        self.say(301, Location="/png")

    def answer_large(self):
        self.say(200, Content_Length=str(1 << 40))

    def answer_endless(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 16))

    def answer_short(self):
        self.say(200, PNG[:40], Content_Length=str(len(PNG)), Connection="close")
        self.close_connection = True

    def answer_packed(self):
        self.say(200, PNG, Content_Encoding="gzip")

    def answer_dripping(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
        while True:
            self.wfile.write(b"a")
            time.sleep(0.02)

    def answer_dripping_body(self):
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"a")
            time.sleep(0.02)

    def answer_silent(self):
        time.sleep(2)

    def answer_nonsense(self):
        self.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        self.close_connection = True


class WebServer(http.server.ThreadingHTTPServer):
    """paths: that were asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Clients that leave are what is tested."""


@contextlib.contextmanager
def web_server() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
