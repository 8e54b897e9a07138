"""Steps that call a command of an App which needs a person: they park, go on and end as a step with `approval` does."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.store.store import Store
from tests.flows.test_parked import decide_some, over, proposals, shotclock
from tests.flows.test_people import INCOMPLETE, NO, WITHIN_S, YES, Runs

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

APP = """
from pathlib import Path
from shotclock import App

app = App("port", version="1.0.0")

@app.command(approval=POLICY)
def ship(what: str) -> str:
    with Path("done").open("a") as file:
        file.write(what + "\\n")
    if Path("broken").exists():
        raise RuntimeError("the crane is stuck")
    return what

@app.command
def look() -> str:
    return "seen"
"""
FLOW = """
timeout: 20m
steps:
  ship: {type: function, target: "port.py:app", command: ship, arguments: {what: crates}}
  tell: {exec: 'echo {{ outputs.ship }}-told >> done', depends_on: ship}
"""
EACH = """
timeout: 20m
steps:
  ship: {type: function, target: "port.py:app", command: ship, arguments: {what: "{{ item }}"}, for_each: [a, b]}
"""
RETRIED = """
timeout: 20m
steps:
  ship:
    type: function
    target: "port.py:app"
    command: ship
    arguments: {what: crates}
    on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}
"""
SERVED = """
timeout: 20m
steps:
  ship:
    type: mcp
    command: PYTHON
    args: [-m, shotclock, serve, "port.py:app"]
    method: ship
    arguments: {what: crates}
    timeout: 120s
  tell: {exec: 'echo {{ outputs.ship }}-told >> done', depends_on: ship}
""".replace("PYTHON", sys.executable)


class Port(Runs):
    """With an App in its folder."""

    def app(self, policy: str = "True") -> None:
        (self.folder / "port.py").write_text(APP.replace("POLICY", policy))


@pytest.fixture
def port(tmp_path: Path) -> Port:
    port = Port(tmp_path)
    port.app()
    return port


def test_a_function_whose_command_needs_approval_parks_the_run_and_runs_once_after_a_yes(
    port: Port, validate_envelope: Any
) -> None:
    port.env["SHOTCLOCK_RESPONSE_TIMEOUT"] = "10m"  # the run's own budget counts, not that of calls
    parked = validate_envelope(port(port.flow(FLOW), "--run-id", "r", "--budget", "1s", code=14))
    jsonschema.validate(parked["data"], INCOMPLETE)
    assert parked["error"]["code"] == "INCOMPLETE" and parked["meta"]["side_effects"] == "none"
    assert parked["data"]["continue_command"] == "shotclock run --resume r"
    assert {name: step["status"] for name, step in parked["data"]["steps"].items()} == dict.fromkeys(
        ("ship", "tell"), "pending"
    )
    [waits] = parked["data"]["waiting"]
    assert waits["title"] == "port ship what=crates" and port.done() == []

    still = port("--resume", "r", "--budget", "1s", code=14)
    assert still["data"]["waiting"][0]["proposal_id"] == waits["proposal_id"]
    asked = port.decide(YES)
    assert "step ship" in asked.ask.justification and "r" in asked.ask.justification
    ended = validate_envelope(port("--resume", "r", "--budget", "1s", code=0))
    assert ended["data"]["steps"]["ship"]["output"] == "crates" and port.done() == ["crates", "crates-told"]
    [proposal] = proposals(port)
    assert proposal.outcome is not None and proposal.outcome.ok
    port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates-told"]


def test_a_functions_approval_given_in_time_counts_though_the_run_goes_on_after_its_ttl(port: Port) -> None:
    port.app('{"ttl": "4s"}')
    port(port.flow(FLOW), "--run-id", "r", code=14)
    port.decide(YES)
    over(port)
    port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates-told"] and len(proposals(port)) == 1


@pytest.mark.parametrize(("policy", "code"), [("reject", 3), ("default", 0)])
def test_a_functions_approval_that_nobody_gave_in_time_ends_as_its_policy_says(
    port: Port, policy: str, code: int
) -> None:
    port.app(f'{{"ttl": "1500ms", "when_expired": "{policy}"}}')
    port(port.flow(FLOW), "--run-id", "r", code=14)
    over(port)
    ended = port("--resume", "r", code=code)
    if code:
        error = ended["data"]["steps"]["ship"]["error"]
        assert (error["code"], error["context"]["rule"]) == ("PROPOSAL_EXPIRED", "approval/expired")
        assert port.done() == [] and ended["data"]["steps"]["ship"]["side_effects"] == "none"
    else:
        assert port.done() == ["crates", "crates-told"]
    assert len(proposals(port)) == 1


def test_a_function_that_was_rejected_has_failed_and_nothing_has_run(port: Port) -> None:
    port(port.flow(FLOW), "--run-id", "r", code=14)
    port.decide(NO)
    ended = port("--resume", "r", code=3)
    error = ended["data"]["steps"]["ship"]["error"]
    assert (error["code"], error["context"]["rule"]) == ("PROPOSAL_REJECTED", "approval/rejected")
    assert "not today" in error["message"] and port.done() == []
    assert ended["data"]["steps"]["tell"]["status"] == "skipped"


def test_a_function_runs_with_what_the_operator_made_of_its_arguments(port: Port) -> None:
    port(port.flow(FLOW), "--run-id", "r", code=14)
    port.decide(Decision(ProposalStatus.MODIFIED, arguments={"what": "feathers"}))
    assert port("--resume", "r", code=0)["data"]["steps"]["ship"]["output"] == "feathers"


def test_a_function_whose_question_has_changed_while_the_run_was_parked_does_not_run(port: Port) -> None:
    port(port.flow(FLOW), "--run-id", "r", code=14)
    port.decide(YES)
    port.app('{"destructive": True}')
    error = port("--resume", "r", code=3)["data"]["steps"]["ship"]["error"]
    assert error["code"] == "ACTION_CHANGED" and "run the workflow again" in error["suggestion"]
    assert port.done() == []


def test_a_run_that_was_killed_while_its_function_waited_finds_the_question_again(port: Port) -> None:
    process = port.start(port.flow(FLOW), "--run-id", "r", "--budget", "25s")
    asked = first_asked(port)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WITHIN_S)
    parked = port("--resume", "r", "--budget", "1s", code=14)
    assert [waits["proposal_id"] for waits in parked["data"]["waiting"]] == [asked]
    port.decide(YES)
    port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates-told"] and len(proposals(port)) == 1


def test_every_item_of_a_function_step_waits_for_its_own_yes(port: Port) -> None:
    parked = port(port.flow(EACH), "--run-id", "r", code=14)
    assert {waits["title"] for waits in parked["data"]["waiting"]} == {"port ship what=a", "port ship what=b"}
    decide_some(port, {"what=b": YES})
    assert len(port("--resume", "r", code=14)["data"]["waiting"]) == 1 and port.done() == ["b"]
    decide_some(port, {"what=a": YES})
    assert port("--resume", "r", code=0)["data"]["steps"]["ship"]["output"] == ["a", "b"]
    assert port.done() == ["b", "a"] and len(proposals(port)) == 2


def test_each_try_of_a_function_asks_and_a_try_that_was_made_is_not_made_again_after_parking(port: Port) -> None:
    (port.folder / "broken").touch()
    port(port.flow(RETRIED), "--run-id", "r", code=14)
    port.decide(YES)
    second = port("--resume", "r", code=14)
    assert port.done() == ["crates"] and second["data"]["steps"]["ship"]["attempts"] == 1
    (port.folder / "broken").unlink()
    port.decide(YES)
    ended = port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates"] and ended["data"]["steps"]["ship"]["attempts"] == 2
    assert len(proposals(port)) == 2


def test_a_function_step_with_an_approval_of_its_own_asks_for_both_and_each_once(port: Port) -> None:
    port(port.flow(FLOW.replace("command: ship,", "command: ship, approval: true,")), "--run-id", "r", code=14)
    port.decide(YES)
    port("--resume", "r", code=14)
    port.decide(YES)
    port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates-told"] and len(proposals(port)) == 2


def test_a_function_that_waits_when_the_runs_time_is_over_says_so(port: Port) -> None:
    ended = port(port.flow(FLOW.replace("20m", "8s")), "--run-id", "r", "--budget", "0", code=10)
    error = ended["data"]["steps"]["ship"]["error"]
    assert error["code"] == "NO_TIME_LEFT" and "run's time was over" in error["message"] and port.done() == []
    [proposal] = proposals(port)
    assert proposal.status is not ProposalStatus.PENDING, "nobody waits for an answer any more"


def test_cancelling_a_run_whose_function_waits_withdraws_the_question(port: Port) -> None:
    port(port.flow(FLOW), "--run-id", "r", code=14)
    shotclock(port, "job", "cancel", "r")
    assert [proposal.status for proposal in proposals(port)] == [ProposalStatus.WITHDRAWN]
    port("--resume", "r", code=143)
    assert port.done() == []


# --- what a yes is bound to -----------------------------------------------------------------------------------


OTHER = APP.replace("POLICY", "True").replace("what + ", "'other ' + what + ")


@pytest.fixture
def two_ports(port: Port) -> Port:
    """With an App of the same name in each of two folders, and a link to one of them."""
    for name, text in (("good", APP.replace("POLICY", "True")), ("evil", OTHER)):
        (port.folder / name).mkdir()
        (port.folder / name / "port.py").write_text(text)
    (port.folder / "link").symlink_to("good")
    return port


def turn_link(port: Port) -> None:
    (port.folder / "link").unlink()
    (port.folder / "link").symlink_to("evil")


def assert_asks_for_something_else(port: Port) -> None:
    step = port("--resume", "r", code=3)["data"]["steps"]["ship"]
    assert step["error"]["code"] == "ACTION_CHANGED" and port.done() == [], step
    assert (step["ending"], step["side_effects"]) == ("not_started", "none")


SHIP = "type: function, command: ship, arguments: {what: crates}"
TARGETS = {
    "a file by a variable": ('{SHIP, target: "{{ env.WHERE }}/port.py:app"}', "port.py"),
    "a module in a directory by a variable": ('{SHIP, target: "port:app", cwd: "{{ env.WHERE }}"}', "port.py"),
}


@pytest.mark.parametrize("written", TARGETS)
def test_a_yes_to_the_program_of_a_function_step_is_no_yes_to_another_of_its_name(
    two_ports: Port, written: str
) -> None:
    step, file = TARGETS[written]
    two_ports.env["WHERE"] = "good"
    flow = f"timeout: 20m\nsteps:\n  ship: {step.replace('SHIP', SHIP)}\n"
    two_ports(two_ports.flow(flow), "--run-id", "r", code=14)
    text = two_ports.decide(YES).ask.text
    assert f'"{os.path.realpath(two_ports.folder)}/good/{file}"' in text, text
    two_ports.env["WHERE"] = "evil"
    assert_asks_for_something_else(two_ports)
    two_ports.env["WHERE"] = "good"
    two_ports(two_ports.flow(flow), "--run-id", "s", code=14)
    two_ports.decide(YES)
    two_ports("--resume", "s", code=0)
    assert two_ports.done() == ["crates"]


def test_a_yes_to_the_program_of_a_function_step_ends_where_a_link_leads_elsewhere(two_ports: Port) -> None:
    flow = f'timeout: 20m\nsteps:\n  ship: {{{SHIP}, target: "port:app", cwd: link}}\n'
    two_ports(two_ports.flow(flow), "--run-id", "r", code=14)
    two_ports.decide(YES)
    turn_link(two_ports)
    assert_asks_for_something_else(two_ports)


def test_a_yes_to_a_function_step_with_an_approval_of_its_own_alone_is_bound_to_the_real_path_of_its_program(
    two_ports: Port,
) -> None:
    step = '{type: function, command: look, target: "link/port.py:app", approval: true}'
    flow = two_ports.flow(f"timeout: 20m\nsteps: {{ship: {step}}}\n")
    two_ports(flow, "--run-id", "r", code=14)
    real = os.path.realpath(two_ports.folder / "good" / "port.py")
    assert f'target: "{real}:app"' in two_ports.decide(YES).ask.text
    turn_link(two_ports)
    assert_asks_for_something_else(two_ports)
    two_ports(flow, "--run-id", "s", code=14)
    two_ports.decide(YES)
    assert two_ports("--resume", "s", code=0)["data"]["steps"]["ship"]["output"] == "seen"


PAIR = """
from pathlib import Path
from shotclock import App, Context

app = App("port", version="1.0.0")

@app.command(approval=True)
def ship(what: str, where: str = "here") -> str:
    Path("done").write_text(f"{what} {where}")
    return what

@app.command
def relay(ctx: Context) -> str:
    return str(ctx.call("ship", {"what": "crates"}).code)
"""


def test_a_commands_own_approval_hides_secret_arguments_of_a_function_step_and_binds_them(port: Port) -> None:
    (port.folder / "port.py").write_text(PAIR)
    variables = 'env: {TOKEN: "${MY_TOKEN}"}'
    text = FLOW.replace("command: ship,", f"command: ship, {variables},")
    flow = port.flow(text.replace("crates", '"{{ env.TOKEN }}"'))
    port.env["MY_TOKEN"] = "sekret-one"
    port(flow, "--run-id", "r", code=14)
    asked = port.decide(YES).ask
    assert "sekret" not in asked.text and "sekret" not in asked.title and 'what: "***"' in asked.text, asked.text
    assert re.search('- "arguments.what: [0-9a-f]{16}"', asked.text), asked.text
    port.env["MY_TOKEN"] = "sekret-two"
    assert_asks_for_something_else(port)
    port.env["MY_TOKEN"] = "sekret-one"
    port(flow, "--run-id", "s", code=14)

    def changed(proposal: Proposal) -> Decision:
        return Decision(ProposalStatus.MODIFIED, arguments={**(proposal.ask.arguments or {}), "where": "there"})

    port.decide(changed)
    port("--resume", "s", code=0)
    assert "sekret-one there" in (port.folder / "done").read_text()


def test_an_approval_of_a_call_inside_a_function_step_binds_the_variables_of_the_step(port: Port) -> None:
    (port.folder / "port.py").write_text(PAIR)
    port.env |= {"MY_TOKEN": "sekret-one", "LEVEL": "low"}
    variables = 'env: {HEIGHT: "${LEVEL}", TOKEN: "${MY_TOKEN}"}'
    step = f'{{type: function, target: "port.py:app", command: relay, {variables}}}'
    flow = port.flow(f"timeout: 20m\nsteps: {{ship: {step}}}\n")
    assert port(flow, "--run-id", "r", code=0)["data"]["steps"]["ship"]["output"] == "INCOMPLETE"
    text = port.decide(YES).ask.text
    assert 'HEIGHT: "low"' in text and 'TOKEN: "***"' in text and "sekret" not in text, text
    port.env["LEVEL"] = "high"
    assert port(flow, "--run-id", "s", code=0)["data"]["steps"]["ship"]["output"] == "INCOMPLETE"
    assert not (port.folder / "done").exists(), "a yes with other variables is none to this call"
    port.env["LEVEL"] = "low"
    assert port(flow, "--run-id", "t", code=0)["data"]["steps"]["ship"]["output"] == "None"
    assert port.done() == ["crates", "here"]


def test_a_function_steps_approval_shows_and_binds_the_variables_that_the_file_sets(port: Port) -> None:
    port.env |= {"MY_TOKEN": "sekret-one", "LEVEL": "low"}
    variables = 'env: {HEIGHT: "${LEVEL}", TOKEN: "${MY_TOKEN}"}'
    flow = port.flow(FLOW.replace("command: ship,", f"command: ship, {variables},"))
    for run, changed in (("r", {"LEVEL": "high"}),):
        port.env |= {"MY_TOKEN": "sekret-one", "LEVEL": "low"}
        port(flow, "--run-id", run, code=14)
        text = port.decide(YES).ask.text
        assert 'HEIGHT: "low"' in text and 'TOKEN: "***"' in text and "sekret" not in text, text
        assert re.search('- "environment.TOKEN: [0-9a-f]{16}"', text), text
        port.env |= changed
        error = port("--resume", run, code=3)["data"]["steps"]["ship"]["error"]
        assert error["code"] == "ACTION_CHANGED" and port.done() == []
    port.env |= {"MY_TOKEN": "sekret-one", "LEVEL": "low"}
    port(flow, "--run-id", "r3", code=14)
    port.decide(YES)
    port("--resume", "r3", code=0)
    assert port.done() == ["crates", "crates-told"]


def test_a_yes_to_a_step_ends_where_its_directory_is_a_link_that_leads_elsewhere(two_ports: Port) -> None:
    flow = "timeout: 20m\nsteps: {ship: {exec: pwd -P >> ../done, cwd: link, approval: true}}\n"
    two_ports(two_ports.flow(flow), "--run-id", "r", code=14)
    real = os.path.realpath(two_ports.folder / "good")
    assert f'directory: "{real}"' in two_ports.decide(YES).ask.text
    turn_link(two_ports)
    assert_asks_for_something_else(two_ports)


def test_a_step_runs_in_the_directory_that_was_approved(two_ports: Port) -> None:
    """The link is turned after the last comparison: between two tries of the step."""
    turn = "rm ../link; ln -s evil ../link"
    flow = f"""
timeout: 20m
steps:
  ship:
    exec: 'pwd -P >> ../done; {turn}; test -e ../again || {{ touch ../again; exit 1; }}'
    cwd: link
    approval: true
    on_fail: {{retry: {{max: 1, backoff: {{delay_ms: 1}}}}}}
"""
    two_ports(two_ports.flow(flow), "--run-id", "r", code=14)
    two_ports.decide(YES)
    two_ports("--resume", "r", code=0)
    assert two_ports.done() == [os.path.realpath(two_ports.folder / "good")] * 2


# --- over MCP -------------------------------------------------------------------------------------------------


def test_an_mcp_step_whose_tool_needs_approval_parks_the_run_and_calls_again_after_a_yes(
    port: Port, validate_envelope: Any
) -> None:
    parked = validate_envelope(port(port.flow(SERVED), "--run-id", "r", "--budget", "1s", code=14))
    jsonschema.validate(parked["data"], INCOMPLETE)
    assert parked["meta"]["side_effects"] == "none" and parked["data"]["steps"]["ship"]["status"] == "pending"
    [waits] = parked["data"]["waiting"]
    [proposal] = proposals(port)
    assert waits["proposal_id"] == proposal.id and waits["title"] == "port ship what=crates"
    assert port.done() == []
    assert len(port("--resume", "r", "--budget", "1s", code=14)["data"]["waiting"]) == 1
    port.decide(YES)
    ended = validate_envelope(port("--resume", "r", code=0))
    assert ended["data"]["steps"]["ship"]["output"] == "crates"
    assert port.done() == ["crates", "crates-told"] and len(proposals(port)) == 1


def test_an_mcp_step_goes_on_by_itself_when_the_yes_comes_while_the_run_waits(port: Port) -> None:
    process = port.start(port.flow(SERVED), "--budget", "25s")
    port.decide(YES)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0 and port.done() == ["crates", "crates-told"]


def test_an_mcp_step_whose_tool_was_rejected_has_failed_with_that(port: Port) -> None:
    port(port.flow(SERVED), "--run-id", "r", "--budget", "1s", code=14)
    port.decide(NO)
    error = port("--resume", "r", code=3)["data"]["steps"]["ship"]["error"]
    assert error["code"] == "PROPOSAL_REJECTED" and port.done() == []


def test_an_mcp_step_that_waits_for_a_decision_in_another_store_is_parked_and_calls_again(port: Port) -> None:
    elsewhere = port.folder / "elsewhere"
    text = SERVED.replace("timeout: 120s", f"timeout: 120s\n    env: {{SHOTCLOCK_HOME: {elsewhere}}}")
    parked = port(port.flow(text), "--run-id", "r", "--budget", "1s", code=14)
    assert len(parked["data"]["waiting"]) == 1 and proposals(port) == []
    os.rename(port.folder / "home", port.folder / "ours")
    os.rename(elsewhere, port.folder / "home")
    port.decide(YES)
    os.rename(port.folder / "home", elsewhere)
    os.rename(port.folder / "ours", port.folder / "home")
    port("--resume", "r", code=0)
    assert port.done() == ["crates", "crates-told"]


def first_asked(port: Port) -> str:
    give_up_at = time.monotonic() + WITHIN_S
    while True:
        assert time.monotonic() < give_up_at, "nobody asks anything"
        if (port.folder / "home").exists():
            with Store.open(port.folder / "home") as store:
                if found := store.proposals.list():
                    return found[0].id
        time.sleep(0.05)
