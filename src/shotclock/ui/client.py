"""The client of a device's daemon, which it starts if none runs.

A request is one line of JSON. Each line of the answer names its command, and the line with the envelope is the last.
A daemon that stays silent until its limit is killed with all below it, and the next command starts another.

`shotclock ui click` imports this module, so the slow asyncio is imported by the one function that needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from typing import Any

from ..core.envelope import Envelope
from ..core.errors import Failure, SideEffects
from ..core.value_types import JsonObject
from ..supervise.clock import monotonic_ns, pause
from ..supervise.command_task import make_private_directory, state_directory
from ..supervise.environment import OVERTIME_VARIABLE, STOP_FILE_VARIABLE
from ..supervise.kill import kill_tree
from ..supervise.private_socket import connect, peer_of
from ..supervise.unsupervised import start_detached
from .device import kind_of
from .payload import Execution, check_device, effects_of_steps, read_execution

START_LIMIT_MS = 30_000  # a browser on a busy machine, and its first page
CONNECT_LIMIT_S = 2.0
CONNECT_PAUSE_S = 0.01
RESULT_MARGIN_MS = 5_000  # the daemon's time beyond `timeoutMs` to answer, which its client waits
KILL_MARGIN_MS = 1_000  # after that, killing a silent daemon may take this long
STOP_LIMIT_MS = 20_000  # stopping a daemon: its execution is cancelled, its browser killed and verified gone
STATUS_LIMIT_MS = 3_000
CUT_LIMIT_S = 5.0  # after its socket was cut, a thread that reads from it returns at once
MAX_ANSWER_BYTES = 64 * 1024 * 1024
KEPT_EVENTS = 20
DEFAULT_IDLE_MS = 600_000

# The variables that a daemon inherits. It outlives the process that starts it, and a browser needs none of its keys.
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_", "TZ", "TMPDIR", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY",
    "XDG_", "DBUS_", "SHOTCLOCK_", "VIRTUAL_ENV", "PYTHON", "PLAYWRIGHT_", "ANDROID_", "ADB_", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_", "LD_LIBRARY_PATH",
)  # fmt: skip

HINT = "run `shotclock doctor ui` first: the device may be gone; error.context.events has its last events"


def folder() -> str:
    return os.path.join(state_directory(), "ui")


def stem_of(device: str) -> str:
    """Return the path of a device's files without their ending. Two devices never share one."""
    name = device
    if not device.isascii() or not device.replace("-", "").replace("_", "").isalnum() or len(device) > 40:
        plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in device)[:24]
        name = f"{plain}-{hashlib.sha256(device.encode()).hexdigest()[:12]}"
    return os.path.join(folder(), name)


class DeviceRequest:
    def __init__(self, device: str, verb: str, command_id: str | None = None, **message: object) -> None:
        self.device = device
        self.verb = verb
        self.command_id: str = verb if command_id is None else command_id
        self.has_started: bool = False  # whether the daemon was started for this request, and may still be starting
        self.steps: list[JsonObject] = []
        self._message = {"do": verb, "commandId": self.command_id, **message}
        self._events: list[JsonObject] = []
        self._connection: socket.socket | None = None
        self._is_sent = False
        self._may_have_begun = False

    def run(self, margin_ms: int, *, until_ns: int | None = None) -> Envelope:
        """Send the request and return the envelope.

        Blocks for at most `margin_ms`, and again for that long once the daemon reports that the command has begun; in
        between for as long as the daemon needs to open its device, or to stop.
        """
        try:
            return self._run(margin_ms, until_ns)
        except Failure as failure:
            if failure.code != "DEVICE_LOST" or self._may_have_begun or self.verb in ("status", "stop"):
                raise
        # The daemon ended before it read the request: nothing has begun.
        self._is_sent = False
        return self._run(margin_ms, until_ns)

    def effects_on(self, execution: Execution) -> SideEffects:
        """Return the effects that the execution may have had."""
        return effects_of_steps(execution, self.steps, is_over=not self._is_sent)

    def cut(self) -> None:
        """End the request from another thread: the daemon sees that its caller has left, and stops the execution."""
        self._may_have_begun = True  # not to be sent again
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self, margin_ms: int, until_ns: int | None) -> Envelope:
        connection = try_connect(self.device)
        if connection is None:
            if self.verb in ("status", "stop"):
                raise self._fail("DEVICE_LOST", f"the daemon of {self.device} has just ended")
            self.has_started = True
            connection = start_daemon(self.device, until_ns=until_ns)
        with connection:
            self._connection = connection
            if until_ns is not None:
                self._message["remainingMs"] = max(1, (until_ns - monotonic_ns()) // 1_000_000)
            self._is_sent = True
            try:
                connection.sendall(json.dumps(self._message).encode() + b"\n")
            except OSError as error:
                message = f"the daemon of {self.device} does not accept the request: {error}"
                raise self._fail("DEVICE_LOST", message) from None
            return self._read(connection, margin_ms, until_ns)

    def _read(self, connection: socket.socket, margin_ms: int, until_ns: int | None) -> Envelope:
        began_ns = monotonic_ns()
        latest_ns = began_ns + (margin_ms + (START_LIMIT_MS if self.has_started else 0)) * 1_000_000
        rest = b""
        while True:
            stop_ns = latest_ns if until_ns is None else min(latest_ns, until_ns)
            *lines, rest = (rest + self._receive(connection, stop_ns, began_ns, stop_ns == latest_ns)).split(b"\n")
            if len(rest) > MAX_ANSWER_BYTES:
                raise self._malformed("it is larger than 64 MiB")
            for line in lines:
                try:
                    answer = json.loads(line)
                except ValueError as error:
                    raise self._malformed(str(error)) from None
                if not isinstance(answer, dict):
                    raise self._malformed("it is no object")
                if answer.get("commandId") != self.command_id:
                    continue
                if type(needed_ms := answer.get("mayTakeMs")) is int:  # nothing has begun
                    latest_ns = monotonic_ns() + needed_ms * 1_000_000
                    continue
                self._may_have_begun = True
                if "begun" in answer:
                    latest_ns = monotonic_ns() + margin_ms * 1_000_000
                elif "event" in answer:
                    self._handle_event(answer["event"])
                elif "envelope" in answer:
                    return self._read_envelope(answer["envelope"])

    def _receive(self, connection: socket.socket, stop_ns: int, began_ns: int, is_own_limit: bool) -> bytes:
        """Return the next bytes. A daemon that is silent until its own limit is killed."""
        connection.settimeout(max(0.001, (stop_ns - monotonic_ns()) / 1e9))
        try:
            chunk = connection.recv(65536)  # even past the limit: a stopped client finds its answer here
        except TimeoutError:
            chunk = None
        except OSError as error:
            raise self._fail("DEVICE_LOST", f"the daemon of {self.device} is gone: {error}") from None
        if chunk == b"":
            raise self._fail("DEVICE_LOST", f"the daemon of {self.device} ended before it answered")
        if chunk is not None or monotonic_ns() < stop_ns:
            return chunk or b""
        waited_ms = (monotonic_ns() - began_ns) // 1_000_000
        message = f"no result of {self.command_id} came from {self.device} within {waited_ms} ms"
        killed = kill_daemon(self.device, connection) if is_own_limit and self.verb != "status" else None
        if killed is None:
            raise self._fail("RESULT_ENVELOPE_TIMEOUT", message)
        message += "; its daemon did not answer, and was killed"
        raise self._fail("RESULT_ENVELOPE_TIMEOUT", message, killed=killed)

    def _handle_event(self, event: object) -> None:
        if isinstance(event, dict):
            self._events = [*self._events, event][-KEPT_EVENTS:]
            if event.get("event") == "stepResult":
                self.steps.append({name: item for name, item in event.items() if name != "event"})

    def _read_envelope(self, written: Any) -> Envelope:
        try:
            envelope = Envelope(written["data"], written["error"], list(written["warnings"]), dict(written["meta"]))
            if envelope.ok is not written["ok"] or not isinstance(envelope.exit_code, int):
                raise ValueError("its parts contradict each other")
            return envelope
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(f"{type(error).__name__}: {error}") from None

    def _malformed(self, why: str) -> Failure:
        return self._fail("RESULT_ENVELOPE_MALFORMED", f"the result of {self.command_id} cannot be read: {why}")

    def _fail(self, code: str, message: str, **context: object) -> Failure:
        data = {"commandId": self.command_id, "stepResults": self.steps} if self.steps else None
        context = {"device": self.device, "commandId": self.command_id, "events": self._events, **context}
        hint = HINT if code == "RESULT_ENVELOPE_TIMEOUT" else None
        return Failure(code, message, data=data, context=context, suggestion=hint)


def execute(
    device: str,
    payload: object,
    *,
    remaining_ms: int | None = None,
    traceparent: str | None = None,
    on_request: Callable[[DeviceRequest], object] | None = None,
) -> Envelope:
    """Run an execution on a device within the rest of the caller's time. Blocks, bounded."""
    until_ns = None if remaining_ms is None else monotonic_ns() + remaining_ms * 1_000_000
    execution = read_execution(payload)
    message = {"execution": execution.written, "pid": os.getpid(), "traceparent": traceparent}
    request = DeviceRequest(device, "execute", execution.command_id, **message)
    if on_request is not None:
        on_request(request)
    try:
        check_device(execution, kind_of(device) == "android")
        return request.run(execution.timeout_ms + RESULT_MARGIN_MS, until_ns=until_ns)
    except Failure as failure:
        failure.side_effects = request.effects_on(execution)
        raise


async def execute_async(device: str, payload: object, **options: Any) -> Envelope:
    """Do as `execute`, in a thread. A cancellation stops the execution."""
    import asyncio

    from ..calls.supervised_commands import run_shielded

    requests: list[DeviceRequest] = []
    working = asyncio.ensure_future(asyncio.to_thread(execute, device, payload, on_request=requests.append, **options))
    try:
        return await asyncio.shield(working)  # bounded by the request itself
    except asyncio.CancelledError:
        for request in requests:
            request.cut()
        await run_shielded(asyncio.wait([working], timeout=CUT_LIMIT_S))
        if working.done() and not working.cancelled():
            working.exception()  # that it was cut
        raise


def find_status(device: str) -> Envelope | None:
    if not is_running(device):
        return None
    until_ns = monotonic_ns() + STATUS_LIMIT_MS * 1_000_000
    return DeviceRequest(device, "status").run(STATUS_LIMIT_MS, until_ns=until_ns)


def stop(device: str) -> bool:
    """Stop the daemon of a device with all below it, by force if it is silent. Raises Failure if a process survives."""
    if not is_running(device):
        return False
    try:
        DeviceRequest(device, "stop").run(RESULT_MARGIN_MS)
    except Failure as failure:
        killed = failure.context.get("killed")
        is_gone = failure.code == "DEVICE_LOST"  # it ended while it read the request
        if not is_gone and not (isinstance(killed, dict) and not killed["survivors"]):
            raise
    return True


def try_connect(device: str) -> socket.socket | None:
    try:
        return connect(f"{stem_of(device)}.sock", CONNECT_LIMIT_S)
    except OSError:
        return None


def is_running(device: str) -> bool:
    connection = try_connect(device)
    if connection is not None:
        connection.close()
    return connection is not None


def kill_daemon(device: str, connection: socket.socket) -> dict[str, object] | None:
    """Kill the daemon with all below it. Its pid is certain while the connection is open; None: it is unknown."""
    pid, user = peer_of(connection)
    if pid in (0, os.getpid()) or user != os.geteuid():
        return None
    survivors = kill_tree(pid, lambda wait_ms: pause(wait_ms / 1000))
    with contextlib.suppress(OSError):  # BlockingIOError: another daemon runs by now
        lock = os.open(f"{stem_of(device)}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_leftovers(stem_of(device))
        finally:
            os.close(lock)
    return {"pid": pid, "survivors": survivors}


def remove_leftovers(stem: str) -> None:
    """Remove the socket and the temporary files of a device's last daemon. Only the holder of the lock may."""
    for ending in (".sock", ".device"):
        with contextlib.suppress(OSError):
            os.unlink(f"{stem}{ending}")
    with contextlib.suppress(OSError):
        with open(f"{stem}.tmp", encoding="utf-8") as file:
            scratch = file.read()
        if os.path.basename(scratch).startswith("shotclock-ui-"):
            shutil.rmtree(scratch, ignore_errors=True)
        os.unlink(f"{stem}.tmp")


def start_daemon(device: str, *, idle_ms: int = DEFAULT_IDLE_MS, until_ns: int | None = None) -> socket.socket:
    kind_of(device)  # refuse a misspelt name
    make_private_directory(folder())
    log = f"{stem_of(device)}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    of_call = (OVERTIME_VARIABLE, STOP_FILE_VARIABLE)
    kept = [name for name in os.environ if name.upper().startswith(KEPT_VARIABLES) and name not in of_call]
    environment = {name: os.environ[name] for name in kept}
    try:
        start_detached("shotclock.ui.daemon", [device, str(idle_ms)], output_fd=output, environment=environment)
    except OSError as error:
        raise Failure("DEVICE_UNAVAILABLE", f"the daemon of {device} could not be started: {error}") from None
    finally:
        os.close(output)
    latest_ns = monotonic_ns() + START_LIMIT_MS * 1_000_000
    latest_ns = latest_ns if until_ns is None else min(latest_ns, until_ns)
    while monotonic_ns() < latest_ns:
        if (connection := try_connect(device)) is not None:
            return connection
        pause(CONNECT_PAUSE_S)
    raise Failure("DEVICE_UNAVAILABLE", f"the daemon of {device} did not start in time; its log is {log}")
