"""Real servers on this machine that take requests and mails, and that can be slow or broken."""

import base64
import contextlib
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WITHIN_S = 20.0
# Far longer than any message may take, so that only the sender's own limit ends the wait.
HANGS_S = 30.0


@dataclass
class Taken:
    """What a server has received, and how it answers."""

    port: int = 0
    items: list[Any] = field(default_factory=list)
    status: int = 200
    drips: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.items) >= count)
        return self.items


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not is_true():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.02)


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: str


@contextmanager
def web_server() -> Iterator[Taken]:
    taken = Taken()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            taken.items.append(Request(self.path, dict(self.headers), body))
            if taken.drips:
                with contextlib.suppress(OSError):
                    for letter in b"HTTP/1.1 200 OK\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n\r\n":
                        self.wfile.write(bytes([letter]))
                        if taken.ended.wait(1):
                            return
                return
            self.send_response(taken.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler), taken):
        yield taken


@dataclass
class Mail:
    to: list[str]
    text: str
    login: str | None
    is_encrypted: bool


@contextmanager
def mail_server(certificate: Path | None = None) -> Iterator[Taken]:
    """An SMTP server, with STARTTLS and AUTH if it has a certificate (and its key beside it)."""
    taken = Taken()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if taken.drips:
                taken.ended.wait(HANGS_S)
                return
            mail = Mail([], "", None, False)
            self.say("220 here")
            while line := self.rfile.readline().decode().strip():
                verb = line.split(" ")[0].upper()
                if verb == "EHLO":
                    self.say("250-here")
                    if certificate is not None:
                        self.say("250-AUTH PLAIN" if mail.is_encrypted else "250-STARTTLS")
                    self.say("250 HELP")
                elif verb == "STARTTLS" and certificate is not None:
                    self.say("220 go on")
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
                    self.request = context.wrap_socket(self.request, server_side=True)
                    self.setup()
                    mail.is_encrypted = True
                elif verb == "AUTH":
                    mail.login = base64.b64decode(line.split(" ")[2]).decode()
                    self.say("235 welcome")
                elif verb == "RCPT":
                    mail.to.append(line.partition(":")[2].strip("<>"))
                    self.say(f"{taken.status} mailbox" if taken.status != 200 else "250 yes")
                elif verb == "DATA":
                    self.say("354 go on")
                    lines = list(iter(lambda: self.rfile.readline().decode(), ".\r\n"))
                    mail.text = "".join(lines)
                    taken.items.append(mail)
                    self.say("250 taken")
                elif verb == "QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("250 yes")

        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a sender that was killed

    with _serving(Server(("127.0.0.1", 0), Handler), taken):
        yield taken


@contextmanager
def _serving(server: socketserver.TCPServer, taken: Taken) -> Iterator[None]:
    taken.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        taken.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(WITHIN_S)
