"""`shotclock token`: shown once, kept as a hash, of use until it is revoked."""

from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from shotclock.supervise.clock import wall_ns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def who_is(token: str) -> Principal | None:
    with Store.open() as store:
        return Access(store).authenticate(token, WallTime.of_ns(wall_ns()))


def test_a_token_is_of_use_until_it_is_revoked_by_name_or_by_id(
    shotclock: Any, validate_envelope: Any, home: Path
) -> None:
    ran = shotclock("token", "create", "--role", "agent", "builder")
    made = validate_envelope(ran.json())["data"]
    assert ran.code == 0
    assert (made["name"], made["role"], made["status"], made["expires_at"]) == ("builder", "agent", "active", None)
    assert who_is(made["token"]) == Principal("builder", Role.AGENT)
    kept = b"".join(file.read_bytes() for file in home.rglob("*") if file.is_file())
    assert made["token"].encode() not in kept, "only its hash is kept"
    again = shotclock("token", "create", "--role", "operator", "builder")
    assert (again.code, validate_envelope(again.json())["error"]["errors"][0]["field"]) == (2, "name")
    ran = shotclock("token", "revoke", "builder")
    assert [each["status"] for each in validate_envelope(ran.json())["data"]["revoked"]] == ["revoked"]
    assert who_is(made["token"]) is None
    other = shotclock("token", "create", "--role", "operator", "builder", "--ttl", "30d").json()["data"]
    assert who_is(other["token"]) == Principal("builder", Role.OPERATOR)
    assert shotclock("token", "revoke", other["id"]).code == 0
    assert who_is(other["token"]) is None
    listed = validate_envelope(shotclock("token", "list").json())
    assert [each["status"] for each in listed["data"]["tokens"]] == ["revoked", "revoked"]
    assert "shotclock_" not in str(listed["data"])
    actions = [entry["action"] for entry in shotclock("inbox", "audit").json()["data"]["entries"]]
    assert actions == ["token-issued", "token-revoked", "token-issued", "token-revoked"]


def test_on_a_terminal_the_token_alone_is_on_stdout(on_terminal: Any) -> None:
    seen = on_terminal("token", "create", "--role", "operator", "ada", "--ttl", "12h", streams=("stdout",))
    assert seen.code == 0
    assert who_is(seen.screen.strip()) == Principal("ada", Role.OPERATOR)
    assert b"only time" in seen.stderr
    table = on_terminal("token", "list", streams=("stdout",)).screen
    assert "ada" in table and "operator" in table and "active" in table and "11h59m" in table
    assert "shotclock_" not in table


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        (["create", "ada"], 2, {"role"}),
        (["create", "--role", "king", "ada"], 2, {"role"}),
        (["create", "--role", "agent"], 2, {"name"}),
        (["create", "--role", "agent", "a b"], 2, {"name"}),
        (["create", "--role", "agent", "\x1b[31m"], 2, {"name"}),
        (["create", "--role", "agent", "ada", "--ttl", "soon"], 2, {"ttl"}),
        (["create", "--role", "agent", "ada", "--ttl", "0"], 2, {"ttl_ms"}),
        (["revoke"], 2, {"name"}),
        (["revoke", "nobody"], 5, None),
        (["steal"], 2, {"verb"}),
        ([], 2, {"verb"}),
    ],
)
def test_what_cannot_be_done_is_refused_and_no_token_is_made(
    words: list[str], code: int, fields: set[str] | None, shotclock: Any, validate_envelope: Any
) -> None:
    ran = shotclock("token", *words)
    error = validate_envelope(ran.json())["error"]
    assert ran.code == code
    assert fields is None or {each["field"] for each in error["errors"]} >= fields
    with Store.open() as store:
        assert Access(store).tokens() == []


def test_help_names_every_verb(shotclock: Any) -> None:
    ran = shotclock("token", "--help")
    assert (ran.code, ran.stderr) == (0, b"")
    assert b"\n  create " in ran.stdout and b"\n  revoke " in ran.stdout
