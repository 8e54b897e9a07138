"""What is approved, repeated or kept is what runs, and a person is shown it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.apps.app.programs import exact
from tests.rows import corners

from .conftest import Home, lines_of, warning_codes

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

ADA = Principal("ada", Role.OPERATOR)
YES = Decision(ProposalStatus.APPROVED)


def with_inbox(work: Callable[[Inbox], Coroutine[Any, Any, Any]], home: Home) -> Any:
    async def scenario() -> Any:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            try:
                async with exact.app:
                    return await work(inbox)
            finally:
                await inbox.close()

    return asyncio.run(asyncio.wait_for(scenario(), 90))


async def call(command: str, **arguments: Any) -> Any:
    return await exact.app.call_with(command, arguments, budget="10ms")


async def proposal_of(inbox: Inbox, envelope: Any) -> Proposal:
    assert envelope.code == "INCOMPLETE", envelope.to_dict()
    found = await inbox.get(envelope.data["proposal_id"])
    assert found is not None
    return found


def shown_for(home: Home, **arguments: Any) -> Any:
    """The text of a payment, from where it says what is run beside what was given."""

    async def work(inbox: Inbox) -> Any:
        return (await proposal_of(inbox, await call("pay", **arguments))).ask

    return with_inbox(work, home)


# --- approvals ----------------------------------------------------------------------------------------------------


def test_what_a_caller_changes_while_a_person_decides_is_not_what_runs(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        value = ["harmless"]
        calling = asyncio.ensure_future(exact.app.call("guarded", folder=str(tmp_path), v=value))
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            await asyncio.sleep(0.02)
        value.append("rm -rf /")
        await inbox.decide(found[0].id, YES, ADA)
        return await calling

    assert with_inbox(work, home).ok
    assert lines_of(tmp_path / "done") == ["['harmless']"]


def test_on_the_command_line_a_number_without_end_is_refused(home: Home, tool: Any, tmp_path: Path) -> None:
    refused = tool("exact.py").envelope("guarded", tmp_path, "--budget", "10ms", "--v", "[1e999]", code=2)
    assert refused["error"]["errors"][0]["field"] == "v"


# --- what runs is shown -------------------------------------------------------------------------------------------


def test_a_number_that_is_converted_is_shown_as_it_runs(home: Home) -> None:
    ask = shown_for(home, amount=9007199254740993)
    assert "  amount: 9007199254740993\n" in ask.text
    assert ask.surroundings["runs as"] == {"amount": 9007199254740992.0}
    assert ask.text.endswith('\n  "runs as":\n    amount: 9007199254740992.0')


CONVERTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"amount": "1e3", "times": "7"}, {"amount": 1000.0, "times": 7}),
    ({"amount": 1, "times": True}, {"times": 1}),
    ({"amount": 1, "to": {"iban": " de1 ", "limit": 2**53 + 1}}, {"to": {"iban": "DE1", "limit": 2.0**53}}),
    ({"amount": 1, "via": "a//b/"}, {"via": "a/b"}),
    ({"amount": 1, "tags": ["b", "a", "b"]}, {"tags": ["a", "b"]}),
    ({"amount": 1, "rates": {"01": "2"}}, {"rates": {"1": 2.0}}),
    ({"amount": 1, "to": {"iban": "DE1"}}, {"to": {"iban": "DE1", "limit": 0.0}}),
]


def test_what_conversion_makes_of_arguments_is_shown_beside_them(home: Home) -> None:
    async def work(inbox: Inbox) -> Any:
        return [await proposal_of(inbox, await call("pay", **arguments)) for arguments, _ in CONVERTED]

    shown = [(each.ask.surroundings or {})["runs as"] for each in with_inbox(work, home)]
    assert shown == [runs_as for _, runs_as in CONVERTED]


def test_what_runs_as_it_was_given_is_shown_once(home: Home) -> None:
    ask = shown_for(
        home, amount=1, times=2, to={"iban": "DE1", "limit": 0}, via="/a/b", pin="1234", tags=["a", "b"], rates={"1": 1}
    )
    assert "runs as" not in ask.text


@pytest.mark.parametrize("around", ["around", "around-as-job"])
def test_a_call_from_inside_another_is_shown_as_it_runs(around: str, home: Home) -> None:
    async def work(inbox: Inbox) -> Any:
        calling = asyncio.ensure_future(exact.app.call(around, amount=9007199254740993))
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            await asyncio.sleep(0.02)
        proposal = await inbox.get(found[0].id)
        await inbox.decide(found[0].id, Decision(ProposalStatus.REJECTED), ADA)
        await calling
        return proposal

    assert with_inbox(work, home).ask.surroundings["runs as"] == {"amount": 9007199254740992.0}


def test_what_becomes_something_else_while_a_person_decides_does_not_run(home: Home, tmp_path: Path) -> None:
    """The command's own check reads a file; what it reads is what the command gets."""
    file = tmp_path / "what"
    file.write_text("harmless")

    async def work(inbox: Inbox) -> Any:
        arguments = {"folder": str(tmp_path), "what": str(file)}
        calling = asyncio.ensure_future(exact.app.call_with("say", arguments, budget="8s"))
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            await asyncio.sleep(0.02)
        first = await inbox.get(found[0].id)
        file.write_text("rm -rf /")
        await inbox.decide(found[0].id, YES, ADA)
        return first, await calling, await proposal_of(inbox, await call("say", **arguments))

    first, answered, second = with_inbox(work, home)
    assert answered.code == "ACTION_CHANGED" and lines_of(tmp_path / "done") == [] and second.id != first.id
    assert [each.ask.surroundings["runs as"] for each in (first, second)] == [
        {"what": "harmless"},
        {"what": "rm -rf /"},
    ]


def test_what_is_another_value_every_time_is_said_to_be_and_can_be_approved(home: Home) -> None:
    async def work(inbox: Inbox) -> Any:
        first = await proposal_of(inbox, await call("stamp", name="a"))
        await inbox.decide(first.id, YES, ADA)
        return first, await exact.app.call("stamp", name="a")

    first, ran = with_inbox(work, home)
    assert ran.ok and ran.data["result"].startswith("a-")
    assert first.ask.text.endswith('\n  "runs as something else every time":\n    - "name"')


# --- keys and jobs ------------------------------------------------------------------------------------------------


PAIRS = [(1, "1"), (1, True), (1, 1.0), ([1], {"1": 1}), (None, "null")]


def test_a_key_that_stands_for_one_value_stands_for_no_other(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        async def keyed(v: Any, key: str) -> Any:
            return await exact.app.call_with("keyed", {"folder": str(tmp_path), "v": v}, idempotency_key=key)

        return [[await keyed(value, str(at)) for value in (one, other, one)] for at, (one, other) in enumerate(PAIRS)]

    for first, second, again in with_inbox(work, home):
        assert first.ok and second.code == "KEY_REUSED"
        assert again.data == first.data and warning_codes(again.to_dict()) == ["REPLAYED"]
    assert lines_of(tmp_path / "done") == [repr(one) for one, _ in PAIRS]


def test_approved_keyed_and_job_calls_take_json_and_others_anything(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        arguments = {"folder": str(tmp_path), "v": b"abc"}
        calls = [exact.app.call_with(each, arguments, budget="20s") for each in ("guarded", "kept", "kept-and-guarded")]
        calls.append(exact.app.call_with("keyed", arguments, idempotency_key="k"))
        plain = await exact.app.call_with("keyed", {"folder": str(tmp_path), "v": b"plain"})
        return [await each for each in calls], plain, await inbox.list()

    envelopes, plain, proposals = with_inbox(work, home)
    for envelope in envelopes:
        assert envelope.code == "ARG_ERROR" and [each["field"] for each in envelope.error["errors"]] == ["v"]
        assert "v: must be text, a number" in envelope.error["message"] and envelope.ending == "not_started"
    assert plain.ok and proposals == [] and home.jobs() == [] and lines_of(tmp_path / "done") == ["b'plain'"]


def test_a_job_takes_what_comes_back_from_json_as_it_was(home: Home, tmp_path: Path) -> None:
    async def work(inbox: Inbox) -> Any:
        return await exact.app.call_with("kept", {"folder": str(tmp_path), "v": [1, "a", None]}, budget="30s")

    assert with_inbox(work, home).ok and lines_of(tmp_path / "done") == ["[1, 'a', None]"]


# --- what else decides what runs, and who has to say yes to it ----------------------------------------------------


def approve_all(home: Home) -> None:
    async def work() -> None:
        with Store.open(home.path) as store:
            inbox = Inbox(store)
            for each in await inbox.list(status=ProposalStatus.PENDING):
                await inbox.decide(each.id, YES, ADA)
            await inbox.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_yes_to_one_input_is_no_yes_to_another(home: Home, tool: Any, tmp_path: Path) -> None:
    program = tool("exact.py")

    def feed(text: str, code: int) -> Any:
        (tmp_path / "input").write_text(text)
        with open(tmp_path / "input", "rb") as stdin:
            return program.envelope("feed", tmp_path, "--budget", "10ms", stdin=stdin, code=code)["data"]

    first = feed("harmless", 14)
    approve_all(home)
    assert feed("rm -rf /", 14)["proposal_id"] != first["proposal_id"]
    assert feed("harmless", 0) == {"result": "'harmless'"}
    with Store.open(home.path) as store:
        proposal = store.proposals.get(first["proposal_id"])
    assert proposal is not None and "\n  stdin:\n    sha256: " in proposal.ask.text


def test_a_yes_to_all_steps_is_no_yes_to_some(home: Home, tool: Any, tmp_path: Path) -> None:
    program = tool("exact.py")
    words = ("stepped", tmp_path, "--budget", "10ms")
    first = program.envelope(*words, code=14)["data"]
    approve_all(home)
    other = program.envelope(*words, "--resume-from", "erase", code=14)["data"]
    assert other["proposal_id"] != first["proposal_id"] and lines_of(tmp_path / "done") == []
    assert program.envelope(*words, code=0)["ok"] and lines_of(tmp_path / "done") == ["'backup'", "'erase'"]


def test_a_repeat_that_has_to_run_after_all_asks_as_well(home: Home, tmp_path: Path) -> None:
    """Its key is in use when it comes, and free again when the first call has failed without a trace."""

    async def work(inbox: Inbox) -> Any:
        async def fails() -> Any:
            return await exact.app.call_with("fails", {"folder": str(tmp_path)}, idempotency_key="k", budget="5s")

        first = asyncio.ensure_future(fails())
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            await asyncio.sleep(0.02)
        await inbox.decide(found[0].id, YES, ADA)
        while not lines_of(tmp_path / "done"):
            await asyncio.sleep(0.02)
        second = asyncio.ensure_future(fails())
        await asyncio.sleep(0.5)
        (tmp_path / "end").touch()
        return await first, await second

    first, second = with_inbox(work, home)
    assert first.code == "FILE_UNREADABLE"
    assert second.code == "INCOMPLETE" and second.data["status"] == "pending"
    assert lines_of(tmp_path / "done") == ["'ran'"], "one yes, one run"


def test_a_call_that_comes_too_late_for_a_job_asks_as_well(home: Home, tmp_path: Path) -> None:
    """The job is under way when it comes, and has ended and been answered when its arguments are checked."""

    async def work(inbox: Inbox) -> Any:
        async def raced(budget: str) -> Any:
            return await exact.app.call_with("raced", {"folder": str(tmp_path)}, budget=budget)

        first = asyncio.ensure_future(raced("30s"))
        while not (found := await inbox.list(status=ProposalStatus.PENDING)):
            await asyncio.sleep(0.02)
        await inbox.decide(found[0].id, YES, ADA)
        while not lines_of(tmp_path / "done"):
            await asyncio.sleep(0.02)
        (tmp_path / "slow").touch()
        second = asyncio.ensure_future(raced("2s"))
        await asyncio.sleep(1)
        (tmp_path / "end").touch()
        ended = await first
        (tmp_path / "checked").touch()
        return ended, await second

    first, second = with_inbox(work, home)
    assert first.ok
    assert second.code == "INCOMPLETE" and second.data["status"] == "pending"
    assert lines_of(tmp_path / "done") == ["'ran'"], "one yes, one run"


# --- which program, and the identical call ------------------------------------------------------------------------

TOOL = """
from pathlib import Path
from shotclock import App

app = App("tool")

@app.command(approval=True)
def danger(folder: str, text: str = "hello", n: float = 1.0, via: Path = Path("a"), raw: bytes = b"x") -> str:
    with open(f"{folder}/done", "a") as file:
        file.write(f"'NAME {text} {n}'\\n")
    return "NAME"

if __name__ == "__main__":
    app()
"""
ASKING = """
import asyncio, json, sys
from tool import app

async def main():
    async with app:
        answer = await app.call_with("danger", {"folder": sys.argv[1]}, budget="10ms")
        print(json.dumps(answer.to_dict()))

asyncio.run(main())
"""


def text_of(home: Home, answer: Any) -> str:
    with Store.open(home.path) as store:
        proposal = store.proposals.get(answer["data"]["proposal_id"])
    assert proposal is not None
    return proposal.ask.text


def write_tools(folder: Path) -> None:
    for name in ("good", "evil"):
        (folder / name).mkdir()
        (folder / name / "tool.py").write_text(TOOL.replace("NAME", name))
        (folder / name / "ask.py").write_text(ASKING)


def ask_from(folder: Path, cwd: Path, *words: str) -> Any:
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        timeout=60,
    )
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("way", corners(["from Python", "-m"], "from Python"))
def test_a_yes_to_a_module_is_no_yes_to_another_file_of_its_name(home: Home, tmp_path: Path, way: str) -> None:
    write_tools(tmp_path)

    def ask(name: str) -> Any:
        words = ("-m", "tool", "danger", str(tmp_path), "--budget", "10ms")
        words = words if way == "-m" else (str(tmp_path / name / "ask.py"), str(tmp_path))
        return ask_from(tmp_path / name, tmp_path, *words)

    first = ask("good")
    text = text_of(home, first)
    assert f'"{os.path.realpath(tmp_path)}/good/tool.py"' in text and '  program: "tool"\n' in text, text
    approve_all(home)
    other = ask("evil")
    assert other["error"]["code"] == "INCOMPLETE" and other["data"]["proposal_id"] != first["data"]["proposal_id"]
    assert lines_of(tmp_path / "done") == [] and ask("good")["ok"]
    assert lines_of(tmp_path / "done") == ["'good hello 1.0'"]


def test_a_yes_to_a_program_behind_a_link_is_no_yes_to_what_the_link_leads_to_later(home: Home, tmp_path: Path) -> None:
    write_tools(tmp_path)
    link = tmp_path / "link"

    def ask(name: str) -> Any:
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        words = (str(link / "tool.py"), "danger", str(tmp_path), "--budget", "10ms")
        return ask_from(link, tmp_path, *words)

    first = ask("good")
    assert f'  program: "{os.path.realpath(tmp_path)}/good/tool.py"' in text_of(home, first)
    approve_all(home)
    assert ask("evil")["data"]["proposal_id"] != first["data"]["proposal_id"]
    assert lines_of(tmp_path / "done") == [] and ask("good")["ok"]


def test_a_call_that_spells_a_default_out_is_the_identical_call(home: Home, tmp_path: Path) -> None:
    write_tools(tmp_path)
    words = ["--n", "1.0", "--text", "hello", "--via", "a"]
    plain = (str(tmp_path / "good" / "tool.py"), "danger", str(tmp_path), "--budget", "10ms")
    first, again = (ask_from(tmp_path, tmp_path, *plain, *more) for more in ([], words))
    assert again["error"]["code"] == "INCOMPLETE", again
    assert again["data"]["proposal_id"] == first["data"]["proposal_id"]
    approve_all(home)
    assert ask_from(tmp_path, tmp_path, *plain, *words)["ok"] and lines_of(tmp_path / "done") == ["'good hello 1.0'"]


def test_the_same_arguments_in_another_order_are_the_identical_call(home: Home) -> None:
    """Also where some run as something else."""
    arguments = {"amount": "1e3", "times": "7", "via": "/a", "pin": "1", "tags": ["b"]}

    async def work(inbox: Inbox) -> Any:
        answers = [await call("pay", **arguments), await call("pay", **dict(reversed(arguments.items())))]
        return [await proposal_of(inbox, each) for each in answers]

    first, second = with_inbox(work, home)
    assert first.id == second.id, (first.ask.text, second.ask.text)
