"""Commands that a person has to approve: nothing runs before somebody said yes to it, and nobody waits for long."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client

from shotclock import App
from shotclock.apps.server._tools import form_for
from shotclock.calls.call import Call, CallRequest, Outcome, admit
from shotclock.calls.principal import Principal, Role
from shotclock.core.catalogue import Catalogue
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Decision, Kind, Policy, Proposal, ProposalRequest, ProposalStatus, ProposedFile
from shotclock.core.value_types import replace
from shotclock.people.approval import Approvals
from shotclock.people.inbox import Inbox
from shotclock.people.person_wait import NOT_BOUND
from shotclock.store.store import Store
from tests.apps.app.programs import guarded
from tests.apps.server import client as mcp
from tests.apps.server.client import envelope_in

from .conftest import Home, lines_of, wait_for, warning_codes

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

ADA = Principal("ada", Role.OPERATOR)
PROGRAM = Path(guarded.__file__).read_text("utf-8")
TARGET = "tests.apps.app.programs.guarded:app"
YES, NO = Decision(ProposalStatus.APPROVED, "fine"), Decision(ProposalStatus.REJECTED, "not on a Friday")
QUICK = "300ms"
INCOMPLETE = json.loads((Path(__file__).parents[2] / "spec" / "incomplete-data.derived.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "20s")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def pending(inbox: Inbox, at_least: int = 1) -> list[Proposal]:
    give_up_at = time.monotonic() + 20
    while len(found := await inbox.list(status=ProposalStatus.PENDING)) < at_least:
        assert time.monotonic() < give_up_at, "nothing was proposed"
        await asyncio.sleep(0.01)
    return [whole for each in found if (whole := await inbox.get(each.id))]


def with_inbox(work: Callable[[Inbox], Coroutine[Any, Any, Any]], home: Home) -> Any:
    async def scenario() -> Any:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            try:
                async with guarded.app:
                    return await work(inbox)
            finally:
                await inbox.close()

    return run(scenario())


def decide_all(home: Home) -> None:
    with Store.open(home.path) as store:
        for each in store.proposals.list(status=ProposalStatus.PENDING):
            store.proposals.decide(each.id, YES, ADA.name, WallTime.of_ns(time.time_ns()))


def decided(home: Home, decision: Decision, command: str, **arguments: Any) -> Any:
    """While the call waits for it."""

    async def work(inbox: Inbox) -> Any:
        calling = asyncio.ensure_future(guarded.app.call(command, **arguments))
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, decision, ADA)
        return await calling

    return with_inbox(work, home)


def test_what_is_approved_in_time_runs(home: Home, tmp_path: Path) -> None:
    envelope = decided(home, YES, "deploy", folder=str(tmp_path), service="web")
    assert envelope.ok and envelope.data == {"service": "web", "replicas": 1}
    assert lines_of(tmp_path / "done") == ["deploy web 1"]


def test_it_runs_with_what_the_operator_made_of_it(home: Home, tmp_path: Path) -> None:
    changed = Decision(ProposalStatus.MODIFIED, arguments={"folder": str(tmp_path), "service": "web", "replicas": 3})
    envelope = decided(home, changed, "deploy", folder=str(tmp_path), service="web")
    assert envelope.data == {"service": "web", "replicas": 3}
    assert lines_of(tmp_path / "done") == ["deploy web 3"]


def test_what_is_rejected_does_not_run_and_says_why(home: Home, tmp_path: Path, validate_envelope: Any) -> None:
    envelope = decided(home, NO, "deploy", folder=str(tmp_path), service="web")
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.meta["exit_code"], envelope.ending) == ("PROPOSAL_REJECTED", 7, "not_started")
    assert envelope.data["status"] == "rejected" and envelope.data["notes"] == "not on a Friday"
    assert envelope.meta["side_effects"] == "none" and lines_of(tmp_path / "done") == []


def test_nobody_answers_and_the_proposal_stays_queued_until_the_identical_call_picks_the_decision_up(
    home: Home, tmp_path: Path, validate_envelope: Any
) -> None:
    async def work(inbox: Inbox) -> Any:
        async def call() -> Any:
            return await guarded.app.call_with("deploy", {"folder": str(tmp_path), "service": "web"}, budget=QUICK)

        first, second = await call(), await call()
        ran_before = lines_of(tmp_path / "done")
        await inbox.decide(first.data["proposal_id"], YES, ADA)
        began = time.monotonic()
        third, took_s = await call(), time.monotonic() - began
        return first, second, ran_before, third, took_s, await call()

    first, second, ran_before, third, took_s, fourth = with_inbox(work, home)
    validate_envelope(first.to_dict())
    jsonschema.validate(first.data, INCOMPLETE)
    assert (first.code, first.meta["exit_code"], first.data["status"]) == ("INCOMPLETE", 14, "pending")
    assert first.data["notes"] == "operator response timed out; proposal remains queued"
    assert first.data["continue_command"] == "call deploy again with the same arguments"
    assert second.data["proposal_id"] == first.data["proposal_id"] and ran_before == []
    assert third.ok and took_s < 5
    assert fourth.code == "INCOMPLETE" and fourth.data["proposal_id"] != first.data["proposal_id"]  # one yes, one run
    assert lines_of(tmp_path / "done") == ["deploy web 1"]


def test_two_identical_calls_that_wait_for_one_approval_do_not_both_run(home: Home, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "service": "web"}

    async def work(inbox: Inbox) -> Any:
        calls = [asyncio.ensure_future(guarded.app.call_with("deploy", arguments, budget="3s")) for _ in range(2)]
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        return await asyncio.gather(*calls)

    codes = sorted(str(envelope.code) for envelope in with_inbox(work, home))
    assert codes == ["INCOMPLETE", "None"] and lines_of(tmp_path / "done") == ["deploy web 1"]


def test_the_clock_of_the_work_starts_with_the_approval(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        calling = asyncio.ensure_future(guarded.app.call("slow", folder=str(tmp_path)))
        [proposal] = await pending(inbox)
        await asyncio.sleep(6.2)  # longer than its timeout
        await inbox.decide(proposal.id, YES, ADA)
        return await calling

    assert with_inbox(work, home).ok


def test_arguments_that_are_wrong_bother_nobody(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        wrong = await guarded.app.call("deploy", folder=str(tmp_path), service="web", replicas="many")
        return wrong, await inbox.list()

    wrong, proposals = with_inbox(work, home)
    assert wrong.code == "ARG_ERROR" and proposals == []


def test_what_expired_is_not_run_and_not_called_rejected(home: Home, tmp_path: Path) -> None:
    envelope = with_inbox(lambda inbox: guarded.app.call("brief", folder=str(tmp_path)), home)
    assert (envelope.code, envelope.data["status"]) == ("PROPOSAL_EXPIRED", "expired")
    assert lines_of(tmp_path / "done") == []


def test_that_it_went_on_unanswered_and_what_became_of_it_is_in_the_trail(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        assert (await guarded.app.call("announced", folder=str(tmp_path))).ok
        [listed] = await inbox.list()
        while (proposal := await inbox.get(listed.id)) is None or proposal.outcome is None:
            await asyncio.sleep(0.02)
        return proposal, [entry.action for entry in await inbox.history(listed.id)], await inbox.verify_audit()

    proposal, told, problems = with_inbox(work, home)
    assert proposal.status is ProposalStatus.EXPIRED and proposal.outcome.ok and problems == []
    assert told == ["proposed", "expired", "went-on", "succeeded"]


def test_a_call_from_inside_another_is_no_way_around_it(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        calling = asyncio.ensure_future(guarded.app.call("around", folder=str(tmp_path), service="web"))
        [proposal] = await pending(inbox)
        before = lines_of(tmp_path / "done")
        await inbox.decide(proposal.id, NO, ADA)
        return before, await calling

    before, envelope = with_inbox(work, home)
    assert before == [] and lines_of(tmp_path / "done") == []
    assert envelope.ok and envelope.data["code"] == "PROPOSAL_REJECTED"


def test_a_repeat_under_its_key_is_answered_and_asks_nobody(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        async def call() -> Any:
            arguments = {"folder": str(tmp_path), "service": "web"}
            return await guarded.app.call_with("deploy", arguments, idempotency_key="k1")

        calling = asyncio.ensure_future(call())
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        return await calling, await call(), await inbox.list()

    first, again, proposals = with_inbox(work, home)
    assert first.ok and again.ok and warning_codes(again.to_dict()) == ["REPLAYED"]
    assert len(proposals) == 1 and lines_of(tmp_path / "done") == ["deploy web 1"]


def test_a_job_that_was_approved_is_attached_to_without_asking_again(home: Home, tool: Any, tmp_path: Path) -> None:
    program = tool("guarded.py")
    first = program.start("migrate", tmp_path, "--budget", "6s")

    async def approve() -> None:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            [proposal] = await pending(inbox)
            await inbox.decide(proposal.id, YES, ADA)
            await inbox.close()

    run(approve())
    wait_for(lambda: lines_of(tmp_path / "done"), "the migration to begin")
    attached = program.envelope("migrate", tmp_path, "--budget", "500ms", code=14)
    told = first.ends(30).json()
    assert attached["data"]["job_id"] == told["data"]["job_id"] and attached["data"]["state"] == "running"
    assert lines_of(tmp_path / "done") == ["migrate begins"]


def test_a_budget_of_0_is_no_limit_of_the_call_and_the_response_budget_still_holds(
    home: Home, tool: Any, tmp_path: Path
) -> None:
    env = {"SHOTCLOCK_RESPONSE_TIMEOUT": "700ms"}
    envelope = tool("guarded.py").envelope("deploy", tmp_path, "web", "--budget", "0", env=env, code=14)
    assert envelope["data"]["status"] == "pending"
    assert envelope["meta"]["duration_ms"] >= 700 and "within 700ms" in envelope["error"]["message"], envelope


def test_on_the_command_line_pending_is_exit_14_and_the_operator_is_told_why(
    home: Home, tool: Any, tmp_path: Path, validate_envelope: Any
) -> None:
    program = tool("guarded.py")
    words = ["deploy", str(tmp_path), "web", "--budget", QUICK, "--justification", "the old one is broken"]
    envelope = validate_envelope(program.envelope(*words, code=14))
    assert envelope["data"]["status"] == "pending"

    async def justification() -> str:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            [proposal] = await pending(inbox)
            await inbox.decide(proposal.id, YES, ADA)
            await inbox.close()
            return proposal.ask.justification

    assert run(justification()) == "the old one is broken"
    assert program.envelope(*words, code=0)["data"] == {"service": "web", "replicas": 1}


def test_defaults_are_shown_and_a_yes_does_not_hold_for_others(home: Home) -> None:
    def paying(to: str) -> App:
        app = App("payer")

        @app.command(approval=True)
        def pay(amount: int, to: str = to, force: bool = True, via: Path = Path("/bank")) -> None: ...

        return app

    async def first(put: Any, inbox: Inbox) -> Any:
        await put(amount=9)
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        return proposal

    async def again(put: Any, inbox: Inbox) -> Any:
        return await put(amount=9)

    proposal = ask_for(paying("ann"), home, first)
    assert proposal.ask.arguments == {"amount": 9, "to": "ann", "force": True, "via": "/bank"}
    shown = 'with:\n  amount: 9\n  force: true\n  to: "ann"\n  via: "/bank"\nwhere:\n  directory: '
    assert proposal.ask.text.startswith(f'run: "payer/pay"\n{shown}')
    other = ask_for(paying("mallory"), home, again)
    assert other.data["status"] == "pending" and other.data["proposal_id"] != proposal.id
    passed = ask_for(paying("ann"), home, again)
    assert isinstance(passed, Call) and passed.arguments == {"amount": 9}


def test_a_yes_does_not_hold_in_another_directory(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("remover")

    @app.command(approval=True)
    def remove(path: Path) -> None: ...

    async def first(put: Any, inbox: Inbox) -> Any:
        await put(path="x")
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        monkeypatch.chdir(tmp_path)
        return await put(path="x")

    assert ask_for(app, home, first).data["status"] == "pending"


def test_inherited_variables_are_not_bound_and_the_text_and_the_page_say_so_but_arguments_are(
    tool: Any, tmp_path: Path, home: Home
) -> None:
    """What docs/howto/approvals.md promises, and what it does not."""
    dropper = tool(
        "dropper.py",
        """
import os
from shotclock import App

app = App("dropper")

@app.command(approval=True)
def drop(table: str, host: str = "") -> str:
    return host or os.environ["DB_HOST"]

app()
""",
    )
    asked = dropper.envelope("drop", "users", "--budget", "1ms", code=14, env={"DB_HOST": "staging"})
    with Store.open(home.path) as store:
        proposal = store.proposals.get(asked["data"]["proposal_id"])
        assert proposal is not None
        said = f'"not covered by this approval": "{NOT_BOUND["not covered by this approval"]}"'
        assert said in proposal.ask.text and "staging" not in proposal.ask.text
        page = (Path(__file__).parents[3] / "docs" / "howto" / "approvals.md").read_text("utf-8")
        assert " ".join(said.split()) in " ".join(page.split())
        store.proposals.decide(proposal.id, YES, ADA.name, WallTime.of_ns(time.time_ns()))
    other = dropper.envelope("drop", "users", "--host", "prod", "--budget", "1ms", code=14, env={"DB_HOST": "staging"})
    assert other["data"]["proposal_id"] != proposal.id, "an argument is bound"
    ran = dropper.envelope("drop", "users", code=0, env={"DB_HOST": "prod"})
    assert ran["data"] == {"result": "prod"}, "a variable is not"


def test_an_approval_binds_the_content_of_the_program_file(tool: Any, tmp_path: Path, home: Home) -> None:
    program, file = tool("guarded.py"), tmp_path / "guarded.py"
    words = ("deploy", tmp_path, "web", "--budget", "1ms")
    asked = program.envelope(*words, code=14)["data"]["proposal_id"]
    decide_all(home)
    file.write_text(PROGRAM.replace('f"deploy', 'f"evil'))
    again = program.envelope(*words, code=14)["data"]["proposal_id"]
    assert again != asked, "it asks anew"
    file.write_text(PROGRAM)
    program.envelope(*words, code=0)
    assert lines_of(tmp_path / "done") == ["deploy web 1"]


def test_an_approved_job_does_not_start_with_another_program_file(tool: Any, tmp_path: Path, home: Home) -> None:
    program, file = tool("guarded.py"), tmp_path / "guarded.py"
    program.envelope("migrate", tmp_path, "--budget", "1ms", code=14)
    decide_all(home)
    program.envelope("migrate", tmp_path, "--budget", "1ms", code=14)
    wait_for(lambda: lines_of(tmp_path / "done"), "the migration to begin")
    os.kill(home.runner(), signal.SIGKILL)
    file.write_text(PROGRAM.replace('"migrate begins"', '"evil"'))
    # As if its runner had not started yet.
    with contextlib.closing(sqlite3.connect(home.path / "shotclock.db", timeout=20)) as database, database:
        database.execute("UPDATE jobs SET state = 'starting', runner = NULL")
    late = f"from shotclock.dispatch._job_runner import main; main({str(home.path)!r}, {home.job().id!r})"
    subprocess.run([sys.executable, "-c", late], check=True, timeout=60)
    envelope = home.job().envelope
    assert envelope is not None and envelope["error"]["code"] == "ACTION_CHANGED"
    assert envelope["meta"]["ending"] == "not_started" and lines_of(tmp_path / "done") == ["migrate begins"]


@pytest.mark.parametrize(
    "other", [{"n": "7"}, {"n": 7.0}, {"n": True}, {"n": 8}, {"n": 7, "more": None}, {"n": 7, "text": "x\u200b"}]
)
def test_a_yes_to_one_call_lets_no_other_pass_through_the_store(other: dict[str, Any], home: Home) -> None:
    app = App("exact")

    @app.command(approval=True)
    def do(n: Any, text: str = "x", more: Any = 0) -> None: ...

    async def ask(put: Any, inbox: Inbox) -> Any:
        await put(n=7)
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        return await put(**other), await put(n=7)

    refused, passed = ask_for(app, home, ask)
    assert refused.data["status"] == "pending" and isinstance(passed, Call)


def test_what_the_operator_left_alone_stays_the_commands_own_default(home: Home) -> None:
    app = App("sloppy")

    @app.command(approval=True)
    def do(n: int, limit: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    async def ask(put: Any, inbox: Inbox) -> Any:
        await put(n=7)
        [proposal] = await pending(inbox)
        changed = {**(proposal.ask.arguments or {}), "n": 8}
        await inbox.decide(proposal.id, Decision(ProposalStatus.MODIFIED, arguments=changed), ADA)
        return await put(n=7)

    assert ask_for(app, home, ask).arguments == {"n": 8}


# --- what became of it --------------------------------------------------------------------------------------------


FAILING = """
import os, signal, time
from shotclock import App, Context, Failure
app = App("failing", default_timeout="5s")

@app.command(approval=True)
def fail(how: str) -> str:
    if how == "full":
        raise Failure("FILE_UNWRITABLE", "the disk is full")
    if how == "hang":
        time.sleep(60)
    return "done"

if __name__ == "__main__":
    app()
"""


def told(home: Home) -> dict[str, Any]:
    """What whoever looks at the one proposal is told about its run, as `inbox show` says it."""
    with Store.open(home.path) as store:
        [proposal] = store.proposals.list()
    shown = subprocess.run(
        [sys.executable, "-m", "shotclock", "inbox", "show", proposal.id, "--json"],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    run: dict[str, Any] = json.loads(shown.stdout)["data"]["run"]
    return run


def approve_the_one(home: Home) -> str:
    async def work() -> str:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            [proposal] = await pending(inbox)
            await inbox.decide(proposal.id, YES, ADA)
            await inbox.close()
            return proposal.id

    return str(run(work()))


@pytest.mark.parametrize(
    ("how", "timeout", "state", "code"),
    [
        ("well", "5s", "succeeded", None),
        ("full", "5s", "failed", "FILE_UNWRITABLE"),
        ("hang", "300ms", "failed", "TIMEOUT"),
    ],
)
def test_the_command_that_continues_is_the_call_itself_and_the_proposal_shows_what_became_of_it(
    how: str, timeout: str, state: str, code: str | None, home: Home, tool: Any
) -> None:
    program = tool("failing.py", FAILING)
    asked = program.envelope("fail", how, "--budget", "200ms", "--timeout", timeout, code=14)
    id = approve_the_one(home)
    # Nothing has run, and nothing says so.
    assert told(home).items() > {"state": "not_started", "at": None}.items() and "until" in told(home)
    check = [sys.executable, "-m", "shotclock", "inbox", "check", id, "--wait", "0"]
    checked = json.loads(subprocess.run(check, capture_output=True, check=True, timeout=60).stdout)
    assert checked["data"]["run"]["state"] == "not_started" and checked["meta"]["ending"] == "not_started"
    assert "continue_command" not in checked["data"]  # it is the call, which only the caller has
    assert told(home)["state"] == "not_started"

    words = shlex.split(asked["data"]["continue_command"])
    ran = subprocess.run(words, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, cwd=program.folder)
    envelope = json.loads(ran.stdout)
    assert (envelope["ok"], (envelope["error"] or {}).get("code")) == (code is None, code), envelope
    shown = told(home)
    assert shown["state"] == state and shown.get("code") == code
    if how == "full":
        assert shown["message"] == "the disk is full"
    with Store.open(home.path) as store:
        assert [entry.action for entry in store.audit.of(id)] == ["proposed", "approved", "used", state]


def test_of_a_run_whose_process_was_killed_nobody_claims_to_know_what_became(home: Home, tool: Any) -> None:
    program = tool("failing.py", FAILING)
    words = ("fail", "hang", "--budget", "200ms", "--timeout", "40s")
    program.envelope(*words, code=14)
    approve_the_one(home)
    running = program.start(*words)
    wait_for(lambda: told(home)["state"] == "running", "the run")
    running.process.kill()
    running.process.wait(20)
    assert told(home)["state"] == "unknown"


def test_what_became_of_a_job_and_of_a_call_inside_another_is_shown_as_well(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        call = guarded.app.call_with("migrate", {"folder": str(tmp_path), "seconds": 1.0}, budget="20s")
        calling = asyncio.ensure_future(call)
        [proposal] = await pending(inbox)
        await inbox.decide(proposal.id, YES, ADA)
        assert (await calling).ok
        inner = asyncio.ensure_future(guarded.app.call("around", folder=str(tmp_path), service="web"))
        [nested] = await pending(inbox)
        await inbox.decide(nested.id, YES, ADA)
        assert (await inner).ok
        found = []
        for each in (proposal, nested):
            while (whole := await inbox.get(each.id)) is None or whole.outcome is None:
                await asyncio.sleep(0.02)
            found.append((whole, [entry.action for entry in await inbox.history(each.id)]))
        return found

    (job, told_of_job), (nested, told_of_nested) = with_inbox(work, home)
    assert job.outcome.ok and job.runner.job_id is not None
    assert told_of_job == ["proposed", "approved", "used", "started", "succeeded"]
    assert nested.outcome.ok and told_of_nested == ["proposed", "approved", "used", "succeeded"]


# --- a file instead of the call -----------------------------------------------------------------------------------


def writing(path: Path, **approval: Any) -> App:
    app = App("writer")

    @app.command(approval={"file": {"path": path, "proposed": "text", "decision": "decision"}, **approval})
    def put(text: str, justification: str = "", decision: dict[str, Any] | None = None) -> None: ...

    return app


def ask_for(app: App, home: Home, ask: Callable[[Callable[..., Any], Inbox], Coroutine[Any, Any, Any]]) -> Any:
    """Only the gate: nothing is run, whatever it lets pass."""
    catalogue = Catalogue.from_plain(json.loads(json.dumps(app.catalogue().to_plain())))
    agent = Principal("agent", Role.AGENT)

    async def scenario() -> Any:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            gate = Approvals(catalogue, lambda: inbox)

            async def put(**arguments: Any) -> Outcome | Call:
                """Return the call where it may run, else its answer."""
                [spec] = catalogue.commands
                call = admit(spec.name, spec.clocks)
                call.arguments = arguments
                call.request = CallRequest(spec.name, arguments, principal=agent, justification="because", budget_ms=50)
                return await gate.approve(call) or call

            try:
                return await ask(put, inbox)
            finally:
                await inbox.close()

    return run(scenario())


def test_what_the_operator_sees_and_changes_is_the_file_and_the_command_is_told(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    path.write_bytes(b"old\r\n")
    app = writing(path)
    [spec] = app.catalogue().commands
    assert set(spec.input_schema["properties"]) == {"text", "justification"}, "nobody says what was decided"

    async def ask(put: Any, inbox: Inbox) -> Any:
        waiting = await put(text="new", decision={"status": "approved"})
        [proposal] = await pending(inbox)
        assert waiting.data["status"] == "pending" and waiting.data["proposal_id"] == proposal.id
        assert proposal.ask.file == ProposedFile(str(path), "new", "old\r\n", was_read=True)
        assert (proposal.ask.kind, proposal.ask.title) == (Kind.FILE, "writer put: policy")
        assert proposal.ask.justification == "because"
        changed = Decision(ProposalStatus.MODIFIED, "softer", file_text="newer")
        await inbox.decide(proposal.id, changed, ADA)
        return proposal.id, await put(text="new", justification="for fun"), await put(text="new")

    id, passed, again = ask_for(app, home, ask)
    assert passed.arguments["text"] == "newer"
    assert passed.arguments["justification"] == "because", "what the operator was shown"
    told = passed.arguments["decision"]
    assert (told["status"], told["notes"], told["proposal_id"], told["decided_by"]) == ("modified", "softer", id, "ada")
    assert told["file"] == {"path": str(path), "text": "newer", "current": "old\r\n"}
    assert again.data["status"] == "pending" and again.data["proposal_id"] != id, "one yes, one run"


def test_another_text_that_is_there_now_is_another_question(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "policy"

    async def ask(put: Any, inbox: Inbox) -> Any:
        await put(text="new")
        [first] = await pending(inbox)
        path.write_text("somebody was faster")
        await inbox.decide(first.id, YES, ADA)
        await put(text="new")
        [second] = await pending(inbox)
        return first.ask.file, second.ask.file

    first, second = ask_for(writing(path), home, ask)
    assert (first.current, second.current) == (None, "somebody was faster")


@pytest.mark.parametrize("made", ["pipe", "folder", "bytes", "too much"])
def test_where_nobody_could_be_shown_what_would_change_nobody_is_asked(made: str, home: Home, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "bytes": lambda: path.write_bytes(b"\xff\xfe"),
        "too much": lambda: path.write_bytes(b"x" * (1024 * 1024 + 1)),
    }[made]()

    async def ask(put: Any, inbox: Inbox) -> Any:
        refused = await put(text="new")
        return refused.problem.code, await inbox.list()

    assert ask_for(writing(path), home, ask) == ("FILE_UNREADABLE", [])


@pytest.mark.parametrize(
    "forged",
    [
        {"policy": Policy()},
        {"policy": Policy(deciders=("ada",), ttl_ms=1)},
        {"file": ProposedFile("", "new", "new")},
        {"title": "Nothing much"},
    ],
)
def test_what_was_approved_by_other_rules_or_against_another_text_lets_nothing_pass(
    forged: dict[str, Any], home: Home, tmp_path: Path
) -> None:
    """An agent can propose what it likes, the gate's own question included."""
    path = tmp_path / "policy"
    path.write_text("old")

    async def ask(put: Any, inbox: Inbox) -> Any:
        waiting = await put(text="new")
        [ours] = await pending(inbox)
        agent = Principal("agent", Role.AGENT)
        await inbox.withdraw(ours.id, agent)
        if "file" in forged:
            forged["file"] = replace(forged["file"], path=str(path))
        theirs = await inbox.propose(replace(ours.ask, **forged), agent, key=ours.key)
        assert theirs.action_hash == ours.action_hash and waiting.data["status"] == "pending"
        if theirs.ask.policy.ttl_ms > 1:
            await inbox.decide(theirs.id, YES, ADA)
        return await put(text="new")

    answer = ask_for(writing(path, deciders=["ada"]), home, ask)
    # What has expired answers nobody: the gate has asked anew.
    assert not isinstance(answer, Call)
    assert answer.problem.code == "ACTION_CHANGED" or answer.data["status"] == "pending"


@pytest.mark.parametrize(
    ("approval", "options", "says"),
    [
        ({"file": {"path": "policy", "proposed": "text"}}, {}, "absolute path"),
        ({"file": {"path": "/policy", "proposed": "words"}}, {}, "name parameters"),
        ({"file": {"path": "/policy", "proposed": "text", "decision": "more"}}, {}, "name parameters"),
        ({"file": {"path": "/policy", "proposed": "text", "decision": "needed"}}, {}, "needs a default"),
        ({"file": {"path": "/policy", "proposed": "text"}}, {}, "would not see needed, told"),
        ({"file": {"proposed": "text"}}, {}, "file has path"),
        ({"file": {"path": "/policy", "proposed": "text", "mode": 1}}, {}, "file has path"),
        ({"file": {"path": "/policy", "proposed": "told", "decision": "told"}}, {}, "would not see needed, text"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_when_it_is_declared(
    approval: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    def put(text: str, needed: str, told: dict[str, Any] | None = None) -> None: ...

    with pytest.raises(ValueError, match=says):
        App("wrong").command(approval=approval, **options)(put)


def test_a_command_that_writes_an_approved_file_does_not_go_on_as_a_job() -> None:
    def put(text: str) -> None: ...

    with pytest.raises(ValueError, match="cannot go on as a job"):
        App("wrong").command(approval={"file": {"path": "/policy", "proposed": "text"}}, interruption=True)(put)


# --- over MCP -------------------------------------------------------------------------------------------------


async def called(client: Client, tool: str, **arguments: Any) -> tuple[Any, bool]:
    result = await client.call_tool(tool, arguments)
    return envelope_in(result), bool(result.is_error)


@pytest.mark.parametrize(("transport", "mode"), [("stdio", mcp.MODERN), ("http", mcp.LEGACY)])
def test_a_gated_tool_answers_pending_as_a_normal_result_and_runs_once_it_is_approved(
    transport: str, mode: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Any
) -> None:
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", QUICK)

    async def scenario() -> None:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            async with mcp.connected(transport, mode, target=TARGET) as (client, _):
                arguments = {"folder": str(tmp_path), "service": "web", "justification": "<b>because</b>"}
                waiting, is_error = await called(client, "deploy", **arguments)
                validate_envelope(waiting)
                assert waiting["data"]["status"] == "pending" and not is_error
                [proposal] = await pending(inbox)
                assert proposal.ask.justification == "<b>because</b>"
                assert "justification" not in (proposal.ask.arguments or {})
                checked, is_error = await called(client, "check-proposal", proposal_id=proposal.id, wait_ms=100)
                assert checked["data"]["status"] == "pending" and not is_error
                await inbox.decide(proposal.id, YES, ADA)
                checked, is_error = await called(client, "check-proposal", proposal_id=proposal.id)
                assert checked["ok"] and checked["data"]["status"] == "approved" and not is_error
                ran, is_error = await called(client, "deploy", **arguments)
                assert ran["ok"] and ran["data"] == {"service": "web", "replicas": 1} and not is_error
            await inbox.close()

    run(scenario())
    assert lines_of(tmp_path / "done") == ["deploy web 1"]


def test_an_agent_proposes_a_file_waits_asks_again_and_takes_it_back(home: Home) -> None:
    async def scenario() -> None:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            async with mcp.connected(target=TARGET) as (client, _):
                ask = {
                    "title": "Allow pypi.org",
                    "justification": "to install",
                    "path": "egress.yaml",
                    "proposed": "allow: [pypi.org]\n",
                    "current": "allow: []\n",
                }
                calling = asyncio.ensure_future(called(client, "propose", **ask))
                [proposal] = await pending(inbox)
                change = Decision(ProposalStatus.MODIFIED, "only this", file_text="allow: [files.pythonhosted.org]\n")
                await inbox.decide(proposal.id, change, ADA)
                decided, is_error = await calling
                assert decided["data"]["status"] == "modified" and not is_error
                assert decided["data"]["file"] == {"path": "egress.yaml", "text": "allow: [files.pythonhosted.org]\n"}
                again, _ = await called(client, "propose", **ask)  # the identical call is answered by the decision
                assert again["data"]["proposal_id"] == decided["data"]["proposal_id"]

                waiting, _ = await called(client, "propose", title="May I?", justification="?", wait_ms=0)
                assert waiting["data"]["status"] == "pending" and waiting["meta"]["exit_code"] == 14
                gone, is_error = await called(client, "withdraw-proposal", proposal_id=waiting["data"]["proposal_id"])
                assert gone["ok"] and gone["data"]["status"] == "withdrawn" and not is_error
            await inbox.close()

    run(scenario())


def test_a_client_is_shown_all_that_would_be_done_however_long_the_reasons_are() -> None:
    arguments = {"service": "web", "note": "x" * 300, "target": "everything\x1b[2J"}
    ask = ProposalRequest(
        Kind.OPERATION, "Deploy web", "because " * 2_000, operation="guarded/deploy", arguments=arguments
    )
    made = Proposal("p-a", ask, "agent", None, ask.action_hash, ProposalStatus.PENDING, WallTime(0), WallTime(1))
    message, _ = form_for(made)
    assert message.startswith(f"{ask.text}\n\nThe agent says: because") and 'target: "everything<U+001B>[2J"' in message
    assert len(message) < 2_000 and "shotclock inbox show p-a" in message


Served = Callable[..., list[tuple[Any, bool]]]
WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("propose", {}, ["justification", "title"]),
    ("propose", {"title": 5, "justification": "x", "wait_ms": -1}, ["title", "wait_ms"]),
    ("propose", {"title": "x", "justification": "x", "path": "a"}, ["path"]),
    ("propose", {"title": "x", "justification": "x", "ttl": "never", "extra": 1}, ["extra", "ttl"]),
    ("check-proposal", {"proposal_id": "p-1", "wait_ms": "1s"}, ["wait_ms"]),
    ("deploy", {"folder": ".", "service": "x", "justification": 4}, ["justification"]),
]


def test_all_that_is_wrong_is_told_at_once(served: Served) -> None:
    for (tool_name, _, fields), (envelope, is_error) in zip(WRONG, served(*(each[:2] for each in WRONG)), strict=True):
        assert is_error and envelope["error"]["code"] == "ARG_ERROR", tool_name
        assert sorted(each["field"] for each in envelope["error"]["errors"]) == fields


def test_an_agent_that_asks_in_a_loop_is_told_that_the_inbox_is_full(
    served: Served, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Any
) -> None:
    monkeypatch.setenv("SHOTCLOCK_INBOX_LIMIT_EACH", "2")
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "10ms")
    loop = [("propose", {"title": f"May I {n}?", "justification": "?", "wait_ms": 10**30}) for n in (1, 2, 3, 1)]
    gated = ("deploy", {"folder": str(tmp_path), "service": "web"})
    *fit, (third, third_is_error), (again, _), (deploy, deploy_is_error) = served(*loop, gated)
    assert [envelope["data"]["status"] for envelope, _ in fit] == ["pending", "pending"]
    assert fit[0][0]["meta"]["budget_ms"] == 10, "nobody waits longer than the response budget"
    assert again["data"] == fit[0][0]["data"], "the identical call still attaches"
    for envelope, is_error in ((third, third_is_error), (deploy, deploy_is_error)):
        error = validate_envelope(envelope)["error"]
        assert is_error and error["code"] == "INBOX_FULL" and error["retryable"]
        assert error["context"]["limit"] == 2 and "withdraw" in error["suggestion"]
        assert envelope["meta"]["side_effects"] == "none"
    with Store.open(home.path) as store:
        assert len(store.proposals.list()) == 2


def test_a_proposal_that_is_not_ones_own_is_not_there(served: Served, home: Home) -> None:
    async def somebody_elses() -> str:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            proposal = await inbox.propose(ProposalRequest(Kind.QUESTION, "mine"), Principal("other", Role.AGENT))
            await inbox.close()
            return proposal.id

    proposal_id = run(somebody_elses())
    calls = [(tool_name, {"proposal_id": proposal_id}) for tool_name in ("check-proposal", "withdraw-proposal")]
    for envelope, _ in served(*calls):
        assert envelope["error"]["code"] == "PROPOSAL_NOT_FOUND"


@pytest.fixture
def served(home: Home) -> Served:
    """Calls of one fresh server."""

    def call(*calls: tuple[str, dict[str, Any]]) -> list[tuple[Any, bool]]:
        async def scenario() -> list[tuple[Any, bool]]:
            async with mcp.connected(target=TARGET) as (client, _):
                return [await called(client, tool_name, **arguments) for tool_name, arguments in calls]

        answers: list[tuple[Any, bool]] = run(scenario())
        return answers

    return call
