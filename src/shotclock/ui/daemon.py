"""The daemon of one device: it keeps the device between commands, for one execution at a time, and holds the clock.

    client (waits `timeoutMs` + 5 s)      daemon ── zygotes, supervisor ── process of the device ── browser

It runs no code of a device itself. If it is killed, all below it dies too, and the next command starts another.

At the end: the devices of this machine, for `shotclock ui devices` and `shotclock doctor ui`.

AGENTS.md: the keeper of a device holds its limits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from ..calls.call import Call, Outcome
from ..calls.outcomes import failure_outcome
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..commands.doctor import Check, Status
from ..core.catalogue import HandlerReference, Operation
from ..core.envelope import Envelope, Problem, warning
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import NS_PER_MS, Clocks
from ..core.trace import TraceContext
from ..core.value_types import JsonObject, as_dict, replace, value
from ..supervise import private_socket
from ..supervise.clock import monotonic_ns, pause
from ..supervise.command_task import make_private_directory
from ..supervise.unsupervised import start_program
from ..worker.context import CallListener
from . import client
from ._adb import Adb, find_server_version, server_address
from ._browser import NO_PLAYWRIGHT, require_chromium
from ._execution import MODULES, RUN_COMMAND, START_PROGRAM, describe_result
from .client import HINT, KEPT_EVENTS, RESULT_MARGIN_MS, START_LIMIT_MS
from .device import DeviceEntry, ProgramOutput, kind_of
from .payload import Execution, effects_of_steps, read_execution

T = TypeVar("T")
Send = Callable[..., None]

ANSWER_RESERVE_MS = 200  # the part of RESULT_MARGIN_MS in which the daemon kills a silent device process and answers
KILL_LIMIT_MS = 5_000  # The longest kill. The client waits as long before it kills the daemon as well.
GRACE_MS = 300  # between the cancellation of an execution without a result and the kill of its process
LOCK_LIMIT_S = 15.0  # the wait for the end of the daemon before this one
LOCK_PAUSE_S = 0.05
READ_LIMIT_S = 5.0  # a client that connects and sends nothing
WRITE_LIMIT_S = 5.0  # a client that does not read
MAX_REQUEST_BYTES = 256 * 1024
CLOSE_LIMIT_MS = 2_000
CANCEL_LIMIT_S = 6.0  # the wait for a cancelled execution: its process is killed by then, and seen dead
LEAVE_LIMIT_S = 2.0  # the time in which clients read that the daemon ends

CHECK_LIMIT_S = 6.0  # a program that hangs reaches it
VERSION_LIMIT_MS = 5_000
# The port at which a Chromium-based app is expected, and the limit of its answer.
CDP_PORT = 9222
CDP_LIMIT_S = 1.0
MAX_CDP_BYTES = 64 * 1024
OUTPUT_LIMIT = 16 * 1024 * 1024  # the largest output is a picture of a screen

_SESSION = "shotclock.ui._execution"


def _operation(name: str, function: str, limit_ms: int, *, mutates: bool) -> Operation:
    clocks = Clocks(timeout_ms=limit_ms, grace_ms=GRACE_MS)
    handler = HandlerReference(_SESSION, function, is_async=True)
    return Operation(name, handler, isolation="shared", mutates=mutates, clocks=clocks)


OPEN = _operation("ui start", "open_session", START_LIMIT_MS, mutates=False)
CLOSE = _operation("ui stop", "close_session", CLOSE_LIMIT_MS, mutates=False)
# One operation, twice: whether an execution mutates follows from its actions.
LOOKING = _operation("ui", "run_execution", START_LIMIT_MS, mutates=False)
CHANGING = _operation("ui", "run_execution", START_LIMIT_MS, mutates=True)
STATUS = _operation("ui status", "open_session", START_LIMIT_MS, mutates=False)


def main(device: str, idle_ms: str) -> None:
    os.chdir("/")  # the directory in which it was started may be removed
    make_private_directory(client.folder())
    stem = client.stem_of(device)
    lock = os.open(f"{stem}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(int(LOCK_LIMIT_S / LOCK_PAUSE_S)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another daemon serves, starts or ends
            if client.is_running(device):
                return
            pause(LOCK_PAUSE_S)
    else:
        return
    client.remove_leftovers(stem)
    with contextlib.suppress(OSError):
        os.truncate(f"{stem}.log", 0)
    scratch = tempfile.mkdtemp(prefix="shotclock-ui-")
    for ending, text in ((".tmp", scratch), (".device", device)):
        with open(f"{stem}{ending}", "w", encoding="utf-8") as file:
            file.write(text)
    try:
        asyncio.run(Daemon(device, int(idle_ms), stem, scratch, lock).serve())
    finally:
        client.remove_leftovers(stem)
        shutil.rmtree(scratch, ignore_errors=True)  # even if its file was removed
        os._exit(0)


@value
class _Holder:
    execution: Execution
    pid: int
    since_ns: int

    def describe(self) -> dict[str, object]:
        return {
            "commandId": self.execution.command_id,
            "taskId": self.execution.task_id,
            "source": self.execution.source,
            "pid": self.pid,
            "ageMs": (monotonic_ns() - self.since_ns) // NS_PER_MS,
            "timeoutMs": self.execution.timeout_ms,
        }


class _DeviceListener(CallListener):
    """Listener to the process of the device: events for the caller, and programs to run for the device."""

    def __init__(self, runtime: Runtime, on_event: Callable[[JsonObject], None]) -> None:
        self._services, self._on_event = RuntimeServices(runtime), on_event
        self._rest = ""
        self.events: list[JsonObject] = []
        self.steps: list[JsonObject] = []

    def wrote(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            event = json.loads(line)
            self.events = [*self.events, event][-KEPT_EVENTS:]
            if event["event"] == "stepResult":
                self.steps.append({name: item for name, item in event.items() if name != "event"})
            self._on_event(event)

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        if question == RUN_COMMAND and isinstance(value, dict):
            return self._services.run_command(value["argv"], within_ms=value["within_ms"])
        if question == START_PROGRAM and isinstance(value, list):
            return self._services.start_program(value)
        return super().ask(question, value)


class Daemon:
    def __init__(self, device: str, idle_ms: int, stem: str, scratch: str, lock: int) -> None:
        self._device, self._idle_ms, self._stem, self._scratch, self._lock = device, idle_ms, stem, scratch, lock
        self._listener: socket.socket | None = None
        self._runtime = self._new_runtime()
        self._opened = False
        self._changing = asyncio.Lock()  # held while the device is opened or replaced
        self._opening: set[asyncio.Task[Envelope | None]] = set()
        self._replacing: asyncio.Task[None] | None = None
        self._holder: _Holder | None = None
        self._call: Call | None = None
        self._executing: asyncio.Task[Envelope] | None = None
        self._last_ns = monotonic_ns()
        self._ending = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()

    def _new_runtime(self) -> Runtime:
        program, environment = Program(imports=(_SESSION,)), {**os.environ, "TMPDIR": self._scratch}
        return Runtime(operations=(OPEN, CLOSE, CHANGING), program=program, environment=environment)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ending.set)
        self._listener = listener = private_socket.listen(f"{self._stem}.sock")
        await self._runtime.__aenter__()
        loop.add_reader(listener.fileno(), self._accept, listener)
        try:
            while not self._ending.is_set():
                left_s = (self._last_ns + self._idle_ms * NS_PER_MS - monotonic_ns()) / 1e9
                if left_s <= 0 and self._holder is None:
                    self._ending.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), max(0.05, left_s))
        finally:
            await self._close_device()
            if self._serving:
                await asyncio.wait(self._serving, timeout=LEAVE_LIMIT_S)

    def _accept(self, listener: socket.socket) -> None:
        if (connection := private_socket.accept(listener)) is not None:
            task = asyncio.ensure_future(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST_BYTES)
        try:
            try:
                line = await asyncio.wait_for(reader.readline(), READ_LIMIT_S)
                request = json.loads(line)
                command_id, verb = str(request["commandId"]), str(request["do"])
            except (TimeoutError, ValueError, KeyError, TypeError):
                return

            def send(**answer: object) -> None:
                writer.write(json.dumps({"commandId": command_id, **answer}).encode() + b"\n")

            envelope = await self._answer(verb, request, send, reader)
            send(envelope=envelope.to_dict())
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(writer.drain(), WRITE_LIMIT_S)
        except ConnectionError:  # the client has left
            pass
        finally:
            self._last_ns = monotonic_ns()
            writer.close()

    async def _answer(self, verb: str, request: JsonObject, send: Send, reader: asyncio.StreamReader) -> Envelope:
        match verb:
            case "execute":
                return await self._execute(request, send, reader)
            case "start":
                began_ns = monotonic_ns()
                send(mayTakeMs=START_LIMIT_MS + RESULT_MARGIN_MS)
                failed = await self._open()
                call = self._runtime.begin(OPEN, {}, began_ns=began_ns)
                return failed or await self._answer_with(call, self._status())
            case "stop":
                send(mayTakeMs=client.STOP_LIMIT_MS)
                call = self._runtime.begin(CLOSE, {}, Clocks(timeout_ms=client.STOP_LIMIT_MS))
                async with self._runtime.answering(call) as answering:
                    await self._close_device()
                    self._ending.set()
                    answering.outcome = Outcome(Ending.FINISHED, data={"device": self._device, "stopped": True})
                return answering.envelope
        return await self._answer_with(self._runtime.begin(STATUS, {}), self._status())

    async def _answer_with(self, call: Call, outcome: Outcome) -> Envelope:
        async with self._runtime.answering(call) as answering:
            answering.outcome = outcome
        return answering.envelope

    def _status(self) -> Outcome:
        holder = None if self._holder is None else self._holder.describe()
        status = {"device": self._device, "pid": os.getpid(), "open": self._opened, "holder": holder}
        return Outcome(Ending.FINISHED, data={**status, "idleMs": self._idle_ms})

    async def _close_device(self) -> None:
        """Cancel the running execution, close the device, and end all of its processes. Each step is bounded."""
        # Accept no more clients: a later one finds no socket, and starts another daemon.
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                os.unlink(f"{self._stem}.sock")
        await self._cancel("the device was stopped")
        async with self._changing:
            if self._opened:
                await self._runtime.call(CLOSE, {"device": self._device})
            await self._runtime.close()
            self._opened = False

    async def _cancel(self, why: str) -> None:
        call, executing = self._call, self._executing
        if call is None or executing is None or executing.done():
            return
        call.cancellation.reason = Problem("CANCELLED", why)
        executing.cancel()
        await asyncio.wait([executing], timeout=GRACE_MS / 1000 + CANCEL_LIMIT_S)

    async def _open(self) -> Envelope | None:
        async with self._changing:
            if self._opened:
                return None
            # The lock file has content once a daemon has opened the device. Phones and attached apps keep their pages.
            is_fresh = os.fstat(self._lock).st_size > 0 and kind_of(self._device) == "browser"
            call = self._runtime.begin(OPEN, {"device": self._device, "is_fresh": is_fresh})
            listener = _DeviceListener(self._runtime, lambda event: None)
            async with self._runtime.answering(call) as answering:
                outcome = await self._runtime.perform(call, listener)
                problem = outcome.problem() if callable(outcome.problem) else outcome.problem
                if problem is not None and problem.code != "DEVICE_UNAVAILABLE":
                    message = f"{self._device} could not be started: {problem.message}"
                    outcome.problem = replace(problem, code="DEVICE_UNAVAILABLE", message=message, entry=None)
                outcome.side_effects = SideEffects.NONE
                outcome.survivors, outcome.warnings = (), ()  # the programs of the device stay
                answering.outcome = outcome
            envelope = answering.envelope
            self._opened = envelope.ok
            if envelope.ok:
                os.ftruncate(self._lock, 1)
                return None
            await self._replace_runtime()
            return envelope

    async def _replace(self) -> None:
        """Kill the device with all its processes; the next execution opens another."""
        async with self._changing:
            if self._opened and not self._ending.is_set():
                self._opened = False
                await self._replace_runtime()

    async def _replace_runtime(self) -> None:
        await self._runtime.close()
        self._runtime = self._new_runtime()
        await self._runtime.__aenter__()

    async def _execute(self, request: JsonObject, send: Send, reader: asyncio.StreamReader) -> Envelope:
        began_ns, trace = monotonic_ns(), TraceContext.carried_by(request)
        try:
            execution = read_execution(request.get("execution"))
            if self._holder is not None:
                raise self._conflict(self._holder)
        except Failure as failure:
            outcome = failure_outcome(failure)
            outcome.ending = Ending.NOT_STARTED
            call = self._runtime.begin(LOOKING, {}, began_ns=began_ns)
            call.caller = trace or call.caller
            return await self._answer_with(call, outcome)
        self._holder = _Holder(execution, int(request.get("pid") or 0), began_ns)
        left, ringing = asyncio.ensure_future(reader.read(1)), None
        try:
            if not self._opened:
                send(mayTakeMs=START_LIMIT_MS + RESULT_MARGIN_MS)
            if (failed := await self._open_for(left)) is not None:
                return failed
            send(begun=True)
            call = self._call = self._begin(execution, request.get("remainingMs"), began_ns)
            call.caller = trace or call.caller
            ring_s = call.bound.limit_ms / 1000
            ringing = asyncio.get_running_loop().call_later(ring_s, lambda: send(mayTakeMs=KILL_LIMIT_MS))
            listener = _DeviceListener(self._runtime, lambda event: send(event=event))
            self._executing = asyncio.ensure_future(self._run(execution, call, listener))
            await asyncio.wait([self._executing, left], return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                await self._cancel("its caller has left")
            return await self._executing  # bounded by its clocks
        finally:
            left.cancel()
            if ringing is not None:
                ringing.cancel()
            self._executing = self._call = self._holder = None

    async def _open_for(self, left: asyncio.Future[bytes]) -> Envelope | None:
        """Open the device. Raises ConnectionError where the caller leaves first; the next caller finds it open."""
        if self._opened:  # the usual case, without a turn of the loop in which the device is held and idle
            return await self._open()
        opening = asyncio.ensure_future(self._open())
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        either: list[asyncio.Future[Any]] = [opening, left]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            raise ConnectionError("its caller has left")
        return opening.result()

    def _conflict(self, holder: _Holder) -> Failure:
        shown = holder.describe()
        message = f"{self._device} has been busy with {shown['commandId']} of {shown['source']} for {shown['ageMs']} ms"
        left_ms = max(0, holder.execution.timeout_ms - int(str(shown["ageMs"])))
        context = {"holder": shown, "device": self._device}
        return Failure("EXECUTION_CONFLICT_IN_FLIGHT", message, context=context, retry_after_ms=left_ms)

    def _begin(self, execution: Execution, remaining_ms: Any, began_ns: int) -> Call:
        """Begin the call of an execution: its own time or the rest of its caller's, and the margin for the result."""
        within_ms = None
        if isinstance(remaining_ms, int):  # minus the time in which the device was opened
            within_ms = max(1, remaining_ms - (monotonic_ns() - began_ns) // NS_PER_MS)
        limit_ms = execution.timeout_ms if within_ms is None else max(1, min(execution.timeout_ms, within_ms))
        clocks = Clocks(timeout_ms=limit_ms + RESULT_MARGIN_MS - ANSWER_RESERVE_MS, grace_ms=GRACE_MS)
        arguments = {"device": self._device, "execution": execution.written, "within_ms": within_ms}
        operation = CHANGING if execution.mutates else LOOKING
        return self._runtime.begin(operation, arguments, clocks, began_ns=began_ns)

    async def _run(self, execution: Execution, call: Call, listener: _DeviceListener) -> Envelope:
        async with self._runtime.answering(call) as answering:
            answering.outcome = await self._judge(execution, call, listener)
        envelope = answering.envelope
        page = envelope.data.get("page") if isinstance(envelope.data, dict) else None
        if not isinstance(page, dict) or page.get("next") == "none":
            self._replacing = asyncio.ensure_future(self._replace())  # the answer need not wait for it
        return envelope

    async def _judge(self, execution: Execution, call: Call, listener: _DeviceListener) -> Outcome:
        try:
            outcome = await self._runtime.perform(call, listener)
        except asyncio.CancelledError:
            outcome = judge_result(execution, self._device, call.cancellation.settle(), listener.events, listener.steps)
            call.cancellation.outcome = outcome
            raise
        return judge_result(execution, self._device, outcome, listener.events, listener.steps)


def judge_result(
    execution: Execution, device: str, outcome: Outcome, events: list[JsonObject], steps: list[JsonObject]
) -> Outcome:
    problem = outcome.problem() if callable(outcome.problem) else outcome.problem
    context: JsonObject = {"commandId": execution.command_id, "device": device, "events": events}
    if problem is None:
        try:
            return _read_result(execution, outcome.value, device)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"the result cannot be read: {type(error).__name__}: {error}"
            problem = Problem("RESULT_ENVELOPE_MALFORMED", message, context=context)
            outcome.ending = Ending.FINISHED
    elif problem.code == "TIMEOUT":
        limit_ms = execution.timeout_ms if problem.fired is None else problem.fired.limit_ms
        message = f"{device} gave no result of an execution of {execution.timeout_ms} ms within {limit_ms} ms"
        problem = replace(
            problem, code="RESULT_ENVELOPE_TIMEOUT", message=message, context=context, suggestion=HINT, entry=None
        )
    elif problem.code != "CANCELLED":
        message = f"the process of {device} ended during the execution: {problem.message}"
        problem = replace(problem, code="DEVICE_LOST", message=message, context=context, entry=None)
    index = next((int(event["index"]) for event in reversed(events) if event["event"] == "step"), -1)
    outcome.problem = problem
    page: dict[str, object] = {"state": "lost", "where": None, "next": "none"}
    if outcome.ending is Ending.CANCELLED:  # it obeyed the cancellation
        page = {"state": "unknown", "where": None, "next": "same"}
    outcome.data = describe_result(execution, "failed", steps, index, page)
    has_begun = outcome.ending is not Ending.NOT_STARTED  # and its last events may be lost
    outcome.side_effects = effects_of_steps(execution, steps, is_over=not has_begun)
    return outcome


def _read_result(execution: Execution, result: Any, device: str) -> Outcome:
    if result["commandId"] != execution.command_id:
        raise ValueError(f"it belongs to {result['commandId']!r:.80}")
    data = {name: item for name, item in result.items() if name not in ("error", "effects")}
    problem, error = None, result["error"]
    if error is not None:
        context = {name: item for name, item in error.items() if name not in ("code", "message")}
        context["device"], suggestion = device, None
        if isinstance(clock := context.get("clock"), dict):
            context["timeout_ms"] = clock["limit_ms"]
            if error["code"] == "OPERATION_TIMEOUT":  # its registered hint is about a server
                suggestion = f"look at data.page; to wait longer, give the {clock['owner']} more time (timeoutMs)"
        problem = Problem(error["code"], error["message"], context=context, suggestion=suggestion)
    warnings = (warning("DEVICE_REPLACED"),) if data["page"].get("state") == "fresh" else ()
    return Outcome(Ending.FINISHED, problem, data, side_effects=SideEffects(result["effects"]), warnings=warnings)


class RuntimeServices:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> ProgramOutput:
        clocks = Clocks(timeout_ms=max(1, within_ms), grace_ms=0)
        envelope = await self._runtime.run(argv, clocks, output_limit=OUTPUT_LIMIT)
        if envelope.error is not None and envelope.code != "COMMAND_FAILED":
            raise Failure(str(envelope.code), str(envelope.error["message"]))
        data = envelope.data if isinstance(envelope.data, dict) else {}
        encoded = data.get("stdout_base64")
        stdout = base64.b64decode(str(encoded)) if encoded else str(data.get("stdout", "")).encode()
        return ProgramOutput(int(str(data.get("exit_code", 0))), stdout, str(data.get("stderr", "")))

    async def start_program(self, argv: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(start_program, argv, os.environ)
        except OSError as error:
            raise Failure("SPAWN_FAILED", f"{argv[0]} could not be started: {error}") from None


async def find_all_devices() -> list[DeviceEntry]:
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        found: list[DeviceEntry] = []
        for name in ("browser", "android"):  # one of kind cdp is reached by its address
            try:
                found += await _in_time(MODULES[name].find_devices(services))
            except Failure as failure:
                found.append(DeviceEntry(name, False, str(failure)))
        return found


async def _in_time(look: Awaitable[T]) -> T:
    """Return the result of a look at this machine. Raises Failure, also if it takes too long."""
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            return await look
    except TimeoutError:
        raise Failure("DEVICE_UNAVAILABLE", f"no answer within {CHECK_LIMIT_S:g} s") from None


@value
class DeviceFindings:
    checks: list[Check]
    devices: list[DeviceEntry]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    def as_data(self) -> dict[str, object]:
        return {"checks": list(map(as_dict, self.checks)), "devices": list(map(as_dict, self.devices))}


def examine() -> DeviceFindings:
    """Check the requirements and list the devices for `doctor ui`. Starts none, and leaves nothing running."""
    return asyncio.run(_examine())


async def _examine() -> DeviceFindings:
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        needs = await asyncio.gather(
            _check("playwright", _check_playwright()),
            _check("chromium", _check_chromium(services)),
            _check("cdp", check_cdp()),
            _check("adb", _check_adb(services)),
            _check("adb_server", _check_adb_server()),
        )
    devices = await find_all_devices()
    checks = [*needs, *(Check(each.name, "ok" if each.usable else "warn", each.detail) for each in devices)]
    usable = [device.name for device in devices if device.usable]
    checks.append(Check("devices", "ok" if usable else "fail", ", ".join(usable) or "no device can be used here"))
    return DeviceFindings(checks, devices)


async def _check(name: str, checking: Awaitable[tuple[Status, str]]) -> Check:
    try:
        return Check(name, *await _in_time(checking))
    except Failure as failure:
        return Check(name, "warn", str(failure))


async def _check_playwright() -> tuple[Status, str]:
    try:
        return "ok", version("playwright")
    except PackageNotFoundError:
        return "warn", NO_PLAYWRIGHT


async def _check_chromium(services: RuntimeServices) -> tuple[Status, str]:
    program = require_chromium()
    output = await services.run_command([program, "--version"], within_ms=VERSION_LIMIT_MS)
    name = output.stdout.decode("utf-8", "replace").strip().split("\n")[0][:100]
    if output.exit_code or not name:
        return "warn", f"{program} --version ended with exit code {output.exit_code}"
    return "ok", f"{name} ({program})"


async def check_cdp() -> tuple[Status, str]:
    """Look for an app with a debugging port. Having none is no fault."""
    address = f"127.0.0.1:{CDP_PORT}"
    try:
        async with asyncio.timeout(CDP_LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", CDP_PORT, limit=MAX_CDP_BYTES)
            try:
                writer.write(b"GET /json/version HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                answer = await reader.readuntil(b"}")
            finally:
                writer.close()
        name = str(json.loads(answer.partition(b"\r\n\r\n")[2])["Browser"])[:100]
    except TimeoutError:
        return "warn", f"{address} gives no answer"
    except OSError:
        start = f"start a Chromium-based app with --remote-debugging-port={CDP_PORT} to use it"
        return "ok", f"nothing on {address}; {start}"
    except (EOFError, asyncio.LimitOverrunError, ValueError, KeyError, TypeError):
        return "warn", f"the program that listens on {address} has no debugging port of Chromium's"
    return "ok", f"{name}: use it with --device cdp:http://{address}"


async def _check_adb(services: RuntimeServices) -> tuple[Status, str]:
    adb = Adb.find(services)
    return "ok", f"{(await adb.find_version())[0]} ({adb.program})"


async def _check_adb_server() -> tuple[Status, str]:
    found = await find_server_version()
    host, port = server_address()
    if found is None:
        return "ok", f"none on {host}:{port}; the first session with a phone starts one, which stays"
    return "ok", f"version {found} on {host}:{port}"
