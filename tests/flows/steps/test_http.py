"""`http_client` against servers that misbehave in every way a server can: it ends on time and leaves nothing."""

import asyncio
import contextlib
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import Clocks
from shotclock.flows.file.loader import load_text
from shotclock.flows.run.runs import RunRequest, start
from shotclock.flows.steps._http import HttpProvider
from shotclock.flows.steps.http_message import HttpRequest, InvalidRequest
from shotclock.store.store import Store
from tests.flows.steps import servers
from tests.flows.steps.conftest import OVERSHOOT_S, Tried, sockets_to
from tests.flows.steps.servers import Connection, Handler, Server, answers, deaf_port, response
from tests.rows import row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

LIMIT_MS = 400
GONE_WITHIN_S = 2.0  # for a server to see that its client has left

Fetch = Callable[..., Tried]


@pytest.fixture
def fetch(trial: Callable[..., Tried]) -> Fetch:
    """One request. Fails if a socket is left."""

    def fetch(url: str, *, timeout_ms: int = 10_000, clocks: Clocks | None = None, **settings: Any) -> Tried:
        port = int(url.rpartition(":")[2].partition("/")[0])
        before = len(sockets_to(port))
        outer = {key: settings.pop(key) for key in ("env", "run_ms", "cancel_after_s") if key in settings}
        tried = trial(
            HttpProvider(), {"url": url, "method": "GET", **settings}, clocks or Clocks(timeout_ms=timeout_ms), **outer
        )
        assert len(sockets_to(port)) == before
        return tried

    return fetch


def assert_timed_out(tried: Tried, limit_ms: int = LIMIT_MS) -> None:
    assert tried.error["code"] == "TIMEOUT"
    assert tried.message == f"Request timed out after {limit_ms}ms"
    assert tried.result.rule == "http_client/fetch_error"
    assert tried.meta["ending"] == "cancelled"
    assert tried.error["context"]["clock"]["owner"] == "step it"
    assert limit_ms / 1000 <= tried.elapsed_s < limit_ms / 1000 + OVERSHOOT_S


# --- hanging ----------------------------------------------------------------------------------------------

HANGING: list[Handler] = [
    servers.says_nothing,
    servers.drips_headers,
    servers.drips_body,
    servers.drips_a_chunk_size,
    servers.drips_trailers,
    servers.drips_gzip,
    servers.drips_an_error,
    servers.drips_promises,
]


@pytest.mark.parametrize("handler", HANGING, ids=lambda handler: handler.__name__)
def test_a_server_that_never_comes_to_an_end_is_left_on_time(handler: Handler, fetch: Fetch) -> None:
    with Server(handler) as server:
        assert_timed_out(fetch(server.url, timeout_ms=LIMIT_MS))
        assert server.all_left(GONE_WITHIN_S)


@pytest.mark.parametrize("handler", [servers.drips_headers, servers.drips_body], ids=lambda handler: handler.__name__)
def test_and_so_is_one_behind_tls(handler: Handler, fetch: Fetch, certificate: Any) -> None:
    file, tls = certificate
    with Server(handler, tls) as server:
        assert_timed_out(fetch(server.url, timeout_ms=LIMIT_MS, env={"SSL_CERT_FILE": str(file)}))
        assert server.all_left(GONE_WITHIN_S)


def test_a_port_that_accepts_nobody_is_left_on_time(fetch: Fetch) -> None:
    with deaf_port() as port:
        tried = fetch(f"http://127.0.0.1:{port}", timeout_ms=LIMIT_MS, method="POST", body="x")
        assert_timed_out(tried)
        assert tried.meta["side_effects"] == "none", "nobody ever heard of the request"


def test_a_handshake_that_drips_is_left_on_time(fetch: Fetch) -> None:
    def drips_a_record(connection: Connection) -> None:
        connection.drip(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc" + b"\0" * 16_000)

    with Server(drips_a_record) as server:
        assert_timed_out(fetch(server.url.replace("http:", "https:"), timeout_ms=LIMIT_MS))
        assert server.all_left(GONE_WITHIN_S)


def test_a_server_that_does_not_read_what_is_posted_is_left_on_time(fetch: Fetch) -> None:
    with Server(servers.reads_nothing) as server:
        tried = fetch(server.url, timeout_ms=LIMIT_MS, method="POST", body="x" * 30_000_000)
        assert_timed_out(tried)
        assert tried.meta["side_effects"] == "unknown"
        assert tried.error["retryable"] is False


def test_a_redirect_to_a_server_that_hangs_is_inside_the_same_deadline(fetch: Fetch) -> None:
    def slow_redirect(connection: Connection) -> None:
        connection.read_request()
        connection.stopped.wait(LIMIT_MS / 4000)
        connection.send(response(status="302 Found", Location=f"{hanging.url}/there"))

    with Server(servers.says_nothing) as hanging, Server(slow_redirect) as server:
        assert_timed_out(fetch(server.url, timeout_ms=LIMIT_MS))
        assert server.all_left(GONE_WITHIN_S) and hanging.all_left(GONE_WITHIN_S)
        assert hanging.connections == 1
        assert not sockets_to(hanging.port)


def test_the_body_of_a_redirect_is_not_waited_for(fetch: Fetch) -> None:
    def redirects(connection: Connection) -> None:
        if b"/first" in connection.read_request():
            connection.send(b"HTTP/1.1 302 Found\r\nLocation: /second\r\nContent-Length: 1000000000\r\n\r\n")
            connection.hang()
        else:
            connection.send(response(b"arrived"))

    with Server(redirects) as server:
        assert fetch(f"{server.url}/first").result.output == "arrived"


def test_what_came_before_the_bell_is_kept(fetch: Fetch) -> None:
    def half(connection: Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\nthe first half")
        connection.hang()

    with Server(half) as server:
        tried = fetch(server.url, timeout_ms=LIMIT_MS)
        assert_timed_out(tried)
        assert tried.data["partial"] is True
        assert tried.data["body"] == tried.result.output == "the first half"


def test_the_deadline_of_the_run_is_earlier_and_is_said_to_be_the_one(fetch: Fetch) -> None:
    with Server(servers.drips_body) as server:
        tried = fetch(server.url, timeout_ms=60_000, run_ms=1_000)
        assert tried.error["code"] == "TIMEOUT"
        assert tried.error["context"]["clock"]["owner"] == "run test"
        assert tried.meta["timeout_ms"] < 1_000, "the run must still be able to answer for itself"
        assert tried.elapsed_s < 1.0 + OVERSHOOT_S


def test_a_run_without_time_left_sends_nothing(fetch: Fetch) -> None:
    with Server(answers(response(b"x"))) as server:
        tried = fetch(server.url, run_ms=0)
        assert tried.error["code"] == "NO_TIME_LEFT"
        assert tried.result.rule == "http_client/fetch_error"
        assert server.connections == 0


def test_silence_is_noticed_by_the_idle_clock(fetch: Fetch) -> None:
    def pauses(connection: Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        for _ in range(4):
            connection.stopped.wait(0.1)
            connection.send(b"x")
        connection.hang()

    with Server(pauses) as server:
        tried = fetch(server.url, clocks=Clocks(timeout_ms=10_000, idle_ms=300))
        assert tried.error["code"] == "STALLED"
        assert tried.result.rule == "http_client/stalled"
        assert 0.6 < tried.elapsed_s < 0.75 + OVERSHOOT_S, "each byte is a sign of life"


def test_a_cancelled_step_closes_its_connection(fetch: Fetch) -> None:
    with Server(servers.drips_body) as server:
        with pytest.raises(asyncio.CancelledError):
            fetch(server.url, cancel_after_s=0.3)
        assert server.connections == 1
        assert server.all_left(GONE_WITHIN_S)
        assert not sockets_to(server.port)


def test_thirty_at_once_that_all_hang_end_on_time(trial: Callable[..., Tried]) -> None:
    class Many(HttpProvider):
        async def run(self, step: Any, call: Any, runtime: Any) -> Any:
            alone = super().run
            results = await asyncio.gather(*(alone(step, call, runtime) for _ in range(30)))
            assert {result.outcome.problem.code for result in results} == {"TIMEOUT"}
            return results[0]

    with Server(servers.drips_body) as server:
        assert_timed_out(trial(Many(), {"url": server.url}, Clocks(timeout_ms=1_000)), 1_000)
        assert server.connections == 30
        assert server.all_left(GONE_WITHIN_S)
        assert not sockets_to(server.port)


# --- names ------------------------------------------------------------------------------------------------

HANGING_LOOKUP = """
import asyncio, json, sys, time
from pathlib import Path
from shotclock.core.limits import Clocks
from shotclock.calls.runtime import Runtime
from shotclock.calls.preloaded_zygote import Program
from shotclock.flows.steps._http import HttpProvider
from shotclock.flows.steps.provider import StepCall
from shotclock.flows.run.step_attempt import run_attempt

async def work():
    async with Runtime(program=Program(), workers=1) as runtime:
        assert await runtime.warm_up()
        provider = HttpProvider()
        began = time.perf_counter()
        settings = {"url": "http://a-name-nobody-answers-for.example:1/", "method": "POST"}
        call = StepCall("it", settings, Clocks(timeout_ms=3_000), {}, Path())
        results = await asyncio.gather(*(run_attempt(provider, call, runtime) for _ in range(3)))
        elapsed = time.perf_counter() - began
        print(json.dumps([elapsed, [[r.envelope.error, r.envelope.meta, r.rule] for r in results]]), flush=True)

asyncio.run(work())
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a resolv.conf of its own")
def test_a_name_server_that_never_answers_neither_delays_the_answer_nor_the_end_of_the_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.53", 53))
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions timeout:30 attempts:5\n")
        (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
        (tmp_path / "program.py").write_text(HANGING_LOOKUP)
        script = (
            'mount --bind "$0/resolv.conf" /etc/resolv.conf && mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf '
            '&& exec "$1" "$0/program.py"'
        )
        began = time.perf_counter()
        ran = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable],
            stdout=subprocess.PIPE,
            timeout=60,
            env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")},
        )
        took_s = time.perf_counter() - began
        silent.setblocking(False)
        assert silent.recv(512), "nobody asked the name server: the test tests nothing"
    assert ran.returncode == 0
    elapsed_s, results = json.loads(ran.stdout)
    assert 3.0 <= elapsed_s < 3.0 + OVERSHOOT_S
    for error, meta, rule in results:
        assert (error["message"], rule) == ("Request timed out after 3000ms", "http_client/fetch_error")
        assert meta["side_effects"] == "none"
    assert took_s < 25, "the process waited for its lookups"


def test_a_name_is_looked_up_and_the_first_address_that_answers_is_taken(fetch: Fetch) -> None:
    with Server(answers(response(b"here"))) as server:
        assert fetch(server.url.replace("127.0.0.1", "localhost")).result.output == "here"


def test_a_name_that_is_not_there_is_a_fetch_error(fetch: Fetch) -> None:
    tried = fetch("http://nowhere.invalid:80/", method="DELETE", timeout_ms=20_000)
    assert (tried.error["code"], tried.result.rule) in (
        ("FETCH_FAILED", "http_client/fetch_error"),
        ("TIMEOUT", "http_client/fetch_error"),  # a machine whose name server is not there either
    )
    assert tried.meta["side_effects"] == "none"


# --- broken -----------------------------------------------------------------------------------------------


def resets(connection: Connection) -> None:
    connection.read_request()
    connection.reset()


def resets_in_the_body(connection: Connection) -> None:
    connection.read_request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
    connection.stopped.wait(0.1)
    connection.reset()


BROKEN: dict[str, Handler] = {
    "resets": resets,
    "resets in the body": resets_in_the_body,
    "closes": lambda connection: None,
    "garbage": answers(b"\x00\xff\x13 not HTTP at all\r\n\r\n"),
    "another protocol": answers(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "a header too large": answers(b"HTTP/1.1 200 OK\r\nX-Huge: " + b"x" * 500_000 + b"\r\n\r\n"),
    "too many headers": answers(b"HTTP/1.1 200 OK\r\n" + b"X-More: yes\r\n" * 50_000 + b"\r\n"),
    "a length that is none": answers(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc"),
    "two lengths": answers(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    "a length too large": answers(response(b"short", Content_Length="1000")),
    "a chunk that is none": answers(response(b"zz\r\nabc\r\n", Transfer_Encoding="chunked")),
    "gzip that is none": answers(response(b"this is no gzip", Content_Encoding="gzip")),
    "a redirect to a file": answers(response(status="302 Found", Location="file:///etc/passwd")),
    "a redirect to nothing": answers(response(status="302 Found", Location="http://127.0.0.1:port/")),
    "a redirect to no port": answers(response(status="302 Found", Location="http://127.0.0.1:77777/")),
    "promises for ever": servers.promises_for_ever,
    "a redirect in a circle": answers(response(status="302 Found", Location="/again")),
}


def test_a_broken_answer_is_a_fetch_error(fetch: Fetch) -> None:
    for name, handler in BROKEN.items():
        with row(name), Server(handler) as server:
            tried = fetch(server.url, timeout_ms=60_000)
            assert tried.error["code"] == "FETCH_FAILED", tried.error
            assert tried.result.rule == "http_client/fetch_error"
            assert tried.message.startswith(f"GET {server.url}")
            assert tried.elapsed_s < 30
            assert server.all_left(GONE_WITHIN_S)


@pytest.mark.parametrize("length", ["2", "4"])
def test_a_length_that_the_step_got_wrong_is_a_fetch_error(length: str, fetch: Fetch) -> None:
    with Server(answers(response(b"x"))) as server:
        tried = fetch(server.url, method="POST", body="abc", headers={"Content-Length": length})
        assert tried.result.rule == "http_client/fetch_error"


def test_a_circle_of_redirects_is_left_after_the_tenth(fetch: Fetch) -> None:
    with Server(answers(response(status="307 Temporary Redirect", Location="/again"))) as server:
        assert "more than 10 redirects" in fetch(server.url, method="POST", body={"a": 1}).message
        assert sum(request.count(b"POST") for request in server.requests) == 11


def test_a_refused_connection_says_so_and_that_nothing_happened(fetch: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tried = fetch(f"http://127.0.0.1:{port}/x?token=hidden", method="POST")
    assert tried.message == f"POST http://127.0.0.1:{port}/x: Connection refused"
    assert tried.meta["side_effects"] == "none"


def test_a_certificate_that_nobody_signed_is_not_trusted(fetch: Fetch, certificate: Any) -> None:
    with Server(answers(response(b"secret")), certificate[1]) as server:
        tried = fetch(server.url)
        assert tried.result.rule == "http_client/fetch_error"
        assert "certificate is not trusted" in tried.message


def test_an_answer_longer_than_it_said_ends_where_it_said(fetch: Fetch) -> None:
    with Server(answers(response(b"abcdef", Content_Length="3"))) as server:
        assert fetch(server.url).result.output == "abc"


# --- too much ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [servers.floods, servers.floods_after_gzip], ids=lambda handler: handler.__name__)
def test_a_body_without_an_end_is_left_where_the_cap_is(handler: Handler, fetch: Fetch) -> None:
    with Server(handler) as server:
        tried = fetch(server.url, max_body_bytes=1_000_000, timeout_ms=60_000)
        assert tried.error["code"] == "BODY_TOO_LARGE"
        assert tried.result.rule == "http_client/body_too_large"
        assert "max_body_bytes, 1000000" in tried.message
        assert tried.elapsed_s < 30
        assert server.all_left(GONE_WITHIN_S)


def test_a_gzip_bomb_is_counted_by_what_it_unpacks_to(fetch: Fetch) -> None:
    bomb = gzip.compress(b"\0" * 200_000_000, 9)
    assert len(bomb) < 250_000
    with Server(answers(response(bomb, Content_Encoding="gzip"))) as server:
        tried = fetch(server.url, max_body_bytes=5_000_000)
        assert tried.result.rule == "http_client/body_too_large"
        assert tried.data["bytes"] < 8_000_000, "it went on unpacking"


def test_a_bomb_within_its_cap_does_not_keep_the_bell_from_ringing(fetch: Fetch) -> None:
    # A flush forgets what came before, so the same bytes can follow each other: ten gigabytes in no time.
    squeeze = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    start = squeeze.compress(b"") + squeeze.flush(zlib.Z_FULL_FLUSH)
    block = squeeze.compress(b"\0" * 10_000_000) + squeeze.flush(zlib.Z_FULL_FLUSH)
    bomb = gzip.compress(start + block * 1_000, 9)
    with Server(answers(response(bomb, Content_Encoding="gzip, gzip"))) as server:
        assert_timed_out(fetch(server.url, timeout_ms=LIMIT_MS, max_body_bytes=10**11))


def test_an_honest_length_over_the_cap_is_not_even_begun(fetch: Fetch) -> None:
    with Server(answers(response(b"", Content_Length="99999999"))) as server:
        tried = fetch(server.url, timeout_ms=5_000)
        assert tried.result.rule == "http_client/body_too_large"
        assert tried.elapsed_s < 4


def test_a_body_exactly_as_large_as_the_cap_is_taken(fetch: Fetch) -> None:
    with Server(answers(response(b"x" * 1000))) as server:
        assert fetch(server.url, max_body_bytes=1000).result.output == "x" * 1000
        assert fetch(server.url, max_body_bytes=999).result.rule == "http_client/body_too_large"


# --- statuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        ("404 Not Found", "HTTP_STATUS", False),
        ("503 Oh", "SERVICE_UNAVAILABLE", True),
        ("429 No", "RATE_LIMITED", True),
    ],
)
def test_a_bad_status_is_a_failure_with_its_body(status: str, code: str, retryable: bool, fetch: Fetch) -> None:
    with Server(answers(response(b'{"why": "because"}', status))) as server:
        tried = fetch(server.url)
        assert (tried.error["code"], tried.result.rule) == (code, "http_client/status")
        assert tried.message == f"GET {server.url} answered {status}"
        assert tried.error["retryable"] is retryable
        assert tried.data["body"] == tried.result.output == '{"why": "because"}'
        assert tried.error["context"]["status"] == int(status[:3])


def test_what_a_gateway_says_of_a_change_promises_nothing(fetch: Fetch) -> None:
    for status in ("502 Bad Gateway", "503 Oh", "504 Gateway Timeout"):
        with Server(answers(response(status=status, Retry_After="2"))) as server:
            tried = fetch(server.url, method="POST")
            assert (tried.error["code"], tried.error["retryable"]) == ("HTTP_STATUS", False)
            assert tried.meta["side_effects"] == "unknown"
            assert tried.error.get("retry_after_ms") == (2_000 if status.startswith("503") else None)
    with Server(answers(response(status="429 No"))) as server:
        tried = fetch(server.url, method="POST")
        assert (tried.error["code"], tried.error["retryable"]) == ("RATE_LIMITED", True)
        assert (tried.meta["side_effects"], tried.meta["exit_code"]) == ("none", 11)


def test_a_bad_status_with_a_body_without_an_end_is_still_that_status(fetch: Fetch) -> None:
    def errors_for_ever(connection: Connection) -> None:
        connection.read_request()
        connection.send(b"HTTP/1.1 500 Oh\r\n\r\n")
        while not connection.stopped.is_set():
            connection.send(servers.FLOOD)

    with Server(errors_for_ever) as server:
        tried = fetch(server.url)
        assert tried.result.rule == "http_client/status"
        assert len(tried.data["body"]) == 65_536
        assert server.all_left(GONE_WITHIN_S)


# --- what is sent and what comes back -----------------------------------------------------------------------


def sent(server: Server) -> tuple[str, dict[str, str], bytes]:
    head, _, body = server.requests[-1].partition(b"\r\n\r\n")
    line, *headers = head.decode().split("\r\n")
    return line, {name.lower(): value for name, value in (header.split(": ", 1) for header in headers)}, body


def test_method_params_headers_and_body_are_sent_as_written(fetch: Fetch) -> None:
    with Server(answers(response(b"ok"))) as server:
        fetch(
            f"{server.url}/a?x=1",
            method="put",
            params={"q": "a b&c", "flag": True, "n": 2},
            headers={"X-Mine": "yes", "X-Number": 3},
            body={"deep": [1, None, "é"]},
        )
        line, headers, body = sent(server)
    assert line == "PUT /a?x=1&q=a+b%26c&flag=true&n=2 HTTP/1.1"
    assert (headers["x-mine"], headers["x-number"], headers["content-type"]) == ("yes", "3", "application/json")
    assert json.loads(body) == {"deep": [1, None, "é"]}


def test_the_time_that_remains_goes_along_with_each_hop(fetch: Fetch) -> None:
    def slow_redirect(connection: Connection) -> None:
        if b"/first" in connection.read_request():
            connection.stopped.wait(0.2)
            connection.send(response(status="302 Found", Location="/second"))
        else:
            connection.send(response(b"ok"))

    with Server(slow_redirect) as server:
        fetch(f"{server.url}/first", timeout_ms=5_000)
        assert server.all_left(GONE_WITHIN_S)
        text = b"".join(server.requests).decode()
    left = [int(line.partition(":")[2]) for line in text.split("\r\n") if line.lower().startswith("shotclock-rem")]
    first, second = sorted(left, reverse=True)
    assert 4_000 < second <= first - 200 <= 4_800, left


def test_json_text_and_binary_come_back_as_what_they_are(fetch: Fetch, tmp_path: Path) -> None:
    with Server(answers(response(b'{"a": [1]}', Content_Type="application/json"))) as server:
        assert json.loads(fetch(server.url).result.output) == {"a": [1]}
    with Server(answers(response("naïve".encode("latin-1"), Content_Type="text/plain; charset=latin-1"))) as server:
        assert fetch(server.url).result.output == "naïve"
    with Server(answers(response(b"\x89PNG\xff\xfe\x00", Content_Type="image/png"))) as server:
        output = fetch(server.url).result.output
        assert Path(output["path"]).read_bytes() == b"\x89PNG\xff\xfe\x00"
        assert (output["bytes"], output["content_type"]) == (7, "image/png")
        assert Path(output["path"]).is_relative_to(tmp_path / "home")


def test_a_charset_that_is_none_costs_nothing(fetch: Fetch) -> None:
    for charset in ("utf-7-nonsense", "base64", "idna", "\udc80"):
        kind = f"Content-Type: text/plain; charset={charset}\r\n".encode("utf-8", "surrogateescape")
        reply = response(b"text").replace(b"\r\n", b"\r\n" + kind, 1)
        with Server(answers(reply)) as server:
            assert fetch(server.url).result.output == "text", charset


def test_a_trusted_certificate_is(fetch: Fetch, certificate: Any) -> None:
    file, tls = certificate
    with Server(answers(response(b"private")), tls) as server:
        assert fetch(server.url, env={"SSL_CERT_FILE": str(file)}).result.output == "private"


def test_a_proxy_is_used_where_the_environment_names_one(fetch: Fetch) -> None:
    with Server(answers(response(b"by proxy"))) as proxy:
        env = {"http_proxy": f"http://me:pass@127.0.0.1:{proxy.port}", "no_proxy": "127.0.0.2"}
        assert fetch("http://10.255.255.1:81/x", env=env).result.output == "by proxy"
        assert proxy.requests[-1].startswith(b"GET http://10.255.255.1:81/x ")
    with Server(answers(response(b"direct"))) as server:
        env = {"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1"}
        assert fetch(server.url, env=env).result.output == "direct"


# --- files --------------------------------------------------------------------------------------------------


def test_a_download_is_there_whole_or_not_at_all(fetch: Fetch, tmp_path: Path) -> None:
    with Server(answers(response(b"\0\1" * 300_000))) as server:
        output = fetch(server.url, output_file="new/folder/it.bin").result.output
    assert output["path"] == str(tmp_path / "work/new/folder/it.bin")
    assert Path(output["path"]).read_bytes() == b"\0\1" * 300_000
    assert output["bytes"] == 600_000


@pytest.mark.parametrize(
    ("handler", "rule"),
    [
        (servers.drips_body, "http_client/download_timeout"),
        (servers.says_nothing, "http_client/download_timeout"),
        (servers.floods, "http_client/body_too_large"),
        (resets_in_the_body, "http_client/fetch_error"),
        (answers(response(b"no", "404 Not Found")), "http_client/status"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_of_a_download_that_fails_nothing_is_left(handler: Handler, rule: str, fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "work/it").write_text("as it was")
    with Server(handler) as server:
        tried = fetch(server.url, timeout_ms=LIMIT_MS, output_file="it", max_body_bytes=1_000_000)
        assert tried.result.rule == rule
        if rule.endswith("timeout"):
            assert tried.message == f"Download timed out after {LIMIT_MS}ms"
            assert tried.elapsed_s < LIMIT_MS / 1000 + OVERSHOOT_S
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["it"]
    assert (tmp_path / "work/it").read_text() == "as it was"


def test_only_a_file_may_be_replaced(fetch: Fetch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "work/fifo")
    (tmp_path / "work/link").symlink_to("/dev/null")
    (tmp_path / "work/file").write_text("")
    with Server(answers(response(b"x"))) as server:
        for name in ("fifo", "link", "/dev/null", ".", "file/below"):
            tried = fetch(server.url, output_file=name)
            assert tried.result.rule == "http_client/output_file", name
            assert tried.error["code"] == "FILE_UNWRITABLE"
    assert Path("/dev/null").is_char_device()


# --- refused before anything is sent, and what is not shown ---------------------------------------------------


UNSENDABLE: list[dict[str, Any]] = [
    {"url": "file:///etc/passwd"},
    {"url": "ftp://127.0.0.1/x"},
    {"url": "127.0.0.1/x"},
    {"url": "http://"},
    {"url": ""},
    {"url": "http://[::1"},
    {"url": "http://127.0.0.1:99999999/"},
    {"url": "http://127.0.0.1/\r\nX-Evil: yes"},
    {"url": "http://127.0.0.1:1/", "method": "GET / HTTP/1.1\r\nX: y"},
    {"url": "http://127.0.0.1:1/", "method": "CONNECT"},
    {"url": "http://127.0.0.1:1/", "headers": {"X-A": "b\r\nX-Evil: yes"}},
    {"url": "http://127.0.0.1:1/", "headers": {"X A": "b"}},
    {"url": "http://127.0.0.1:1/", "headers": {"": "b"}},
    {"url": "http://127.0.0.1:1/", "body": [float("nan")]},
    {"url": "http://127.0.0.1:1/", "body": "\ud800"},
    {"url": "http://127.0.0.1:1/", "params": {"a": float("inf")}},
    {"url": "http://127.0.0.1:1/", "params": ["a"]},
    {"url": "http://127.0.0.1:1/", "headers": {"X": "\ud800"}},
    {"url": "http://127.0.0.1:1/", "max_body_bytes": "many"},
    {"url": "http://127.0.0.1:1/", "output_file": ""},
    {"url": "http://127.0.0.1:1/", "output_file": "a\0b"},
    {"url": "http://127.0.0.1:1/\ud800"},
    {"url": ["http://127.0.0.1:1/"]},
]


def test_what_cannot_be_sent_is_refused(trial: Callable[..., Tried]) -> None:
    for settings in UNSENDABLE:
        with row(settings), pytest.raises(InvalidRequest):
            HttpRequest.of(settings)
    tried = trial(HttpProvider(), UNSENDABLE[0])
    assert (tried.error["code"], tried.result.rule) == ("STEP_INVALID", "http_client/invalid"), tried.error
    assert tried.meta["ending"] == "not_started"


SECRET = "s3cr3t-v4lue"


def test_no_secret_is_in_an_error(fetch: Fetch, trial: Callable[..., Tried]) -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "X-Other": SECRET}
    for handler in (resets, answers(f"{SECRET}\r\n\r\n".encode()), answers(response(status="400 Bad"))):
        with Server(handler) as server:
            url = server.url.replace("//", f"//user:{SECRET}@")
            tried = fetch(url, headers=headers, params={"key": SECRET})
            assert SECRET not in tried.result.envelope.to_json()
    for settings in (
        {"url": "http://127.0.0.1:1/", "headers": {"Authorization": f"{SECRET}\nX: {SECRET}"}},
        {"url": f"http://user:{SECRET}@[bad/", "headers": headers},
        {"url": f"http://user:{SECRET}@127.0.0.1:badport/", "headers": headers},
    ):
        assert SECRET not in trial(HttpProvider(), settings).result.envelope.to_json()


def test_no_secret_follows_a_redirect_to_somebody_else(fetch: Fetch) -> None:
    headers = {"Authorization": SECRET, "Cookie": SECRET, "X-Api-Key": SECRET, "X-Auth-Token": SECRET, "X-Plain": "y"}
    with Server(answers(response(b"thanks"))) as other:
        reply = response(status="302 Found", Location=f"{other.url}/here")
        with Server(answers(reply)) as server:
            assert fetch(server.url, headers=headers).result.output == "thanks"
            assert server.requests[-1].count(SECRET.encode()) == 4
        assert SECRET.encode() not in other.requests[-1]
        assert b"X-Plain" in other.requests[-1]


def flow_with_redirect(server: Server, status: str, other: Server, step: str, tmp_path: Path) -> dict[str, Any]:
    server._handler = answers(response(status=status, Location=f"{other.url}/here"))
    text = (
        f"steps:\n  a:\n    type: http_client\n    url: {server.url}/\n    env: {{API_TOKEN: '${{API_TOKEN}}'}}\n{step}"
    )
    return run_flow(text, tmp_path)["data"]["steps"]["a"]


@pytest.mark.parametrize(
    "value",
    ["{{ env.API_TOKEN }}", "v1 {{ env.API_TOKEN }}", "{{ env.API_TOKEN | urlencode }}", "c2VjcmV0IHZhbHVlLzEyMzQ="],
)
def test_no_header_that_holds_a_secret_follows_a_redirect_to_somebody_else(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "secret value/1234")
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    step = f"    headers: {{X-Vault: '{value}', X-Plain: 'y'}}\n"
    with Server(answers(response(b"thanks"))) as other, Server(answers(response())) as server:
        ended = flow_with_redirect(server, "302 Found", other, step, tmp_path)
        assert ended["output"] == "thanks", ended
        assert b"X-Vault" in server.requests[-1]
        assert b"X-Vault" not in other.requests[-1] and b"X-Plain" in other.requests[-1]


@pytest.mark.parametrize("status", ["307 Temporary Redirect", "308 Permanent Redirect"])
def test_a_body_that_holds_a_secret_does_not_follow_a_redirect_to_somebody_else(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "secret-value-1234")
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    step = "    method: POST\n    body: {token: '{{ env.API_TOKEN }}'}\n"
    with Server(answers(response(b"thanks"))) as other, Server(answers(response())) as server:
        ended = flow_with_redirect(server, status, other, step, tmp_path)
        assert ended["error"]["code"] == "FETCH_FAILED" and "the body holds a secret" in ended["error"]["message"]
        assert other.requests == [] and b"secret-value-1234" in server.requests[-1]
        ended = flow_with_redirect(server, "303 See Other", other, step, tmp_path)
        assert ended["output"] == "thanks" and b"secret-value" not in other.requests[-1]
        ended = flow_with_redirect(server, status, other, "    method: POST\n    body: {plain: 1}\n", tmp_path)
        assert ended["output"] == "thanks" and b"plain" in other.requests[-1]


# --- through the engine ---------------------------------------------------------------------------------------


def run_flow(text: str, tmp_path: Path) -> dict[str, Any]:
    loaded = load_text(textwrap.dedent(text).encode(), "flow.yaml", tmp_path)
    assert loaded.workflow is not None, loaded.findings
    request = RunRequest(loaded.workflow, str(tmp_path / "flow.yaml"), tmp_path)

    async def work() -> dict[str, Any]:
        with contextlib.closing(Store.open(tmp_path / "home")) as store:
            return (await start(request, store)).to_dict()

    return asyncio.run(work())


def test_a_step_is_tried_again_when_the_server_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Callable[..., Any]
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    busy = response(b"later", "429 Too Many", Retry_After="1")
    with Server(answers(busy, response(b'{"items": [1, 2]}'))) as server:
        began = time.perf_counter()
        envelope = run_flow(
            f"""
            steps:
              fetch:
                type: http_client
                url: {server.url}/{{{{ 'a' ~ 'b' }}}}
                timeout: 5000
                on_fail: {{retry: {{max: 2, backoff: {{delay_ms: 10}}}}}}
              count:
                type: command
                depends_on: fetch
                exec: echo "{{{{ outputs.fetch['items'] | length }}}}"
            """,
            tmp_path,
        )
        elapsed_s = time.perf_counter() - began
    assert validate_envelope(envelope)["ok"], envelope
    assert envelope["data"]["steps"]["fetch"]["attempts"] == 2
    assert envelope["data"]["steps"]["count"]["output"] == "2"
    assert elapsed_s >= 1.0, "it did not wait as long as it was told to"
    assert all(request.startswith(b"GET /ab ") for request in server.requests)
