"""Messages pass unchanged in both directions."""

import json
import sys
from pathlib import Path

import pytest

from shotclock.wrap._lines import LONGEST_LINE
from tests.wrap.client import SERVER, connected, failure, wrapped

pytestmark = pytest.mark.usefixtures("no_survivors")

PEAK_LIMIT_KB = 120 * 1024
LARGE, TOO_LARGE = 10_000_000, 60_000_000


def test_the_client_reads_the_very_bytes_that_the_server_wrote(tmp_path: Path) -> None:
    for style in ([], ["--id-last"]):
        record = tmp_path / f"record{len(style)}"
        with wrapped(server=[*SERVER, *style, "--record", str(record)]) as client:
            assert client.text("echo", text='ü \u2028 \U0001f600 \\ "') == 'ü \u2028 \U0001f600 \\ "'
            client.receive(client.request("tools/list"))
            assert client.text("flood", count=200) == "done"
            assert len(client.text("big", size=300_000)) == 300_000
            assert client.receive(client.request("unknown/method"))["error"]["code"] == -32601
        assert b"".join(client.lines) == record.read_bytes()


def test_ids_of_both_types_are_kept_apart() -> None:
    big = 2**70
    with wrapped() as client:
        for id in (big, str(big), "1", 7):
            client.call("echo", id=id, text=f"{id!r}")
        for id in ("1", big, 7, str(big)):
            assert client.receive(id)["result"]["content"][0]["text"] == repr(id)


def test_a_long_request_reaches_the_server_whole() -> None:
    text = "é" * 400_000
    with wrapped() as client:
        assert client.text("echo", text=text) == text
        # As the TypeScript SDK writes it: the id comes last.
        params = {"name": "echo", "arguments": {"text": text}, "_meta": {"progressToken": "last"}}
        line = json.dumps({"method": "tools/call", "params": params, "jsonrpc": "2.0", "id": "last"})
        client.write(line.encode() + b"\n")
        assert client.receive("last")["result"]["content"][0]["text"] == text


def test_the_server_asks_the_client_and_gets_its_answer() -> None:
    with wrapped() as client:
        id = client.call("ask")
        question = client.wait_for("sampling/createMessage")
        assert question["id"] == 0
        client.send(id=0, result={"text": "hello"})
        assert json.loads(client.receive(id)["result"]["content"][0]["text"]) == {"text": "hello"}


def test_other_text_on_stdout_goes_to_stderr(tmp_path: Path) -> None:
    with open(tmp_path / "stderr", "wb") as stderr, wrapped(stderr=stderr) as client:
        assert client.text("garbage") == "ok"
        assert client.text("other_id") == "right"
        assert client.text("twice") == "first"
        assert client.text("echo", text="after") == "after"
    said = (tmp_path / "stderr").read_bytes()
    for line in (b"Debugger listening", b"[1,2]", b"42", b'"text"', b"{}", b"nobody-asked"):
        assert line in said.splitlines() or line in said
    texts = [json.loads(line)["result"]["content"][0]["text"] for line in client.lines[1:]]
    assert texts == ["ok", "right", "first", "after"]


def test_nothing_is_sent_to_the_server_before_the_client_speaks(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = (
        "import sys\n"
        "for line in sys.stdin:\n"
        f"    open({str(seen)!r}, 'a').write(line)\n"
        """    print('{"jsonrpc":"2.0","id":1,"result":{}}', flush=True)"""
    )
    with wrapped(server=[sys.executable, "-c", program], greets=False) as client:
        client.receive(client.request("server/discover", {}))
    assert [json.loads(line)["method"] for line in seen.read_text().splitlines()] == ["server/discover"]


@pytest.mark.slow
def test_a_result_of_10_mb_passes_and_one_of_60_mb_is_refused_in_bounded_memory() -> None:
    for style in ([], ["--id-last"]):
        with wrapped(server=[*SERVER, *style], cold=True) as client:
            assert len(client.text("big", size=LARGE)) == LARGE
            text, envelope = failure(client.ask("big", size=TOO_LARGE))
            assert (
                envelope["error"]["code"] == "RESULT_TOO_LARGE"
                and f"the most that is passed on is {LONGEST_LINE}" in text
            )
            assert client.text("echo", text="next") == "next"
            status = Path(f"/proc/{client.process.pid}/status").read_text()
        peak_kb = int(status.split("VmHWM:")[1].split()[0])
        assert peak_kb <= PEAK_LIMIT_KB


@pytest.mark.slow
def test_a_request_that_is_too_long_is_refused_and_the_next_one_passes() -> None:
    with wrapped() as client:
        client.call("echo", text="x" * (LONGEST_LINE + 1), id="long")
        assert "bytes was not passed on" in client.receive("long")["error"]["message"]
        assert client.text("echo", text="next") == "next"


@pytest.mark.slow
def test_a_flood_reaches_a_slow_client_whole() -> None:
    with wrapped() as client:
        id = client.call("flood", count=20_000)
        assert client.receive(id)["result"]["content"][0]["text"] == "done"
        assert [message["params"]["data"] for message in client.others] == list(range(20_000))


def test_the_answers_equal_those_of_a_direct_connection() -> None:
    seen = []
    for argv in (SERVER, [sys.executable, "-m", "shotclock", "wrap", "--", *SERVER]):
        with connected(argv) as client:
            client.greet()
            client.receive(client.request("tools/list"))
            client.ask("echo", text="same")
            client.write(b"not json\n")
            client.receive(client.request("ping"))
        seen.append(client.lines)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_large_answers_are_cut_with_a_link_to_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    for style in ([], ["--id-last"]):
        with wrapped("--result-limit", "20k", server=[*SERVER, *style]) as client:
            assert len(client.text("big", size=10_000)) == 10_000
            for size in (30_000, 300_000, 5_000_000):
                text, link = client.ask("big", size=size)["content"]
                assert len(text["text"]) < 21_000 and text["text"].startswith("xxx") and text["text"].endswith("xxx")
                assert "shotclock left out" in text["text"] and link["type"] == "resource_link"
                whole = json.loads(Path(link["uri"].removeprefix("file://")).read_bytes())
                assert whole["result"]["content"][0]["text"] == "x" * size
                assert client.ask("big", size=size, fails=True)["isError"] is True
                # Clients refuse a success without the structured content that they may expect.
                assert client.ask("big", size=size, structured=True)["isError"] is True
                assert "isError" not in client.ask("big", size=size)
            client.receive(client.request("tools/list"))
            assert client.text("echo", text="next") == "next"
