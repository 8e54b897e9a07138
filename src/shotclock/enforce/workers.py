"""The pool: warm worker processes seen from the runtime, and how a call gets one.

A worker serves one call at a time over its own socket. It arms a timer for each call that its supervisor hears,
and the supervisor kills it without being told, so the loop this runs on may be late without the work living
longer. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from ..core.clocks import ClockKind, Clocks
from ..core.deadlines import NS_PER_MS
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, warning
from ..core.operation import Handler
from . import wire
from .admission import Admission, Outcome
from .alarms import NOT_YET, Alarms
from .clock import monotonic_ns
from .commands import count_processes
from .kernel import Bell
from .outcomes import crash_outcome, stalled_problem, timeout_problem, worker_outcome
from .processes import REPORT_MARGIN_MS, shielded
from .supervisor import VERIFY_LIMIT_MS, Report
from .worker import MAIN_ALIAS
from .zygote import PRELOADED, WORKER

# How long closing waits for supervisors to report that their workers are gone.
CLOSE_LIMIT_S = 3.0
DEFAULT_WARM = max(2, min(8, os.cpu_count() or 2))
DEFAULT_MOST = 64
# A burst of short calls waits for the warm workers, because forking competes with the very work that is being
# waited for. A worker that is busy with one call for longer than this is replaced in the count.
GROW_AFTER_S = 0.05
# How long the imports of the preloaded zygote may take. A call does not wait longer than its own clocks; this is
# when the zygote is taken for hung and started anew by the next call.
IMPORT_LIMIT_NS = 60_000_000_000
# After a worker that died before it came up.
RESPAWN_PAUSE_S = 0.25
# Workers beyond the warm ones are kept this long in case the load comes back.
IDLE_KEPT_S = 10.0
# Between two looks at whether the workers are up.
WARM_UP_PAUSE_S = 0.005
# How often the calls of the pool are looked at. Only for those that wait for a worker is this their precision.
SWEEP_S = 0.01
# A worker that answered its last call within this may have some more waiting in its socket …
QUICK_NS = 1_000_000
MOST_AHEAD = 6
# … from where they are taken back if the one before them runs for longer than this.
HELD_UP_NS = 5_000_000
# The supervisor hears the bell by itself; this is for a worker that was stuck before it could arm it.
LATE_BELL_NS = 30_000_000


@dataclass(slots=True, eq=False)
class Task:
    """One call of a function, on its way to a worker and back."""

    admission: Admission
    handler: Handler
    arguments: Mapping[str, object]
    depth: int
    on_progress: Callable[[int, int | None, str | None], None]
    on_call: Callable[[str, Mapping[str, object], Clocks], Awaitable[Envelope]]
    done: asyncio.Future[Outcome] = field(init=False)
    message: bytes = field(init=False)
    give_up_ns: float = field(init=False)
    """When waiting for a worker ends."""
    waits_for_queue: bool = field(init=False)
    """Whether that is the queue clock's doing, or the bell's."""
    worker: Worker | None = None
    alarms: Alarms | None = None
    stalled: bool = False

    def __post_init__(self) -> None:
        bell, queue_ms = self.admission.bound.bell, self.admission.clocks.queue_ms
        bell_ns = bell.at_ns if bell is not None else inf
        queue_ns = self.admission.started_ns + queue_ms * NS_PER_MS if queue_ms else inf
        self.give_up_ns, self.waits_for_queue = min(bell_ns, queue_ns), queue_ns < bell_ns

    def resolve(self, outcome: Outcome) -> None:
        """The first word counts: a result and a kill may cross, and only one is delivered."""
        if not self.done.done():
            self.done.set_result(outcome)

    def pack(self) -> bytes:
        """What the worker is told. Raises what pickle raises: such arguments never leave, and cost no worker."""
        admission, handler = self.admission, self.handler
        bell = admission.bound.bell
        return wire.frame(
            (
                "run",
                MAIN_ALIAS if handler.__module__ == "__main__" else handler.__module__,
                handler.__qualname__,
                pickle.dumps(dict(self.arguments)),
                admission.name,
                admission.request_id,
                bell.at_ns if bell is not None else 0,
                self.depth,
            )
        )

    @property
    def grace_ms(self) -> int:
        bound = self.admission.bound
        return bound.grace_ms if bound.bell is not None else self.admission.clocks.grace_ms or 0


class Worker:
    """A worker process and its supervisor, from fork to the last report."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._control, their_control = socket.socketpair()
        self._calls, their_calls = socket.socketpair()
        self._tokens, self._tokens_in = os.pipe()
        self.started = False
        self.assigned: deque[Task] = deque()
        """What it was given: the first runs, the next waits in its socket with a token in the pipe."""
        self.began_ns = 0
        self._took_ns = QUICK_NS
        self._skipping = 0
        self._sending = False
        self.gone: asyncio.Future[Report | None] = self._loop.create_future()
        self._further: set[asyncio.Task[None]] = set()
        self.grace_ms = 0
        self.stopping = False
        for fd in (self._control.fileno(), self._calls.fileno(), self._tokens, self._tokens_in):
            os.set_blocking(fd, False)
        bell = Bell()
        try:
            fds = [their_control.fileno(), their_calls.fileno(), bell.fd, self._tokens]
            wire.send_fds(pool.zygote, WORKER, fds)
        except (wire.Broken, OSError):
            self._close()
            raise
        finally:
            their_control.close()
            their_calls.close()
            bell.close()  # the worker arms it, its supervisor hears it
        self._reports, self._replies = wire.Inbox(self._control), wire.Inbox(self._calls)
        self._loop.add_reader(self._control, self._on_report)
        self._loop.add_reader(self._calls, self._on_reply)

    @property
    def task(self) -> Task | None:
        """The call it runs."""
        return self.assigned[0] if self.assigned else None

    @property
    def is_idle(self) -> bool:
        return not self.assigned and not self._skipping

    @property
    def room(self) -> int:
        """How many calls it may be given. One whose calls are quick may have some waiting, so that it need not sleep
        between them; they are refilled some at a time, because waking it for each costs more than the call."""
        if self.stopping or self._skipping or self._sending:
            return 0
        if self._took_ns >= QUICK_NS:
            return 0 if self.assigned else 1
        return MOST_AHEAD - len(self.assigned) if len(self.assigned) <= MOST_AHEAD // 2 else 0

    # --- a call -------------------------------------------------------------------------------------------

    def set_grace(self, grace_ms: int) -> None:
        if grace_ms != self.grace_ms:
            self.grace_ms = grace_ms
            self._order("grace", grace_ms)

    def begin(self, *tasks: Task) -> None:
        """Give the worker calls. Each is resolved exactly once, whatever happens to the process."""
        if not self.assigned:
            self.began_ns = monotonic_ns()
        for task in tasks:
            task.worker = self
            self.assigned.append(task)
        message = b"".join([task.message for task in tasks])
        try:
            os.write(self._tokens_in, b"." * len(tasks))
            sent = self._calls.send(message)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it is dying; its supervisor will report
        for task in tasks:
            if task.alarms is not None:
                task.alarms.sign_of_life()
                if task.alarms.soft_rang:
                    self.ask_to_wind_down(task)
        if sent < len(message):  # larger than the socket's buffer: the loop sends the rest as the worker reads
            self._sending = True
            rest = self._loop.create_task(self._send_rest(message[sent:]))
            self.gone.add_done_callback(lambda _: rest.cancel())

    async def _send_rest(self, rest: bytes) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self._calls, rest)
        self._sending = False

    def take_back(self) -> list[Task]:
        """The calls it has not started. From here on it never will: their tokens are ours."""
        try:
            count = len(os.read(self._tokens, 64))
        except OSError:
            return []
        taken = [self.assigned.pop() for _ in range(min(count, len(self.assigned)))]
        self._skipping += len(taken)
        for task in taken:
            task.worker = None
        return taken[::-1]

    def ask_to_wind_down(self, task: Task) -> None:
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self._calls, ("stopping", task.admission.request_id))

    def stop(self, why: str) -> None:
        """The polite ladder, run by the supervisor: TERM, grace, KILL."""
        self.stopping = True
        self._order("stop", why)

    def kill(self, why: str) -> None:
        self.stopping = True
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
            self._loop.remove_reader(self._calls)  # its supervisor tells how it ended
            return
        for message in messages:
            self._take(message)

    def _take(self, message: wire.Message) -> None:
        task = self.task
        if message[0] == "skipped":
            self._skipping -= 1
            if self.is_idle and not self.stopping:
                self._pool.give_back(self)
        if task is None:
            return
        match message:
            case ("done", str(kind), payload, list(leaked)):
                self._finish(task, worker_outcome(kind, payload), leaked)
            case ("progress", int(done), total, unit):
                if task.alarms is not None:
                    task.alarms.sign_of_life()
                task.on_progress(done, total, unit)
            case ("call", str(name), bytes(arguments), dict(limits)):
                further = asyncio.ensure_future(self._redispatch(task, name, arguments, limits))
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
                await self._loop.sock_sendall(self._calls, wire.frame(("answer", answer)))

    def _finish(self, task: Task, outcome: Outcome, leaked: list[dict[str, object]]) -> None:
        self.assigned.popleft()
        now_ns = monotonic_ns()
        self._took_ns, self.began_ns = now_ns - self.began_ns, now_ns
        if leaked:
            # It returned, but what it started lives on. The worker goes, and everything below it.
            names = ", ".join(f"{left['command']} ({left['pid']})" for left in leaked[:5])
            message = f"{count_processes(leaked)} outlived the function, stopped now: {names}"
            outcome.warnings.append(warning("DESCENDANTS_STOPPED", message, processes=leaked))
            self.gone.add_done_callback(lambda _: task.resolve(outcome))
            self.kill("leaked processes")
            return
        if not self.stopping:
            self._pool.give_back(self)  # first: the worker has its next call before anybody reads this answer
        task.resolve(outcome)

    def _on_report(self) -> None:
        try:
            messages = self._reports.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            self.end(None)
            return
        for message in messages:
            match message:
                case ("started", _):
                    self.started = True
                    self._pool.give_back(self)
                case ("ended", dict(packed)):
                    self.end(Report.unpack(packed))

    def end(self, report: Report | None) -> None:
        """The process and everything below it is gone, or its supervisor was killed and its zygote saw to it."""
        if self.gone.done():
            return
        self.stopping = True
        with contextlib.suppress(wire.Broken, OSError):
            while self.task is not None:  # a result sent before the kill is still in the socket, and is the truth
                for message in self._replies.receive():
                    self._take(message)
        unstarted = self.take_back()
        self._close()
        self.gone.set_result(report)
        self._pool.lost(self, unstarted)
        for task in self.assigned:
            task.resolve(crash_outcome(task.admission, report))
        self.assigned.clear()

    def _order(self, *order: object) -> None:
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self._control, order)

    def _close(self) -> None:
        for sock in (self._control, self._calls):
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
                sock.close()
        for fd in (self._tokens, self._tokens_in):
            os.close(fd)
        self._tokens = self._tokens_in = -1


class Pool:
    """Keeps `warm` workers ready, grows to `most` while calls hang, and refills as soon as one is killed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        request_fork: Callable[[bytes, list[int]], None],
        *,
        warm: int = DEFAULT_WARM,
        most: int = DEFAULT_MOST,
        preload: tuple[str, ...] = (),
    ) -> None:
        self.loop = loop
        self.warm, self.most = warm, max(warm, most)
        self._request_fork = request_fork
        self._preload = preload
        self.zygote: socket.socket
        self._zygote_control: socket.socket | None = None
        self._zygote_started_ns = 0
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._waiting: deque[Task] = deque()
        self._growth: asyncio.TimerHandle | None = None
        self._trim: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._context = contextvars.Context()  # for all our timers, instead of a copy of the caller's for each
        self._closing = False

    @property
    def size(self) -> int:
        return len(self._all)

    async def warm_up(self, within_s: float) -> bool:
        """Start the warm workers and wait for them. False if they are not all up in time."""
        self.refill()
        give_up_ns = monotonic_ns() + int(within_s * 1e9)
        while sum(worker.started for worker in self._all) < self.warm:
            if monotonic_ns() >= give_up_ns:
                return False
            await asyncio.sleep(WARM_UP_PAUSE_S)
        return True

    async def run(self, task: Task) -> Outcome:
        """Run a call in a worker. Returns when the work has ended one way or the other; bounded by its clocks."""
        task.done = self.loop.create_future()
        try:
            task.message = task.pack()
        except Exception as error:
            problem = {"field": "arguments", "message": f"cannot be sent to a worker process: {error}"}
            return Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", problem["message"], "validation", errors=[problem]))
        clocks = task.admission.clocks
        if clocks.soft_ms or clocks.idle_ms:
            task.alarms = Alarms(
                self.loop, task.admission, on_soft=lambda: _wind_down(task), on_idle=lambda: self._stall(task)
            )
        self._watch()
        try:
            self._submit(task)
            outcome = await task.done
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        except (wire.Broken, OSError) as error:
            self._leave_queue(task)
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no worker could be started: {error}"))
        finally:
            if task.alarms is not None:
                task.alarms.cancel()
        if task.stalled and outcome.ending is Ending.KILLED:
            outcome.problem = stalled_problem(task.admission)
        elif task.alarms is not None and task.alarms.soft_rang:
            outcome.warnings.append(warning("SOFT_LIMIT", limit_ms=clocks.soft_ms))
        return outcome

    # --- clocks: the supervisors' are the ones that count, this looks after what they cannot see ------------

    def _watch(self) -> None:
        """One timer for all calls: as long as there are any, look at them every few milliseconds."""
        if self._sweep is None:
            self._sweep = self.loop.call_later(SWEEP_S, self._look, context=self._context)

    def _look(self) -> None:
        self._sweep = None
        now_ns = monotonic_ns()
        for worker in self._all:
            if len(worker.assigned) > 1 and now_ns - worker.began_ns > HELD_UP_NS:
                self._put_first(worker.take_back())
        for task in [task for task in self._waiting if now_ns >= task.give_up_ns]:
            self._turn_away(task, ClockKind.QUEUE if task.waits_for_queue else ClockKind.TIMEOUT)
        for worker in [worker for worker in self._all if worker.task is not None]:
            self._look_at(worker, now_ns)
        if self._waiting or any(worker.task is not None for worker in self._all):
            self._watch()

    def _look_at(self, worker: Worker, now_ns: int) -> None:
        """A supervisor that has not heard the bell by now has a worker that was stuck before it could arm it."""
        assert worker.task is not None
        bound = worker.task.admission.bound
        if bound.bell is None or bound.kill is None or now_ns < bound.bell.at_ns + LATE_BELL_NS:
            return
        if not worker.stopping:
            worker.stop(ClockKind.TIMEOUT.value)
        elif now_ns > bound.kill.at_ns + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS:
            worker.end(None)

    def _turn_away(self, task: Task, kind: ClockKind) -> None:
        """No worker in time: it never started."""
        admission = task.admission
        self._leave_queue(task)
        elapsed_ns = monotonic_ns() - admission.started_ns
        message = "no worker came free in time"
        if not any(worker.started for worker in self._all):
            message = "no worker came up in time; importing the modules it needs takes too long"
            if monotonic_ns() - self._zygote_started_ns > IMPORT_LIMIT_NS:
                self._close_zygote()  # its supervisor kills it, and whatever its imports hang in
        if kind is ClockKind.QUEUE:
            problem = Problem("QUEUE_TIMEOUT", message, fired=admission.fired(kind, elapsed_ns))
        else:
            late = timeout_problem(admission, elapsed_ns)
            problem = Problem("TIMEOUT", f"{late.message}: {message}", fired=late.fired)
        task.resolve(Outcome(Ending.NOT_STARTED, problem))

    def _stall(self, task: Task) -> object:
        if task.worker is None or task.worker.task is not task:
            assert task.alarms is not None
            task.alarms.sign_of_life()  # the clock of silence starts with the work
            return NOT_YET
        task.stalled = True
        task.worker.stop(ClockKind.IDLE.value)
        return None

    async def _stop(self, task: Task) -> None:
        """The caller was cancelled: stop the work and wait, bounded, until it is gone."""
        worker = task.worker
        if worker is not None and worker.task is not task:
            taken = worker.take_back()
            self._put_first([other for other in taken if other is not task])
            worker = None if task in taken else worker
        if worker is None:
            self._leave_queue(task)
        elif not task.done.done() or task.done.cancelled():
            worker.stop("cancelled")
            limit_s = (task.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000
            await shielded(worker.wait_gone(limit_s))

    # --- places -------------------------------------------------------------------------------------------

    def _submit(self, task: Task) -> None:
        self._waiting.append(task)
        if self._idle:
            self.give_back(self._idle.pop())
            return
        self.refill()
        # A call made by a call must not wait for a place its own caller holds: it always gets a worker.
        if task.depth and not self._coming():
            self._spawn()
        self._plan_growth()

    def _put_first(self, tasks: list[Task]) -> None:
        """Calls that were held up go before all others, and to whoever is free now."""
        self._waiting.extendleft(reversed(tasks))
        while self._waiting and self._idle:
            self.give_back(self._idle.pop())
        if self._waiting:
            self._plan_growth()

    def _leave_queue(self, task: Task) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(task)

    def give_back(self, worker: Worker) -> None:
        if self._closing or worker.gone.done():
            return
        tasks: list[Task] = []
        for _ in range(min(worker.room, len(self._waiting))):
            # The supervisor knows one grace at a time: that of the call that runs and of those right behind it.
            if worker.is_idle and not tasks:
                worker.set_grace(self._waiting[0].grace_ms)
            elif self._waiting[0].grace_ms != worker.grace_ms:
                break
            tasks.append(self._waiting.popleft())
        if tasks:
            worker.begin(*tasks)
        if not worker.is_idle:
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

    def lost(self, worker: Worker, unstarted: list[Task]) -> None:
        self._all.discard(worker)
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        self._put_first(unstarted)
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
            self._request_fork(PRELOADED, [their_control.fileno(), theirs.fileno()])
        self._zygote_control = control
        self._zygote_started_ns = monotonic_ns()
        wire.send(self.zygote, ("prepare", list(sys.path), list(self._preload), *_main_program()))

    def _close_zygote(self) -> None:
        if self._zygote_control is not None:
            self._zygote_control.close()
            self.zygote.close()
            self._zygote_control = None

    async def close(self) -> None:
        """Kill every worker and wait, bounded, until each tree is reported gone."""
        self._closing = True
        for handle in (self._growth, self._trim, self._sweep):
            if handle is not None:
                handle.cancel()
        workers = list(self._all)
        for worker in workers:
            self._waiting += worker.take_back()
        for task in list(self._waiting):
            task.resolve(Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", "the runtime is closing")))
        self._waiting.clear()
        for worker in workers:
            worker.kill("closing")
        if workers:
            await asyncio.wait([worker.gone for worker in workers], timeout=CLOSE_LIMIT_S)
        for worker in workers:
            worker.end(None)
        self._close_zygote()


@lru_cache(maxsize=1024)
def unfindable(handler: Handler) -> str | None:
    """Why a worker could not find this very function by its name, if so."""
    name = getattr(handler, "__qualname__", None)
    module = sys.modules.get(getattr(handler, "__module__", None) or "")
    if name is None or module is None:
        return f"{handler!r} has no name to import it by"
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is handler or getattr(found, "__shotclock_handler__", None) is handler:
        return None
    return f"{module.__name__}.{name} cannot be imported, or is not this function"


def _wind_down(task: Task) -> None:
    if task.worker is not None:
        task.worker.ask_to_wind_down(task)


def _main_program() -> tuple[str | None, str | None]:
    """How the workers can import the program that runs here: by name, by file, or not at all (a REPL)."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return spec.name, None
    file = getattr(main, "__file__", None)
    return None, os.path.abspath(file) if file else None
