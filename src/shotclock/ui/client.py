"""The way to a device: the socket of the daemon that keeps it, and how one is started where none is there.

One line of JSON is a request. Lines come back until one of them has the envelope; each says which command it is about,
and what is about another one is passed over. Every wait ends: at the command's own time and 5 s, or at the caller's.
A daemon that says nothing until then is killed with all below it, so that the next command finds none and starts one.

Stands before every `shotclock ui click`: what it imports, it needs.
"""

from __future__ import annotations

import json
import os
import socket

from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.value_types import field, record
from ..process.clock import monotonic_ns, pause
from ..process.command_task import make_private_directory, state_directory
from .device_names import kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = "ui"
# How long a daemon and its device may take to come up: a browser on a busy machine, and its first page.
START_LIMIT_MS = 30_000
CONNECT_LIMIT_S = 2.0
CONNECT_PAUSE_S = 0.01
# What the daemon has beyond `timeoutMs` to answer, and what this end waits for it.
RESULT_MARGIN_MS = 5_000
# What killing a silent daemon may take after that.
KILL_MARGIN_MS = 1_000
# What stopping a daemon may take: its execution is cancelled, its browser killed and seen gone.
STOP_LIMIT_MS = 20_000
LOOK_LIMIT_MS = 3_000
# More than any valid payload has as JSON that is all escapes; what is longer the daemon would not read.
MOST_SENT = 250_000
MOST_BYTES = 64 * 1024 * 1024
KEPT_EVENTS = 20
DEFAULT_IDLE_MS = 600_000

# What a daemon is told of the environment that it happens to be started in. It outlives whoever that is, and a browser
# has no use for their keys.
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_", "TZ", "TMPDIR", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY",
    "XDG_", "DBUS_", "SHOTCLOCK_", "VIRTUAL_ENV", "PYTHON", "PLAYWRIGHT_", "ANDROID_", "ADB_", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_", "LD_LIBRARY_PATH",
)  # fmt: skip

HINT = "run `shotclock doctor ui` first: the device may be gone; error.context.events is what it said last"


def folder() -> str:
    return os.path.join(state_directory(), FOLDER)


def stem_of(device: str) -> str:
    """Return the name of a device as a part of a path. Two devices never share one."""
    if device.isascii() and device.replace("-", "").replace("_", "").isalnum() and len(device) <= 40:
        return device
    import hashlib

    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in device)[:24]
    return f"{plain}-{hashlib.sha256(device.encode()).hexdigest()[:12]}"


def socket_path(device: str) -> str:
    return os.path.join(folder(), f"{stem_of(device)}.sock")


@record
class Exchange:
    """One request to the daemon of a device, and what came back."""

    device: str
    request: dict[str, Any]
    command_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last ones."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The results of steps that were told before the end."""
    connection: socket.socket | None = None
    is_heard: bool = False
    """Whether the daemon has said anything about this command, so that it may have begun."""
    has_started: bool = False
    """Whether the daemon was started for this, and is still coming up."""

    def run(self, margin_ms: int, *, until_ns: int | None = None) -> Envelope:
        """Send the request and return the envelope. Blocks, bounded by `margin_ms`, and again by that from the moment
        at which the daemon says that it has begun; in between by what it says that it needs to open its device, or to
        stop. Raises Failure."""
        try:
            return self._run(margin_ms, until_ns)
        except Failure as failure:
            if failure.code != "DEVICE_LOST" or self.is_heard or self.request["do"] in ("status", "stop"):
                raise
        # The daemon was on its way out, and had said nothing: nothing has begun.
        return self._run(margin_ms, until_ns)

    def _run(self, margin_ms: int, until_ns: int | None) -> Envelope:
        with self._connect(until_ns) as connection:
            self.connection = connection
            connection.settimeout(CONNECT_LIMIT_S)
            if until_ns is not None:
                self.request["remainingMs"] = max(1, (until_ns - monotonic_ns()) // 1_000_000)
            line = json.dumps(self.request).encode() + b"\n"
            if len(line) > MOST_SENT:
                self._check_payload()
            try:
                connection.sendall(line)
            except OSError as error:
                raise self._lost(f"the daemon of {self.device} does not take the request: {error}") from None
            return self._read(connection, margin_ms, until_ns)

    def cut(self) -> None:
        """End the exchange from another thread: the daemon sees that its caller has left, and stops the execution."""
        self.is_heard = True  # not to be sent again
        if self.connection is not None:
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _connect(self, until_ns: int | None) -> socket.socket:
        connection = try_connect(self.device)
        if connection is not None:
            return connection
        if self.request["do"] in ("status", "stop"):
            raise self._lost(f"the daemon of {self.device} has just ended")
        if self.request["do"] == "execute":
            self._check_payload()  # nothing is started for what is not valid
        self.has_started = True
        return start_daemon(self.device, until_ns=until_ns)

    def _check_payload(self) -> None:
        from .payload import read_execution

        read_execution(self.request["execution"], timeout_ms=self.request.get("timeoutMs"))

    def _read(self, connection: socket.socket, margin_ms: int, until_ns: int | None) -> Envelope:
        started_ns = monotonic_ns()
        coming_up_ms = START_LIMIT_MS if self.has_started else 0
        may_kill = self.request["do"] != "status"
        latest_ns = started_ns + (margin_ms + coming_up_ms) * 1_000_000
        rest = b""
        while True:
            now_ns = monotonic_ns()
            stop_ns = latest_ns if until_ns is None else min(latest_ns, until_ns)
            if now_ns >= stop_ns:
                waited_ms = (now_ns - started_ns) // 1_000_000
                killed = kill_daemon(self.device, connection) if may_kill and stop_ns == latest_ns else None
                raise self._silent(waited_ms, killed)
            connection.settimeout(max(0.001, (stop_ns - now_ns) / 1e9))
            try:
                chunk = connection.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(f"the daemon of {self.device} is gone: {error}") from None
            if not chunk:
                raise self._lost(f"the daemon of {self.device} ended before it answered")
            rest += chunk
            if len(rest) > MOST_BYTES:
                raise self._malformed("it is larger than 64 MiB")
            while b"\n" in rest:
                line, _, rest = rest.partition(b"\n")
                told = self._parse(line)
                if told.get("commandId") != self.command_id:
                    continue  # about another command, which does not end this one
                if type(needed_ms := told.get("mayTakeMs")) is int:  # nothing has begun
                    latest_ns = monotonic_ns() + needed_ms * 1_000_000
                    continue
                self.is_heard = True
                if "begun" in told:
                    latest_ns = monotonic_ns() + margin_ms * 1_000_000
                elif "event" in told:
                    self._note(told["event"])
                elif "envelope" in told:
                    return self._envelope(told["envelope"])

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            told = json.loads(line)
        except ValueError as error:
            raise self._malformed(str(error)) from None
        if not isinstance(told, dict):
            raise self._malformed("it is no object")
        return told

    def _note(self, event: Any) -> None:
        if isinstance(event, dict):
            self.events = [*self.events, event][-KEPT_EVENTS:]
            if event.get("event") == "stepResult":
                self.steps.append({name: item for name, item in event.items() if name != "event"})

    def _envelope(self, told: Any) -> Envelope:
        try:
            envelope = Envelope(told["data"], told["error"], list(told["warnings"]), dict(told["meta"]))
            if envelope.ok is not told["ok"] or not isinstance(envelope.exit_code, int):
                raise ValueError("its parts contradict each other")
            return envelope
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(f"{type(error).__name__}: {error}") from None

    # --- what can go wrong ----------------------------------------------------------------------------------

    def _context(self) -> dict[str, object]:
        return {"device": self.device, "commandId": self.command_id, "events": self.events}

    def _silent(self, waited_ms: int, killed: dict[str, object] | None) -> Failure:
        message = f"no result of {self.command_id} came from {self.device} within {waited_ms} ms"
        context = self._context()
        if killed is not None:
            message += "; its daemon did not answer, and was killed"
            context["killed"] = killed
        return Failure("RESULT_ENVELOPE_TIMEOUT", message, data=self._partial(), context=context, suggestion=HINT)

    def _malformed(self, why: str) -> Failure:
        message = f"the result of {self.command_id} cannot be read: {why}"
        return Failure("RESULT_ENVELOPE_MALFORMED", message, data=self._partial(), context=self._context())

    def _lost(self, message: str) -> Failure:
        return Failure("DEVICE_LOST", message, data=self._partial(), context=self._context())

    def _partial(self) -> dict[str, object] | None:
        return {"commandId": self.command_id, "stepResults": self.steps} if self.steps else None


def execute(
    device: str,
    payload: dict[str, Any],
    *,
    timeout_ms: Any = None,
    remaining_ms: int | None = None,
    traceparent: str | None = None,
    on_exchange: Callable[[Exchange], object] | None = None,
) -> Envelope:
    """Run an execution on a device, and return its envelope. `timeout_ms` replaces the payload's own; `remaining_ms` is
    what the caller has left, and `traceparent` its place in a trace. Blocks, bounded. Raises Failure."""
    command_id = payload.get("commandId", payload.get("command_id"))
    command_id = command_id if isinstance(command_id, str) else ""
    request: dict[str, Any] = {"do": "execute", "commandId": command_id, "execution": payload, "pid": os.getpid()}
    if timeout_ms is not None:
        request["timeoutMs"] = timeout_ms
    if traceparent is not None:
        request["traceparent"] = traceparent
    until_ns = None
    if remaining_ms is not None:
        until_ns = monotonic_ns() + remaining_ms * 1_000_000
    exchange = Exchange(device, request, command_id)
    if on_exchange is not None:
        on_exchange(exchange)
    whole: Any = timeout_ms if timeout_ms is not None else payload.get("timeoutMs", payload.get("timeout_ms"))
    whole_ms = int(whole) if type(whole) in (int, float) and 0 <= whole < 1e9 else 0
    return exchange.run(whole_ms + RESULT_MARGIN_MS, until_ns=until_ns)


def ask(device: str, verb: str, *, within_ms: int = LOOK_LIMIT_MS) -> Envelope | None:
    """Ask the daemon of a device for its status. Return None where there is none. Raises Failure."""
    connection = try_connect(device)
    if connection is None:
        return None
    connection.close()
    exchange = Exchange(device, {"do": verb, "commandId": verb}, verb)
    return exchange.run(within_ms, until_ns=monotonic_ns() + within_ms * 1_000_000)


def stop(device: str) -> bool:
    """Stop the daemon of a device, and all below it; kill them where it does not answer. Return whether there was one.
    Blocks, for RESULT_MARGIN_MS and then STOP_LIMIT_MS. Raises Failure where something would not die."""
    connection = try_connect(device)
    if connection is None:
        return False
    connection.close()
    try:
        Exchange(device, {"do": "stop", "commandId": "stop"}, "stop").run(RESULT_MARGIN_MS)
    except Failure as failure:
        killed = failure.context.get("killed")
        is_gone = failure.code == "DEVICE_LOST"  # it ended while it was told to
        if not is_gone and not (isinstance(killed, dict) and not killed["survivors"]):
            raise
    return True


# --- sockets and daemons --------------------------------------------------------------------------------------


def try_connect(device: str) -> socket.socket | None:
    """Return a connection to the daemon of a device; None where nobody listens."""
    path = socket_path(device)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(CONNECT_LIMIT_S)
    try:
        with_short_path(path, connection.connect)
    except OSError:
        connection.close()
        return None
    return connection


def kill_daemon(device: str, connection: socket.socket) -> dict[str, object] | None:
    """Kill the daemon at the other end, and all below it; remove what it leaves. Return its pid and what would not die;
    None where this machine does not say who it is. That the connection is open proves that it is still that one."""
    from ..process.kill import kill_tree
    from ..process.private_socket import peer_of

    pid, user = peer_of(connection)
    if pid in (0, os.getpid()) or user != os.geteuid():
        return None
    left = kill_tree(pid, lambda wait_ms: pause(wait_ms / 1000))
    _clean_up_after(device)
    return {"pid": pid, "survivors": left}


def _clean_up_after(device: str) -> None:
    """Remove what a daemon that was killed has left, unless another one serves by now."""
    import fcntl

    stem = os.path.join(folder(), stem_of(device))
    try:
        lock = os.open(f"{stem}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_leftovers(stem)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def remove_leftovers(stem: str) -> None:
    """Remove the socket and the temporary files of this device's last daemon. Only who holds the lock may."""
    import contextlib
    import shutil

    for ending in (".sock", ".device"):
        with contextlib.suppress(OSError):
            os.unlink(f"{stem}{ending}")
    with contextlib.suppress(OSError):
        with open(f"{stem}.tmp", encoding="utf-8") as file:
            scratch = file.read()
        if os.path.basename(scratch).startswith("shotclock-ui-"):
            shutil.rmtree(scratch, ignore_errors=True)
        os.unlink(f"{stem}.tmp")


def with_short_path(path: str, use: Callable[[str], object]) -> None:
    """Call a function with a name of this file that fits into the address of a socket: 107 bytes, and a home may be
    longer. Raises OSError."""
    if len(os.fsencode(path)) < 100:
        use(path)
        return
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        use(f"/proc/self/fd/{parent}/{os.path.basename(path)}")
    finally:
        os.close(parent)


def start_daemon(device: str, *, idle_ms: int = DEFAULT_IDLE_MS, until_ns: int | None = None) -> socket.socket:
    """Start the daemon of a device, unless somebody else does at this moment, and return a connection to it. Raises
    Failure DEVICE_UNAVAILABLE where none comes up in time."""
    from ..process.environment import OVERTIME_VARIABLE, STOP_FILE_VARIABLE
    from ..process.unsupervised import start_detached

    kind_of(device)  # nothing is started, and kept, for a name that is misspelt
    make_private_directory(folder())
    log = os.path.join(folder(), f"{stem_of(device)}.log")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        of_call = (OVERTIME_VARIABLE, STOP_FILE_VARIABLE)
        environment = {
            name: text
            for name, text in os.environ.items()
            if name.upper().startswith(KEPT_VARIABLES) and name not in of_call
        }
        start_detached("shotclock.ui.daemon", [device, str(idle_ms)], output_fd=output, environment=environment)
    except OSError as error:
        raise Failure("DEVICE_UNAVAILABLE", f"the daemon of {device} could not be started: {error}") from None
    finally:
        os.close(output)
    give_up_ns = monotonic_ns() + START_LIMIT_MS * 1_000_000
    give_up_ns = give_up_ns if until_ns is None else min(give_up_ns, until_ns)
    while monotonic_ns() < give_up_ns:
        if (connection := try_connect(device)) is not None:
            return connection
        pause(CONNECT_PAUSE_S)
    raise Failure("DEVICE_UNAVAILABLE", f"the daemon of {device} did not come up in time; its log is {log}")
