"""Fixtures every test may use: a valid envelope, no survivors, and the command itself, run without pipes."""

import contextlib
import fcntl
import gc
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shotclock.supervise.environment import AGENT_MARKS
from shotclock.supervise.leftovers import MARK, Watch
from tests.warm import WarmStart, be_ready, end_zygotes, spawn_warm, spawning_cold, starting_warm, zygote_pids

pytest_plugins = ["tests.command_line"]

SPEC = Path(__file__).parent / "spec"

# Where this is set, every program that a test starts would compile all that it imports, and so would every pytest.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An agent may run the tests; what it marks them with would give every `exec` another limit.
for mark in AGENT_MARKS:
    os.environ.pop(mark, None)

# `nohup`, and a shell that starts us in the background, leave these ignored, and so would all be that we start.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

ENDINGS = {"killed", "cancelled", "abandoned", "finished", "not_started", "detached"}
SIDE_EFFECTS = {"none", "partial", "complete", "unknown"}

SURVIVORS_GONE_WITHIN_S = 3.0  # what the code under test may still be stopping when the test returns
KILLED_GONE_WITHIN_S = 5.0  # after our own SIGKILL: only a process stuck in the kernel runs this out


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings  # not above: workers that run a test module's functions import this one, too

    # Other tests, and other people, share these cores: how long one example took says nothing about the code.
    # `make check` is for every few minutes: a third of the examples, and others each time.
    settings.register_profile("shotclock", deadline=None, max_examples=20 if leaves_out_slow(config) else 60)
    settings.load_profile("shotclock")
    leave_terminal()
    if not hasattr(config, "workerinput"):  # workers inherit it
        # The user's own store may be of another version, and is none of the tests' business.
        os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shotclock-state-")
    spawn_warm()
    gc.disable()  # until all is collected: what is made by then stays


def leave_terminal() -> None:
    """Have no /dev/tty, and none in what tests start: `exec` gives it to its command. Ctrl-C still ends the tests."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


# --- what is collected ----------------------------------------------------------------------------

WHOLLY_SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def leaves_out_slow(config: pytest.Config) -> bool:
    """Whether this is `make check`."""
    return "not slow" in config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, a module of nothing else is not imported: some take the SDK or a browser along."""
    if collection_path.suffix != ".py" or not leaves_out_slow(config):
        return None
    return bool(WHOLLY_SLOW.search(collection_path.read_text("utf-8"))) or None


# What takes longest, in tests that wait more than they work: begun last, it would keep one process busy when all the
# others are done. Each process begins with one of these; the first are the longest. Those on Temporal are two, of about
# four minutes each: whoever takes one of them from the others needs an engine and workers of its own for it.
FIRST = (
    ("tests/temporal/test_conformance.py", "tests/temporal/test_jobs.py"),
    ("tests/temporal/",),
    ("tests/docs/",),
    ("tests/ui/",),
    ("tests/apps/server/",),
    ("tests/flows/steps/test_mcp.py", "tests/flows/test_run_view.py", "tests/people/", "tests/dispatch/"),
    ("tests/flows/steps/test_ai.py",),  # all of it in one process, which imports pydantic-ai once
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by who begins with them: xdist gives each process its share of the list, one after the other, and
    lets those who are done take from the others."""
    count = config.workerinput["workercount"] if hasattr(config, "workerinput") else 1
    shares: list[list[pytest.Item]] = [[] for _ in range(count)]
    rest: list[pytest.Item] = []
    for item in items:
        group = next((number for number, starts in enumerate(FIRST) if item.nodeid.startswith(starts)), None)
        (rest if group is None else shares[group % count]).append(item)
    size = -(-len(items) // count)
    for share in shares:
        taken = max(0, size - len(share))
        share += rest[:taken]
        del rest[:taken]
    items[:] = [item for share in shares for item in share] + rest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported and collected stays: no look for garbage in a test, or in a fork of it, walks over it again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    end_zygotes()


# --- the envelope ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def validate_envelope() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that fails on anything but an envelope that keeps the contract, and returns it."""
    from jsonschema import Draft7Validator

    formats = Draft7Validator.FORMAT_CHECKER
    assert "date-time" in formats.checkers, "rfc3339-validator is missing: timestamps would go unchecked"
    schema = json.loads((SPEC / "response-envelope.json").read_text("utf-8"))
    validator = Draft7Validator(schema, format_checker=formats)

    def validate(envelope: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(envelope)]
        assert not problems, "\n".join([*problems, json.dumps(envelope, indent=1, default=repr)])
        meta = envelope["meta"]
        assert envelope["ok"] == (meta["exit_code"] == 0), envelope
        assert "timeout_ms" in meta, meta
        assert meta.get("ending") in ENDINGS, meta
        assert meta.get("side_effects") in SIDE_EFFECTS, meta
        return envelope

    return validate


# --- survivors ------------------------------------------------------------------------------------


@pytest.fixture
def no_survivors() -> Iterator[Watch]:
    """Fails the test if anything it started is still there 3 s after it returned.

    For a whole module: `pytestmark = pytest.mark.usefixtures("no_survivors")`, which also sets it up before,
    and so tears it down after, the fixtures that the tests name themselves. Close every runtime inside the
    test: workers that one started earlier forks meanwhile count as this test's.
    """
    if not Path("/proc/self/environ").exists():
        pytest.skip("survivors are found through /proc")
    watch = Watch(uuid.uuid4().hex, zygote_pids)
    watch.begin()
    before = os.environ.get(MARK)
    os.environ[MARK] = watch.token
    try:
        yield watch
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before
        survivors = watch.wait_until_alone(SURVIVORS_GONE_WITHIN_S)
        immortal = watch.wait_until_alone(KILLED_GONE_WITHIN_S, kill=True) if survivors else []
    if survivors:
        left = {p.identity for p in survivors}
        report = [f"{len(survivors)} survived the test by {SURVIVORS_GONE_WITHIN_S:g} s, killed now:"]
        report += [f"  {p}" for p in survivors]
        gone = [p for p in watch.seen.values() if p.identity not in left]
        report += ["also seen:", *(f"  {p}" for p in gone)] if gone else []
        report += ["not even SIGKILL ended:", *(f"  {p}" for p in immortal)] if immortal else []
        pytest.fail("\n".join(report), pytrace=False)


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: bytes
    stderr: bytes
    elapsed_s: float

    def json(self) -> Any:
        """stdout as exactly one JSON document."""
        return parse(self.stdout)

    def envelope(self) -> Any:
        """The last line of stderr that is not empty, where passthrough leaves it."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        assert lines, f"nothing on stderr, exit code {self.code}"
        return parse(lines[-1])


def parse(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise AssertionError(f"not one JSON document ({error}): {text[-2000:]!r}") from error


@pytest.fixture
def warm_starts() -> Iterator[None]:
    """Programs that the test, or a client it uses, starts with `subprocess` start warm, where they can."""
    with starting_warm():
        yield


@pytest.fixture
def cold_runtimes() -> Iterator[None]:
    """A runtime in the test's own process starts its processes as it does elsewhere: see tests/warm.py."""
    with spawning_cold():
        yield


@pytest.fixture
def enveloped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shotclock exec` reports every end by its envelope on stderr, so that a test can look into it."""
    monkeypatch.setenv("SHOTCLOCK_REPORT", "json")


@pytest.fixture
def shotclock(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """A function that runs `python -m shotclock …`, bounded; warm (see tests/warm.py), unless told otherwise.

    Files, never pipes, on all three streams: a leaked grandchild that holds a pipe would hang the reader.
    `env` is laid over our own environment; a value of None takes the variable away.
    """
    be_ready()

    def run(
        *args: str | bytes | os.PathLike[str],
        timeout: float = 30,
        input: bytes | None = None,
        env: dict[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stderr_to_stdout: bool = False,
        cold: bool = False,
    ) -> Ran:
        folder = tmp_path_factory.mktemp("shotclock")
        (folder / "in").write_bytes(input or b"")
        environment = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
        with (
            open(folder / "in" if input is not None else os.devnull, "rb") as stdin,
            open(folder / "out", "wb") as stdout,
            open(folder / "err", "wb") as stderr,
        ):
            began = time.perf_counter()
            process = (subprocess.Popen if cold else WarmStart)(
                [sys.executable, "-m", "shotclock", *args],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT if stderr_to_stdout else stderr,
                env=environment,
                cwd=cwd,
            )
            overran = not ends_within(process, timeout)
            elapsed_s = time.perf_counter() - began
            if overran:
                process.kill()
            code = process.wait(KILLED_GONE_WITHIN_S)
        ran = Ran(code, (folder / "out").read_bytes(), (folder / "err").read_bytes(), elapsed_s)
        if overran:
            pytest.fail(
                f"shotclock {args} was still running after {timeout} s\n"
                f"stdout: {ran.stdout[-2000:]!r}\nstderr: {ran.stderr[-2000:]!r}"
            )
        return ran

    return run


def ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Popen.wait(timeout) looks every 50 ms, too coarse to measure an overshoot; a pidfd tells at once."""
    if not hasattr(os, "pidfd_open"):
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)
