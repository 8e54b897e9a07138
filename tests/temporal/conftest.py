"""What tests on Temporal share: one real server and a few real workers for all tests of a process."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.apps.web.conftest import browser, opened  # noqa: F401 fixtures, for the page of a server before an engine
from tests.warm import WarmStart

WITHIN_S = 60.0  # what a start or a short run may take on a machine that is busy with other tests
POLL_S = 0.05


def wait_until(holds: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """Wait for a condition, bounded, and return what it returned."""
    give_up_at = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < give_up_at, f"{what}: not within {within_s:g}s"
        time.sleep(POLL_S)
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Proxy:
    """A TCP link to an engine that can be cut, delayed and mended."""

    def __init__(self, to_port: int, host: str = "127.0.0.1") -> None:
        self._to_port = to_port
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"temporal://{host}:{self.port}"
        self.delay_s = 0.0
        self.deaf_after: int | None = None
        """Once a client has sent so many bytes at once, no answer reaches it until the link is mended."""
        self._is_cut = self._is_deaf = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut or self._is_deaf:
                _reset(theirs)
                continue
            try:
                ours = socket.create_connection(("127.0.0.1", self._to_port), timeout=WITHIN_S)
            except OSError:  # the engine is away
                _reset(theirs)
                continue
            ours.settimeout(None)
            self._open += [theirs, ours]
            threading.Thread(target=self._copy, args=(theirs, ours, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(ours, theirs, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if is_request and self.deaf_after is not None and len(data) >= self.deaf_after:
                    self._is_deaf, self.deaf_after = True, None
                if is_request or not self._is_deaf:
                    target.sendall(data)
        except OSError:
            pass
        _reset(source)
        _reset(target)

    @property
    def is_deaf(self) -> bool:
        return self._is_deaf

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._is_cut = True
        for each in self._open:
            _reset(each)
        self._open.clear()

    def mend(self) -> None:
        self.cut()  # what was held back is lost
        self.delay_s, self._is_cut, self._is_deaf = 0.0, False, False

    def close(self) -> None:
        self._listener.close()
        self.cut()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
    connection.close()


class Program:
    """`shotclock …` as a process of its own, with its output in files."""

    def __init__(
        self,
        words: list[str],
        folder: Path,
        name: str,
        home: Path | None = None,
        prefix: tuple[str, ...] = (),
        own_session: bool = False,
    ):
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        environment = {**os.environ, "SHOTCLOCK_HOME": str(home or folder / "home")}
        environment.pop("SHOTCLOCK_REMAINING_MS", None)
        if words[0] == "worker":
            environment.setdefault("SHOTCLOCK_PAYLOADS", str(folder / "payloads"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = WarmStart(
                [*prefix, sys.executable, "-m", "shotclock", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=own_session,
            )

    def wait_for_line(self, text: str) -> None:
        def has_said() -> bool:
            assert self.process.poll() is None, self.err.read_text() + self.out.read_text()
            return text in self.err.read_text()

        wait_until(has_said, f"{text!r} of {self.process.args}")

    def ended(self, within_s: float = WITHIN_S) -> tuple[int, dict[str, Any]]:
        """The exit code and the envelope."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.process.args} did not end; it said {self.err.read_text()[-2000:]}") from None
        text = self.out.read_text()
        assert text, self.err.read_text()[-2000:]
        return code, json.loads(text)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WITHIN_S)

    def stop(self) -> None:
        """End it politely."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Cluster:
    """An engine with a file as its database, and workers."""

    folder: Path
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"
    programs: list[Program] = field(default_factory=list)
    started: int = 0

    @property
    def url(self) -> str:
        return f"temporal://{self.host}:{self.port}"

    def start_engine(self) -> Program:
        self.started += 1
        wait_until(lambda: is_free(self.port), "the end of a server that was killed")
        words = ["engine", "dev", "--port", str(self.port), "--db", str(self.folder / "engine.db")]
        self.programs.append(engine := Program(words, self.folder, f"engine{self.started}"))
        engine.wait_for_line("answers")
        return engine

    def start_worker(self, *options: str, url: str | None = None, **how: Any) -> Program:
        """Start a worker and wait until it takes work; `how` is for `Program`."""
        self.started += 1
        words = ["worker", "--on", url or self.url, *([] if "--drain" in options else ["--drain", "1s"]), *options]
        self.programs.append(worker := Program(words, self.folder, f"worker{self.started}", **how))
        worker.wait_for_line("takes up to")
        return worker

    def close(self) -> None:
        for program in reversed(self.programs):  # workers first: they say good-bye to the engine
            program.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One engine and two workers, for all tests that break neither."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start_engine()
        made.start_worker()
        made.start_worker()
        yield made
    finally:
        made.close()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An engine of the test's own, to be killed; the test starts its workers."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()


class Runs:
    """Runs of workflow files in a folder of the test's own, here or on an engine, by the command line."""

    def __init__(self, folder: Path, on: str | None) -> None:
        self.folder = folder
        self.on = on
        self._started: list[Program] = []

    @property
    def where(self) -> list[str]:
        return [] if self.on is None else ["--on", self.on]

    def write(self, text: str, name: str = "flow.yaml") -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def start(self, text: str | None, *options: str) -> Program:
        """Start a run of this text, or what the options say."""
        if text is not None:
            self.write(text)
        words = ["run", *(["flow.yaml"] if text is not None else []), *self.where, *options]
        words += [] if "--json" in words else ["--json"]
        return self._program(words)

    def run(self, text: str | None, *options: str) -> tuple[int, dict[str, Any]]:
        return self.start(text, *options).ended()

    def call(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Run another subcommand, against the same engine."""
        return self._program([*words, "--json", *self.where]).ended()

    def _program(self, words: list[str]) -> Program:
        program = Program(words, self.folder, f"program{len(self._started)}")
        self._started.append(program)
        return program

    def wait_for(self, name: str, lines: int = 1) -> list[str]:
        """Wait until a step has written so many lines into a file."""
        file = self.folder / name

        def written() -> list[str]:
            found = file.read_text().splitlines() if file.exists() else []
            return found if len(found) >= lines else []

        return wait_until(written, f"{lines} lines in {name}")

    def close(self) -> None:
        for program in self._started:
            program.kill()


def steps_of(envelope: dict[str, Any]) -> dict[str, str]:
    return {name: step["status"] for name, step in envelope["data"]["steps"].items()}


@pytest.fixture
def on_engine(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, cluster.url)
    yield made
    made.close()


@pytest.fixture
def link(cluster: Cluster) -> Iterator[Proxy]:
    """A link to the shared engine, for a caller of the test's own."""
    made = Proxy(cluster.port)
    yield made
    made.close()


@pytest.fixture
def runs(on_engine: Runs) -> Runs:
    """Where a module does not say otherwise."""
    return on_engine


@pytest.fixture(params=["embedded", "temporal"])
def on_either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    on = None
    if request.param == "temporal":
        cluster: Cluster = request.getfixturevalue("cluster")
        on = cluster.url
        monkeypatch.setenv("SHOTCLOCK_PAYLOADS", str(cluster.folder / "payloads"))  # where the workers' are
    made = Runs(tmp_path, on)
    yield made
    made.close()
