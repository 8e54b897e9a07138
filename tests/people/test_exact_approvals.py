"""An approval holds for one action, as it was when it was proposed."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock import App
from shotclock.calls.call import Call, CallRequest, admit
from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Decision, Kind, ProposalRequest, ProposalStatus
from shotclock.people.approval import Approvals
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store

ADA, AGENT = Principal("ada", Role.OPERATOR), Principal("agent", Role.AGENT)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def asked_of(gate: Approvals, spec: Any, arguments: dict[str, Any], budget_ms: int) -> Any:
    """Ask for a call. Return it where it may run, else its answer."""
    call = admit(spec.name, spec.clocks)
    call.arguments = arguments
    call.request = CallRequest(spec.name, arguments, principal=AGENT, budget_ms=budget_ms)
    return await gate.approve(call) or call


# --- values -------------------------------------------------------------------------------------------------------

texts = st.sampled_from(["", "a", "1", "1.0", "true", "inf", "null", "\u202e", "a\nb", "[]"])
plain = texts | st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, 2.0**53])
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
)


@given(one=values, other=values)
def test_two_values_that_differ_in_anything_have_different_texts(one: Any, other: Any) -> None:
    asks = [ProposalRequest(Kind.OPERATION, "t", operation="o", arguments={"v": value}) for value in (one, other)]
    assert (asks[0].text == asks[1].text) == (json.dumps(one) == json.dumps(other))
    assert (asks[0].action_hash == asks[1].action_hash) == (asks[0].text == asks[1].text)


def test_a_call_inside_another_with_an_argument_that_is_not_json_is_refused(tmp_path: Path) -> None:
    app = App("exact")

    @app.command(approval=True)
    def do(v: Any) -> None: ...

    async def scenario() -> Any:
        with Store.open(tmp_path) as store:
            inbox = Inbox(store)
            try:
                call = admit("do", app.catalogue().commands[0].clocks)
                call.arguments = {"v": b"abc"}
                return await Approvals(app.catalogue(), lambda: inbox).approve(call), await inbox.list()
            finally:
                await inbox.close()

    refused, proposals = run(scenario())
    assert refused.problem.code == "ARG_ERROR" and refused.problem.message.startswith("v: must be") and not proposals


# --- between the question and the run -----------------------------------------------------------------------------


def asked_while(home: Path, app: App, arguments: dict[str, Any], meanwhile: Callable[[], object]) -> Any:
    """What became of a call that was approved while it waited, after something else had happened."""

    async def scenario() -> Any:
        with Store.open(home) as store:
            inbox = Inbox(store)
            [spec] = app.catalogue().commands
            gate = Approvals(app.catalogue(), lambda: inbox)
            try:
                asking = asyncio.ensure_future(asked_of(gate, spec, arguments, budget_ms=2_000))
                while not (found := await inbox.list(status=ProposalStatus.PENDING)):
                    await asyncio.sleep(0.01)
                meanwhile()
                await inbox.decide(found[0].id, Decision(ProposalStatus.APPROVED), ADA)
                answer = await asking
                return answer if isinstance(answer, Call) else answer.problem.code
            finally:
                await inbox.close()

    return run(scenario())


@pytest.mark.parametrize("goes", [True, False])
def test_a_yes_does_not_hold_where_the_directory_is_another_by_then(
    goes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("remover")

    @app.command(approval=True)
    def remove(path: str) -> None: ...

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    answer = asked_while(
        tmp_path / "home", app, {"path": "x"}, lambda: os.chdir(tmp_path / "elsewhere") if goes else None
    )
    if goes:
        assert answer == "ACTION_CHANGED"
    else:
        assert isinstance(answer, Call)


@pytest.mark.parametrize("changes", [True, False])
def test_a_yes_does_not_hold_where_the_file_is_another_by_then(changes: bool, tmp_path: Path) -> None:
    app, path = App("writer"), tmp_path / "policy"
    path.write_text("old")

    @app.command(approval={"file": {"path": str(path), "proposed": "text"}})
    def put(text: str) -> None: ...

    answer = asked_while(
        tmp_path / "home", app, {"text": "new"}, lambda: path.write_text("somebody was faster" if changes else "old")
    )
    if changes:
        assert answer == "ACTION_CHANGED"
    else:
        assert isinstance(answer, Call) and answer.arguments["text"] == "new"
