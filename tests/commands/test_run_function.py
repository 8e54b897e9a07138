"""`shotclock.run` and `shotclock.arun`: `subprocess.run`, with nothing left behind."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shotclock import Clocks, Operation, Runtime, arun, run
from shotclock.commands.run import CalledProcessError, IdleExpired, SupervisorLost, TimeoutExpired
from shotclock.supervise.command_pool import pool
from tests.calls.bounds import soon
from tests.processes import is_running, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "supervisors")]

LIMIT_S = 20.0
DAEMON = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"


@pytest.fixture
def supervisors(no_survivors: object) -> Iterator[None]:
    """End the supervisors of this process after the test, as it would at its exit."""
    yield
    pool.close()


def python(code: str, **options: object) -> "subprocess.Popen[str]":
    """Start a program that uses `run`."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], **given)  # type: ignore[call-overload, no-any-return]


def output_of(code: str, **options: object) -> str:
    with python(code, **options) as program:
        out, err = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, err
    assert err == ""
    return out


def test_the_tests_of_python_itself_pass_with_it() -> None:
    theirs = pytest.importorskip("test.test_subprocess", reason="the `test` package of Python is not installed")
    cases = theirs.RunFuncTestCase
    replaced = types.SimpleNamespace(**{**vars(subprocess), "run": run})
    before = theirs.subprocess
    theirs.subprocess = replaced
    try:
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(cases)
        result = unittest.TestResult()
        suite.run(result)
    finally:
        theirs.subprocess = before
    assert result.testsRun > 15
    assert [(str(case), text) for case, text in result.failures + result.errors] == []


def test_results_are_those_of_subprocess(tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(b"from a file")
    shell = {"shell": True, "capture_output": True}
    table: list[tuple[object, dict[str, object]]] = [
        (["true"], {}),
        (["sh", "-c", "exit 3"], {}),
        (["sh", "-c", "kill -9 $$"], {}),
        ("echo out; echo err >&2", shell),
        ("echo out; echo err >&2", {"shell": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}),
        ("echo out; echo err >&2", {"shell": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}),
        ("echo $0", {**shell, "executable": "/bin/bash"}),
        (["echo", "a"], {"executable": "printf", "capture_output": True}),
        (["echo $0 $1", "a", "b"], shell),
        ("cat", {**shell, "input": b"in"}),
        ("cat", {**shell, "input": "ein\nÄ", "encoding": "utf-8"}),
        ("cat", {**shell, "stdin": subprocess.PIPE}),
        ("cat", {**shell, "stdin": subprocess.DEVNULL}),
        ("printf 'a\\r\\nb\\rc'", {**shell, "text": True}),
        ("printf '\\377'", {**shell, "errors": "replace", "encoding": "utf-8"}),
        ("true", {**shell, "input": b"x" * 1_000_000}),
        ("head -c 3000000 /dev/zero", shell),
        ("cat; echo done", {**shell, "input": b"y" * 1_000_000}),
        ("pwd", {**shell, "cwd": tmp_path}),
        ("pwd", shell),
        ("env", {**shell, "env": {"A": "b", "C": "\udcff"}}),
        ("umask", {**shell, "umask": 0o027}),
        ("umask", shell),
        ("ps -o sid= -p $$ | grep -c $$", {**shell, "start_new_session": True}),
    ]
    for args, options in table:
        expected = subprocess.run(args, **options)  # type: ignore[call-overload]
        given = run(args, timeout=LIMIT_S, **options)  # type: ignore[arg-type]
        assert vars(given) == {**vars(expected), "leftovers": [], "survivors": []}, (args, options)
        assert isinstance(given, subprocess.CompletedProcess)
    with (tmp_path / "given").open("rb") as given_in, (tmp_path / "out").open("wb") as out:
        run(["cat"], stdin=given_in, stdout=out)
    assert (tmp_path / "out").read_bytes() == b"from a file"


def test_mistakes_are_raised_as_subprocess_raises_them_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    table: list[tuple[object, dict[str, object]]] = [
        (["no-such-command"], {}),
        ([tmp_path / "text"], {}),
        (["true"], {"cwd": tmp_path / "missing"}),
        (["true"], {"cwd": tmp_path / "text"}),
        (["true"], {"stdin": 1, "input": b""}),
        (["true"], {"capture_output": True, "stdout": 1}),
        (["true\0"], {}),
        (["true"], {"env": {"A=B": "c"}}),
        (["true"], {"input": "text"}),
        (["true"], {"wrong": 1}),
        (["true"], {"stdout": 999}),
        (Path("true"), {"shell": True}),
        (["sh", "-c", "printf '\\377'"], {"encoding": "utf-8", "stdout": subprocess.PIPE}),
    ]
    for args, options in table:
        with pytest.raises(Exception) as theirs:
            subprocess.run(args, **options)  # type: ignore[call-overload]
        with pytest.raises(theirs.type) as ours:
            run(args, timeout=LIMIT_S, **options)  # type: ignore[arg-type]
        assert getattr(ours.value, "errno", None) == getattr(theirs.value, "errno", None)
        assert str(getattr(ours.value, "filename", None)) == str(getattr(theirs.value, "filename", None))
    for option in ({"preexec_fn": print}, {"close_fds": False}, {"pass_fds": [5]}, {"user": 0}, {"process_group": 7}):
        with pytest.raises(ValueError, match=rf"run\(\) does not support {next(iter(option))}="):
            run(["true"], **option)  # type: ignore[arg-type]


def test_a_program_without_stdout_is_refused() -> None:
    code = """
    import os
    from shotclock import run
    answer = os.dup(1)
    os.close(1)
    try:
        run(["true"])
    except ValueError as error:
        os.write(answer, str(error).encode())
    """
    assert output_of(code) == "descriptor 1 is closed: open it first, for example /dev/null"


def test_in_a_program_without_stdin_commands_have_an_empty_one() -> None:
    code = """
    import os, threading
    from shotclock import run
    os.close(0)
    assert run(["cat"], input=b"given", capture_output=True).stdout == b"given"
    os.close(0)
    outputs = []
    def read():
        outputs.append(run(["cat"], capture_output=True).stdout)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(outputs == [b""] * 8, os.path.realpath("/proc/self/fd/0"))
    """
    assert output_of(code) == "True /dev/null\n"


def test_a_daemon_in_its_own_session_is_stopped_and_named() -> None:
    done = run(DAEMON, shell=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
    daemon = int(done.stdout)
    assert not is_running(daemon)
    assert done.returncode == 0
    assert [left["pid"] for left in done.leftovers] == [daemon]
    assert done.leftovers[0]["command"] == "sleep 600"
    assert done.survivors == []


def test_a_child_that_holds_the_pipe_does_not_hold_up_the_answer() -> None:
    began = time.monotonic()
    done = run("echo $$; sleep 600 & echo $!", shell=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert time.monotonic() - began < 5
    _, child = map(int, done.stdout.split())
    assert not is_running(child)
    assert [left["pid"] for left in done.leftovers] == [child]


def test_a_process_outside_the_tree_that_holds_the_pipe_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    script = f"echo hello; until [ -e {taken} ]; do sleep 0.01; done"
    taker = f"sleep 0.2; exec 3>/proc/$(pgrep -nf 'until .* -e {taken}')/fd/1; touch {taken}; sleep 600"
    with subprocess.Popen(["sh", "-c", taker], start_new_session=True) as outside:
        try:
            assert run(["sh", "-c", script], capture_output=True, timeout=LIMIT_S).stdout == b"hello\n"
            assert outside.poll() is None
        finally:
            os.killpg(outside.pid, signal.SIGKILL)


def test_a_timeout_kills_the_whole_tree_and_keeps_the_output() -> None:
    script = f"trap '' TERM; {DAEMON}; echo err >&2; sleep 600"
    with pytest.raises(TimeoutExpired) as raised:
        run(script, shell=True, capture_output=True, text=True, timeout=2)
    error = raised.value
    assert not is_running(int(error.stdout))
    assert (error.stderr, error.timeout, error.cmd) == (b"err\n", 2, script)
    assert error.survivors == error.leftovers == []
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.stdout, again.survivors) == (str(error), error.stdout, [])


def test_silence_is_ended_wherever_the_output_goes(tmp_path: Path) -> None:
    script = "for n in 1 2 3; do echo $n; echo $n >&2; sleep 0.3; done; sleep 600"
    with pytest.raises(IdleExpired, match="wrote nothing for") as raised:
        run(script, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, idle=0.7)
    assert raised.value.stdout == b"1\n1\n2\n2\n3\n3\n"
    assert isinstance(raised.value, subprocess.TimeoutExpired)
    with (tmp_path / "out").open("wb") as out, pytest.raises(IdleExpired):
        run("echo a; sleep 600", shell=True, stdout=out, idle=0.2)
    assert (tmp_path / "out").read_bytes() == b"a\n"
    with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space left"):
        run(["echo", "a"], stdout=full, idle=LIMIT_S)
    assert run("echo a; sleep 0.1; echo b", shell=True, capture_output=True, idle=LIMIT_S).stdout == b"a\nb\n"


def test_check_raises_with_the_leftovers() -> None:
    with pytest.raises(CalledProcessError) as raised:
        run(f"{DAEMON}; exit 4", shell=True, stdout=subprocess.PIPE, check=True)
    assert raised.value.returncode == 4
    assert [left["pid"] for left in raised.value.leftovers] == [int(raised.value.stdout)]


def test_the_deadline_of_the_call_around_it_applies() -> None:
    code = """
    import subprocess, time
    from shotclock import run
    began = time.monotonic()
    try:
        run(["sleep", "600"], timeout=300)
    except subprocess.TimeoutExpired as error:
        assert error.timeout < 2, error
    try:
        run(["true"])
    except subprocess.TimeoutExpired:
        print("no time left", time.monotonic() - began < 10)
    """
    assert output_of(code, env={**os.environ, "SHOTCLOCK_REMAINING_MS": "1500"}) == "no time left True\n"


def test_a_program_that_is_killed_takes_its_commands_with_it() -> None:
    code = """
    import threading
    from shotclock import run
    script = "setsid sleep 600 & echo $! $PPID $$; sleep 600"
    threading.Thread(target=run, args=[script], kwargs={"shell": True}).start()
    """
    with python(code) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        zygote = psutil.Process(pids[1]).ppid()
        program.kill()
        program.wait(LIMIT_S)
        wait_until_gone(*pids, zygote)


def test_a_program_keeps_its_handlers_its_children_and_its_orphans() -> None:
    code = """
    import ctypes, os, signal, subprocess
    from shotclock import run
    caught = []
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, lambda number, frame: caught.append(number))
    before = [signal.getsignal(number) for number in range(1, 32)]
    run(["true"])
    assert caught == [signal.SIGCHLD], caught  # the start of the zygote, once
    caught.clear()
    for _ in range(3):
        run("sleep 600 & exit 3", shell=True)
    assert [signal.getsignal(number) for number in range(1, 32)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert caught == [], caught
    run(["sh", "-c", "kill -INT $0", str(os.getpid())])
    assert caught == [signal.SIGINT], caught
    signal.signal(signal.SIGUSR1, lambda *_: caught.append(run(["sh", "-c", "exit 5"]).returncode))
    assert run(["sh", "-c", "kill -USR1 $0; sleep 0.2; exit 6", str(os.getpid())]).returncode == 6
    assert caught == [signal.SIGINT, 5], caught
    try:
        os.wait()
    except ChildProcessError:
        print("no children")
    flag = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0)
    print("subreaper", flag.value)
    """
    assert output_of(code) == "no children\nsubreaper 0\n"


def test_a_program_that_ignores_its_children_or_reaps_them_all_can_run_commands() -> None:
    for handler in ("signal.SIG_IGN", "lambda *_: os.waitpid(-1, os.WNOHANG)"):
        code = f"""
        import os, signal
        from shotclock import run
        signal.signal(signal.SIGCHLD, {handler})
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print([run(["sh", "-c", "exit 3"]).returncode for _ in range(3)])
        """
        assert output_of(code) == "[3, 3, 3]\n"


def test_ctrl_c_interrupts_the_command_and_is_raised_when_it_is_gone() -> None:
    code = """
    import os, signal
    from shotclock import run
    script = "trap 'echo interrupted; exit 5' INT; setsid sleep 600 & echo $! $$; kill -INT $0; sleep 600 & wait"
    try:
        run(["sh", "-c", script, str(os.getpid())])
    except KeyboardInterrupt:
        print("raised")
    print(run(["echo", "next"], capture_output=True).stdout)
    """
    pids, *rest = output_of(code).splitlines()
    assert rest == ["interrupted", "raised", "b'next\\n'"]
    assert all(not is_running(int(pid)) for pid in pids.split())


def test_a_fork_of_the_program_has_supervisors_of_its_own_and_leaves_the_parents_alone() -> None:
    code = """
    import os
    from shotclock import run
    guard = lambda: int(run(["sh", "-c", "echo $PPID"], capture_output=True).stdout)
    parent = guard()
    if not (child := os.fork()):
        assert guard() != parent
        raise SystemExit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert guard() == parent
    print("done")
    """
    assert output_of(code) == "done\n"


def test_a_fork_does_not_keep_the_commands_of_a_killed_parent() -> None:
    code = """
    import os, threading, time
    from shotclock import run
    threading.Thread(target=run, args=["echo $$; sleep 600"], kwargs={"shell": True}).start()
    run(["true"])
    if not os.fork():
        os.close(1), os.close(2)
        time.sleep(60)
    """
    with python(code) as program:
        assert program.stdout is not None
        command = int(program.stdout.readline())
        forked = psutil.Process(program.pid).children
        while not forked():
            time.sleep(0.01)
        left = forked()
        program.kill()
        wait_until_gone(command)
        assert left[0].is_running()
        left[0].kill()


def test_a_killed_spare_supervisor_or_zygote_is_replaced() -> None:
    def guard() -> psutil.Process:
        return psutil.Process(int(run(["sh", "-c", "echo $PPID"], capture_output=True, timeout=LIMIT_S).stdout))

    first = guard()
    assert guard() == first
    zygote = first.parent()
    assert zygote is not None
    first.kill()
    wait_until_gone(first.pid)
    second = guard()
    assert second != first
    zygote.kill()
    second.kill()
    wait_until_gone(zygote.pid, second.pid)
    assert guard().parent() != zygote


def test_a_killed_supervisor_is_reported_and_its_command_is_gone(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(SupervisorLost) as raised:
        run(f"setsid sleep 600 & echo $! $$ > {pids}; kill -9 $PPID; sleep 600", shell=True, timeout=LIMIT_S)
    assert raised.value.survivors == []
    assert all(not is_running(int(pid)) for pid in pids.read_text().split())


def test_survivors_are_unknown_where_the_zygote_was_killed_as_well(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    kill_both = "kill -9 $(ps -o ppid= -p $PPID) $PPID"
    with pytest.raises(SupervisorLost) as raised:
        run(f"echo $$ > {pids}; {kill_both}; exec sleep 600", shell=True, timeout=LIMIT_S)
    assert raised.value.survivors == [{"pid": 0, "command": "unknown: /proc does not show it"}]
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert run(["true"], timeout=LIMIT_S).returncode == 0


def test_the_end_of_the_program_ends_the_commands_of_its_daemon_threads() -> None:
    code = """
    import os, threading
    from shotclock import run
    script = "setsid sleep 600 & echo $! $PPID $$; sleep 600"
    reader, writer = os.pipe()
    threading.Thread(target=run, args=[script], kwargs={"shell": True, "stdout": writer}, daemon=True).start()
    print(os.read(reader, 100).decode())
    """
    began = time.monotonic()
    pids = [int(pid) for pid in output_of(code).split()]
    assert len(pids) == 3
    wait_until_gone(*pids)
    assert time.monotonic() - began < 5


def test_arun_does_not_block_the_loop_and_a_cancellation_kills_first() -> None:
    async def scenario() -> None:
        began = time.monotonic()
        results = await asyncio.gather(
            *(arun(["sh", "-c", f"sleep 0.5; echo {n}"], capture_output=True, timeout=LIMIT_S) for n in range(20))
        )
        assert [int(result.stdout) for result in results] == list(range(20))
        assert time.monotonic() - began < 5
        with pytest.raises(FileNotFoundError):
            await arun(["no-such-command"])
        with pytest.raises(TimeoutExpired):
            await arun(["sleep", "600"], timeout=0.1)
        reader, writer = os.pipe()
        task = asyncio.create_task(arun("setsid sleep 600 & echo $$ $!; sleep 600", shell=True, stdout=writer))
        pids = await asyncio.to_thread(os.read, reader, 100)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(not is_running(int(pid)) for pid in pids.split())
        os.close(reader)
        os.close(writer)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def runs_commands(seconds: float) -> list[int]:
    return [run(["sh", "-c", f"sleep {seconds}; exit {n}"]).returncode for n in range(3)]


async def runs_commands_in_threads(seconds: float, pids: str = "/dev/null") -> list[int]:
    script = f"echo $$ > {pids}.new; mv {pids}.new {pids}; exec sleep {seconds}"
    return [(await asyncio.to_thread(run, ["sh", "-c", script])).returncode for _ in range(2)]


def test_a_function_runs_commands_within_its_own_deadline_and_none_outlives_it(tmp_path: Path) -> None:
    limits = Clocks.of("2s", grace="100ms")

    async def scenario() -> None:
        async with Runtime() as runtime:
            alone = Operation("alone", runs_commands)
            well = await runtime.call(alone, {"seconds": 0}, Clocks.of("10s"))
            assert (well.data, well.warnings) == ([0, 1, 2], [])
            again = await runtime.call(alone, {"seconds": 0}, Clocks.of("10s"))
            assert (again.data, again.warnings) == ([0, 1, 2], [])
            late = await runtime.call(alone, {"seconds": 600}, limits)
            assert (late.code, late.meta["survivors"]) == ("TIMEOUT", [])
            shared = Operation("shared", runs_commands_in_threads, isolation="shared")
            marked = tmp_path / "pid"
            call = asyncio.create_task(runtime.call(shared, {"seconds": 600, "pids": str(marked)}, Clocks.of("60s")))
            await soon(marked.exists, 20)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await soon(lambda: not is_running(int(marked.read_text())), 20)  # beyond the grace of 5 s

    asyncio.run(asyncio.wait_for(scenario(), 40))


def test_import_is_light_until_it_is_used() -> None:
    code = """
    import sys
    import shotclock
    assert "subprocess" not in sys.modules and "asyncio" not in sys.modules
    from shotclock import run
    assert "asyncio" not in sys.modules
    """
    assert output_of(code) == ""
