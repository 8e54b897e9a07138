"""What lies in Temporal's history: no secrets, and nothing large."""

import asyncio
import http.server
import json
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shotclock.core.errors import Failure
from shotclock.flows.file.loader import load_text
from shotclock.temporal._payloads import (
    INLINE_LIMIT,
    THRESHOLD,
    EncryptingCodec,
    UnreadablePayload,
    make_converter,
    read_keys,
    write_workflow,
)
from shotclock.temporal.connection import connect, read_address
from tests.temporal.conftest import Cluster, Program, Runs, wait_until

WITHIN_S = 30


# --- the codec --------------------------------------------------------------------------------------------


def converted(variables: dict[str, str], value: object) -> tuple[object, bytes]:
    """The value after a journey, and what lay on the way."""

    async def main() -> tuple[object, bytes]:
        converter = make_converter(variables)
        payloads = await converter.encode([value])
        (back,) = await converter.decode(payloads)
        return back, b"".join(payload.SerializeToString() for payload in payloads)

    return asyncio.run(main())


def test_what_is_encrypted_comes_back_and_cannot_be_read_on_the_way(tmp_path: Path) -> None:
    key = {"SHOTCLOCK_CODEC_KEY": secrets.token_hex(32), "SHOTCLOCK_PAYLOADS": str(tmp_path)}
    for value in ({"password": "hunter2-hunter2"}, "hunter2-hunter2" * 20_000):
        back, way = converted(key, value)
        assert back == value and b"hunter2" not in way
    assert not any(b"hunter2" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_another_key_reads_nothing() -> None:
    payload = make_converter({}).payload_converter.to_payload("text")
    old, new = b"a" * 32, b"b" * 32
    sent = asyncio.run(EncryptingCodec([old]).encode([payload]))
    for keys, ours in (([new], "[0-9a-f]{16}$"), ([], "not set$")):
        with pytest.raises(UnreadablePayload, match=f"with key [0-9a-f]{{16}}, and SHOTCLOCK_CODEC_KEY is {ours}"):
            asyncio.run(EncryptingCodec(keys).decode(sent))
    assert asyncio.run(EncryptingCodec([old]).decode([payload])) == [payload], "sent before there was a key"


def test_the_first_of_several_keys_encrypts_and_each_of_them_reads() -> None:
    payload = make_converter({}).payload_converter.to_payload("text")
    old, new = b"a" * 32, b"b" * 32
    for keys, reads in (([new, old], [new]), ([old, new], [old])):
        sent = asyncio.run(EncryptingCodec(keys).encode([payload]))
        assert asyncio.run(EncryptingCodec(reads).decode(sent)) == [payload]
        assert asyncio.run(EncryptingCodec(keys[::-1]).decode(sent)) == [payload]
    assert read_keys({"SHOTCLOCK_CODEC_KEY": f"{new.hex()}, {old.hex()}"}) == [new, old]


@pytest.mark.parametrize("text", ["short", "zz" * 32, "ab" * 31])
def test_a_key_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Failure, match="SHOTCLOCK_CODEC_KEY"):
        read_keys({"SHOTCLOCK_CODEC_KEY": text})


# --- what is large ----------------------------------------------------------------------------------------


def test_what_is_large_lies_in_a_directory(tmp_path: Path) -> None:
    value = "x" * (THRESHOLD + 1)
    back, way = converted({"SHOTCLOCK_PAYLOADS": f"file://{tmp_path}"}, value)
    assert back == value and len(way) < 1000
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1
    back, way = converted({"SHOTCLOCK_PAYLOADS": str(tmp_path)}, "small")
    assert back == "small" and b"small" in way


def test_what_is_large_without_a_place_and_what_is_not_there_name_the_variable_to_set(
    tmp_path: Path, object_store: tuple[str, dict[str, bytes]]
) -> None:
    assert converted({}, "x" * (THRESHOLD + 1))[0], "several values together may be larger than one"
    with pytest.raises(ValueError, match="set SHOTCLOCK_PAYLOADS to"):
        converted({}, "x" * INLINE_LIMIT)
    sent = asyncio.run(make_converter({"SHOTCLOCK_PAYLOADS": str(tmp_path / "one")}).encode(["x" * INLINE_LIMIT]))
    for place in ("", str(tmp_path / "other"), object_store[0]):
        with pytest.raises(UnreadablePayload, match="SHOTCLOCK_PAYLOADS"):
            asyncio.run(make_converter({"SHOTCLOCK_PAYLOADS": place}).decode(sent))


@pytest.fixture
def object_store() -> Iterator[tuple[str, dict[str, bytes]]]:
    kept: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            body = kept.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/bucket", kept
    server.shutdown()
    server.server_close()


def test_what_is_large_lies_in_an_object_store(object_store: tuple[str, dict[str, bytes]]) -> None:
    url, kept = object_store
    value = {"text": "y" * (THRESHOLD + 1)}
    back, way = converted({"SHOTCLOCK_PAYLOADS": url}, value)
    assert back == value and len(way) < 1000 and len(kept) == 1
    (path,) = kept
    kept[path] += b"!"  # somebody has changed it
    with pytest.raises(Exception, match="not what was stored"):
        asyncio.run(make_converter({"SHOTCLOCK_PAYLOADS": url}).decode(asyncio.run(_sent(url, value, kept))))


async def _sent(url: str, value: object, kept: dict[str, bytes]) -> list[object]:
    payloads = await make_converter({"SHOTCLOCK_PAYLOADS": url}).encode([value])
    for path in kept:
        kept[path] += b"!"
    return payloads


# --- of a whole run ---------------------------------------------------------------------------------------

SECRET = "s3cr3t-that-nobody-may-see"


@pytest.mark.slow
def test_an_agent_whose_tool_is_a_workflow_is_refused() -> None:
    written = b"tools: {a: {workflow: a.yaml}}\nsteps: {it: {type: ai, prompt: p, ai: {tools: a}}}"
    workflow = load_text(written).workflow
    assert workflow is not None
    with pytest.raises(Failure, match="cannot be an agent's tool on Temporal"):
        write_workflow(workflow, {}, {})


def test_what_only_works_on_one_machine_is_refused() -> None:
    for written, word in (
        (b"concurrency: g\nsteps: {a: {exec: x}}", "`concurrency`"),
        (b"steps: {a: {exec: x, artifacts: y}}", "`artifacts`"),
    ):
        workflow = load_text(written).workflow
        assert workflow is not None
        with pytest.raises(Failure, match=word) as refused:
            write_workflow(workflow, {}, {})
        assert refused.value.code == "PRECONDITION"


def test_a_file_with_a_secret_is_refused_where_history_would_show_it(cluster: Cluster, tmp_path: Path) -> None:
    runs = Runs(tmp_path, cluster.url)
    text = f"""
        steps:
          uses: {{type: command, exec: "test -n \\"$API_TOKEN\\"", env: {{API_TOKEN: {SECRET}}}}}
        """
    code, envelope = runs.run(text)
    assert code == 4 and envelope["error"]["code"] == "PRECONDITION" and SECRET not in json.dumps(envelope)
    assert "SHOTCLOCK_CODEC_KEY" in envelope["error"]["suggestion"]


@pytest.mark.slow
def test_no_secret_and_nothing_large_is_in_the_history_of_a_run(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", secrets.token_hex(32))
    monkeypatch.setenv("SHOTCLOCK_PAYLOADS", str(tmp_path / "payloads"))
    monkeypatch.setenv("DEPLOY_TOKEN", f"{SECRET}-of-the-worker")
    queue, run_id = f"q-{tmp_path.name}", f"secret-{time.monotonic_ns()}"
    worker = cluster.start_worker("--queue", queue)
    runs = Runs(tmp_path, cluster.url)
    try:
        code, envelope = runs.run(
            f"""
            steps:
              uses:
                type: command
                exec: "echo $API_TOKEN $DEPLOY_TOKEN; printf %s \\"$API_TOKEN\\" | wc -c"
                env: {{API_TOKEN: {SECRET}, DEPLOY_TOKEN: "${{DEPLOY_TOKEN}}"}}
              large: {{type: command, exec: "head -c 900000 /dev/zero | tr '\\\\\\\\0' x"}}
              reads: {{type: command, exec: "wc -c", stdin: "{{{{ outputs.large }}}}", depends_on: [large]}}
            """,
            *("--queue", queue, "--run-id", run_id),
        )
        assert code == 0, json.dumps(envelope)[:3000]
        said = envelope["data"]["steps"]["uses"]["output"]
        assert SECRET not in json.dumps(envelope["data"]) and said.endswith(f"\n{len(SECRET)}"), said
        assert envelope["data"]["steps"]["reads"]["output"] == "900000"

        async def history() -> bytes:
            client = await connect(read_address(cluster.url, {}))
            fetched = await client.get_workflow_handle(run_id).fetch_history()
            return b"".join(event.SerializeToString() for event in fetched.events)

        told = asyncio.run(asyncio.wait_for(history(), WITHIN_S))
        assert SECRET.encode() not in told and len(told) < 200_000

        # Whoever has not the key sees that there is a run, and is told why not more.
        for other in (None, secrets.token_hex(32)):
            monkeypatch.delenv("SHOTCLOCK_CODEC_KEY")
            if other is not None:
                monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", other)
            code, listed = runs.call("job", "list")
            assert code == 0 and run_id in [job["job_id"] for job in listed["data"]["jobs"]], listed
            for words in (["report", run_id], ["run", "--resume", run_id], ["job", "wait", run_id]):
                code, refused = runs.call(*words)
                assert code == 14 and "SHOTCLOCK_CODEC_KEY" in refused["error"]["suggestion"], (words, refused)
            monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", "")
    finally:
        worker.stop()
        wait_until(lambda: worker.process.poll() is not None, "the end of the worker")


@pytest.mark.slow
def test_a_large_value_without_a_shared_folder_is_refused_at_the_start_or_when_its_step_ends(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_PAYLOADS", "")
    queue, runs = f"q-{tmp_path.name}", Runs(tmp_path, cluster.url)
    flow = "steps: {large: {type: command, exec: 'head -c 140000 /dev/zero | tr \"\\0\" x'}}"
    (tmp_path / "large.yaml").write_text(f"inputs: {{text: {{default: {'y' * 140_000}}}}}\n{flow}")
    code, refused = runs.run(None, "large.yaml", "--queue", queue)
    assert (code, refused["error"]["code"], refused["meta"]["side_effects"]) == (4, "PRECONDITION", "none"), refused
    assert "set SHOTCLOCK_PAYLOADS to" in refused["error"]["suggestion"], refused
    worker = cluster.start_worker("--queue", queue, home=tmp_path / "of-the-worker")
    try:
        code, envelope = runs.run(flow, "--queue", queue)
    finally:
        worker.stop()
    error = envelope["data"]["steps"]["large"]["error"]
    assert (code, error["code"]) == (3, "OUTPUT_INVALID") and "set SHOTCLOCK_PAYLOADS to" in error["message"], envelope


@pytest.mark.slow
def test_another_key_is_named_by_run_report_and_worker_and_with_the_old_one_beside_it_the_run_continues(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, queue, run_id = secrets.token_hex(32), secrets.token_hex(32), f"q-{tmp_path.name}", f"key-{tmp_path.name}"
    runs = Runs(tmp_path, cluster.url)

    def start_worker(keys: str, name: str = queue) -> Program:
        monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", keys)
        return cluster.start_worker("--queue", name)

    workers = [start_worker(old), start_worker(new, f"{queue}-new")]
    monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", old)
    try:
        running = runs.start(
            f"""
            timeout: 100
            steps:
              there: {{type: command, exec: touch there, runs_on: {queue}-new, continue_on_failure: true}}
              waits:
                type: command
                exec: "echo begun >> begun; while test ! -e go; do sleep 0.1; done"
                depends_on: [there]
                idempotent: true
            finally: {{end: {{type: command, exec: touch ended}}}}
            """,
            *("--queue", queue, "--run-id", run_id, "--heartbeat", "2s"),
        )
        runs.wait_for("begun")
        workers[0].kill()
        workers.append(start_worker(new))
        monkeypatch.setenv("SHOTCLOCK_CODEC_KEY", old)
        code, envelope = running.ended()
        named = f"a worker of run {run_id!r} cannot read its record: it is encrypted with key "
        assert code == 14 and envelope["error"]["message"].startswith(named), envelope
        assert envelope["meta"]["side_effects"] == "unknown" and "NEW,OLD" in envelope["error"]["suggestion"]
        code, told = runs.call("report", run_id)
        assert code == 14 and told["error"]["message"].startswith(named), told
        said = workers[2].err.read_text()
        assert ": it is encrypted with key " in said and "ValueError" not in said, said

        workers[2].kill()
        workers.append(start_worker(f"{new},{old}"))
        (tmp_path / "go").touch()
        wait_until(
            lambda: runs.run(None, "--resume", run_id)[0] != 14, "the engine, which pauses before it tries again"
        )
        code, envelope = runs.run(None, "--resume", run_id)
        assert code == 0 and (tmp_path / "ended").exists(), envelope
        there = envelope["data"]["steps"]["there"]
        assert there["error"]["code"] == "PRECONDITION" and "its worker cannot read it" in there["error"]["message"]
        assert there["side_effects"] == "none" and not (tmp_path / "there").exists(), there
    finally:
        for worker in workers:
            worker.stop()
