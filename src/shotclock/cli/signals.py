"""The signals that mean "stop", over the life of a command line: before its work, during it, and while it answers.

raise_on_stop      nothing has begun: leave where we are
StopSignal         the work listens, and stops what it started; a second signal ends us at once
note_stops         the answer is being written, and is written once
"""

from __future__ import annotations

import os
import signal

from ..process.kill import STOP_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio

# Some send a signal twice at once, to a process and to its group (`timeout` does): that is one wish, not two.
ONE_WISH_S = 0.2

heard: list[int] = []
"""Those that came, in their order."""


class Signalled(BaseException):
    """A signal came before the work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


def raise_on_stop() -> None:
    for number in _listened_to():
        signal.signal(number, _raise)


def note_stops() -> None:
    for number in _listened_to():
        signal.signal(number, _note)
    # `StopSignal` held them back when its loop ended, until somebody listens again.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore() -> None:
    """Ignore them: the answer is out and the process about to end; the interpreter would give the signals their
    defaults back."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignal:
    """The first signal as a future of its name, from here on; one that came before and was lost in a finaliser or a
    fork hook, where Python swallows exceptions, counts as well."""

    def __init__(self) -> None:
        from asyncio import get_running_loop

        self._loop = get_running_loop()
        self.stop: asyncio.Future[str] = self._loop.create_future()
        self._heard_at = self._loop.time()

    def __enter__(self) -> asyncio.Future[str]:
        for number in _listened_to():
            self._loop.add_signal_handler(number, self._hear, number)
        if heard:
            self.stop.set_result(signal.Signals(heard[0]).name)
        return self.stop

    def __exit__(self, *_: object) -> None:
        # The loop gives signals back to their defaults when it is closed. None may come in between.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _hear(self, number: int) -> None:
        if self.stop.done():
            if (
                self._loop.time() - self._heard_at > ONE_WISH_S
            ):  # it means now: everything below us dies with our socket
                os._exit(128 + number)
            return
        self._heard_at = self._loop.time()
        heard.append(number)
        self.stop.set_result(signal.Signals(number).name)


def _listened_to() -> list[signal.Signals]:
    """Return those we listen to. Whoever is started by nohup does not hear SIGHUP, and a script's background job not
    SIGQUIT."""
    may_be_ignored = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in STOP_SIGNALS if n not in may_be_ignored or signal.getsignal(n) is not signal.SIG_IGN]


def _raise(number: int, frame: object) -> None:
    heard.append(number)
    raise Signalled(number)


def _note(number: int, frame: object) -> None:
    heard.append(number)
