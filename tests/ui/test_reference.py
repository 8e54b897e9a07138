"""docs/reference/ui.md names every action, param, limit, code and command, and no other."""

import re
from pathlib import Path

from shotclock.ui import payload
from shotclock.ui.cli import TABLE
from shotclock.ui.payload import ACTION_TYPES, KEYS, MODES, Matcher

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "ui.md").read_text("utf-8")


def rows(heading: str) -> dict[str, str]:
    """The rows of the first table below a heading, by what their first cell begins with."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^\| `([^`]+)`(.*)$", section, re.MULTILINE)
    return dict(lines)


def test_every_action_is_there_with_its_params() -> None:
    found = rows("Actions")
    assert set(found) == set(ACTION_TYPES)
    for name, kind in ACTION_TYPES.items():
        params = found[name].split(" | ")[1]
        for info in kind.model_fields.values():
            assert f"`{info.keys[0]}`" in params, (name, info.keys)


def test_every_key_mode_and_matcher_is_there() -> None:
    for word in (*KEYS, *MODES, *(info.keys[0] for info in Matcher.model_fields.values())):
        assert f"`{word}`" in PAGE, word


def test_the_limits_are_those_of_the_code() -> None:
    for number in (
        f"{payload.MIN_TIMEOUT_MS} to {payload.MAX_TIMEOUT_MS}",
        f"above 0, at most {payload.MAX_NAVIGATION_MS} | required",
        f"above 0, at most {payload.MAX_WAIT_MS}",
        f"0 to {payload.MAX_SLEEP_MS}",
        f"{payload.BEST_EFFORT_MAX_STEPS} actions and {payload.BEST_EFFORT_MAX_TIMEOUT_MS} ms at most",
        f"1 to {payload.MAX_ACTIONS} actions",
        f"{payload.MAX_PAYLOAD_BYTES:,} bytes",
    ):
        assert number in PAGE, number


def test_every_command_is_there() -> None:
    section = PAGE.split("\n## The commands\n", 1)[1].split("\n## ", 1)[0]
    assert {command.name for command in TABLE.commands} == set(re.findall(r"`ui ([a-z-]+)", section))
