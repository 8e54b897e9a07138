"""Tokens: who has one is somebody, who has anything else is nobody, and only operators hand them out."""

from pathlib import Path

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.errors import Failure
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Kind, Proposal, ProposalRequest, ProposalStatus
from shotclock.core.value_types import replace
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.people.work import AGENT, ANN

NOW = WallTime(1_800_000_000_000)


@pytest.fixture
def access(home: Path):
    with Store.open(home) as store:
        yield Access(store)


@pytest.mark.parametrize("role", Role)
def test_a_token_says_who_its_holder_is(access: Access, role: Role):
    issued = access.issue("bot", role, ANN, NOW)
    assert issued.text.startswith(f"shotclock_{role}_")
    assert access.authenticate(issued.text, NOW) == Principal("bot", role)


def test_the_text_of_a_token_is_nowhere_in_the_home(access: Access, home: Path):
    issued = access.issue("bot", Role.AGENT, ANN, NOW)
    secret = issued.text.split("_", 3)[3]
    for file in home.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file


def test_whatever_is_not_exactly_a_living_token_is_nobody(access: Access):
    text = access.issue("bot", Role.AGENT, ANN, NOW).text
    other = access.issue("other", Role.OPERATOR, ANN, NOW).text
    swapped = "_".join([*text.split("_", 3)[:3], other.split("_", 3)[3]])
    raised = text.replace("_agent_", "_operator_")
    for said in ("", "x", text[:-1], text + "x", text + "\n", " " + text, text.upper(), swapped, raised, "\udcff", "é"):
        assert access.authenticate(said, NOW) is None, said
    assert access.authenticate(text[:-1] + ("a" if text[-1] != "a" else "b"), NOW) is None


def test_an_expired_or_revoked_token_is_nobody(access: Access):
    expiring = access.issue("one", Role.AGENT, ANN, NOW, ttl_ms=1000)
    assert access.authenticate(expiring.text, NOW + 999) is not None
    assert access.authenticate(expiring.text, NOW + 1000) is None
    revoked = access.issue("two", Role.OPERATOR, ANN, NOW)
    assert [token.name for token in access.revoke("two", ANN, NOW)] == ["two"]
    assert access.authenticate(revoked.text, NOW) is None
    assert access.revoke("two", ANN, NOW) == []
    assert {token.name for token in access.tokens()} == {"one", "two"}


def test_agents_neither_issue_nor_revoke(access: Access):
    access.issue("bot", Role.AGENT, ANN, NOW)
    for attempt in (lambda: access.issue("x", Role.AGENT, AGENT, NOW), lambda: access.revoke("bot", AGENT, NOW)):
        with pytest.raises(Failure) as refused:
            attempt()
        assert refused.value.code == "NOT_ALLOWED"
    assert len(access.tokens()) == 1


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 65, "-x", "a\n", "ä", "a/b", "<b>", "\x1b[0m", "(clock)"])
def test_a_name_is_plain(access: Access, name: str):
    with pytest.raises(Failure) as refused:
        access.issue(name, Role.AGENT, ANN, NOW)
    assert refused.value.code == "ARG_ERROR"


@pytest.mark.parametrize("ttl_ms", [0, -1, 1.5, True, 10**15])
def test_a_token_lives_for_a_time(access: Access, ttl_ms: int):
    with pytest.raises(Failure) as refused:
        access.issue("x", Role.AGENT, ANN, NOW, ttl_ms=ttl_ms)
    assert refused.value.code == "ARG_ERROR"


def test_tokens_are_in_the_audit_file(access: Access, home: Path):
    access.issue("bot", Role.AGENT, ANN, NOW)
    access.revoke("bot", ANN, NOW)
    lines = (home / "audit.jsonl").read_text().splitlines()
    assert len(lines) == 2 and "token-issued" in lines[0] and "token-revoked" in lines[1]


def test_an_agent_sees_its_own_and_an_operator_all():
    ask = ProposalRequest(Kind.QUESTION, "?")
    mine = Proposal("p-1", ask, "agent", None, ask.action_hash, ProposalStatus.PENDING, NOW, NOW + 1)
    assert AGENT.may_see(mine) and ANN.may_see(mine)
    assert not AGENT.may_see(replace(mine, asked_by="other")) and ANN.may_see(replace(mine, asked_by="other"))


def test_whoever_runs_the_process_is_an_operator():
    local = Principal.local()
    assert local.role is Role.OPERATOR and local.name
