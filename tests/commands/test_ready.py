"""Signs of readiness: lines in pieces, ports and their holders, and URLs."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shotclock.commands._ready import LineWatch, Probe, Ready, find_holder, find_listeners, look_at_url, read_url

LIMIT_S = 5.0


@contextmanager
def server_with_status(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(LIMIT_S)


def test_a_line_is_found_in_pieces_and_before_its_end() -> None:
    watch = LineWatch(r"^listening on \d+$")
    assert not watch.finds(b"starting\nlisten")
    assert watch.finds(b"ing on 3000")
    assert LineWatch(r"^ready$").finds(b"x\r\nready\r\n")
    assert not LineWatch(r"^ready$").finds(b"not ready\n")
    assert LineWatch("ready").finds(b"\xff" * 100_000 + b"ready")


@pytest.mark.slow
def test_a_url_answers_below_500() -> None:
    for status, is_ready in ((200, True), (404, True), (500, False), (503, False)):
        with server_with_status(status) as url:
            assert (look_at_url(f"{url}?a=b", LIMIT_S) == "") is is_ready
            assert bool(find_holder(Ready(url=url))) is is_ready
    assert "refused" in look_at_url(url, LIMIT_S)
    assert "label" in look_at_url(f"http://{'a' * 70}/", LIMIT_S)
    unusable = ("localhost", "ftp://host/", "http://", "http://host:99999/", "http://host:0/")
    for text in (*unusable, "http://host/a b", "http://host/ä", "http://ho\nst/"):
        with pytest.raises(ValueError, match="is not a URL"):
            read_url(text)


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_years_is_given_up_and_named() -> None:
    watch = LineWatch(r"^(a+)+$")
    assert not watch.finds(b"a" * 60 + b"b\n")
    assert "'^(a+)+$' takes too long" in watch.trouble
    assert not watch.finds(b"aaa\n")


@pytest.mark.slow
def test_a_server_that_never_ends_its_answer_is_not_waited_for_and_holds_its_place() -> None:
    for answer in (b"HTTP/1.1 200 OK\r\nX: ", b"", b"HTTP/1.1 "):
        with dripping_server(answer) as url:
            began = time.monotonic()
            assert find_holder(Ready(url=url)) == f"{url} is answered by another process already"
            assert time.monotonic() - began < LIMIT_S
    with dripping_server(b"") as url:
        assert look_at_url(url, 0.2) == f"{url} accepts the connection and does not answer"


@contextmanager
def dripping_server(answer: bytes) -> Iterator[str]:
    """A server that begins with this answer and then sends a byte again and again."""
    over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(answer)
                    while not over.wait(0.05):
                        client.sendall(b"a")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        server.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_server_of_another_user_counts_only_if_the_command_has_a_process_of_that_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, server_pid = server.getsockname()[1], os.getpid()
        assert list(find_listeners(port).values()) == ["0"]  # this loads the codec, too
        for tree, is_ready in (([server_pid], True), ([], False)):
            pid = os.fork()
            if pid == 0:
                os.setuid(65534)
                probe = Probe(Ready(port=port), lambda pids=tree: pids)  # type: ignore[misc]
                probe.start()
                os._exit(10 + len(select.select([probe.fd], [], [], 2.0)[0]))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10 + is_ready


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert len(find_listeners(port)) == 1
        assert f"(pid {os.getpid()})" in find_holder(Ready(port=port))
    assert find_holder(Ready(port=port)) == "" and find_holder(Ready(output="x")) == ""
