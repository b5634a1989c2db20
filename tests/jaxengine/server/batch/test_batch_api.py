"""/v1/files and /v1/batches with OpenAI's own client: forms, owners, quotas, ends, and batches that go on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.keys import NO_KEY
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch import service
from jaxengine.server.batch.service import BatchService
from jaxengine.server.batch.store import BatchStore
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Answer, Connection, http_client
from tests.jaxengine.server.http.checked_document import Checked
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(service, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(service, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(service, "_REFUSED_SECONDS", 0.05)


def config(tmp_path: Path, **more: Any) -> ServerConfig:
    return ServerConfig(
        served_model_name="tiny", enable_batch_api=True, batch_storage_dir=str(tmp_path / "store"), **more
    )


def fail(error: Exception) -> None:
    raise error


def no_space() -> None:
    fail(OSError(errno.ENOSPC, "no space"))


def line(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


@contextlib.asynccontextmanager
async def running(app: Any, engine: Any, options: ServerConfig):
    task = asyncio.create_task(BatchService(app, engine, options).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def ended(client: openai.AsyncOpenAI, batch: Any, *statuses: str) -> Any:
    for _ in range(1000):
        batch = await client.batches.retrieve(batch.id)
        if batch.status in (statuses or ("completed", "failed", "expired", "cancelled")):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(batch)


async def start(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Any:
    file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
    fields: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, **fields)


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_from_file_to_results(chat_engine, tmp_path):
    """Answers have the types of /openapi.json, and a request that fails is in the error file."""
    options, engine = config(tmp_path), ScriptedEngine(chat_engine, "Yes.")
    app = create_app(engine, options)
    client = openai_client(app)
    content = line("a") + b"\n" + line("none", messages=[]) + line("b", priority=None)
    file = await client.files.create(
        file=("../../etc/passwd", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.purpose) == ("../../etc/passwd", len(content), "batch")
    assert file.expires_at is not None and file.expires_at - file.created_at == 3600
    assert (await client.files.content(file.id)).content == content
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
    )
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 86400
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.files.delete(file.id)
    async with running(app, engine, options):
        batch = await ended(client, batch)
    assert batch.status == "completed" and batch.metadata == {"for": "a test"} and batch.errors is None
    assert batch.request_counts is not None and batch.request_counts.model_dump() == {
        "total": 3,
        "completed": 2,
        "failed": 1,
    }
    good, bad = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    assert [row["custom_id"] for row in good] == ["a", "b"] and [row["custom_id"] for row in bad] == ["none"]
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
    assert bad[0]["response"]["status_code"] == 400 and "messages" in bad[0]["error"]["message"]
    assert [call[3] for call in engine.calls] == [0, 0]  # the engine's policy has no priorities
    await check_lists(client, app, file, batch)


async def check_lists(client: openai.AsyncOpenAI, app: Any, file: Any, batch: Any) -> None:
    other = await start(client, line("x"))
    assert [each.id async for each in client.batches.list(limit=1)] == [other.id, batch.id]
    names = [each.id async for each in client.files.list(limit=1, order="asc")]
    assert names[0] == file.id and {batch.output_file_id, batch.error_file_id} < set(names) and len(names) == 4
    assert [each.id async for each in client.files.list(purpose="batch")] == [other.input_file_id, file.id]
    async with http_client(app, "none") as plain:
        checked = Checked((await plain.get("/openapi.json")).json())
        for path, name, given in (("/v1/files", "file_id", file.id), ("/v1/batches", "batch_id", batch.id)):
            for form, at in ((path, path), (f"{path}/{{{name}}}", f"{path}/{given}")):
                checked.check("get", form, "application/json", [(await plain.get(at)).json()])
        assert (await plain.get("/v1/files?after=file-0")).status_code == 400
        assert (await plain.get("/v1/batches?limit=101")).status_code == 400
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


async def test_a_batch_goes_on_where_it_was(chat_engine, tmp_path, monkeypatch):
    """Whoever takes over asks only for what has no result, also after a full disk; each custom_id is there once."""
    options, engine = config(tmp_path), ScriptedEngine(chat_engine, "Yes.")
    app = create_app(engine, options)
    client = openai_client(app)
    ids = [f"id {number}" for number in range(40)]
    batch = await start(client, b"".join(map(line, ids)))
    plain, seen, again = service.call, [], []

    async def slow(app: Any, each: Any, state: Any):
        (partial,) = tmp_path.rglob("*.partial")
        again.extend([each.custom_id] if f'"{each.custom_id}"' in partial.read_text() else [])
        await asyncio.sleep(0.02)
        seen.append(each.custom_id)
        if len(seen) == 9:
            raise OSError(errno.ENOSPC, "no space")
        return (429 if len(seen) % 5 == 0 else 200), (await plain(app, each, state))[1]

    monkeypatch.setattr(service, "call", slow)
    for most in (8, 9, 16, 23, 30):
        async with running(app, engine, options), running(app, engine, options):  # one of them waits
            while len(seen) < most:
                await asyncio.sleep(0.01)
        (partial,) = tmp_path.rglob("*.partial")
        with partial.open("ab") as file:
            file.write(b'{"custom_id": "id 3')  # as a killed process leaves it
    sweep, bugs = BatchStore.sweep, [KeyError("a bug")]
    monkeypatch.setattr(BatchStore, "sweep", lambda store: sweep(store) if not bugs else fail(bugs.pop()))
    async with running(app, engine, options):
        batch = await ended(client, batch)
    assert not bugs
    assert batch.status == "completed" and batch.error_file_id is None
    assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == ids
    assert not again
    assert not [*tmp_path.rglob("*.partial"), *tmp_path.rglob("*.whole"), *tmp_path.rglob("upload-*")]


async def test_ends_before_all_is_answered(chat_engine, tmp_path):
    options, engine = config(tmp_path), ScriptedEngine(chat_engine, "Yes.")
    app = create_app(engine, options)
    client, store = openai_client(app), BatchStore.of(options)

    async def call(app: Any, each: Any, state: Any):
        if each.custom_id != "quick":
            await asyncio.Event().wait()
        return 200, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "call", call)
        async with running(app, engine, options):
            for status in ("cancelled", "expired"):
                batch = await start(client, line("quick") + line("slow"))
                owner = next((tmp_path / "store" / "owners").iterdir()).name
                while not (await client.batches.retrieve(batch.id)).request_counts.completed:
                    await asyncio.sleep(0.02)
                if status == "cancelled":
                    assert (await client.batches.cancel(batch.id)).status == "cancelling"
                else:
                    store.change(owner, batch.id, lambda record: record.update(expires_at=int(time.time())))
                batch = await ended(client, batch)
                assert batch.status == status
                assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == ["quick"]
                with pytest.raises(openai.BadRequestError, match=f"is {status}"):
                    await client.batches.cancel(batch.id)
                if status == "expired":
                    (late,) = await rows(client, batch.error_file_id)
                    assert (late["custom_id"], late["response"]) == ("slow", None)
                    assert late["error"]["code"] == "batch_expired"
    assert engine.calls == []


async def test_files_that_are_no_requests(chat_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "MAX_LINES", 3)
    options, engine = config(tmp_path), ScriptedEngine(chat_engine, "Yes.")
    app = create_app(engine, options)
    client = openai_client(app)
    cases = (
        (b"\n", None, "it has no requests"),
        (line("a") + b"{", 2, "it is not valid JSON: it ends too early"),
        (line("a") + line("a"), 2, "custom_id 'a' is that of line 1 too"),
        (line("a") + line("b", "/v1/completions"), 2, f"url must be the batch's endpoint, {CHAT}, got /v1/completions"),
        (b"".join(map(line, "abcd")), 4, "it is one request too many; allowed: 3"),
        (b"\xff" * 5000, 1, "it is not valid Unicode text in UTF-8"),
    )
    batches = [await start(client, content) for content, _, _ in cases]
    async with running(app, engine, options):
        for batch, (_, number, problem) in zip(batches, cases, strict=True):
            batch = await ended(client, batch)
            assert batch.status == "failed" and batch.output_file_id is None
            (error,) = batch.errors.data
            assert (error.line, error.message) == (number, problem)


FORM = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
GOOD = FORM % (b"purpose", b"", b"batch")
FILE = FORM % (b"file", b'; filename="a"', b"{}")


async def test_forms_that_are_refused(chat_engine, tmp_path, monkeypatch):
    """Nothing of them is left."""
    app = create_app(chat_engine, config(tmp_path, max_batch_file_bytes=1 << 20))

    async def post(body: Any, **headers: str) -> Answer:
        named = {"Content-Type": "multipart/form-data; boundary=x", **headers}
        async with http_client(app) as client:
            return Answer(await client.post("/v1/files", content=body, headers=named))

    for body, status, problem in (
        (GOOD + b"--x--", 400, "file is missing"),
        (FILE + b"--x--", 400, "purpose is None; allowed: 'batch'"),
        (FILE + FORM % (b"purpose", b"", b"fine-tune") + b"--x--", 400, "purpose is 'fine-tune'"),
        (GOOD + FORM % (b"file", b'; filename="%b"' % (b"a" * 300), b"") + b"--x--", 400, "file has the name 'aaa"),
        (GOOD + FORM % (b"file", b'; filename="a\x00"', b"") + b"--x--", 400, "file has the name 'a"),
        (GOOD + FILE + FILE + b"--x--", 400, "file is given twice"),
        (GOOD + GOOD + FILE + b"--x--", 400, "purpose' is given 2 times"),
        (GOOD + FILE + FORM % (b"expires_after[seconds]", b"", b"60") + b"--x--", 400, "expires_after[anchor] is None"),
        (GOOD + FILE, 400, "the form is cut short"),
        (GOOD + FORM % (b"file", b"", b"0" * (3 << 20)) + b"--x--", 413, "file has more than 1048576 bytes"),
    ):
        answer = await post(body)
        assert answer.status == status and problem in answer.error["message"], (answer.error, problem)
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71):
        assert (await post(b"{}", **{"Content-Type": kind})).status == 415
    for spared in ([], [None]):  # the disk is full for the content, or for its record alone
        monkeypatch.setattr(os, "fsync", lambda _, spared=spared: spared.pop() if spared else no_space())
        assert (await post(GOOD + FILE + b"--x--")).status == 507
    monkeypatch.undo()
    assert not [each for each in (tmp_path / "store" / "owners").rglob("*") if each.is_file()]
    async with http_client(create_app(chat_engine, ServerConfig())) as client:
        for path in ("/v1/files", "/v1/batches"):
            answer = Answer(await client.get(path))
            assert answer.status == 404 and "--enable-batch-api and --batch-storage-dir" in answer.error["message"]


async def test_a_large_file_is_never_held_whole(chat_engine, tmp_path):
    app, piece = create_app(chat_engine, config(tmp_path)), b"0" * (1 << 20)
    tracemalloc.start()
    head = GOOD + FILE[:-4]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    connection = Connection(app, "/v1/files", head, *[piece] * 64, b"\r\n--x--", headers=headers)
    answer = json.loads(await asyncio.wait_for(connection.chunks.get(), 60))
    await connection.leave()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer["bytes"] == 64 << 20 and peak < 16 << 20
    await asyncio.to_thread(BatchStore.of(config(tmp_path)).delete_file, NO_KEY.hex(), answer["id"])


async def test_keys_own_what_they_store(chat_engine, tmp_path):
    """Another key finds nothing, quotas are each key's, and a key that is gone answers nothing any more."""
    options = config(
        tmp_path,
        api_key=("one", "two"),
        max_batch_files_per_client=2,
        max_batches_per_client=1,
        max_batch_bytes_per_client=1024,
    )
    engine = ScriptedEngine(chat_engine, "Yes.")
    app = create_app(engine, options)
    one, two = (openai_client(app).with_options(api_key=key) for key in ("one", "two"))
    batch = await start(one, line("a"))
    for get in (
        two.batches.retrieve(batch.id),
        two.files.retrieve(batch.input_file_id),
        two.batches.cancel(batch.id),
        two.files.content(batch.input_file_id),
        two.files.delete(batch.input_file_id),
        two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        one.files.retrieve("../../x"),
        one.files.retrieve(batch.id),
        one.batches.retrieve("batch_"),
    ):
        with pytest.raises(openai.NotFoundError):
            await get
    assert not (await two.files.list()).data and not (await two.batches.list()).data
    with pytest.raises(openai.RateLimitError, match="max_batches_per_client"):
        await start(one, line("b"))
    with pytest.raises(openai.RateLimitError, match="max_batch_files_per_client"):
        await start(one, line("c"))
    with pytest.raises(openai.RateLimitError, match="max_batch_bytes_per_client"):
        await start(two, line("d", user="x" * 1000))
    async with running(app, engine, options):
        batch = await ended(one, batch)
    assert batch.status == "completed" and engine.clients == [None]
    locked = config(tmp_path, api_key="two", max_batch_files_per_client=9)
    batch = await start(two, line("e"))
    async with running(create_app(engine, config(tmp_path, api_key="one")), engine, locked):
        batch = await ended(two, batch)
    assert (await rows(two, batch.error_file_id))[0]["response"]["status_code"] == 401


def test_a_file_counts_once_in_its_owners_quota(tmp_path):
    store = BatchStore.of(config(tmp_path, max_batch_bytes_per_client=1024))
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "store", *(tmp_path / "store").glob("*/"))} == {0o700}
    for size in (600, 424):
        upload = store.upload("aa")
        upload.write(b"x" * size)
        assert upload.keep("a.jsonl", "batch", None)["bytes"] == size
    upload = store.upload("aa")
    upload.write(b"x")
    with pytest.raises(OverloadedError, match="1025 bytes; allowed: 1024"):
        upload.keep("a.jsonl", "batch", None)
    upload.discard()


def test_a_damaged_record_is_left_out_and_hides_no_other(tmp_path, caplog):
    store = BatchStore.of(config(tmp_path))
    ids = []
    for name in "ab":
        upload = store.upload("me")
        upload.write(b"{}")
        ids.append(upload.keep(name, "batch", None)["id"])
    paths = [tmp_path / "store" / "owners" / "me" / f"{each}.json" for each in ids]
    whole = paths[0].read_bytes()
    flipped = whole.replace(b'"processed"', b'"qrocessed"')
    other = paths[1].read_bytes()  # whole, of another id
    for content in (flipped, other, whole[:-1], b"{}", b"[]", b"[" * 100_000, b"", b"\xff", b"null"):
        paths[0].write_bytes(content)
        for _ in range(2):
            assert store.file("me", ids[0]) is None and [each["id"] for each in store.files("me")] == ids[1:], content
    assert sum("is damaged" in each.getMessage() for each in caplog.records) == 1
    for content in (whole, whole.partition(b"\n")[0]):
        paths[0].write_bytes(content)
        assert store.file("me", ids[0])["filename"] == "a"
    store = BatchStore.of(config(tmp_path, max_batches_per_client=1))
    fields = {"status": "validating", "created_at": 0}
    lost = paths[0].with_name(f"{store.create('me', fields)['id']}.json")
    lost.write_bytes(b"")
    batch = store.create("me", fields)  # what cannot be read takes no place
    store.sweep()
    assert not lost.exists() and [each["id"] for each in store.batches("me")] == [batch["id"]]


def test_old_things_are_removed(tmp_path, monkeypatch):
    store = BatchStore.of(config(tmp_path, batch_retention_hours=1))
    upload = store.upload("me")
    upload.write(b"{}")
    file = upload.keep("a", "batch", None)
    upload.discard()
    left = store.upload("me")
    fields = {"status": "validating", "input_file_id": file["id"], "created_at": 0}
    batch = store.create("me", fields)["id"]
    path = tmp_path / "store" / "owners" / "me" / f"{file['id']}.json"
    path.write_text(json.dumps({**file, "expires_at": 1}))
    lone = path.with_name(f"file-{32 * '0'}.data")  # as a process leaves it that was killed before its record
    lone.write_text("")
    for each in (lone, left._path):
        os.utime(each, (1, 1))
    store.sweep()
    assert path.exists() and not Path(left._path).exists() and not lone.exists()  # a batch still reads the first
    with monkeypatch.context() as ended:
        ended.setattr(Path, "glob", lambda folder, pattern: [folder / "upload-gone"])  # since it was listed
        store.sweep()
    with monkeypatch.context() as full, pytest.raises(OSError, match="no space"):
        full.setattr(os, "fsync", lambda _: no_space())
        store.create("me", fields)
    assert store.file("me", file["id"]) is None and store.live() == [("me", batch)]
    store.finish("me", batch, [b"x\n"], [], {"status": "completed"})
    assert [each["filename"] for each in store.files("me")] == [f"{batch}_output.jsonl"]
    live, results = tmp_path / "store" / "live" / batch, Path(f"{store.results_path('me', batch)}.partial")
    live.write_text("me")  # as a process leaves them that was killed after it had stored the batch's end
    results.write_text("")
    assert store.live() == [] and not live.exists() and not results.exists()
    store.sweep()
    assert not path.exists() and store.batch("me", batch) is None and not list(store.batches("me"))
    (tmp_path / "store" / "live" / batch).write_text("me")  # as a process leaves it that was killed at the end
    assert store.live() == []
    (tmp_path / "file").write_text("")
    for name, options in (
        ("batch_storage_dir", {"batch_storage_dir": None}),
        ("batch_storage_dir", {"enable_batch_api": False}),
        ("batch_retention_hours", {"batch_retention_hours": 0.5}),
    ):
        with pytest.raises(ConfigError, match=name):
            config(tmp_path, **options) if name == "batch_retention_hours" else ServerConfig(
                **{"enable_batch_api": True, "batch_storage_dir": "x", **options}
            )
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore.of(ServerConfig(enable_batch_api=True, batch_storage_dir=str(tmp_path / "file")))
