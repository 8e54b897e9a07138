"""`finally`: however a run ends, its last steps run exactly once, after all others, and within their reserve."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.rows import row
from tests.temporal.conftest import Cluster, Program, Runs, wait_until
from tests.temporal.test_losses import HEARTBEAT_S, Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_starts")]

RESERVE_MS = 4_400  # two steps of 2 s, and the reserve of their calls
LATE_MS = 3_000  # a busy machine starts and stops steps later than it should

FLOW = """
timeout: {timeout}
fail_fast: {fail_fast}
steps:
  work: {{exec: 'echo work >> audit; touch up; {work}', grace: 100ms, on_fail: {{run: undo}}}}
  beside: {{exec: '{beside}', grace: 100ms}}
  after: {{exec: 'echo after >> audit', depends_on: work}}
  undo: {{exec: 'echo undo >> audit', timeout: 2}}
finally:
  - {{id: first, exec: 'echo first {{{{ run.status }}}} {{{{ run.failure.code }}}} >> audit', timeout: 2}}
  - {{id: second, exec: 'echo second {{{{ steps.work.status }}}} >> audit', timeout: 2}}
"""


class End(NamedTuple):
    """One way in which a run ends, and what is left of it."""

    code: int
    error: str | None
    status: str
    failure: str = ""
    work: str = "exit 0"
    beside: str = "exit 0"
    timeout: int = 60
    fail_fast: bool = False
    stop: Callable[[Runs, Program, str], object] | None = None
    undone: bool = True


HANG = "sleep 50"
SIGNALLED = {"work": HANG, "status": "cancelled", "failure": "CANCELLED"}
ENDS = {
    "success": End(0, None, "succeeded", undone=False),
    "failure": End(3, "STEPS_FAILED", "failed", "COMMAND_FAILED", work="exit 7"),
    "timeout of the run": End(10, "TIMEOUT", "timed_out", "TIMEOUT", work=HANG, timeout=9),
    "fail_fast": End(
        3,
        "STEPS_FAILED",
        "failed",
        "COMMAND_FAILED",
        work=HANG,
        beside="while [ ! -e up ]; do sleep 0.05; done; exit 1",
        fail_fast=True,
    ),
    "SIGINT": End(130, "CANCELLED", **SIGNALLED, stop=lambda _, run, id: run.process.send_signal(signal.SIGINT)),
    "SIGTERM": End(143, "CANCELLED", **SIGNALLED, stop=lambda _, run, id: run.process.send_signal(signal.SIGTERM)),
}
ON_ENGINE = {"cancel": End(143, "CANCELLED", **SIGNALLED, stop=lambda runs, _, id: runs.call("job", "cancel", id))}


def audit_of(runs: Runs) -> list[str]:
    return [line.strip() for line in (runs.folder / "audit").read_text().splitlines()]


def assert_ran_once(runs: Runs, envelope: dict[str, Any]) -> None:
    """Assert that both steps ran once, in their order, after all others and within their reserve."""
    lines = [line.split()[0] for line in audit_of(runs)]
    assert lines[-2:] == ["first", "second"] and lines.count("first") == lines.count("second") == 1, lines
    steps = envelope["data"]["steps"]
    first, second = steps["first"], steps["second"]
    assert first["finally"] and second["finally"] and "finally" not in steps["work"], steps
    others = [step for step in steps.values() if not step.get("finally") and step.get("started_ms") is not None]
    assert all(step["started_ms"] + step["duration_ms"] <= first["started_ms"] + 1 for step in others), steps
    assert second["started_ms"] + second["duration_ms"] - first["started_ms"] <= RESERVE_MS, steps


def test_the_last_steps_run_once_however_a_run_ends(on_either: Runs, validate_envelope: Callable[[Any], Any]) -> None:
    runs = on_either
    for name, end in (ENDS if runs.on is None else ENDS | ON_ENGINE).items():
        with row(name):
            for left in ("audit", "up"):
                (runs.folder / left).unlink(missing_ok=True)
            run_id = f"finally-{time.monotonic_ns()}"
            text = FLOW.format(
                timeout=end.timeout, fail_fast=str(end.fail_fast).lower(), work=end.work, beside=end.beside
            )
            program = runs.start(text, "--run-id", run_id)
            if end.stop is not None:
                runs.wait_for("audit")
                end.stop(runs, program, run_id)
            code, envelope = program.ended()
            validate_envelope(envelope)
            error = (envelope["error"] or {}).get("code")
            assert (code, error) == (end.code, end.error), envelope
            assert_ran_once(runs, envelope)
            assert f"first {end.status} {end.failure}".strip() in audit_of(runs), audit_of(runs)
            assert ("undo" in audit_of(runs)) == end.undone, audit_of(runs)
            if name.startswith("timeout"):
                began_ms = envelope["data"]["steps"]["first"]["started_ms"]
                assert began_ms <= end.timeout * 1000 - RESERVE_MS + LATE_MS, envelope


# --- a process that dies ------------------------------------------------------------------------------------------

CUT = """
timeout: 90
steps:
  work: {{exec: 'echo work >> audit; {work}', on_fail: {{run: undo, goto: work}}}}
  after: {{exec: 'echo after >> audit', depends_on: work}}
  undo: {{exec: 'echo undo >> audit'}}
finally:
  - id: first
    exec: 'echo first {{{{ run.status }}}} {{{{ run.failure.code }}}} >> audit; [ -e go ] || sleep 50'
    timeout: 60
    idempotent: {idempotent}
  - {{id: second, exec: 'echo second >> audit', timeout: 2}}
"""


class Cut(NamedTuple):
    """A run that is killed once its audit has a line, what continues it, and what is in the audit at the end."""

    at: str
    code: int
    audit: list[str]
    steps: dict[str, str]
    work: str = "exit 0"
    idempotent: bool = False
    resume: bool = True


DONE = {"work": "succeeded", "after": "succeeded", "undo": "skipped", "first": "succeeded", "second": "succeeded"}
CUTS = {
    "in a step, then resumed": Cut(
        "work",
        3,
        ["work", "undo", "first failed INTERRUPTED", "second"],
        DONE | {"work": "interrupted", "after": "skipped", "undo": "succeeded"},
        work="sleep 50",
    ),
    "in a step, then cancelled": Cut(
        "work",
        143,
        ["work", "undo", "first cancelled INTERRUPTED", "second"],
        DONE | {"work": "interrupted", "after": "skipped", "undo": "succeeded"},
        work="sleep 50",
        resume=False,
    ),
    "in an idempotent finally step": Cut(
        "first", 0, ["work", "after", "first succeeded", "first succeeded", "second"], DONE, idempotent=True
    ),
    "in another finally step": Cut(
        "first", 3, ["work", "after", "first succeeded", "second"], DONE | {"first": "interrupted"}
    ),
    "in a finally step of a failed run": Cut(
        "first",
        3,
        ["work", "undo", "first failed COMMAND_FAILED", "first failed COMMAND_FAILED", "second"],
        DONE | {"work": "failed", "after": "skipped", "undo": "succeeded"},
        work="exit 1",
        idempotent=True,
    ),
}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, None)
    yield made
    made.close()


def test_a_run_that_was_killed_finishes_once_when_it_is_continued(runs: Runs) -> None:
    for name, cut in CUTS.items():
        with row(name):
            for left in ("audit", "go"):
                (runs.folder / left).unlink(missing_ok=True)
            run_id = f"cut-{time.monotonic_ns()}"
            text = CUT.format(work=cut.work, idempotent=str(cut.idempotent).lower())
            if cut.work == "exit 1":
                text = text.replace(", goto: work", "")
            program = runs.start(text, "--run-id", run_id)
            wait_until(lambda at=cut.at: any(at in line for line in audit_or_nothing(runs)), cut.at)
            program.kill()
            (runs.folder / "go").touch()
            if not cut.resume:
                runs.call("job", "cancel", run_id)
            code, envelope = runs.run(None, "--resume", run_id)
            assert code == cut.code, envelope
            assert audit_of(runs) == cut.audit
            assert {name: step["status"] for name, step in envelope["data"]["steps"].items()} == cut.steps
            again = runs.run(None, "--resume", run_id)
            assert again[0] == cut.code and audit_of(runs) == cut.audit, "an ended run finished again"


def audit_or_nothing(runs: Runs) -> list[str]:
    return audit_of(runs) if (runs.folder / "audit").exists() else []


def test_a_parked_run_has_not_finished_until_it_is_cancelled(runs: Runs) -> None:
    code, envelope = runs.run(
        """
        steps: {ask: {type: human-input, prompt: "go on?", timeout: 60}}
        finally: {last: {exec: 'echo last {{ run.status }} >> audit', timeout: 2}}
        """,
        "--run-id",
        "parked",
        "--budget",
        "100ms",
    )
    assert code == 14 and audit_or_nothing(runs) == [], envelope
    runs.call("job", "cancel", "parked")
    assert audit_of(runs) == ["last cancelled"]


# --- a worker that dies -------------------------------------------------------------------------------------------

LOST = """
timeout: 60
steps:
  work: {{exec: 'echo work >> audit; [ "{at}" != work ] || [ -e go ] || sleep 50', on_fail: {{run: undo}}}}
  undo: {{exec: 'echo undo >> audit'}}
finally:
  - id: first
    exec: 'echo first {{{{ run.status }}}} >> audit; [ "{at}" != first ] || [ -e go ] || sleep 50'
    idempotent: {idempotent}
    timeout: 30
  - {{id: second, exec: 'echo second >> audit', timeout: 5}}
"""
LOSSES = [
    ("work", "false", ["work", "undo", "first failed", "second"]),
    ("first", "true", ["work", "first succeeded", "first succeeded", "second"]),
    ("first", "false", ["work", "first succeeded", "second"]),
]


@pytest.fixture
def workers(cluster: Cluster, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(cluster, f"q-{tmp_path.name}")
    yield made
    made.close()


def test_a_run_whose_worker_dies_finishes_once(on_engine: Runs, workers: Workers) -> None:
    for at, idempotent, audit in LOSSES:
        with row(at, idempotent):
            for left in ("audit", "go"):
                (on_engine.folder / left).unlink(missing_ok=True)
            workers.close()  # so that one worker has every step
            worker = workers.start()
            where = ("--queue", workers.queue, "--heartbeat", f"{HEARTBEAT_S}s")
            program = on_engine.start(LOST.format(at=at, idempotent=idempotent), *where)
            wait_until(lambda at=at: any(at in line for line in audit_or_nothing(on_engine)), at)
            (on_engine.folder / "go").touch()
            workers.start()
            worker.kill()
            code, envelope = program.ended()
            assert audit_of(on_engine) == audit, envelope
            assert code == (0 if idempotent == "true" else 3), envelope
