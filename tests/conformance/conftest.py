"""The conformance suite runs published programs, and is collected only by `make conformance`, which installs them."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

FOLDER = os.environ.get("SHOTCLOCK_CONFORMANCE", "")
collect_ignore_glob = [] if FOLDER else ["test_*.py"]
PAGE = b"<!doctype html><title>A page</title><h1>Hello</h1><p>Some text with a <a href='/x'>link</a>.</p>"


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """A page on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            found = self.path in ("/", "/plain")
            self.send_response(200 if found else 404)
            self.send_header("content-type", "text/html" if self.path == "/" else "text/plain")
            self.end_headers()
            self.wfile.write(PAGE if self.path == "/" else b"nothing but text")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)
