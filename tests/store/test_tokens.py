"""Tokens in the store: a name is unique among the living, and what ends one is written down."""

from pathlib import Path

import pytest

from shotclock.core.errors import Failure
from shotclock.core.value_types import replace
from shotclock.store.audit import Token
from shotclock.store.store import Store
from tests.store.work import NOW, in_children

TOKEN = Token("aaaaaaaa", "bot", "agent", "0" * 64, NOW, NOW + 1000)


def test_a_token_comes_back_whole(store: Store, home: Path):
    store.tokens.add(TOKEN, "root")
    with Store.open(home) as other:
        assert other.tokens.get("aaaaaaaa") == TOKEN
        assert other.tokens.get("bot") is None
        assert other.tokens.list() == [TOKEN]


def test_a_name_is_unique_among_the_living(store: Store):
    store.tokens.add(TOKEN, "root")
    with pytest.raises(Failure, match="active token") as refused:
        store.tokens.add(replace(TOKEN, id="bbbbbbbb"), "root")
    assert refused.value.code == "ARG_ERROR"
    store.tokens.add(replace(TOKEN, id="bbbbbbbb", created_at=NOW + 1000, expires_at=None), "root")
    assert store.tokens.revoke("bbbbbbbb", "root", NOW + 1001)
    store.tokens.add(replace(TOKEN, id="cccccccc", created_at=NOW + 1002), "root")


def test_a_token_is_revoked_once_by_id_or_by_name_and_both_are_in_the_trail(store: Store):
    store.tokens.add(TOKEN, "root")
    store.tokens.add(replace(TOKEN, id="bbbbbbbb", name="other"), "root")
    assert [token.id for token in store.tokens.revoke("bot", "ann", NOW)] == ["aaaaaaaa"]
    assert store.tokens.revoke("aaaaaaaa", "ann", NOW) == []
    assert store.tokens.revoke("nobody", "ann", NOW) == []
    assert [token.id for token in store.tokens.revoke("bbbbbbbb", "ann", NOW)] == ["bbbbbbbb"]
    assert all(not token.is_active(NOW) for token in store.tokens.list())
    entries = store.audit.entries()
    assert [entry.action for entry in entries] == ["token-issued"] * 2 + ["token-revoked"] * 2
    assert "0" * 64 not in str([entry.details for entry in entries]), "the hash of a token is nobody's business"


def test_a_token_lives_until_it_expires(store: Store):
    assert TOKEN.is_active(NOW + 999) and not TOKEN.is_active(NOW + 1000)
    assert replace(TOKEN, expires_at=None).is_active(NOW + 10**10)


def add_one(number: int, home: Path) -> bool:
    with Store.open(home) as store:
        try:
            store.tokens.add(replace(TOKEN, id=f"aaaaaaa{number}"), "root")
        except Failure:
            return False
        return True


@pytest.mark.usefixtures("no_survivors")
def test_of_processes_that_take_a_name_at_once_one_gets_it(store: Store, home: Path):
    assert sorted(in_children(4, add_one, home)) == [False, False, False, True]
