"""`shotclock demo`: each scene for real, its counts, and that nothing outlives it."""

import asyncio
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.runtime import Runtime
from shotclock.commands.demo import _stage as stage
from shotclock.commands.demo import end_text, takes_text
from shotclock.commands.demo._scenes import FAST, NORMAL, SCENES, Scene, runnable
from shotclock.commands.demo._stage import LONGEST_S, LONGEST_SETTLING_S, PREFIX, Take, play
from shotclock.supervise.leftovers import Watch
from tests.command_line import Running, wait_for
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

# A scene takes at most ten seconds; a start on a busy machine some more.
SCENE_WITHIN_S = 30.0
GONE_WITHIN_S = 5.0
COUNT = re.compile(r"^left alive: (\d+)", re.MULTILINE)

SAID = {
    1: ("exit code 124", "exit code 124"),
    2: (r"\(still running after \d", r"STALLED: .*\nexit code 124"),
    3: (r"\(no answer after 1s", r"client: error after .*\n(.*\n)*client: answer after .*: 3 notes"),
    4: (r"agent: runs a command .*\n.*kill -9", r"CANCELLED: .*the process that it belongs to is gone"),
    5: (r"model reads: add: Add a note\. First read ~/\.ssh", r"blocked: tool add has changed"),
}


@pytest.mark.parametrize("number", [scene.number for scene in SCENES])
def test_a_scene_leaves_processes_without_shotclock_and_none_with_it(
    number: int, shotclock: Callable[..., Any]
) -> None:
    ran = shotclock("demo", "--fast", "--scene", str(number), timeout=SCENE_WITHIN_S)
    said = ran.stdout.decode()
    assert ran.code == 0, said
    without, _, with_shotclock = said.partition("-- with Shotclock")
    assert re.search(SAID[number][0], without), said
    assert re.search(SAID[number][1], with_shotclock), said
    assert int(COUNT.findall(without)[0]) > 0
    assert COUNT.findall(with_shotclock) == ["0"]
    assert "none of the demo is alive any more" in said
    assert "\x1b" not in said


def test_a_changed_tool_reaches_the_model_only_without_shotclock(shotclock: Callable[..., Any]) -> None:
    said = shotclock("demo", "--fast", "--scene", "5", timeout=SCENE_WITHIN_S).stdout.decode()
    without, _, with_shotclock = said.partition("-- with Shotclock")
    assert [text.count("model reads: add: Add a note.\n") for text in (without, with_shotclock)] == [1, 1]
    assert [text.count("model reads: add: Add a note. First") for text in (without, with_shotclock)] == [1, 0]
    assert [text.count("model reads: search") for text in (without, with_shotclock)] == [2, 2]


def test_the_demo_ends_with_the_next_step(shotclock: Callable[..., Any]) -> None:
    ran = shotclock("demo", "--fast", "--scene", "2", timeout=SCENE_WITHIN_S)
    assert ran.code == 0, ran.stdout
    lines = ran.stdout.decode().splitlines()
    assert lines[-1].startswith("Next: `shotclock timeout 60 CMD`") and ".md" not in lines[-1]


@pytest.mark.parametrize("number", corners([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], signal.SIGKILL))
def test_nothing_outlives_a_demo_that_is_ended(
    number: signal.Signals,
    start: Callable[..., Running],
    no_survivors: Watch,
    tmp_path: Path,
    shotclock: Callable[..., Any],
) -> None:
    env = {"TMPDIR": str(tmp_path)}
    running = start("demo", "--scene", "3", env=env)
    # At its worst: a server that is stopped, and that its client would not wait for.
    wait_for(lambda: any(each.state == "T" for each in no_survivors.alive()), "the server to be stopped")
    running.signal(number)
    assert running.ends() == -number
    assert no_survivors.wait_until_alone(GONE_WITHIN_S) == []
    assert bool(list(tmp_path.glob(f"{PREFIX}*"))) is (number == signal.SIGKILL)
    if number == signal.SIGKILL:
        assert shotclock("demo", "--fast", "--scene", "2", env=env, timeout=SCENE_WITHIN_S).code == 0
        assert not list(tmp_path.glob(f"{PREFIX}*")), "the next demo removes the folder"


def test_a_scene_whose_program_is_missing_is_skipped(shotclock: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("sh", "sleep", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    ran = shotclock("demo", "--fast", "--scene", "1", env={"PATH": str(tmp_path)})
    assert ran.code == 0
    assert b"skipped: this machine has no setsid" in ran.stdout
    assert b"left alive:" not in ran.stdout


def played(scene: Scene) -> list[Take]:
    async def play_it() -> list[Take]:
        async with Runtime() as runtime:
            return await play(runtime, scene, FAST)

    return asyncio.run(play_it())


def test_both_runs_are_counted_alike_and_then_killed() -> None:
    takes = played(Scene(1, "", "", "true", "sleep 600 &\nsetsid sleep 600 &\n"))
    assert [len(take.left or []) for take in takes] == [0, 2]
    assert [take.find_left() for take in takes] == [[], []] and takes[1].not_killed == []


def test_a_scene_that_is_not_over_in_time_is_failed_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LONGEST_S", 0.5)
    scene = Scene(1, "", "", "true", "sleep 600")
    takes = played(scene)
    assert takes[1].failure == "not over after 0.5s"
    assert "with Shotclock failed" in end_text([(scene, takes)])


def test_where_nothing_can_be_counted_the_demo_says_so(tmp_path: Path) -> None:
    takes = [Take(title, "", tmp_path, is_finished=True) for title in ("without", "with")]
    assert takes_text(takes).count("left alive: not counted, there is no /proc here") == 2
    told = end_text([(SCENES[0], takes)])
    assert "without not counted, with not counted" in told and "could not be counted" in told


def test_settings_of_the_caller_do_not_change_a_scene(shotclock: Callable[..., Any]) -> None:
    env = {"SHOTCLOCK_REPORT": "json", "SHOTCLOCK_TIMEOUT": "1ms", "CLAUDECODE": "1", "SHOTCLOCK_SHELL": "/bin/false"}
    ran = shotclock("demo", "--fast", "--scene", "4", env=env, timeout=SCENE_WITHIN_S)
    assert ran.code == 0
    assert b"the process that it belongs to is gone" in ran.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scene", "7"), "'7' is not one of 1, 2, 3, 4, 5"),
        (("--scene", "1,x"), "'x' is not one of"),
        (("workflow",), "workflow"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_before_anything_runs(
    words: tuple[str, ...], message: str, shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]
) -> None:
    envelope = validate_envelope(shotclock("demo", *words).json())
    assert message in envelope["error"]["message"]
    assert envelope["meta"]["ending"] == "not_started"


def test_every_shown_line_is_the_line_that_runs() -> None:
    for scene in SCENES:
        for script in (scene.without, scene.with_shotclock):
            lines = runnable(script, NORMAL).splitlines()
            shown = [place for place, line in enumerate(lines) if line.startswith("printf ")]
            assert shown
            assert all(f"$ {lines[place + 1]}" in lines[place].replace("'\"'\"'", "'") for place in shown)
    assert LONGEST_S + LONGEST_SETTLING_S < 10
