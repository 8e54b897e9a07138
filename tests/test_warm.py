"""A program that starts warm sees what it would if it had started cold, leaves the same way, and hides no daemon."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Watch, ends_within
from tests.rows import row
from tests.warm import ENDED_WITHIN_S, WarmStart, own_terminal

pytestmark = [
    pytest.mark.usefixtures("no_survivors"),
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a clone of another process's child is Linux's"),
]

# A cold start with imports, on a busy machine.
RUN_WITHIN_S = 30.0
POLL_S = 0.01

# Everything that a program can ask about its start.
SHOW = """
import asyncio, json, os, random, signal, sys, tempfile, threading, time
main = sys.modules["__main__"]
frame, frames = sys._getframe(), []
while frame is not None:
    frames.append(frame.f_globals["__name__"])
    frame = frame.f_back
streams = {}
for name in ("stdin", "stdout", "stderr"):
    stream = getattr(sys, name)
    streams[name] = [
        stream.encoding, stream.errors, stream.newlines, stream.line_buffering, stream.write_through, stream.mode,
        stream.name, stream.buffer.mode, str(type(stream.buffer)), stream.fileno(), stream.isatty(),
        stream is getattr(sys, f"__{name}__"), os.get_inheritable(stream.fileno()),
    ]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable,
    "flags": str(sys.flags), "dont_write_bytecode": sys.dont_write_bytecode,
    "main": {k: str(type(v)) if k in ("__builtins__", "__loader__", "__spec__") else v
             for k, v in vars(main).items() if k.startswith("__")},
    "name": __name__, "is main": main.__dict__ is globals(), "code": sys._getframe().f_code.co_filename,
    "only itself": set(frames) <= {"__main__", "runpy"},
    "cwd": os.getcwd(), "environ": dict(os.environ), "timezone": time.tzname, "temporary": tempfile.gettempdir(),
    "streams": streams, "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
    "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getppid()],
    "threads": [t.name for t in threading.enumerate()], "thread id": threading.get_native_id() == os.getpid(),
    "process": open("/proc/self/stat").read().split()[1], "umask": os.umask(0o22),
}, default=str))
"""
LEAVINGS = {
    "the end": "print('said')",
    "256 + 7": "raise SystemExit(263)",
    "a text": "import sys; sys.exit('wörds of farewell')",
    "an error": "def f():\n    1 / 0\nf()",
    "a syntax error": "print('never'\n",
    "a signal": "import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "an interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(10)",
    "at once": "import os; print('lost'); os._exit(4)",
    "a hook": "import atexit, sys; atexit.register(print, 'at exit'); print('said'); sys.exit(5)",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
    "nobody reads": "import os, sys; print('x'); os.close(1); sys.exit(0)",
    "an echo": "import sys; print(sys.stdin.read().upper() + input.__name__)",
}


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., Any]:
    """A function that runs words of Python cold and warm: exit code, stdout and stderr of both."""

    def run(*words: str, input: bytes = b"", **options: Any) -> list[tuple[int, bytes, bytes]]:
        (tmp_path / "in").write_bytes(input)
        answers = []
        for start in (subprocess.Popen, WarmStart):
            with (
                open(tmp_path / "in", "rb") as stdin,
                open(tmp_path / "out", "wb") as out,
                open(tmp_path / "err", "wb") as err,
            ):
                streams = {"stdin": stdin, "stdout": out, "stderr": err, **options}
                process = start([sys.executable, *words], **streams)
                assert getattr(process, "is_warm", False) == (start is WarmStart)
                code = process.wait(RUN_WITHIN_S)
            answers.append((code, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()))
        return answers

    return run


def test_a_program_sees_the_same_whether_it_starts_warm_or_cold(both: Callable[..., Any], tmp_path: Path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "shows.py").write_text(SHOW)
    (tmp_path / "pack" / "__main__.py").write_text(SHOW)
    (tmp_path / "link.py").symlink_to(tmp_path / "pack" / "__main__.py")
    env = {**os.environ, "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "ODD": "\udcff", "EMPTY": ""}
    env["PYTHONDONTWRITEBYTECODE"] = "" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "1"
    env.pop("HOME", None)
    for way in (["../shows.py"], [str(tmp_path / "link.py")], ["-m", "shows"], ["-m", "pack"], ["-c", SHOW]):
        with row(way[:2]):
            cwd = tmp_path / "pack" if way == ["../shows.py"] else tmp_path
            cold, warm = both(*way, "one", "", "--two=\udcfe", cwd=cwd, env=env)
            assert (cold[0], cold[2]) == (0, b"")
            expected, seen = json.loads(cold[1]), json.loads(warm[1])
            # The flag says how the interpreter was started, the attribute what counts.
            del expected["flags"], seen["flags"]
            assert seen == expected


SPAWN = """
import functools, os, sys
from shotclock.supervise import zygote
from tests import warm, warm_zygote
warm_zygote._address = "\\0 where nobody listens"
warm_zygote._path[:] = [folder for folder in sys.path if folder]
if sys.argv[1] == "cloned":
    warm.spawn_warm()
elif sys.argv[1] == "forked":
    os.posix_spawn = functools.partial(warm_zygote.spawn_from, os.getpid(), True)
os.dup2(0, 50), os.dup2(0, 60)  # inheritable, and not the last one, which SHOW leaves out
null = os.open(os.devnull, os.O_RDWR)
python = [sys.executable, "-P", "-c", sys.argv[2], "one", ""]
environment = {**zygote.needed_variables(), "TZ": "Asia/Tokyo"}
actions = [(os.POSIX_SPAWN_DUP2, null, 0)]
pid = os.posix_spawn(python[0], python, environment, file_actions=actions, setsigmask=[], setsid=sys.argv[3] == "True")
assert bool(warm.zygote_pids()) == (sys.argv[1] == "cloned")
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
warm.end_zygotes()
sys.exit(code)
"""


@pytest.mark.parametrize(("way", "new_session"), [("cloned", True), ("forked", False)])
def test_a_process_of_a_runtime_sees_the_same_whether_it_starts_warm_or_cold(
    way: str, new_session: bool, tmp_path: Path
):
    show = SHOW.replace("os.getppid()", f"os.getppid() == {os.getpid()}") + "sys.stdout.flush(); raise SystemExit(7)"
    said = []
    for start in ("cold", way):
        with open(tmp_path / "out", "wb") as out:
            words = [sys.executable, "-c", SPAWN, start, show, str(new_session)]
            assert subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, timeout=RUN_WITHIN_S).returncode == 7
        said.append(json.loads((tmp_path / "out").read_bytes()))
        del said[-1]["flags"]  # -P is one, which counts for the path alone
        if way == "forked":
            del said[-1]["only itself"]  # those of the program are above it, and it never returns to them
    assert said[0] == said[1]
    assert said[1]["argv"] == ["-c", "one", ""] and "50" in said[1]["fds"]


RUNNER = """
import os, sys, time
from pathlib import Path
code = "import os\\nif os.fork(): os._exit(0)\\nos.closerange(3, 4096)\\n" + Path("show").read_text()
with open("out", "wb") as out:
    actions = [(os.POSIX_SPAWN_DUP2, out.fileno(), number) for number in (1, 2)]
    words = [sys.executable, "-P", "-c", code, "one"]
    pid = os.posix_spawn(words[0], words, dict(os.environ), file_actions=actions, setsid=True, setsigmask=[])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_runner_of_a_job_sees_the_same_whether_it_starts_warm_or_cold(tmp_path: Path):
    (tmp_path / "runner.py").write_text(RUNNER)
    # Its parent is there or gone already; -P is a flag that counts for the path alone.
    show = SHOW.replace(", os.getppid()", "").replace('"flags": str(sys.flags),', "")
    (tmp_path / "show").write_text(show + "sys.stdout.flush(); os.rename('out', 'done')")
    said = []
    for start in (subprocess.Popen, WarmStart):
        process = start([sys.executable, "runner.py"], cwd=tmp_path, env=dict(os.environ), stdin=subprocess.DEVNULL)
        assert process.wait(RUN_WITHIN_S) == 0
        give_up_at = time.monotonic() + RUN_WITHIN_S
        while not (tmp_path / "done").exists():
            assert time.monotonic() < give_up_at, (tmp_path / "out").read_text()
            time.sleep(POLL_S)
        said.append(json.loads((tmp_path / "done").read_text()))
        (tmp_path / "done").unlink()
    assert said[0] == said[1]
    assert said[1]["argv"] == ["-c", "one"]


def test_streams_and_sessions_are_the_same_on_a_terminal_and_on_pipes(both: Callable[..., Any], tmp_path: Path):
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    try:
        said = []
        for start in (subprocess.Popen, WarmStart):
            process = start(
                [sys.executable, "-c", SHOW + "os.close(os.open('/dev/tty', os.O_RDWR))"],
                stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True, preexec_fn=own_terminal,
                env=dict(os.environ),  # a cold one would else also get what readline, unseen by Python, put into ours
            )  # fmt: skip
            assert ends_within(process, RUN_WITHIN_S) and process.wait() == 0
            with process.stdout:
                said.append(json.loads(process.stdout.read()))
    finally:
        os.close(ours)
        os.close(theirs)
    assert said[0] == said[1]
    assert said[1]["session"][:2] == [True, True]


def test_a_program_leaves_the_same_way(both: Callable[..., Any], tmp_path: Path):
    for leaving, text in LEAVINGS.items():
        (tmp_path / "leaves.py").write_text(text)
        ways = [["leaves.py"]]
        if leaving in ("256 + 7", "an error", "an interrupt"):
            ways += [["-m", "leaves"], ["-c", text]]
        for words in ways:
            with row(leaving, words[0]):
                cold, warm = both(*words, cwd=tmp_path, input="lié\n".encode())
                assert warm == cold


def test_what_a_clone_cannot_do_is_started_cold(tmp_path: Path):
    python = [sys.executable, "-c", "pass"]
    for asked in (
        {"args": [sys.executable, "-X", "dev", "-c", "pass"]},
        {"args": [sys.executable, "-m", "shotclock", "exec", "--", "true"]},
        {"args": ["env", *python]},
        {"args": f"{sys.executable} -c pass", "shell": True},
        {"args": python, "preexec_fn": os.getpid},
        {"args": python, "umask": 0o77},
        {"args": python, "close_fds": False},
        {"args": python, "env": {**os.environ, "LC_ALL": "C"}},
        {"args": python, "env": {**os.environ, "OTEL_PROPAGATORS": "baggage"}},
        {"args": [sys.executable, "absent.py"]},
    ):
        with row(asked), open(os.devnull, "wb") as null:
            process = WarmStart(**asked, stdout=null, stderr=null, cwd=tmp_path)
            assert not process.is_warm
            assert process.wait(RUN_WITHIN_S) == (2 if "absent.py" in asked["args"] else 0)


def test_a_file_that_would_hide_a_module_is_not_passed_over(tmp_path: Path):
    (tmp_path / "pydantic.py").write_text("raise SystemExit(77)")
    (tmp_path / "program.py").write_text("import pydantic")
    for words in (["program.py"], ["-m", "program"], ["-c", "import pydantic"]):
        process = WarmStart([sys.executable, *words], cwd=tmp_path)
        assert process.wait(RUN_WITHIN_S) == 77


# --- what stays ---------------------------------------------------------------------------------------------------

STAYS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        time.sleep(60)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("start", [subprocess.Popen, WarmStart])
def test_a_daemon_that_a_program_left_behind_is_found_warm_or_cold(start: Any, no_survivors: Watch):
    process = start([sys.executable, "-c", STAYS])
    assert getattr(process, "is_warm", False) == (start is WarmStart)
    try:
        assert process.wait(RUN_WITHIN_S) == 0
        [daemon] = no_survivors.alive()
        assert daemon.ppid != os.getpid(), "it is below us, and would have been found anyway"
    finally:
        no_survivors.wait_until_alone(ENDED_WITHIN_S, kill=True)


def test_a_zygote_ends_with_the_process_it_is_for(tmp_path: Path):
    program = (
        "import os, signal, sys\nfrom tests.warm import WarmStart, zygote_pids\n"
        "assert WarmStart([sys.executable, '-c', 'pass']).wait(30) == 0\n"
        "print(*zygote_pids(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    with process:
        assert process.stdout is not None
        zygotes = process.stdout.read().split()
        assert process.wait(RUN_WITHIN_S) == -signal.SIGKILL
    give_up_at = time.monotonic() + ENDED_WITHIN_S
    while any(Path(f"/proc/{int(pid)}").exists() for pid in zygotes):
        assert time.monotonic() < give_up_at
        time.sleep(POLL_S)
