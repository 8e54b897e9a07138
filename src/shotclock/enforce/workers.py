"""The pool: warm worker processes seen from the runtime, and how a call gets one.

A worker serves one call at a time over its own socket. Its supervisor hears the call's bell (a timer both
hold) and kills it without being told, so the loop this runs on may be late without the work living longer.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.clocks import ClockKind, Clocks
from ..core.deadlines import NS_PER_MS
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, as_data, warning
from ..core.errors import Failure, is_registered
from ..core.operation import Handler
from . import wire
from .admission import Admission, Outcome
from .alarms import Alarms
from .clock import monotonic_ns
from .kernel import Bell
from .processes import REPORT_MARGIN_MS, shielded
from .supervisor import VERIFY_LIMIT_MS, Report
from .zygote import MAIN_ALIAS, PRELOADED, WORKER

# How long closing waits for supervisors to report that their workers are gone.
CLOSE_LIMIT_S = 3.0
DEFAULT_WARM = max(2, min(8, os.cpu_count() or 2))
DEFAULT_MOST = 64
# A burst of short calls waits for the warm workers, because forking competes with the very work that is being
# waited for. A worker that is busy with one call for longer than this is replaced in the count.
GROW_AFTER_S = 0.05
# After a worker that died before it came up.
RESPAWN_PAUSE_S = 0.25
# Workers beyond the warm ones are kept this long in case the load comes back.
IDLE_KEPT_S = 10.0


@dataclass(slots=True)
class Task:
    """One call of a function, on its way to a worker."""

    admission: Admission
    handler: Handler
    arguments: Mapping[str, object]
    depth: int
    on_progress: Callable[[int, int | None, str | None], None]
    on_call: Callable[[str, Mapping[str, object], Clocks], Awaitable[Envelope]]


class Worker:
    """A worker process and its supervisor, from fork to the last report."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self.control, their_control = socket.socketpair()
        self.calls, their_calls = socket.socketpair()
        self.bell = Bell()
        self.started = False
        self.task: Task | None = None
        self.done: asyncio.Future[Outcome] | None = None
        self.gone: asyncio.Future[Report | None] = self._loop.create_future()
        self.began_ns = 0
        self._further: set[asyncio.Task[None]] = set()
        self._grace_ms = 0
        self._stopping = False
        self.on_sign: Callable[[], None] = _nothing
        for sock in (self.control, self.calls):
            sock.setblocking(False)
        try:
            wire.send_fds(pool.zygote, WORKER, [their_control.fileno(), their_calls.fileno(), self.bell.fd])
        except (wire.Broken, OSError):
            self._close()
            raise
        finally:
            their_control.close()
            their_calls.close()
        self._reports, self._replies = wire.Inbox(self.control), wire.Inbox(self.calls)
        self._loop.add_reader(self.control, self._on_report)
        self._loop.add_reader(self.calls, self._on_reply)

    # --- a call -------------------------------------------------------------------------------------------

    def begin(self, task: Task) -> asyncio.Future[Outcome]:
        """Give the worker a call. The future resolves exactly once, whatever happens to the process."""
        self.task, self.done = task, self._loop.create_future()
        self.on_sign = _nothing
        self.began_ns = monotonic_ns()
        admission = task.admission
        bell = admission.bound.bell
        module, qualname = task.handler.__module__, task.handler.__qualname__
        # Pickled before the bell is armed: what cannot be sent never started, and costs no worker.
        message = wire.frame(
            (
                "run",
                MAIN_ALIAS if module == "__main__" else module,
                qualname,
                pickle.dumps(dict(task.arguments)),
                admission.name,
                admission.request_id,
                bell.at_ns if bell else 0,
                task.depth,
            )
        )
        grace_ms = admission.bound.grace_ms if bell else admission.clocks.grace_ms or 0
        if grace_ms != self._grace_ms:
            self._grace_ms = grace_ms
            self._order("grace", grace_ms)
        if bell is not None:
            self.bell.arm(bell.at_ns)
        try:
            sent = self.calls.send(message)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(message)  # it is dying; its supervisor will report
        if sent < len(message):  # larger than the socket's buffer: the loop sends the rest as the worker reads
            rest = self._loop.create_task(self._send_rest(message[sent:]))
            self.done.add_done_callback(lambda _: rest.cancel())
        return self.done

    async def _send_rest(self, rest: bytes) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self.calls, rest)

    def ask_to_wind_down(self) -> None:
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self.calls, ("stopping",))

    def stop(self, why: str) -> None:
        """The polite ladder, run by the supervisor: TERM, grace, KILL."""
        self._stopping = True
        self._order("stop", why)

    def kill(self, why: str) -> None:
        self._stopping = True
        self._order("kill", why)

    async def wait_gone(self, within_s: float) -> bool:
        """Whether the worker's whole tree was reported gone in time."""
        await asyncio.wait([self.gone], timeout=within_s)
        return self.gone.done()

    # --- what the process says ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            messages = self._replies.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            self._loop.remove_reader(self.calls)  # its supervisor tells how it ended
            return
        for message in messages:
            match message:
                case ("done", str(kind), payload, list(leaked)):
                    self._finish(kind, payload, leaked)
                case ("progress", int(done), total, unit) if self.task is not None:
                    self.on_sign()
                    self.task.on_progress(done, total, unit)
                case ("call", str(name), bytes(arguments), dict(limits)) if self.task is not None:
                    further = asyncio.ensure_future(self._redispatch(self.task, name, arguments, limits))
                    self._further.add(further)  # the loop itself only holds tasks weakly
                    further.add_done_callback(self._further.discard)

    async def _redispatch(self, task: Task, name: str, arguments: bytes, limits: dict[str, int | None]) -> None:
        envelope = await task.on_call(name, pickle.loads(arguments), Clocks(**limits))
        try:
            answer = pickle.dumps(envelope)
        except Exception:  # the value cannot be pickled; its JSON form always can
            answer = pickle.dumps(Envelope(envelope.data, envelope.error, envelope.warnings, envelope.meta))
        if self.task is task:
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self.calls, wire.frame(("answer", answer)))

    def _finish(self, kind: str, payload: object, leaked: list[dict[str, object]]) -> None:
        done, self.task = self.done, None
        self.bell.disarm()
        if done is None or done.done():
            return
        outcome = _outcome(kind, payload)
        if leaked:
            # It returned, but what it started lives on. The worker goes, and everything below it.
            self.kill("leaked processes")
            names = ", ".join(f"{left['command']} ({left['pid']})" for left in leaked[:5])
            outcome.warnings.append(
                warning(
                    "DESCENDANTS_STOPPED",
                    f"{len(leaked)} processes outlived the function and were stopped: {names}",
                    processes=leaked,
                )
            )
            self.gone.add_done_callback(lambda _: _resolve(done, outcome))
        else:
            done.set_result(outcome)
            if not self._stopping:
                self._pool.give_back(self)

    def _on_report(self) -> None:
        try:
            messages = self._reports.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            self._end(None)
            return
        for message in messages:
            match message:
                case ("started", _):
                    self.started = True
                    self._pool.came_up(self)
                case ("ended", dict(packed)):
                    self._end(Report.unpack(packed))

    def _end(self, report: Report | None) -> None:
        """The process and everything below it is gone, or its supervisor was killed and its zygote saw to it."""
        if self.gone.done():
            return
        task, done = self.task, self.done
        self.task = None
        # A result that was sent before the kill is still in the socket, and is the truth.
        if task is not None:
            with contextlib.suppress(Exception):
                for message in self._replies.receive():
                    if message[0] == "done":
                        self.task = task
                        self._stopping = True
                        self._finish(*message[1:])
                        task = None
        self.task = None
        self._close()
        self.gone.set_result(report)
        self._pool.lost(self)
        if task is not None and done is not None:
            _resolve(done, _crash_outcome(task.admission, report))

    def _order(self, *order: object) -> None:
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self.control, order)

    def _close(self) -> None:
        for sock in (self.control, self.calls):
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
                sock.close()
        self.bell.close()


class Pool:
    """Keeps `warm` workers ready, grows to `most` while calls hang, and refills as soon as one is killed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start_zygote: Callable[[], socket.socket],
        *,
        warm: int = DEFAULT_WARM,
        most: int = DEFAULT_MOST,
        preload: tuple[str, ...] = (),
    ) -> None:
        self.loop = loop
        self.warm, self.most = warm, max(warm, most)
        self._start_clean = start_zygote
        self._preload = preload
        self.zygote: socket.socket
        self._zygote_control: socket.socket | None = None
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._growth: asyncio.TimerHandle | None = None
        self._trim: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def size(self) -> int:
        return len(self._all)

    async def run(self, task: Task) -> Outcome:
        """Run a call in a worker. Returns when the work has ended one way or the other; bounded by its clocks."""
        worker = await self._take(task)
        if isinstance(worker, Outcome):
            return worker
        try:
            done = worker.begin(task)
        except Exception as error:  # the arguments cannot be pickled
            worker.task = None
            self.give_back(worker)
            problem = {"field": "arguments", "message": f"cannot be sent to a worker process: {error}"}
            return Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", problem["message"], "validation", errors=[problem]))
        return await self._watch(worker, task, done)

    async def _watch(self, worker: Worker, task: Task, done: asyncio.Future[Outcome]) -> Outcome:
        admission = task.admission
        bound = admission.bound
        backstop = alarms = None
        stalled = False

        def on_idle() -> None:
            nonlocal stalled
            stalled = True
            worker.stop("idle")

        if admission.clocks.soft_ms or admission.clocks.idle_ms:
            alarms = Alarms(self.loop, admission, on_soft=worker.ask_to_wind_down, on_idle=on_idle)
            worker.on_sign = alarms.sign_of_life
        if bound.kill is not None:
            late_ns = bound.kill.at_ns - monotonic_ns() + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
            backstop = self.loop.call_later(late_ns / 1e9, worker._end, None)
        try:
            outcome = await done
            if stalled and outcome.ending is Ending.KILLED:
                outcome.problem = stalled_problem(admission)
            elif alarms is not None and alarms.soft_rang:
                outcome.warnings.append(warning("SOFT_LIMIT", limit_ms=admission.clocks.soft_ms))
            return outcome
        except asyncio.CancelledError:
            worker.stop("cancelled")
            grace_s = (admission.clocks.grace_ms or 0) / 1000
            await shielded(worker.wait_gone(grace_s + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000))
            raise
        finally:
            if backstop is not None:
                backstop.cancel()
            if alarms is not None:
                alarms.cancel()

    # --- places -------------------------------------------------------------------------------------------

    async def _take(self, task: Task) -> Worker | Outcome:
        if self._idle:
            return self._idle.pop()
        admission = task.admission
        try:
            self.refill()
            # A call made by a call must not wait for a place its own caller holds: it always gets a worker.
            if task.depth and not self._coming():
                self._spawn()
        except (wire.Broken, OSError, BlockingIOError) as error:
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no worker could be started: {error}"))
        waiter: asyncio.Future[Worker] = self.loop.create_future()
        self._waiting.append(waiter)
        self._plan_growth()
        queue_ms, bell = admission.clocks.queue_ms, admission.bound.bell
        kind, until_ns = ClockKind.QUEUE, admission.started_ns + (queue_ms or 0) * NS_PER_MS
        if bell is not None and (not queue_ms or bell.at_ns <= until_ns):
            kind, until_ns = ClockKind.TIMEOUT, bell.at_ns
        wait_s = (until_ns - monotonic_ns()) / 1e9 if queue_ms or bell else None
        try:
            await asyncio.wait([waiter], timeout=wait_s)
        except asyncio.CancelledError:
            self._leave_queue(waiter)
            raise
        if waiter.done() and not waiter.cancelled():
            return waiter.result()
        self._leave_queue(waiter)
        fired = admission.fired(kind, monotonic_ns() - admission.started_ns)
        message = "no worker came free in time"
        if not any(worker.started for worker in self._all):
            message = "no worker came up in time; importing the modules it needs may take too long"
            self._close_zygote()  # its supervisor kills it, and whatever its imports hang in
        code = "QUEUE_TIMEOUT" if kind is ClockKind.QUEUE else "TIMEOUT"
        return Outcome(Ending.NOT_STARTED, Problem(code, message, fired=fired))

    def _leave_queue(self, waiter: asyncio.Future[Worker]) -> None:
        if waiter.done() and not waiter.cancelled():
            self.give_back(waiter.result())  # it came in the very moment we left
            return
        waiter.cancel()
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)

    def give_back(self, worker: Worker) -> None:
        if self._closing or worker.gone.done():
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)
        if len(self._idle) > self.warm and self._trim is None:
            self._trim = self.loop.call_later(IDLE_KEPT_S, self._trim_idle)

    def _trim_idle(self) -> None:
        self._trim = None
        while len(self._idle) > self.warm:
            self._idle.pop(0).kill("not needed")

    def _plan_growth(self) -> None:
        if self._growth is None:
            self._growth = self.loop.call_later(GROW_AFTER_S, self._grow)

    def _grow(self) -> None:
        """Calls wait. Workers busy with one call for long are as good as missing: make up for them."""
        self._growth = None
        if not self._waiting or self._closing:
            return
        long_ago = monotonic_ns() - int(GROW_AFTER_S * 1e9)
        stuck = sum(worker.task is not None and worker.began_ns < long_ago for worker in self._all)
        wanted = 2 * stuck if stuck == len(self._all) else self.warm + stuck
        with contextlib.suppress(wire.Broken, OSError):
            while len(self._all) < min(wanted, stuck + len(self._waiting), self.most):
                self._spawn()
        self._plan_growth()

    def came_up(self, worker: Worker) -> None:
        self.give_back(worker)

    def lost(self, worker: Worker) -> None:
        self._all.discard(worker)
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        if self._closing:
            return
        if worker.started:
            self._refill_quietly()
        else:  # it could not even start: the machine is full, or the imports kill it. Not again at once.
            self.loop.call_later(RESPAWN_PAUSE_S, self._refill_quietly)

    def _refill_quietly(self) -> None:
        if not self._closing:
            with contextlib.suppress(wire.Broken, OSError):
                self.refill()

    def refill(self) -> None:
        """At least `warm` workers, running or on their way."""
        while len(self._all) < self.warm:
            self._spawn()

    def _coming(self) -> bool:
        return any(not worker.started for worker in self._all)

    def _spawn(self) -> None:
        if self._zygote_control is None:
            self._start_preloaded()
        try:
            self._all.add(Worker(self))
        except wire.Broken:
            self._start_preloaded()  # it was killed under us; once more with a new one
            self._all.add(Worker(self))

    def _start_preloaded(self) -> None:
        """Ask the clean zygote for one that has imported what the workers need."""
        self._close_zygote()
        control, their_control = socket.socketpair()
        self.zygote, theirs = socket.socketpair()
        self.zygote.setblocking(False)
        with their_control, theirs:
            wire.send_fds(self._start_clean(), PRELOADED, [their_control.fileno(), theirs.fileno()])
        self._zygote_control = control
        wire.send(self.zygote, ("prepare", list(sys.path), list(self._preload), *_main_program()))

    def _close_zygote(self) -> None:
        if self._zygote_control is not None:
            self._zygote_control.close()
            self.zygote.close()
            self._zygote_control = None

    async def close(self) -> None:
        """Kill every worker and wait, bounded, until each tree is reported gone."""
        self._closing = True
        for handle in (self._growth, self._trim):
            if handle is not None:
                handle.cancel()
        for waiter in self._waiting:
            waiter.cancel()
        workers = list(self._all)
        for worker in workers:
            worker.kill("closing")
        if workers:
            await asyncio.wait([worker.gone for worker in workers], timeout=CLOSE_LIMIT_S)
        for worker in workers:
            worker._end(None)
        self._close_zygote()


def _main_program() -> tuple[str | None, str | None]:
    """How the workers can import the program that runs here: by name, by file, or not at all (a REPL)."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return spec.name, None
    file = getattr(main, "__file__", None)
    return None, os.path.abspath(file) if file else None


def _outcome(kind: str, payload: Any) -> Outcome:
    """What the worker said, as an outcome. The table of everything a function can do to its caller."""
    match kind:
        case "returned":
            try:
                value, data = pickle.loads(payload)
            except Exception as error:
                message = f"the result cannot be rebuilt here: {type(error).__name__}: {error}"
                return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", message))
            return Outcome(Ending.FINISHED, value=value, data=as_data(value if data is None else data))
        case "invalid":
            message = "; ".join(f"{problem['field']}: {problem['message']}" for problem in payload)
            return Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", message, "validation", errors=payload))
        case "unimportable":
            return Outcome(Ending.NOT_STARTED, Problem("HANDLER_NOT_IMPORTABLE", payload, "validation"))
        case "unserializable":
            return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", payload))
        case "failed":
            try:
                return failure_outcome(pickle.loads(payload))
            except Exception as error:
                return raised_outcome(type(error).__name__, str(error), "")
        case _:
            name, text, lines, pickled = payload
            outcome = raised_outcome(name, text, lines)
            with contextlib.suppress(Exception):
                outcome.value = pickle.loads(pickled) if pickled else None
            return outcome


def failure_outcome(failure: Failure) -> Outcome:
    """A handler's expected failure, with the code it chose."""
    if not is_registered(failure.code):
        return raised_outcome("Failure", f"{failure.code} is not registered: {failure}", "")
    problem = Problem(
        failure.code,
        str(failure),
        context=failure.context or None,
        suggestion=failure.suggestion,
        retry_after_ms=failure.retry_after_ms,
        side_effects=failure.side_effects,
    )
    return Outcome(Ending.FINISHED, problem, as_data(failure.data), value=failure)


def raised_outcome(name: str, text: str, lines: str) -> Outcome:
    context: dict[str, object] = {"exception": name}
    if lines:
        context["traceback"] = lines
    return Outcome(Ending.FINISHED, Problem("INTERNAL_ERROR", f"{name}: {text}" if text else name, context=context))


def _crash_outcome(admission: Admission, report: Report | None) -> Outcome:
    """The worker ended without answering: by a clock, by our order, or by itself."""
    from .commands import signal_name

    if report is None:
        return Outcome(Ending.KILLED, Problem("SUPERVISOR_LOST", "the worker's supervisor was killed"))
    survivors = report.survivors
    if report.fired == ClockKind.TIMEOUT:
        bell = admission.bound.bell
        elapsed = (bell.at_ns if bell else monotonic_ns()) - admission.started_ns
        elapsed_ns = max(elapsed, monotonic_ns() - admission.started_ns)
        return Outcome(Ending.KILLED, timeout_problem(admission, elapsed_ns), survivors=survivors)
    if report.stopped is not None:
        return Outcome(Ending.KILLED, Problem("CANCELLED", f"stopped: {report.stopped}"), survivors=survivors)
    status = report.status
    context: dict[str, object] = {"exit_code": status}
    how = f"left with exit code {status}"
    if status is not None and status < 0:
        context = {"signal": signal_name(-status)}
        how = f"was ended by {signal_name(-status)}"
    if report.leaked:
        context["stopped"] = report.leaked
    message = f"the process running {admission.name} {how}"
    return Outcome(Ending.FINISHED, Problem("WORKER_CRASHED", message, context=context), survivors=survivors)


def timeout_problem(admission: Admission, elapsed_ns: int) -> Problem:
    from ..core.durations import format_duration

    fired = admission.fired(ClockKind.TIMEOUT, elapsed_ns)
    return Problem("TIMEOUT", f"{admission.name} timed out after {format_duration(fired.limit_ms)}", fired=fired)


def stalled_problem(admission: Admission) -> Problem:
    from ..core.durations import format_duration

    fired = admission.fired(ClockKind.IDLE, monotonic_ns() - admission.started_ns)
    return Problem("STALLED", f"{admission.name}: no sign of life for {format_duration(fired.limit_ms)}", fired=fired)


def _nothing() -> None:
    pass


def _resolve(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
