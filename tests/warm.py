"""A warm start: a Python program under test without the second that its imports take, a fork of one that has them.

    process = WarmStart([sys.executable, "-m", "shotclock", "inbox", "list"], stdout=out, env=environment)

`WarmStart` is a `subprocess.Popen`. For each pytest process there is one *zygote* that has imported what our programs
import (and another one for those on Temporal, which import its SDK as well); asked over a socket it clones itself, as a
sibling: the clone is pytest's own child, to wait for and to signal like any other. There it sets up what a cold start
would give the program (arguments, environment, folder, descriptors, streams, signals, `sys.path`, `__main__`), runs it,
and leaves as the interpreter does, short of tearing down modules.

What a runtime starts by itself (`python -P -c …`: zygotes, and the runners of jobs) is warm as well, also without being
asked for: in pytest's own process a clone of a second, smaller zygote (`spawn_warm`), in a warm `shotclock …` a fork of
that program itself, and a job's runner a child of the second zygote (`spawn_from` in warm_zygote.py). The fixture
`cold_runtimes` is for tests that look at just that.

It is here for speed alone: the suite starts some three thousand programs, and a server, a run and a command of `inbox`
cost a fifth to a third of a core's time of their cold start; a runtime with a worker costs a fifth.

What it cannot do the same way is started cold: flags of the interpreter, `preexec_fn`, words before Python, variables
that were looked at while starting or importing, a folder whose files would hide a module that is there already. So is
`shotclock exec`, which is quick by itself. A warm program can be told from a cold one by its command line and its
environment in /proc; a test that looks at those, or at what is imported, must start it cold (`subprocess.Popen`).

An import that only works where something else was imported before is no longer noticed by a test that starts warm.
test_cold_starts.py starts a command of each surface cold; so do the sessions of tests/docs (howto/temporal.md for what
is on Temporal), tests/supervise and the demo.
"""

import fcntl
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.warm_zygote import receive, send, spawned_fds

# A zygote imports for a second; on a machine on its knees for many. A clone is there in milliseconds.
READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 30.0
ENDED_WITHIN_S = 5.0

# What the interpreter and the dynamic linker look at before any of our code runs.
LOOKED_AT_FIRST = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
# Looked at while starting, but without a trace in what runs later, or set again by the clone.
HARMLESS = {"HOME", "PYTHONDONTWRITEBYTECODE"}

ZYGOTE = Path(__file__).with_name("warm_zygote.py")
_STREAMS = (0, 1, 2)
# What a test has set when it happens to be the first would hold for all the others. Without this one, as all that tests
# start (conftest.py): a clone can set it again, but the zygote's own `sys.flags` stay what they were.
_AT_FIRST = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_Popen = subprocess.Popen  # a test may have put WarmStart in its place
_posix_spawn = os.posix_spawn


class WarmStart(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, warm where that makes no difference to the program, and cold everywhere else."""

    is_warm = False

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(_Popen._execute_child).bind(self, *given).arguments
        pid = _start_warm(asked)
        if pid is None:
            super()._execute_child(*given)
            return
        self.pid, self._child_created, self.is_warm = pid, True, True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in names))


@contextmanager
def starting_warm() -> Iterator[None]:
    """Meanwhile whoever uses `subprocess` in this process, clients of the SDK too, starts programs warm."""
    before, subprocess.Popen = subprocess.Popen, WarmStart  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def spawn_warm() -> None:
    """From now on a runtime in this process starts its own processes (`python -P -c …`) warm."""
    os.posix_spawn = _spawn  # type: ignore[assignment]


@contextmanager
def spawning_cold() -> Iterator[None]:
    """Meanwhile they start as they do where there are no tests."""
    before, os.posix_spawn = os.posix_spawn, _posix_spawn
    try:
        yield
    finally:
        os.posix_spawn = before


def own_terminal() -> None:
    """For `preexec_fn`, with `start_new_session`: stdin becomes the controlling terminal, as in a window."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def zygote_pids() -> set[int]:
    """Of this process's zygotes. What /proc says of a clone's image is what it says of its zygote's."""
    return {zygote.process.pid for zygote in _zygotes.values() if zygote.owner == os.getpid()}


def be_ready() -> None:
    """For a test that measures how long programs take: the first one would have to wait for the zygote."""
    with _starting, suppress(_Gone):
        if "programs" not in _zygotes and sys.platform.startswith("linux"):
            _zygotes["programs"] = _Zygote("programs")


def end_zygotes() -> None:
    for kind in list(_zygotes):
        _end_zygote(kind)


def _end_zygote(kind: str) -> None:
    zygote = _zygotes.pop(kind)
    if zygote.owner == os.getpid():
        zygote.end()


def _start_warm(asked: Mapping[str, Any]) -> int | None:
    """The pid of a clone that runs the program; None where it has to be a cold start."""
    environment = {
        os.fsdecode(name): os.fsdecode(value)
        for name, value in (os.environ if asked["env"] is None else asked["env"]).items()
    }
    cwd = os.getcwd() if asked["cwd"] is None else os.fspath(asked["cwd"])
    if not _is_plain(asked, cwd):
        return None
    words = [os.fsdecode(word) for word in asked["args"]]
    folder = _folder_of_modules(words, cwd)
    if folder is None or any("\0" in word for word in (*words, *environment, *environment.values())):
        return None
    streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    fds = [number if given == -1 else given for number, given in zip(_STREAMS, streams, strict=True)]
    passed = sorted(set(asked["pass_fds"]) - set(_STREAMS))
    session = (asked["start_new_session"], asked["process_group"], asked["preexec_fn"] is own_terminal)
    request = ([*_STREAMS, *passed], words, environment, cwd, folder, *session)
    kind = "programs on Temporal" if _speaks_to_temporal(words) else "programs"
    return _clone(kind, request, [*fds, *passed], folder or cwd)


def _spawn(path: Any, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
    """`os.posix_spawn`, warm for a process of a runtime, and as ever for everything else."""
    pid = _spawn_warm(argv, env, **options)
    return _posix_spawn(path, argv, env, **options) if pid is None else pid


def _spawn_warm(argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int | None:
    fds = spawned_fds(argv, options)
    if fds is None:
        return None
    session = (options.get("setsid", False), -1, False)
    request = ([*fds], list(argv), dict(env), os.getcwd(), None, *session)
    return _clone("runtimes", request, [*fds.values()], None)


def _clone(kind: str, request: Any, fds: list[int], folder: str | None) -> int | None:
    """The pid of a clone of that zygote; None where it has to be a cold start."""
    with _starting:
        for _ in range(2):  # a test may have killed the zygote, with everything else it found
            try:
                for needed in (kind, "runtimes"):  # which programs ask for the runners of their jobs
                    if needed not in _zygotes:
                        _zygotes[needed] = _Zygote(needed)
                zygote = _zygotes[kind]
                if zygote.owner != os.getpid() or not zygote.would_be_the_same(request[2], folder):
                    return None
                return zygote.clone(request, fds)
            except _Gone:
                if kind in _zygotes:
                    _end_zygote(kind)
    return None


def _is_plain(asked: Mapping[str, Any], cwd: Any) -> bool:
    """Whether nothing is asked for that a clone does not do."""
    if not sys.platform.startswith("linux") or isinstance(asked["args"], str | bytes | os.PathLike):
        return False
    if asked["shell"] or asked["preexec_fn"] not in (None, own_terminal):
        return False
    if asked["executable"] not in (None, asked["args"][0]):
        return False
    if any(asked[name] is not None for name in ("gid", "gids", "uid")) or asked["umask"] >= 0:
        return False
    if not asked["close_fds"] or not asked["restore_signals"] or not os.path.isdir(cwd):
        return False
    if signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    inherited = (number for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")) if asked[name] == -1)
    return all(_is_open(number) for number in inherited)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _folder_of_modules(words: list[str], cwd: str) -> str | None:
    """What a cold start would put at the front of `sys.path`. None for what cannot be started warm."""
    match words:
        case [python, "-c", _, *_] if python == sys.executable:
            return ""
        case [python, "-m", "shotclock", "exec", *_] if python == sys.executable:
            return None
        case [python, "-m", _, *_] if python == sys.executable:
            return os.path.realpath(cwd)
        case [python, file, *_] if python == sys.executable and file.endswith(".py"):
            path = os.path.realpath(os.path.join(cwd, file))
            return os.path.dirname(path) if os.path.isfile(path) else None
    return None


def _speaks_to_temporal(words: list[str]) -> bool:
    return any(word.startswith("temporal://") for word in words)


def _ignored() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}


class _Gone(Exception):
    """The zygote was killed, or could not import what it should: its complaint is on stderr."""


class _Zygote:
    """It ends when its socket is closed, and when we die."""

    def __init__(self, kind: str) -> None:
        self.owner = os.getpid()
        self._ignored = _ignored()
        self._environment = {k: v for k, v in _AT_FIRST.items() if not k.startswith(("SHOTCLOCK_", "OTEL_"))}
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(READY_WITHIN_S)
        with theirs:
            # Its complaints go where ours go; nothing of it may hold a stream that a test has brought.
            self.process = _Popen(
                [sys.executable, str(ZYGOTE), str(theirs.fileno()), kind],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )
        try:
            self._modules, self._looked_at = pickle.loads(receive(self._socket)[0])
        except (EOFError, OSError) as error:
            self.end()
            raise _Gone from error
        self._socket.settimeout(ANSWER_WITHIN_S)

    def would_be_the_same(self, environment: Mapping[str, str], folder: str | None) -> bool:
        """Whether a cold start with this environment, and modules in this folder, if any, would import the same."""
        differing = {name for name, _ in environment.items() ^ self._environment.items()} - HARMLESS
        if any(name in self._looked_at or name.startswith(LOOKED_AT_FIRST) for name in differing):
            return False
        if _ignored() != self._ignored:
            return False
        try:
            found = os.listdir(folder) if folder is not None else []
        except OSError:
            return False
        return self._modules.isdisjoint(name.partition(".")[0] for name in found)

    def clone(self, request: Any, fds: list[int]) -> int | None:
        """None where the kernel would not clone."""
        try:
            send(self._socket, pickle.dumps(request), fds)
            answer = pickle.loads(receive(self._socket)[0])
        except (EOFError, ConnectionError) as error:
            raise _Gone from error
        assert not isinstance(answer, str), f"a clone could not be set up: {answer}"
        return answer  # type: ignore[no-any-return]

    def end(self) -> None:
        self._socket.close()
        try:
            self.process.wait(ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(ENDED_WITHIN_S)


_zygotes: dict[str, _Zygote] = {}
_starting = threading.Lock()
