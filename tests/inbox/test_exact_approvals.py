"""A yes holds for one action: values that JSON writes alike are told apart, shown apart and approved apart."""

import asyncio
import collections
import datetime as dt
import decimal
import enum
import ipaddress
import os
import pathlib
import struct
import uuid
import zoneinfo
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PrivateAttr, SecretStr

from shotclock import App
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.inbox.access import Principal, Role
from shotclock.inbox.approval import Approvals
from shotclock.inbox.inbox import Inbox
from shotclock.runtime.call import Call, CallRequest, admit
from shotclock.store.store import Store

ADA, AGENT = Principal("ada", Role.OPERATOR), Principal("agent", Role.AGENT)


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Level(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    RED = "red"


class Text(str):
    pass


class Other(str):
    pass


class Count(int):
    pass


class Pair(collections.namedtuple("Pair", "a b")):
    pass


@dataclass
class Order:
    a: Any = 1
    _hidden: Any = 0
    quiet: Any = field(default=0, repr=False, compare=False)


class Model(BaseModel):
    a: Any = 1
    left_out: Any = Field(default=0, exclude=True)
    _private: Any = PrivateAttr(0)


def with_private(value: Any) -> Model:
    made = Model()
    made._private = value
    return made


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def asked_of(gate: Approvals, spec: Any, arguments: dict[str, Any], budget_ms: int) -> Any:
    """Ask for a call. Return it where it may run, else its answer."""
    call = admit(spec.name, spec.clocks, arguments=arguments)
    call.request = CallRequest(spec.name, arguments, principal=AGENT, budget_ms=budget_ms)
    return await gate.approve(call) or call


class Gate:
    """One gate before a command that takes anything, with a store of its own."""

    def __init__(self, home: Path) -> None:
        app = App("exact")

        @app.command(approval=True)
        def do(v: Any) -> None: ...

        self._home, self._catalogue = home, app.catalogue()

    def ask(self, *values: Any, approve_first: bool = False) -> list[Any]:
        async def scenario() -> list[Any]:
            with Store.open(self._home) as store:
                inbox = Inbox(store)
                gate = Approvals(self._catalogue, lambda: inbox)
                [spec] = self._catalogue.commands
                told: list[Any] = []
                try:
                    for value in values:
                        told.append(await asked_of(gate, spec, {"v": value}, budget_ms=0))
                        if approve_first and len(told) == 1:
                            await inbox.decide(told[0].data["proposal_id"], Decision(ProposalStatus.APPROVED), ADA)
                finally:
                    await inbox.close()
                return told

        answers: list[Any] = run(scenario())
        return answers

    def proposals(self, *values: Any) -> list[Proposal | str]:
        """What each is asked as; the reason where nobody is asked because it cannot be told apart."""
        found: list[Proposal | str] = []
        for value in values:
            [asked] = self.ask(value)
            if asked.problem.code == "ARG_ERROR":
                found.append(asked.problem.message)
                continue
            with Store.open(self._home) as store:
                proposal = store.proposals.get(asked.data["proposal_id"])
            assert proposal is not None
            found.append(proposal)
        return found


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    for name in ("SHOTCLOCK_INBOX_LIMIT_EACH", "SHOTCLOCK_INBOX_LIMIT"):
        monkeypatch.setenv(name, "100000")
    yield Gate(tmp_path)


# --- the property -------------------------------------------------------------------------------------------------

texts = st.sampled_from(["", "a", "1", "1.0", "true", "inf", "nan", "YWJj", "2026-01-01", "red", "/a", "PT1S"])
zones = st.sampled_from([None, dt.UTC, dt.timezone(dt.timedelta(hours=1)), zoneinfo.ZoneInfo("Europe/Berlin")])
moments = st.builds(
    lambda hour, zone, fold: dt.datetime(2026, 1, 1, hour, tzinfo=zone, fold=fold),
    st.integers(0, 2), zones, st.integers(0, 1),
)  # fmt: skip
keys = st.one_of(texts, st.sampled_from([1, 1.5, True, None, b"a", dt.date(2026, 1, 1), Colour.RED, Text("a")]))
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 2.0**53]),
    texts,
    texts.map(Text),
    texts.map(Other),
    st.integers(0, 2).map(Count),
    st.binary(max_size=3),
    st.sampled_from([*Colour, *Level, *Word]),
    st.sampled_from([dt.date(2026, 1, 1), dt.time(1), dt.time(1, fold=1), dt.timedelta(seconds=1)]),
    moments,
    st.sampled_from(["1", "1.0", "NaN", "inf"]).map(decimal.Decimal),
    st.sampled_from([uuid.UUID(int=1), uuid.UUID(int=1, is_safe=uuid.SafeUUID.safe), ipaddress.ip_address("::1")]),
    texts.map(pathlib.Path),
    texts.map(pathlib.PurePosixPath),
    st.sampled_from([Fraction(1, 2), 1j, range(3), SecretStr("a"), SecretStr("b")]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=2)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(collections.deque),
        st.lists(hashable, max_size=2).map(set),
        st.lists(hashable, max_size=2).map(frozenset),
        st.binary(max_size=2).map(bytearray),
        st.dictionaries(keys, inner, max_size=2),
        st.dictionaries(texts, inner, max_size=2).map(collections.OrderedDict),
        st.builds(Order, inner, inner, inner),
        st.builds(Model, a=inner, left_out=inner),
        st.builds(with_private, inner),
        st.builds(Pair, inner, inner),
    )


anything = st.recursive(hashable, containers, max_leaves=4)


def strict(value: Any) -> Any:
    """Equal exactly where nothing that runs could tell the two apart. Made without the code under test."""
    kind = type(value).__qualname__
    if isinstance(value, dict):
        return kind, tuple((strict(name), strict(each)) for name, each in value.items())
    if isinstance(value, set | frozenset):
        return kind, tuple(sorted(map(repr, map(strict, value))))
    if isinstance(value, list | tuple | collections.deque):
        return kind, tuple(map(strict, value))
    if isinstance(value, Order):
        return kind, strict(vars(value))
    if isinstance(value, Model):
        return kind, strict(vars(value)), strict(value.model_fields_set), strict(value._private)
    if isinstance(value, SecretStr):
        return kind, value.get_secret_value()
    if isinstance(value, uuid.UUID):
        return kind, value.int, value.is_safe.name
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    return kind, repr(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(one=anything, other=anything)
@example(one=float("inf"), other="inf")
@example(one=b"abc", other="YWJj")
@example(one={1: "a"}, other={"1": "a"})
def test_two_values_that_differ_in_anything_never_share_an_approval(gate: Gate, one: Any, other: Any) -> None:
    first, second = gate.proposals(one, other)
    if isinstance(first, str) or isinstance(second, str):
        return  # nobody is asked about what cannot be told apart
    assert (first.id == second.id) == (strict(one) == strict(other)), (first.ask.text, second.ask.text)
    assert (first.ask.text == second.ask.text) == (first.id == second.id), "what differs is shown differently"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(value=anything)
def test_what_is_not_json_is_another_value_than_its_json(gate: Gate, value: Any) -> None:
    asked, *_ = gate.proposals(value)
    if isinstance(asked, str):
        return
    written = (asked.ask.arguments or {})["v"]
    [plain] = gate.proposals(written)
    assert isinstance(plain, Proposal) and plain.ask.arguments == asked.ask.arguments
    assert (plain.id == asked.id) == (strict(written) == strict(value)), (plain.ask.text, asked.ask.text)


ALIKE = [
    (float("inf"), "inf"),
    (float("nan"), "nan"),
    (float("nan"), struct.unpack(">d", b"\xff\xf8\0\0\0\0\0\0")[0]),
    (b"abc", "YWJj"),
    (b"abc", bytearray(b"abc")),
    ({1: "x"}, {"1": "x"}),
    ({True: 1}, {"true": 1}),
    ({1: "x"}, {True: "x"}),
    ({b"a": 1}, {"a": 1}),
    ((1, 2), [1, 2]),
    ({1, 2}, [1, 2]),
    ({1, 2}, frozenset([1, 2])),
    (dt.date(2026, 1, 1), "2026-01-01"),
    (Path("/a"), "/a"),
    (decimal.Decimal("1.0"), "1.0"),
    (uuid.UUID(int=1), str(uuid.UUID(int=1))),
    (Colour.RED, "red"),
    (Word.RED, Colour.RED),
    (Level.ONE, Colour.ONE),
    (Level.ONE, 1),
    (Text("a"), "a"),
    (Text("a"), Other("a")),
    (Count(1), 1),
    (1, 1.0),
    (1, True),
    (Order(1), {"a": 1, "quiet": 0}),
    (Order(1, 0), Order(1, 1)),
    (Order(1, 0, 0), Order(1, 0, 1)),
    (Model(a=1), {"a": 1}),
    (Model(a=1), Model()),
    (Model(left_out=1), Model(left_out=2)),
    (with_private(1), with_private(2)),
    (SecretStr("a"), SecretStr("b")),
    (dt.datetime(2026, 10, 25, 2, 30, fold=0), dt.datetime(2026, 10, 25, 2, 30, fold=1)),
    (dt.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
     dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))),
    (collections.OrderedDict(a=1), {"a": 1}),
    (collections.defaultdict(int, {"a": 1}), collections.defaultdict(None, {"a": 1})),
    (collections.deque([1]), collections.deque([1], maxlen=1)),
    ([b"a", "YQ=="], ["YQ==", b"a"]),
    ({"a": {"b": b"a"}}, {"a.b": b"a"}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=[f"{one!r} {other!r}"[:60] for one, other in ALIKE])
def test_a_yes_to_one_lets_what_json_writes_alike_not_pass(gate: Gate, one: Any, other: Any) -> None:
    first, second, again = gate.ask(one, other, one, approve_first=True)
    assert not isinstance(second, Call) and second.data["proposal_id"] != first.data["proposal_id"]
    assert isinstance(again, Call), "the same once more is what was approved"


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
