"""The zygotes behind `tests.warm`: programs that import ours, wait, and become them, one clone each."""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import linecache
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import BuiltinImporter, SourceFileLoader
from io import TextIOWrapper
from typing import Any

# What programs under test import sooner or later. Not OpenTelemetry's SDK: code asks whether somebody else imported it.
_BY_PROGRAMS = (
    "shotclock.apps.app",
    "shotclock.apps.cli",
    "shotclock.terminal.subcommand",
    "shotclock.apps.cli_inbox",
    "shotclock.people.cli_editing",
    "shotclock.apps._inbox_drawing",
    "rich.table",
    "rich.filesize",
    "shotclock.apps.cli_inbox_wait",
    "shotclock.commands.jobs",
    "shotclock.apps.cli_serve",
    "shotclock.flows.cli.live_view",
    "shotclock.commands.maintenance",
    "shotclock.flows.cli.report",
    "shotclock.flows.cli.run",
    "shotclock.flows.cli.check",
    "shotclock.dispatch.job_client",
    "shotclock.net.mcp_client",
    "shotclock.apps.server._http",
    "shotclock.apps.server._tool_calls",
    "shotclock.apps.server.serve",
    "shotclock.apps.server._stdio",
    "shotclock.flows.report.report",
    "shotclock.flows.engines",
)
# What programs import beside that which speak to Temporal. No others: the SDK is half of all that is imported.
_BY_PROGRAMS_ON_TEMPORAL = (
    *_BY_PROGRAMS,
    "shotclock.temporal.cli",
    "shotclock.temporal._engine",
    "shotclock.temporal.front_end",
    "shotclock.temporal._worker",
)
# What the processes below a runtime import. No more: each of the many that are forked would copy it.
_BY_RUNTIMES = (
    "shotclock.apps.app",
    "shotclock.dispatch._job_runner",
    "asyncio",
    "shotclock.worker.main",
    "shotclock.supervise.zygote",
)
IMPORTED = {
    "programs": _BY_PROGRAMS,
    "programs on Temporal": _BY_PROGRAMS_ON_TEMPORAL,
    "runtimes": _BY_RUNTIMES,
}

_SYS_CLONE3 = 435
_CLONE_PARENT = 0x8000
_CLONE_CHILD_CLEARTID = 0x20_0000
_CLONE_CHILD_SETTID = 0x100_0000
_PR_SET_PDEATHSIG = 1
_PR_GET_TID_ADDRESS = 40

# A clone is there in milliseconds; only a machine on its knees exhausts this.
_ANSWER_WITHIN_S = 30.0
_LENGTH = struct.Struct("!Q")
_MOST_FDS = 250

_libc = ctypes.PyDLL(None, use_errno=True)
_posix_spawn = os.posix_spawn
_exit_code: int | None = None
_path: list[str] = []
_address = ""  # of the zygote of runtimes


# --- what both sides say --------------------------------------------------------------------------


def send(to: socket.socket, body: bytes, fds: Iterable[int] = ()) -> None:
    socket.send_fds(to, [_LENGTH.pack(len(body))], list(fds))
    to.sendall(body)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Raises EOFError when the other side is gone."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MOST_FDS)
    if len(head) < _LENGTH.size:  # a local socket does not cut eight bytes in two
        raise EOFError
    (wanted,) = _LENGTH.unpack(head)
    body = bytearray()
    while len(body) < wanted:
        if not (received := sock.recv(min(wanted - len(body), 1 << 20))):
            raise EOFError
        body += received
    return bytes(body), fds


# --- the zygote -----------------------------------------------------------------------------------


def prepare(kind: str) -> set[str]:
    """Import everything; the variables that were looked at meanwhile."""
    del sys.path[0]  # our own folder
    _path[:] = sys.path
    with _noting_what_is_looked_at() as looked_at:
        for name in IMPORTED[kind]:
            importlib.import_module(name)
        _build_what_workers_build()
    # A collection in a clone that walked over all this would copy every page it is on.
    gc.collect()
    gc.freeze()
    return looked_at


def _build_what_workers_build() -> None:
    """What is imported and built late: every runtime would do it before its first worker."""
    from shotclock.core.arguments import signature_of, to_jsonable

    signature_of(set_up).build_model()
    to_jsonable(b"")


@contextmanager
def _noting_what_is_looked_at() -> Iterator[set[str]]:
    looked_at: set[str] = set()
    plain = type(os.environ)

    class Noting(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            looked_at.add(name)
            return str(super().__getitem__(name))

    os.environ.__class__ = Noting
    try:
        yield looked_at
    finally:
        os.environ.__class__ = plain


def wait_for_a_program(requests: socket.socket, others: socket.socket) -> tuple[socket.socket, Any, list[int]]:
    """Clone ourselves for each request. Returns in the clones alone, with what they are to become.

    `others` is where a program under test asks for a process that leaves its family at once: that is a child of ours.
    """
    while True:
        # Unbounded on purpose: a zygote without work has nothing to do, and ends with the other side.
        ready, _, _ = select.select([requests, others] if others.getsockname() else [requests], [], [])
        asked = requests if requests in ready else others.accept()[0]
        try:
            body, fds = receive(asked)
        except (EOFError, ConnectionError):
            if asked is requests:
                os._exit(0)
            asked.close()
            continue
        try:
            if _clone() if asked is requests else os.fork() == 0:
                return asked, pickle.loads(body), fds
        except OSError:  # a sandbox that forbids it, or a machine without a process to spare
            send(asked, pickle.dumps(None))
        for fd in fds:
            os.close(fd)
        if asked is not requests:
            asked.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    )


def _clone() -> bool:
    """Like a fork, but the child is our sibling. True there. Libc is told the new thread id as by its own fork."""
    address = ctypes.c_void_p()
    flags = _CLONE_PARENT
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address)) == 0:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = _CloneArguments(flags=flags, child_tid=address.value or 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(_SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return True
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return False


# --- the clone ------------------------------------------------------------------------------------


def set_up(requests: socket.socket, request: Any, fds: list[int], interrupt: Any) -> list[str]:
    """All that a cold start would have from exec and from the interpreter. Then the other side hears of us."""
    numbers, *more = request
    answer = _keep(dict(zip(numbers, fds, strict=True)), requests.detach())
    with socket.socket(fileno=answer) as other:
        try:
            words = _begin(interrupt, *more)
        except BaseException:
            send(other, pickle.dumps(traceback.format_exc()))
            os._exit(1)
        send(other, pickle.dumps(os.getpid()))
    return words


def _keep(fds: Mapping[int, int], another: int) -> int:
    """Leave nothing open but these, by the numbers that they are to have, and another one, by any number: that."""
    first_free = max(*(int(name) for name in os.listdir("/proc/self/fd")), *fds) + 1
    *held, another = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free) for fd in [*fds.values(), another])
    os.closerange(0, first_free)
    for fd, number in zip(held, fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return another


def _begin(
    interrupt: Any,
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    folder: str | None,
    new_session: bool,
    process_group: int,
    own_terminal: bool,
) -> list[str]:
    os.chdir(cwd)
    if new_session:
        os.setsid()
    elif process_group >= 0:
        os.setpgid(0, process_group)
    if own_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, interrupt)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, f"__{name}__"))
        setattr(sys, f"__{name}__", stream)
        setattr(sys, name, stream)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = words
    sys.argv = words[1:]
    if folder is not None:
        sys.path.insert(0, folder)
    return words


def _stream(number: int, zygotes: Any) -> Any:
    """As `create_stdio` of CPython makes it; encoding and errors are the zygote's, which has the same locale."""
    mode = "r" if number == 0 else "w"
    unbuffered = zygotes.write_through
    buffer: Any = open(number, mode + "b", 0 if unbuffered and number else -1, closefd=False)
    raw = getattr(buffer, "raw", buffer)
    raw.name = f"<{('stdin', 'stdout', 'stderr')[number]}>"
    stream = TextIOWrapper(
        buffer,
        zygotes.encoding,
        zygotes.errors,
        newline="\n",
        line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = mode
    return stream


def run(words: list[str]) -> None:
    """The program, as `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    match words[1:]:
        case ["-m", module, *_]:
            sys.argv = ["-m", *words[3:]]
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        case ["-c", text, *rest] | ["-P", "-c", text, *rest]:
            sys.argv = ["-c", *rest]
            if sys.version_info >= (3, 13):  # from there on a traceback shows the lines of such a text
                linecache.cache["<string>"] = (len(text), None, text.splitlines(keepends=True), "<string>")
            exec(compile(text, "<string>", "exec", dont_inherit=True), main.__dict__)
        case [file, *_]:
            path = os.path.join(os.getcwd(), file.removeprefix("./"))  # what the interpreter takes for absolute
            main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
            if sys.version_info < (3, 15):
                main.__dict__["__cached__"] = None
            with open(path, "rb") as opened:
                code = compile(opened.read(), path, "exec", dont_inherit=True)
            exec(code, main.__dict__)


# --- what a program of ours starts itself -----------------------------------------------------------------------


def spawned_fds(argv: Sequence[str], options: Mapping[str, Any]) -> dict[int, int] | None:
    """What is open in a process of a runtime (`python -P -c …`) that `os.posix_spawn` is asked for, by its numbers
    there, and what that is here. None for anything else."""
    if list(argv[:3]) != [sys.executable, "-P", "-c"] or options.keys() - {"file_actions", "setsid", "setsigmask"}:
        return None
    if options.get("setsigmask") != [] or not sys.platform.startswith("linux"):
        return None
    if "shotclock.ui.daemon" in argv[3]:  # tests find it by its command line and environment: a clone has others
        return None
    fds: dict[int, int] = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one that this was read from
            if os.get_inheritable(fd):
                fds[fd] = fd
    for action, fd, number in options["file_actions"]:
        assert action == os.POSIX_SPAWN_DUP2
        fds[number] = fds.get(fd, fd)
    return fds if fds.keys() >= {0, 1, 2} else None


ANY = 0


def spawn_from(
    program: int, can_fork: bool, path: str, argv: Sequence[str], env: Mapping[str, str], **options: Any
) -> int:
    """`os.posix_spawn` in a program under test. A process of a runtime is a fork of the program, where that `can_fork`:
    it runs nobody's code, which would have declared already what it declares when it is imported, and has no threads.
    One that leaves our family at once, a job's runner, is made by the zygote of runtimes; whoever waits until it has
    left waits for another one, which ends at once."""
    fds = spawned_fds(argv, options) if program in (ANY, os.getpid()) else None
    if fds is not None and options.get("setsid"):
        request = ([*fds], list(argv), dict(env), os.getcwd(), None, True, -1, False)
        if _ask_zygote_of_runtimes(request, fds.values()):
            return _posix_spawn("/bin/true", ["true"], {})
    if fds is None or not can_fork or len(os.listdir("/proc/self/task")) > 1:
        return _posix_spawn(path, argv, env, **options)
    if pid := os.fork():
        return pid
    try:
        _become(list(argv), dict(env), fds, options.get("setsid", False))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:  # whatever happens: above us are the frames of the program
        os._exit(1)


def _ask_zygote_of_runtimes(request: Any, fds: Iterable[int]) -> bool:
    """Return whether there is one."""
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.settimeout(_ANSWER_WITHIN_S)
        try:
            zygote.connect(_address)
        except ConnectionRefusedError:
            return False
        send(zygote, pickle.dumps(request), fds)
        answer = pickle.loads(receive(zygote)[0])
    assert isinstance(answer, int), f"it could not be set up: {answer}"
    return True


def _become(words: list[str], environment: dict[str, str], fds: Mapping[int, int], new_session: bool) -> None:
    global _exit_code
    os.posix_spawn = _posix_spawn  # users' code will run below us
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.close(_keep(fds, 0))
    sys.path[:] = _path
    _begin(signal.default_int_handler, words, environment, os.getcwd(), None, new_session, -1, False)
    gc.freeze()
    try:
        run(words)
        _exit_code = 0
    except SystemExit as leaving:
        _exit_code = code_of(leaving)
    atexit._run_exitfuncs()
    leave()


def show_without_us() -> None:
    """No traceback of the program's begins here."""
    hook, ours = sys.excepthook, __file__  # which is gone when the hook runs

    def show(kind: Any, error: Any, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == ours:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def code_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def leave() -> None:
    """The very last exit hook: all that is left is to take a thousand modules apart, which nobody will notice."""
    if _exit_code is None:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:
        return  # the interpreter will see it as well, and has its own way to say so
    os._exit(_exit_code)


def main(fd: int, kind: str) -> None:
    global _exit_code, _address
    atexit.register(leave)  # before any import can: the last to be registered is the first to be called
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for pytest and the programs
    requests = socket.socket(fileno=fd)
    looked_at = prepare(kind)
    _address = f"\0shotclock-tests-{os.getppid()}"
    others = socket.socket(socket.AF_UNIX)
    if kind == "runtimes":
        others.bind(_address)
        others.listen()
    send(requests, pickle.dumps(({name.partition(".")[0] for name in sys.modules} - {"__main__"}, looked_at)))
    asked, request, fds = wait_for_a_program(requests, others)
    others.close()
    words = set_up(asked, request, fds, interrupt)
    is_runner = asked is not requests
    if kind != "runtimes" or is_runner:
        can_fork = is_runner or words[1:3] == ["-m", "shotclock"]
        program = ANY if is_runner else os.getpid()  # a runner is a fork of the one that was started
        os.posix_spawn = functools.partial(spawn_from, program, can_fork)  # type: ignore[assignment]
    try:
        run(words)
        _exit_code = 0
    except SystemExit as leaving:
        _exit_code = code_of(leaving)
        raise
    except KeyboardInterrupt:  # the interpreter ends by the signal itself
        show_without_us()
        raise
    except BaseException:
        _exit_code = 1
        show_without_us()
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
