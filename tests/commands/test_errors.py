"""`shotclock errors`: the registry as data, as a page, and as a table on a terminal."""

from typing import Any

import pytest

from shotclock.core.errors import error_entries, warning_entries

pytestmark = pytest.mark.usefixtures("no_survivors")


def built_in() -> list[Any]:
    """Without what other tests have registered in this process, as an application would."""
    return [entry for entry in error_entries() if not entry.code.startswith(("TEST_", "ACME_"))]


def test_the_whole_registry_is_printed(shotclock: Any, validate_envelope: Any):
    ran = shotclock("errors")
    data = validate_envelope(ran.json())["data"]
    assert ran.code == 0
    assert {entry["code"] for entry in data["errors"]} == {entry.code for entry in built_in()}
    assert {entry["code"]: entry["summary"] for entry in data["warnings"]} == warning_entries()
    for entry in data["errors"]:
        assert set(entry) == {"code", "exit_code", "http_status", "retryable", "side_effects", "summary", "hint"}


@pytest.mark.parametrize("spelling", ["QUEUE_TIMEOUT", "queue_timeout", "queue-timeout"])
def test_one_code_is_looked_up_however_it_is_spelled(spelling: str, shotclock: Any, validate_envelope: Any):
    data = validate_envelope(shotclock("errors", spelling).json())["data"]
    assert [entry["code"] for entry in data["errors"]] == ["QUEUE_TIMEOUT"]
    assert data["warnings"] == []


def test_a_warning_is_looked_up_as_well(shotclock: Any, validate_envelope: Any):
    data = validate_envelope(shotclock("errors", "SURVIVORS").json())["data"]
    assert data["errors"] == []
    assert [entry["code"] for entry in data["warnings"]] == ["SURVIVORS"]


def test_an_unknown_code_exits_5_with_the_nearest_one(shotclock: Any, validate_envelope: Any):
    ran = shotclock("errors", "TIMEOT")
    envelope = validate_envelope(ran.json())
    assert ran.code == 5
    assert envelope["error"]["suggestion"] == "did you mean TIMEOUT?"
    assert envelope["data"] is None


def test_a_terminal_gets_a_table_with_every_code(on_terminal: Any, monkeypatch: pytest.MonkeyPatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    seen = on_terminal("errors", streams=("stdout", "stderr"), env={"TERM": "xterm", "COLUMNS": "120"})
    assert seen.code == 0
    assert '{"ok"' not in seen.screen
    for entry in built_in():
        assert entry.code in seen.screen
    for code in warning_entries():
        assert code in seen.screen
    one = on_terminal("errors", "TIMEOUT", streams=("stdout", "stderr"), env={"TERM": "xterm", "COLUMNS": "160"})
    assert "only if nothing was changed" in one.screen
