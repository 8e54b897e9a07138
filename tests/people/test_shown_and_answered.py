"""Proposals as JSON, in and out, what an operator's change becomes, and the answer to the agent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.catalogue import ApprovedFile, CommandSpec, HandlerReference
from shotclock.core.errors import Ending, Failure
from shotclock.core.limits import WallTime
from shotclock.core.proposal import (
    ActionOutcome,
    Decision,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    Runner,
)
from shotclock.core.value_types import replace
from shotclock.people import approval, cli_editing, inbox, proposal_json
from shotclock.people.person_wait import LastUse, outcome_of, run_of
from shotclock.people.proposal_json import (
    compared_with,
    form,
    parse_exact_arguments,
    read_decision,
    read_number,
    read_request,
)
from shotclock.supervise.clock import wall_time
from shotclock.supervise.kernel import this_process
from tests.people.work import AGENT, ANN

OPERATION = ProposalRequest(Kind.OPERATION, "t", operation="run r-1 step s", arguments={"a": 1}, dispatched=True)
APPROVED, MODIFIED, REJECTED, EXPIRED = (
    ProposalStatus(name) for name in ("approved", "modified", "rejected", "expired")
)
FAR = WallTime(3_000_000_000_000)


def proposal(
    status: ProposalStatus = ProposalStatus.PENDING, ask: ProposalRequest = OPERATION, **fields: Any
) -> Proposal:
    if status.is_decided:
        fields = {"decision": Decision(status, "no"), "decided_by": "ann", "decided_at": wall_time(), **fields}
    return replace(Proposal("p-1", ask, "bot", None, ask.action_hash, status, WallTime(1), FAR), **fields)


def fields_of(work: Any, *arguments: Any) -> list[str]:
    with pytest.raises(Failure) as found:
        work(*arguments)
    errors: Any = found.value.context["errors"]
    return [each["field"] for each in errors]


def file_of(path: Path, current: str | None = None, was_read: bool = False) -> ProposalRequest:
    return read_request({"title": "f", "file": {"path": str(path), "proposed": "new", "current": current}})


def test_a_request_and_a_decision_are_read_and_every_unknown_field_is_named() -> None:
    asked = read_request({"title": "t", "operation": "o", "policy": {"ttl": "5m", "remind_ms": 3, "deciders": ["ann"]}})
    assert (asked.kind, asked.policy) == (Kind.OPERATION, Policy(300_000, 3, deciders=("ann",)))
    assert read_request({"choices": ["a"]}).kind is Kind.QUESTION and read_request({"choices": ["a"]}).choices == ("a",)
    for body, fields in (
        ({"dispatched": True, "kind": []}, ["dispatched", "kind"]),
        ({"file": {"path": "x"}}, ["file"]),
        ({"file": {"path": "x", "proposed": "", "was_read": True}}, ["file.was_read"]),
        ({"policy": {"ttl": "soon", "x": 1}}, ["policy.x", "policy.ttl"]),
        ({"policy": []}, ["policy"]),
    ):
        assert fields_of(read_request, body) == fields, body
    decided = read_decision({"status": "modified", "arguments_text": '{"a": 9007199254740993}'})
    assert (decided.status, decided.arguments) == (MODIFIED, {"a": 2**53 + 1})
    assert fields_of(read_decision, {"status": "maybe", "x": 1}) == ["x", "status"]
    for text in (None, "[1]", "{", '{"a": NaN}', '{"a": 1, "a": 2}'):
        with pytest.raises(ValueError):
            parse_exact_arguments(text)
    assert read_number("12", "n", 1, 12) == 12 and fields_of(read_number, 13, "n", 1, 12) == ["n"]
    assert fields_of(read_number, "1" * 20, "n", 1, 2**60) == fields_of(read_number, 0, "n", 1, 12) == ["n"]
    assert proposal_json.parse_object(b'{"a": 1}') == {"a": 1} and fields_of(proposal_json.parse_object, b"[]") == [
        "body"
    ]


def test_a_proposed_file_is_compared_with_what_an_operator_would_find(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, current, who, before, source, contradicts in (
        (None, None, ANN, None, "nothing", False),
        (None, "old", ANN, "old", "claim", False),
        ("there", None, ANN, "there", "read", False),
        ("new", None, ANN, None, "same", False),
        ("there", "old", ANN, "there", "read", True),
        ("there", "there", ANN, "there", "read", False),
        ("there", "old", AGENT, "old", "claim", False),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        compared = compared_with(proposal(ask=file_of(path, current)), who)
        assert (compared.before, compared.source, compared.contradicts) == (before, source, contradicts)
    ended = compared_with(proposal(REJECTED, file_of(path, "old")), ANN)
    assert ended.source == "claim" and compared_with(proposal(), ANN).source == "nothing"
    assert (
        approval.digest_of_file(str(path)).startswith("sha256 ") and approval.digest_of_file("/none") == "no such file"
    )
    assert approval.digest_of_file("/dev/null") == "not a regular file"
    with pytest.raises(Failure):
        proposal_json.read_text_file("/dev/null")


def test_what_a_person_is_shown_has_every_character_visible_and_numbers_as_text() -> None:
    schema = {
        "properties": {"a": {"type": "integer", "enum": [1, 2], "description": "d\u202e"}, "b": {}},
        "required": ["b"],
    }
    first, second = form(replace(OPERATION, input_schema=schema), {"a": 2**53 + 1})
    assert (first["text"], first["options"], first["description"]) == ("9007199254740993", ["1", "2"], "d<U+202E>")
    assert (second["text"], second["kind"], second["required"], first["required"]) == (None, None, True, False)
    assert [form(OPERATION, {"x": each})[0]["kind"] for each in (True, "", 1, 1.5, [])] == [
        "boolean", "string", "integer", "number", None,
    ]  # fmt: skip
    ask = replace(OPERATION, title="a\u202eb", policy=Policy(deciders=("ann",), destructive=True))
    shown = proposal_json.whole(proposal(MODIFIED, ask, decision=Decision(MODIFIED, arguments={"a": 2})), ANN)
    assert shown["shown"]["title"] == "a<U+202E>b" and shown["may_decide"] and shown["_trusted"] is False
    assert "a: 2" in shown["shown"]["modified"] and shown["confirmation"] == "run r-1 step s"
    assert shown["arguments_text"] == '{\n  "a": 1\n}' and shown["created_at"] == "1970-01-01T00:00:00.001Z"
    for who in (AGENT, Principal("bob", Role.OPERATOR)):
        assert not proposal_json.summary(proposal(ask=ask).summary, who)["may_decide"]


def test_the_state_of_an_approved_action_and_the_answer_to_its_agent() -> None:
    here, gone = this_process(), replace(this_process(), started=1)
    at = wall_time()
    for fields, state in (
        ({}, "not_started"),
        ({"used_at": at, "runner": Runner(here)}, "running"),
        ({"used_at": at, "runner": Runner(gone)}, "unknown"),
        ({"used_at": at, "outcome": ActionOutcome(True, at)}, "succeeded"),
        ({"used_at": at, "outcome": ActionOutcome(False, at, "X")}, "failed"),
    ):
        run = run_of(proposal(APPROVED, **fields), dispatched=True)
        assert run is not None and run["state"] == state
    assert run_of(proposal(APPROVED), dispatched=False) is None and run_of(proposal(REJECTED), dispatched=True) is None
    waiting = run_of(proposal(APPROVED), True, LastUse(FAR))
    assert waiting == {"state": "not_started", "at": None, "run_id": "r-1", "until": FAR.iso()}
    missed = run_of(proposal(APPROVED, replace(OPERATION, operation="o")), True, LastUse(WallTime(1), "r-2"))
    assert missed is not None and (missed["state"], missed["run_id"]) == ("missed", "r-2")
    assert run_of(proposal(EXPIRED, runner=Runner(here)), True) == {"state": "running", "at": None}
    for made, code, ending in (
        (proposal(APPROVED), None, Ending.NOT_STARTED),
        (proposal(APPROVED, replace(OPERATION, dispatched=False)), None, Ending.FINISHED),
        (proposal(), "INCOMPLETE", Ending.NOT_STARTED),
        (proposal(REJECTED), "PROPOSAL_REJECTED", Ending.NOT_STARTED),
        (proposal(EXPIRED), "PROPOSAL_EXPIRED", Ending.NOT_STARTED),
        (proposal(ProposalStatus.WITHDRAWN), "PROPOSAL_WITHDRAWN", Ending.NOT_STARTED),
    ):
        outcome: Any = outcome_of(made, 5, 10)
        assert (None if outcome.problem is None else outcome.problem.code, outcome.ending) == (code, ending)
    data: Any = outcome_of(proposal(), 5, 10, "again").data
    assert (data["continue_command"], data["cancel_command"]) == ("again", "shotclock inbox withdraw p-1")
    resumed: Any = outcome_of(proposal(APPROVED), 5, 10).data
    assert resumed["continue_command"] == "shotclock run --resume r-1"


def test_a_change_runs_with_hidden_values_restored_and_the_callers_own_objects(tmp_path: Path) -> None:
    class Box:
        async def digest_of_hidden(self, text: str) -> str:
            return text[::-1]

    async def hide(value: Any, place: str = "arguments") -> tuple[Any, list[str]]:
        hidden: list[str] = []
        redact = lambda text: text.replace("pw", "***")  # noqa: E731
        return await inbox.hide_secrets(Box(), redact, value, place, hidden), hidden  # type: ignore[arg-type]

    real = {"a": ["x pw", 1], "pw1": 2, "pw2": 3}
    shown, hidden = asyncio.run(hide(real))
    assert shown == {"a": ["x ***", 1], "***1": 2, "***2": 3} and hidden[0] == "arguments.a[0]: wp x"
    assert asyncio.run(hide({"TOKEN": "t", "X": "t"}, "environment"))[0] == {"TOKEN": "***", "X": "t"}
    assert inbox.restore_hidden({"a": ["x ***", 2]}, shown, real) == {"a": ["x pw", 2]}
    assert inbox.restore_hidden({"a": ["y ***"]}, shown, real) == {"a": ["y ***"]}, "an edited text is the operator's"
    spec, given = CommandSpec("c", HandlerReference("m", "c")), {"a": (mine := [1]), "b": 1}
    made = proposal(MODIFIED, replace(OPERATION, arguments={"a": [1], "b": 1, "d": 0}))
    made = replace(made, decision=Decision(MODIFIED, arguments={"a": [1], "b": 5, "d": 0}))
    approved = approval._make_approved_arguments(spec, given, made)
    assert approved == {"a": [1], "b": 5} and approved["a"] is mine, "a default that was only shown is not passed"
    assert approval._make_approved_arguments(spec, given, proposal(APPROVED)) is given
    written = replace(spec, approved_file=ApprovedFile("/f", "text", "decision"))
    answered = approval._make_approved_arguments(written, {"text": "x"}, proposal(APPROVED, file_of(tmp_path)))
    assert answered["text"] == "new" and answered["decision"]["file"]["path"] == "/f"  # type: ignore[index]
    changed = cli_editing._decision(proposal(), '{"a": 2}', "n")
    assert (changed.status, changed.arguments, changed.notes) == (MODIFIED, {"a": 2}, "n")
    for text in ('{"a": 1}', "{", '{"a": NaN}'):
        assert fields_of(cli_editing._decision, proposal(), text, "") == ["file"], text
    summary = {"most_ms": 90, "asked_ms": 200, "elapsed_ms": 1, "remaining_ms": 5, "granted_ms": 0, "has_grown": True}
    assert list(approval._choices(summary, 50)) == ["50ms more", "90ms more", "no more time"]
    text = approval._describe({**summary, "progress": [], "calls": [], "stdout": "out", "stderr": " "})
    assert "stopped in 5ms" in text and "has grown" in text and "stdout:\nout" in text and "stderr" not in text
