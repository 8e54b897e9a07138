"""Pages that freeze, flood, crash and go away: every call answers in time, says what became of the page, and the next
execution works. All cases in one session of a real browser, each once here, and three times in a row in `make soak`."""

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import act, data_of
from .pages import Session, kill

pytestmark = pytest.mark.slow

BUDGET_MS = 2500
GO = act("click", "go", "Go", timeoutMs=1200)
SNAP = {"id": "snap", "type": "snapshot_ui"}
FROZEN = {"WAIT_TIMEOUT", "EVAL_TIMEOUT", "OPERATION_TIMEOUT", "DEVICE_LOST"}
NEXT = {"same", "recovered", "fresh", "none"}


def page_says(envelope: dict[str, Any], *states: str) -> None:
    page = envelope["data"]["page"]
    assert page["state"] in states and page["next"] in NEXT, page


def frozen(session: Session, envelope: dict[str, Any], *codes: str) -> None:
    assert envelope["elapsed_ms"] <= BUDGET_MS + 5000, envelope
    assert envelope["error"]["code"] in (codes or FROZEN), envelope
    assert envelope["data"]["position"]["actionId"] is not None


def spin(session: Session) -> None:
    told = session.run(session.open("/spin"), GO, SNAP, timeout_ms=BUDGET_MS)
    frozen(session, told, "OPERATION_TIMEOUT")
    assert told["meta"]["side_effects"] == "unknown"  # the click may have done anything
    page_says(told, "unresponsive")
    assert told["data"]["page"]["where"] == f"{session.url}/spin" and told["data"]["page"]["next"] == "recovered"


def spin_at_once(session: Session) -> None:
    told = session.run(session.open("/spin-at-once"), SNAP, timeout_ms=BUDGET_MS)
    frozen(session, told, "OPERATION_TIMEOUT")
    page_says(told, "unresponsive")


def dialogs(session: Session) -> None:
    told = session.run(session.open("/dialogs"), GO, SNAP, timeout_ms=BUDGET_MS)
    frozen(session, told)
    page_says(told, "unresponsive", "same", "changed")
    asked = {"type": "alert", "message": "1", "answer": "dismissed"}
    assert asked in told["data"]["stepResults"][-1]["data"]["dialogs"], told  # of the step in which they came
    if told["data"]["page"]["state"] == "unresponsive":  # the page was brought back, or given up
        told = session.run(session.open("/"))
        assert told["ok"] and told["data"]["stepResults"][0]["data"].keys() == {"where", "status"}, told


def confirms(session: Session) -> None:
    told = session.run(session.open("/confirms"), GO, timeout_ms=BUDGET_MS)
    assert told["ok"] and data_of(told, "go")["dialogs"] == [{"type": "confirm", "message": "1", "answer": "pending"}]
    accept = {"id": "yes", "type": "answer_dialog", "params": {"accept": True}}
    answers = [each["answer"] for each in data_of(session.run(accept, timeout_ms=BUDGET_MS), "yes")["dialogs"]]
    assert sorted(answers) == ["accepted", "pending"]
    frozen(session, session.run(SNAP, timeout_ms=BUDGET_MS))


def never_comes(session: Session) -> None:
    told = session.run(session.open("/never", timeoutMs=500), timeout_ms=BUDGET_MS)
    frozen(session, told, "OPERATION_TIMEOUT")
    page_says(told, "same", "changed")


def hanging_download(session: Session) -> None:
    told = session.run(session.open("/hanging-download"), GO, SNAP, timeout_ms=BUDGET_MS)
    assert told["ok"], told
    told = session.run(session.open("/endless"), timeout_ms=BUDGET_MS)
    assert told["elapsed_ms"] <= BUDGET_MS + 5000
    assert data_of(told, "open")["download"] is True
    page_says(told, "same")


def crashed_renderer(session: Session) -> None:
    assert session.run(session.open("/"))["ok"]
    kill(session.processes("--type=renderer"))
    frozen(session, session.run(act("wait_for_node", "w", "Never", timeoutMs=500), timeout_ms=BUDGET_MS), "DEVICE_LOST")


def killed_browser(session: Session) -> None:
    assert session.run(session.open("/"))["ok"]
    kill([pid for pid in session.processes("--remote-debugging-pipe") if pid not in session.processes("--type=")])
    told = session.run(SNAP, timeout_ms=BUDGET_MS)
    frozen(session, told, "DEVICE_LOST")
    page_says(told, "lost")


def flooding_worker(session: Session) -> None:
    told = session.run(session.open("/flood"), GO, SNAP, timeout_ms=BUDGET_MS)
    assert told["elapsed_ms"] <= BUDGET_MS + 5000
    if not told["ok"]:
        frozen(session, told)


CASES = [
    spin,
    spin_at_once,
    dialogs,
    confirms,
    never_comes,
    hanging_download,
    crashed_renderer,
    killed_browser,
    flooding_worker,
]


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_page_that_freezes_is_answered_in_time_and_the_next_execution_works(
    case: Callable[[Session], None], times: int, session: Session
) -> None:
    for _ in range(times):
        case(session)
        told = session.run(session.open("/"), act("read_text", "read", "Shop"), timeout_ms=15000)
        assert told["ok"], told
        assert data_of(told, "read")["text"] == "Shop"
