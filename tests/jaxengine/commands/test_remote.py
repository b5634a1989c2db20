"""`chat --url` and `complete --url` against a server that answers with what it was sent."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import sys
import threading

import pytest

import jaxengine.api.llm
from jaxengine.commands.cli import main
from tests.tables import each_row

PNG = b"\x89PNG"


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization"), None))
        if self.path in BROKEN:
            self.send_response(200)
            self.send_header("Content-Length", "300000")
            self.end_headers()
            self.wfile.write(BROKEN[self.path])
            return
        self._answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        said = body.get("prompt") or body["messages"][-1]["content"]
        if said == "refused deeply":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"[" * 60_000)
            return
        if said == "refused":
            self._answer(400, {"error": {"message": "too long"}})
            return
        self.send_response(200)
        self.end_headers()
        wrap = (lambda text: {"text": text}) if "prompt" in body else (lambda text: {"delta": {"content": text}})
        events = [{"choices": [wrap(f"<{word}>")]} for word in str(said).split()]
        if "messages" in body:
            events.insert(0, {"choices": [{"delta": {"role": "assistant", "reasoning": "hm."}}]})
        events.append({"error": {"message": "broken"}} if said == "breaks" else {"choices": [], "usage": USAGE})
        for event in [OTHER[said]] if said in OTHER else events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if said != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        """Prints nothing."""

    def _answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


# Lists of models that are no such list, by their paths: one is cut off, one nested too deeply.
BROKEN = {"/cut/models": b"{", "/deep/models": b"[" * 300_000}
# Events of servers that stream otherwise than OpenAI's, by the prompt.
OTHER = {
    "number": 3,
    "choices": {"choices": {"text": "a"}},
    "choice": {"choices": ["a"]},
    "delta": {"choices": [{"delta": "a"}]},
    "text": {"choices": [{"text": ["a"]}]},
    "usage": {"choices": [], "usage": 7},
    "completion_tokens": {"usage": {"completion_tokens": "7"}},
}
USAGE = {"prompt_tokens": 1, "completion_tokens": 7}


@pytest.fixture
def talk(monkeypatch, capsys):
    monkeypatch.setattr(jaxengine.api.llm, "LLM", None)  # nothing is loaded
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(command, lines, *arguments, path="/v1"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        server.seen.clear()
        status = main([command, "--url", f"http://127.0.0.1:{server.server_port}{path}", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err, list(server.seen)

    with contextlib.closing(server.socket):
        yield run
        server.shutdown()


def test_a_conversation_goes_to_the_server_without_its_reasoning(talk, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    options = ("--system", "S", "--max-tokens", "9", "--api-key-file", str(tmp_path / "key"))
    status, out, err, seen = talk("chat", "a b\nc\n", *options)
    assert status == 0 and out == "hm.<a><b>\nhm.<c>\n" and err.count("[7 tokens") == 2
    assert [(path, key) for path, key, _ in seen] == [
        ("/v1/models", "Bearer secret"),
        *[("/v1/chat/completions", "Bearer secret")] * 2,
    ]
    body = seen[-1][2]
    assert body["model"] == "first" and body["max_tokens"] == 9 and body["stream"] is True
    assert [(each["role"], each["content"]) for each in body["messages"]] == [
        ("system", "S"),
        ("user", "a b"),
        ("assistant", "<a><b>"),
        ("user", "c"),
    ]


def test_pictures_are_sent_as_data_and_as_addresses(talk, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    *_, seen = talk("chat", "", "--quick", "look", "--image", str(tmp_path / "a.png"), "--image", "https://a.org/b")
    parts = seen[-1][2]["messages"][0]["content"]
    addresses = [part["image_url"]["url"] for part in parts[:2]]
    assert addresses == ["data:image/png;base64,iVBORw==", "https://a.org/b"]


@each_row(("path", "message"), [("/cut", "no server answers at"), ("/deep", "no model is found at")])
def test_a_broken_list_of_models_is_one_line(talk, path, message):
    status, _, err, _ = talk("complete", "a", path=path)
    assert status == 2 and message in err and err.count("\n") == 1


def test_texts_are_continued(talk):
    extra = ("--extra-args", '{"mine": 1}', "--model-name", "second", "--thinking-token-budget", "5")
    status, out, _, seen = talk("complete", "a b\n\nc\n", *extra, path="")
    assert (status, out) == (0, "<a><b>\n<c>\n")
    (first, second) = (body for path, _, body in seen if path == "/v1/completions")
    assert first["prompt"] == "a b" and second["model"] == "second" and second["vllm_xargs"] == {"mine": 1}
    assert second["thinking_token_budget"] == 5 and "thinking_words" not in second  # the server has its own
    assert len(seen) == 2  # a model with a name is not asked for


@each_row(
    ("command", "text", "message"),
    [
        ("chat", "refused", "answered 400: too long"),
        ("complete", "refused", "answered 400: too long"),
        ("complete", "refused deeply", "answered 400: Bad Request"),
        ("complete", "breaks", "broken"),
        ("chat", "cut", "was cut off"),
        *(("complete", said, "the server's stream is not OpenAI's: ") for said in OTHER),
    ],
)
def test_a_refusal_is_said_and_the_next_text_is_answered(talk, command, text, message):
    status, out, err, _ = talk(command, f"{text}\nnext\n")
    assert status == 0 and message in err and out.endswith("<next>\n")
    assert talk(command, "", "--quick", text)[0] == 1


@each_row(
    ("arguments", "message"),
    [
        (("--url", "ftp://a"), "url is 'ftp://a'; allowed: http://HOST:PORT/v1"),
        (("--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1/v1"),
        (("--url", "http://u:p@a/v1"), "allowed: http://HOST:PORT/v1"),
        (("--url", "http://a", "--dtype", "float32"), "dtype is 'float32'; allowed: absent with --url"),
        (("--url", "http://a", "some/model"), "--model-name names the server's model"),
        (("--url", "http://a", "--stop-after", '{"strings": ["x"]}'), "stop_after"),
        (("--url", "http://a", "--api-key", "a", "--api-key-file", "b"), "absent with --api-key"),
        (("--url", "http://a", "--api-key-file", "/no/such"), "api_key_file is '/no/such'; allowed: a text file"),
        (("--model-name", "m"), "absent without --url; --model names the model to load"),
        (("--api-key", "hidden"), "api_key is '...'; allowed: absent without --url"),
        (("--url", "http://a", "--temperature", "9"), "temperature"),
        (("--url", "http://a", "--thinking-token-budget", "-5"), "thinking_token_budget"),
        (("--thinking-token-budget", "5"), "must be None without thinking_words"),
    ],
)
def test_what_cannot_be_honoured_is_refused(capsys, arguments, message):
    for command in ("chat", "complete"):
        assert main([command, *arguments]) == 2
        assert message in capsys.readouterr().err
