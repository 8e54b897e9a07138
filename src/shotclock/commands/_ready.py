"""Readiness of a background command: a port that it listens on, a line of its output, or a URL that answers."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Container
from urllib.parse import urlsplit

from ..dispatch.background_command import Ready
from ..supervise import kernel
from .shell_limits import TooSlow, limited_cpu

# Between two looks at a port or a URL.
LOOK_PAUSE_S = 0.1
CONNECT_LIMIT_S = 1.0
# A server that compiles at the first request may take this long for it.
URL_LIMIT_S = 10.0
LONGEST_LINE = 8_192
# The processor time of one search for a line: a pattern that backtracks would take years.
SEARCH_LIMIT_S = 0.25
_LISTENING = "0A"


def read_url(text: str) -> str:
    """Return the URL. Raises ValueError unless it is one of http or https."""
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_usable = is_usable and text.isascii() and text.isprintable() and " " not in text
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(f"{text[:80]!r} is not a URL such as http://localhost:3000/")
    return text


def find_holder(ready: Ready) -> str:
    """Return why the sign of readiness would come from another server, which is there already; or an empty text."""
    if ready.port is not None and answers_on(ready.port):
        return f"port {ready.port} is held by another process{name_holder(ready.port)}"
    if ready.url is not None:
        with contextlib.suppress(OSError, ValueError):
            if _get_status(ready.url, CONNECT_LIMIT_S) < 500:  # a slow server may answer later
                return f"{ready.url} is answered by another process already"
    return ""


def answers_on(port: int) -> bool:
    """Return whether a server accepts connections on this port of the machine itself."""
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), CONNECT_LIMIT_S).close()
        except OSError:
            continue
        return True
    return False


class Probe(threading.Thread):
    """Thread that looks at a port or a URL until it answers. Then `fd` becomes readable."""

    fd: int

    def __init__(self, ready: Ready, list_tree: Callable[[], list[int]]) -> None:
        """`list_tree` returns the processes of the command."""
        super().__init__(daemon=True)
        self._ready, self._list_tree = ready, list_tree
        self.fd, self._answer = os.pipe()
        self.trouble: str = "nothing was seen of it yet"
        self._given_up = threading.Event()

    def run(self) -> None:
        while not self._given_up.is_set():
            url = self._ready.url
            trouble = self._look_at_port() if url is None else look_at_url(url, URL_LIMIT_S)
            if not trouble:
                os.write(self._answer, b"1")
                return
            self.trouble = trouble
            self._given_up.wait(LOOK_PAUSE_S)

    def give_up(self) -> None:
        self._given_up.set()

    def _look_at_port(self) -> str:
        port = self._ready.port or 0
        is_answered = answers_on(port)  # before the look at its holder, which may just come up
        sockets, tree = find_listeners(port), self._list_tree()
        if sockets and any(_holds(pid, sockets) for pid in tree):
            return ""
        if not is_answered:
            return f"port {port} refuses connections"
        # Without a holder in /proc it is in a container, and the port was free at the start. Of a process under sudo
        # only the user is seen.
        if not sockets or not _hidden_users(tree).isdisjoint(sockets.values()):
            return ""
        return f"port {port} is held by another process{name_holder(port)}"


def look_at_url(address: str, limit_s: float) -> str:
    """Return why the URL gives no sign of life; an empty text if it answers with a status below 500."""
    try:
        status = _get_status(address, limit_s)
    except (OSError, ValueError) as error:
        return f"{address}: {str(error) or type(error).__name__}"
    if not status:
        return f"{address} accepts the connection and does not answer"
    return "" if status < 500 else f"{address} answers with status {status}"


def _get_status(address: str, limit_s: float) -> int:
    """Return the status of a GET; 0 if there is a server that gives none in time. Raises OSError or ValueError."""
    url = urlsplit(address)
    kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    more = {}
    if url.scheme == "https":  # nothing is sent that must be secret, and servers of developers sign for themselves
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        kind, more = http.client.HTTPSConnection, {"context": trusting}
    connection = kind(url.hostname, url.port, timeout=limit_s, **more)
    # The timeout of the socket begins again with every byte.
    bound = threading.Timer(limit_s, _hang_up, [connection])
    bound.daemon = True
    bound.start()
    try:
        connection.connect()
        try:
            connection.request("GET", f"{url.path or '/'}{f'?{url.query}' if url.query else ''}")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
    finally:
        bound.cancel()
        connection.close()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError):
        if (link := connection.sock) is not None:
            socket.socket.shutdown(link, socket.SHUT_RDWR)


def find_listeners(port: int) -> dict[str, str]:
    """Return the sockets that listen on a port, as /proc names them, `socket:[123]`, with the ids of their users."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as table:
                rows = [line.split() for line in table][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                found[f"socket:[{row[9]}]"] = row[7]
    return found


def name_holder(port: int) -> str:
    """Return the visible process that listens on a port, for a message; an empty text if none is seen."""
    if not (sockets := find_listeners(port)):
        return ""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    holder = next((pid for pid in pids if _holds(pid, sockets)), None)
    return "" if holder is None else f": {kernel.describe(holder)['command']} (pid {holder})"


def _hidden_users(pids: list[int]) -> set[str]:
    """Return the ids of the users of the processes whose open files are hidden from us."""
    users: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            try:
                os.listdir(f"/proc/{pid}/fd")
            except PermissionError:
                with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
                    users.update(*(line.split()[1:] for line in file if line.startswith("Uid:")))
    return users


def _holds(pid: int, sockets: Container[str]) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in sockets:
                return True
        except OSError:
            continue
    return False


class LineWatch:
    """Search for a line in the output, also for one without an end yet. Only for the main thread."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._rest = b""
        self.trouble: str = "no line of its output matched"
        self._is_too_slow = False

    def finds(self, chunk: bytes) -> bool:
        if self._is_too_slow:
            return False
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        texts = (line[-LONGEST_LINE:].rstrip(b"\r").decode("utf-8", "replace") for line in (*lines, rest))
        try:
            with limited_cpu(SEARCH_LIMIT_S):
                return any(map(self._pattern.search, texts))
        except TooSlow:
            self._is_too_slow = True
            self.trouble = f"the search for {self._pattern.pattern!r} takes too long; write a simpler pattern"
            return False
