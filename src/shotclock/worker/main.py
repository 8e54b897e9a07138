"""Program of a worker process: take a call, run its function, send the result, and stay warm.

A worker runs one call at a time and arms a timer for it; its supervisor kills it at the limit. The other kind is in
`shared_worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from ..supervise import ipc, kernel, spans
from ..supervise.clock import monotonic_ns
from ..supervise.environment import OVERTIME_VARIABLE, quiet_this_process, set_call_variables
from . import messages
from ._shared_worker import SharedWorker
from .context import Context, Stopped, helpers_of_python
from .messages import BEGUN, SHARED, Answer, Ask, Done, FurtherCall, Logged, Partial, Progress, Run, Step, open_memory
from .running_call import Reply, RunningCall, event_loop, read_stdin_from, reply_to_error, reply_to_result, set_answer

inside_worker = False
"""True in a worker and in its zygote: no runtime may be started there."""

# How many leaked processes an answer names; there may be thousands.
_LEAKED_NAMED = 50
# A child may end between being counted and being listed; one that no look finds cannot be named.
_LEAK_LOOKS = 3
# A worker that answered this close to its limit may be about to be killed: no other call may begin in it.
CLOSE_CALL_NS = 3_000_000
# A worker ends after this many calls, and with it the 280 bytes that C keeps of the variables of each.
MOST_CALLS = 50_000
# How long tasks left by an async function may take to be cancelled. If one stays, the worker ends.
OTHERS_LIMIT_S = 0.1


class OnlyCall(RunningCall):
    """The one call of a worker for itself."""

    coroutine: RunningCoroutine | None = None
    is_last: bool = False
    """Something of the call would disturb the next: the worker ends after the answer."""
    _is_async = False
    _is_over = False

    def __init__(self, request: Run, sock: socket.socket, inbox: messages.Reader) -> None:
        super().__init__(request)
        self._sock = sock
        self._inbox = inbox
        self.behind: list[ipc.Message] = []
        """The calls behind this one, read meanwhile."""

    def context(self, function: Callable[..., Any]) -> Context:
        self._is_async = inspect.iscoroutinefunction(function)
        self._thread = threading.get_ident()
        self._answers: dict[int, bytes] = {}
        # The function may have threads. One of them reads at a time, and hands the others their answers.
        self._changed = threading.Condition(threading.Lock())
        self._sending = threading.Lock()
        self._is_read = False
        self._asking = 0
        return super().context(function)

    def send(self, message: messages.FromWorker) -> None:
        with self._sending:
            self._refuse_if_over()
            _send(self._sock, message)

    def send_news(self, message: Progress | Partial | Step | Logged) -> None:
        with self._sending:
            if not self._is_over:  # otherwise it would count as news of the next call
                _send(self._sock, message)

    def is_stopping(self) -> bool:
        if self._is_async and threading.get_ident() != self._thread:  # its loop reads
            return self.stopping
        with self._changed:  # held while it reads: the call does not end meanwhile
            if self._is_read or self._is_over:
                return self.stopping
            while not self.stopping and (self._inbox.has_unread or select.select([self._sock], [], [], 0)[0]):
                self.take(self._inbox.next())
            self._changed.notify_all()
        return self.stopping

    def end(self) -> None:
        """Let no thread that the function left behind send or read any more. One that is reading cannot be stopped: the
        worker ends with it, and a call that it may have read goes to another worker, because it has not begun."""
        if self._context is None:  # it can neither send nor ask
            return
        with self._sending, self._changed:
            self._is_over = True
            self.is_last = self.is_last or self._asking > 0
            self._changed.notify_all()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RuntimeError(f"{self.request.name} has ended; its threads can ask for nothing any more")

    def answer_to(self, message: FurtherCall | Ask, unpickle: Callable[[bytes], Any]) -> Any:
        if self._is_async:
            return super().answer_to(message, unpickle)
        return unpickle(self._wait_for_answer(message))

    def _wait_for_answer(self, message: FurtherCall | Ask) -> bytes:
        """Ask and wait for the answer, in any thread. Our supervisor kills us at the limit."""
        with self._changed:
            self._refuse_if_over()
            self._asking += 1
        try:
            self.send(message)
            while not self._has_answer(message.question):
                try:
                    self.take(self._inbox.next())
                finally:
                    with self._changed:
                        self._is_read = False
                        self._changed.notify_all()
            return self._answers.pop(message.question)
        finally:
            with self._changed:
                self._asking -= 1

    def _has_answer(self, question: int) -> bool:
        """Wait until the answer is there, or it is this thread's turn to read: then return False."""
        with self._changed:
            while question not in self._answers:
                self._refuse_if_over()
                if not self._is_read:
                    self._is_read = True
                    return False
                self._changed.wait()  # bounded by our supervisor; the thread that reads notifies us
            return True

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, Answer):
            if not set_answer(message) and self._context is not None:
                self._answers[message.question] = message.answer
        elif isinstance(message, Run) or message[0] > self.number:
            self.behind.append(message)
        elif message[0] == self.number:  # others came too late for their call
            super().take(message)
            if isinstance(message, messages.MoveBell):  # commands that the function starts read it there
                set_call_variables(message.bell_ns, self.trace.traceparent, self.request.caller[2])

    def run_async(self, coroutine: Coroutine[Any, Any, Any]) -> object:
        """Run an async function on the loop of this worker, and read messages meanwhile."""
        loop = event_loop()
        while self._inbox.has_unread:
            self.take(self._inbox.next())
        loop.add_reader(self._sock, self._read, loop)
        running = self.coroutine = RunningCoroutine(loop, coroutine)
        try:
            return running.run()
        finally:
            self.is_last = not running.end_others()
            loop.remove_reader(self._sock)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # `ctx.stopping` may have read it since the loop woke, and to read again would block.
        if not select.select([self._sock], [], [], 0)[0]:
            return
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:  # the runtime is gone; our supervisor notices
            loop.remove_reader(self._sock)
            return
        for message in received:
            self.take(message)


class RunningCoroutine:
    """An async function on the loop of this worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._loop = loop
        self._task = loop.create_task(coroutine)
        self._is_cancelling = self._is_cancelled = self._is_thrown = False

    def stop(self) -> None:
        """Cancel it, from the repeated signal. If its loop does not run, raise `Stopped` wherever it is, once."""
        if not self._is_cancelling:
            self._is_cancelling = True
            self._loop.call_soon_threadsafe(self._cancel)
        elif not self._is_cancelled and not self._is_thrown:
            self._is_thrown = True
            raise Stopped

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._task.cancel()

    def run(self) -> Any:
        """Return its result. Raises Stopped if it was stopped."""
        try:
            return self._loop.run_until_complete(self._task)
        except Stopped:
            if not self._task.done():  # raised in the loop, between two steps; the coroutine still cleans up
                self._task.cancel()
                with contextlib.suppress(BaseException):
                    self._loop.run_until_complete(self._task)
            raise
        finally:
            if self._is_cancelling:
                raise Stopped

    def end_others(self) -> bool:
        """Cancel the tasks that it left. Return False if one is still there."""
        others = asyncio.all_tasks(self._loop)
        if not others:
            return True
        for task in others:
            task.cancel()
        _, left = self._loop.run_until_complete(asyncio.wait(others, timeout=OTHERS_LIMIT_S))
        return not left


def prepare_forks(*, serves_many: bool = True) -> None:
    """Do what is the same for all forks. Unless it `serves_many`, garbage is not collected: that would copy every page
    of the program for one command."""
    quiet_this_process()
    read_stdin_from(os.devnull)
    # What is imported stays; a collection in a fork that walked over it would copy every page it is on.
    if serves_many:
        gc.collect()
    gc.freeze()


def serve_calls(sock: socket.socket, bell: kernel.DeadlineTimer, memory: int, tokens: int) -> NoReturn:
    words = open_memory(memory)
    os.close(memory)
    if words[SHARED]:
        SharedWorker(sock, words).serve()
    _serve_one_at_a_time(sock, bell, words, CallTokens(tokens))


class CallTokens:
    """The numbers of the calls that may begin, in a pipe. The runtime takes a number out to move its call elsewhere."""

    def __init__(self, fd: int) -> None:
        self._fd, self._number = fd, 0

    def take(self, number: int) -> bool:
        """Return whether this call may begin. Calls and tokens come in the order of their numbers."""
        while self._number < number:
            try:
                self._number = int.from_bytes(os.read(self._fd, 8), "little")
            except BlockingIOError:
                return False
        return self._number == number


def _serve_one_at_a_time(
    sock: socket.socket, bell: kernel.DeadlineTimer, words: memoryview, tokens: CallTokens
) -> NoReturn:
    sock.setblocking(True)
    inbox = messages.Reader(sock)
    kernel.become_subreaper()  # so that "no child left" means "nothing left" here as well
    kernel.name_process("shotclock-work")
    me = os.getpid()
    is_running = is_asked = False
    call: OnlyCall | None = None

    def on_term(number: int, frame: object) -> None:
        nonlocal is_asked
        if not is_running:
            os._exit(0)
        if call is not None and call.coroutine is not None:
            call.coroutine.stop()
        elif not is_asked:  # once: our supervisor repeats the signal, which must not hit the clean-up
            is_asked = True
            raise Stopped

    signal.signal(signal.SIGTERM, on_term)
    while True:
        try:
            message = inbox.next()  # unbounded on purpose: a warm worker waits for work, and dies with its supervisor
        except ipc.Broken:
            os._exit(0)
        if not isinstance(message, Run) or not tokens.take(message.number):
            continue  # it came too late for its call, or was taken back
        call = OnlyCall(message, sock, inbox)
        try:
            if bell_ns := message.bell_ns:
                bell.arm(bell_ns)  # before anything of the call runs; from here on the supervisor decides
            is_running, is_asked = True, False
            # Before any code of the call: if the worker dies, a call that has not begun is given to another one.
            words[BEGUN] = message.number
            reply = _perform(call)
            is_running = False
            if os.getpid() != me:  # the function forked and came back twice; its caller waits for one answer
                os._exit(0)
            finished_ns = monotonic_ns()
            if bell_ns:
                bell.disarm()
            call.end()
        except Stopped:
            # The limit was reached. An answer would come too late; the supervisor waits for our end.
            _flush()
            os._exit(0)
        _flush()
        leaked = _find_leaked(call) if kernel.has_children() else []
        inbox.put_back(call.behind)
        try:
            _send(sock, Done(message.number, *reply, leaked, finished_ns))
        except ipc.Broken:
            os._exit(0)
        if call.is_last or message.number >= MOST_CALLS:
            os._exit(0)
        while leaked or (bell_ns and finished_ns > bell_ns - CLOSE_CALL_NS):
            signal.pause()  # unbounded on purpose: the runtime reads our answer and has us killed


def _send(sock: socket.socket, message: messages.FromWorker) -> None:
    try:
        sock.sendall(messages.pack(message))
    except OSError as error:
        raise ipc.Broken(str(error)) from error


def _perform(call: OnlyCall) -> Reply:
    request = call.request
    spans.stand_at(call.trace)
    set_call_variables(request.bell_ns, call.trace.traceparent, request.caller[2])
    if request.overtime_address:
        os.environ[OVERTIME_VARIABLE] = request.overtime_address
    try:
        if request.stdin_path is not None:
            read_stdin_from(request.stdin_path)
        bound = call.bind()
        if isinstance(bound, tuple):
            return bound
        result = bound()
        if isinstance(result, types.CoroutineType):
            result = call.run_async(result)
    except Stopped:
        raise
    except BaseException as error:
        if call.coroutine is not None and type(error).__name__ == "CancelledError":
            return "cancelled", None  # by itself: nothing asked it to stop
        return reply_to_error(error, call.errors_shown)
    finally:
        if request.stdin_path is not None:
            read_stdin_from(os.devnull)
        if request.overtime_address:
            os.environ.pop(OVERTIME_VARIABLE, None)
    return reply_to_result(result)


def _find_leaked(call: OnlyCall) -> list[dict[str, object]]:
    """Return the processes that the function left running, and collect its dead children."""
    command_pool = sys.modules.get("shotclock.supervise.command_pool")
    ours = set(command_pool.pool.helpers() if command_pool is not None else [])
    if helpers := helpers_of_python().intersection(kernel.children_of(os.getpid())):
        ours |= helpers
        call.is_last = True  # their children would have the variables of this call
    for _ in range(_LEAK_LOOKS):
        if kernel.collect_dead():
            return []
        alive = [pid for pid in kernel.descendants(os.getpid()) if pid not in ours and not kernel.is_zombie(pid)]
        if alive or ours:
            return [kernel.describe(pid) for pid in alive[:_LEAKED_NAMED]]
    return [kernel.describe(kernel.UNKNOWN_PID)]


def _flush() -> None:
    with contextlib.suppress(Exception):  # the function may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
