"""Runs on Temporal send no notifications, and say so."""

from pathlib import Path

import pytest

from tests.temporal.conftest import Runs

pytestmark = pytest.mark.slow

STEPS = "steps: {a: {exec: 'true'}}\n"


def test_a_file_with_notify_is_refused(runs: Runs) -> None:
    code, answer = runs.run("notify: [{on: [failed], webhook: 'https://example.com'}]\n" + STEPS)
    assert (code, answer["error"]["code"]) == (answer["meta"]["exit_code"], "PRECONDITION")
    assert "`notify` of a file is not sent" in answer["error"]["message"]
    assert answer["meta"]["ending"] == "not_started"


def test_the_answer_warns_where_the_users_file_asks_for_messages_about_runs(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = tmp_path / "shotclock" / "config.toml"
    config.parent.mkdir()
    for events, codes in (('["failed", "proposed"]', ["NOT_NOTIFIED"]), ('["proposed"]', [])):
        config.write_text(f'[[notify]]\non = {events}\nwebhook = "http://127.0.0.1:1/x"\n')
        code, answer = runs.run(STEPS)
        assert (code, [each["code"] for each in answer["warnings"]]) == (0, codes)
