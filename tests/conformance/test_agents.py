"""Five coding agents, each with and without the installation: the end of commands that go wrong.

Without the installation the outcome is only recorded. The table of docs/howto/agents.md is from here:
each observation is a line of the file `observations` in the folder of the agents.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.agents._status import codex_hash
from tests.conformance.coding_agents import AGENTS, DENIED, CodingAgent, Place
from tests.conformance.session import FOLDER, PROGRAMS, START_S, Session, session, wait_until

pytestmark = pytest.mark.timeout(300)
each_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
BOUND_S = 30.0  # after which a command without limits counts as hung
GONE_S = 2.0  # the promise for an agent that was killed; the rest of the bound is for a busy machine
SLACK_S = 10.0


def observe(agent: CodingAgent, scenario: str, installed: bool, text: str) -> None:
    with open(FOLDER / "observations", "a", encoding="utf-8") as file:
        file.write(json.dumps({"agent": agent.name, "scenario": scenario, "installed": installed, "seen": text}) + "\n")


def outcome(running: Session, within_s: float) -> tuple[str | None, str]:
    """Return the result for the model, and the outcome in words."""
    result = running.result(within_s)
    took = f"{running.elapsed_s:.0f} s"
    left = len(running.left())
    return result, f"{'no answer' if result is None else 'answer'} after {took}, {left} processes left"


@each_agent
def test_a_hung_command_is_stopped_and_the_model_is_told(agent: CodingAgent, tmp_path: Path) -> None:
    command = "echo begun; tail -f MARK"
    with session(agent, tmp_path / "without", command, installed=False) as running:
        result, text = outcome(running, BOUND_S)
        observe(agent, "hung", False, f"{text}: {(result or '')[-300:]}")
    with session(agent, tmp_path / "with", command, installed=True) as running:
        result, text = outcome(running, START_S)
        observe(agent, "hung", True, f"{text}: {(result or '')[-300:]}")
        assert result is not None
        assert "TIMEOUT" in result
        assert "begun" in result
        assert not running.left()


@each_agent
def test_a_leaked_daemon_is_stopped_with_its_command(agent: CodingAgent, tmp_path: Path) -> None:
    command = "setsid tail -f MARK </dev/null >/dev/null 2>&1 & echo started"
    with session(agent, tmp_path / "without", command, installed=False) as running:
        result, text = outcome(running, BOUND_S)
        assert running.process is not None
        wait_until(lambda: running.process is not None and running.process.poll() is not None, BOUND_S)
        ended = "ended" if running.process.poll() is not None else "still runs"
        observe(agent, "daemon", False, f"{text}; the agent {ended}, {len(running.left())} processes left")
    with session(agent, tmp_path / "with", command, installed=True) as running:
        result, text = outcome(running, START_S)
        observe(agent, "daemon", True, f"{text}: {(result or '')[-300:]}")
        assert result is not None
        assert "started" in result
        assert not running.left()


@each_agent
def test_a_prompt_for_input_does_not_hang(agent: CodingAgent, tmp_path: Path) -> None:
    command = "read -r -p 'Overwrite? ' answer; echo \"answer: [$answer]\"; true MARK"
    for installed in (False, True):
        with session(agent, tmp_path / str(installed), command, installed=installed) as running:
            result, text = outcome(running, START_S if installed else BOUND_S)
            observe(agent, "prompt", installed, f"{text}: {(result or '')[-300:]}")
            if installed:
                assert result is not None
                assert "INPUT_WANTED" in result or "answer: []" in result


@pytest.mark.parametrize("agent", [each for each in AGENTS if each.background], ids=lambda agent: agent.name)
def test_a_command_in_the_background_lives_past_the_limit_and_ends_with_its_agent(
    agent: CodingAgent, tmp_path: Path
) -> None:
    """The second command is there to outlast the limit of the first, which is 5 seconds."""
    command, then = "tail -f MARK >/dev/null", ("timeout 8 tail -f /dev/null; echo waited",)
    for installed in (False, True):
        folder, arguments = tmp_path / str(installed), agent.background or {}
        with session(agent, folder, command, installed=installed, arguments=arguments, then=then) as running:
            assert running.result(START_S) is not None
            assert running.result(START_S, 1) is not None
            alive = len(running.left())
            running.kill_agent()  # Claude Code does not end by itself while it has such a command
            is_gone = wait_until(lambda running=running: not running.left(), SLACK_S if installed else GONE_S)
            observe(agent, "background", installed, f"{alive} alive past the limit, {is_gone=} after the agent")
            assert not installed or (alive, is_gone) == (int(agent.says_so), True)


@each_agent
def test_a_denied_command_stays_denied(agent: CodingAgent, tmp_path: Path) -> None:
    commands = (f"{DENIED} made", f"echo first && {DENIED} made")
    ways: tuple[dict[str, object], ...] = ({}, agent.background or {})
    for place, (command, more) in enumerate((each, way) for each in commands for way in ways):
        for installed in (False, True):
            folder = tmp_path / f"{place}-{installed}"
            with session(agent, folder, command, installed=installed, denies=True, arguments=more) as running:
                result, _ = outcome(running, START_S)
                made = (running.place.project / "made").exists()
                observe(agent, "denied", installed, f"{'ran' if made else 'denied'}: {(result or '')[-200:]}")
                assert result is not None
                assert not made


@each_agent
def test_commands_end_with_an_agent_that_is_killed(agent: CodingAgent, tmp_path: Path) -> None:
    command = "setsid tail -f MARK >/dev/null & tail -f MARK >/dev/null"  # on a pipe, tail ends with its reader
    for installed in (False, True):
        with session(agent, tmp_path / str(installed), command, installed=installed) as running:
            assert wait_until(lambda running=running: len(running.left()) >= 2, START_S)
            running.kill_agent()
            began = time.monotonic()
            is_gone = wait_until(lambda running=running: not running.left(), SLACK_S if installed else 2 * GONE_S)
            took = time.monotonic() - began
            observe(
                agent, "killed", installed, f"gone after {took:.1f} s" if is_gone else f"{len(running.left())} left"
            )
            assert is_gone or not installed


def test_a_url_that_copilot_denies_stays_denied(tmp_path: Path) -> None:
    agent = next(each for each in AGENTS if each.name == "copilot")
    command = "curl -sS --max-time 1 https://denied.invalid/; true MARK"

    def deny(place: Place) -> None:
        place.write(".copilot/settings.json", {"deniedUrls": ["denied.invalid"]})

    for installed in (False, True):
        with session(agent, tmp_path / str(installed), command, installed=installed, before=deny) as running:
            result = running.result(START_S)
            assert result is not None
            assert "denied due to the following rules" in result


def shotclock(running: Session, *words: str) -> Any:
    """Run a subcommand in the home of the session, and return its data."""
    command = [str(PROGRAMS / "shotclock"), *words]
    environ = running.agent.environ(running.place)
    done = subprocess.run(command, env=environ, cwd=running.place.project, capture_output=True, timeout=START_S)
    return json.loads(done.stdout)["data"]


def test_codex_runs_the_hook_once_it_is_trusted_as_status_says(tmp_path: Path) -> None:
    agent = next(each for each in AGENTS if each.name == "codex")
    command = "tr '\\0' ' ' < /proc/$PPID/cmdline; true MARK"

    def trust(place: Place) -> None:
        """Write the hash, as Codex does after the review of a person."""
        file, config = place.home / ".codex/hooks.json", place.home / ".codex/config.toml"
        group = json.loads(file.read_text())["hooks"]["PreToolUse"][0]
        state = f'[hooks.state."{file}:pre_tool_use:0:0"]\ntrusted_hash = "{codex_hash(group)}"\n'
        config.write_text(f"{config.read_text()}\n{state}")

    for is_trusted, before in ((False, lambda place: None), (True, trust)):
        folder = tmp_path / str(is_trusted)
        with session(agent, folder, command, installed=True, asks=True, before=before) as running:
            result = running.result(START_S)
            status = shotclock(running, "agent", "status", "codex")["agents"][0]
            assert result is not None
            assert (status["trusted"], "shotclock-sh" in result) == (is_trusted, is_trusted)


def test_a_hung_command_is_stopped_inside_the_sandbox_of_codex(tmp_path: Path) -> None:
    agent = next(each for each in AGENTS if each.name == "codex")

    def confine(place: Place) -> None:
        config = place.home / ".codex/config.toml"
        config.write_text(config.read_text().replace("danger-full-access", "workspace-write"))

    command = "touch /usr/made; tail -f MARK"
    with session(agent, tmp_path / "with", command, installed=True, before=confine) as running:
        result = running.result(START_S)
        assert result is not None
        assert "Read-only file system" in result, "it is in the sandbox"
        assert "TIMEOUT" in result
        assert not running.left()


@pytest.mark.parametrize("name", ["claude", "copilot"])
def test_an_operator_decides_what_the_agent_may_run(name: str, tmp_path: Path) -> None:
    agent = next(each for each in AGENTS if each.name == name)
    for verb, notes in (("approve", ""), ("reject", "not today")):
        folder, command = tmp_path / verb, "touch made; true MARK"
        with session(agent, folder, command, installed=True, asks=True, more=("--approvals",)) as running:
            found: list[dict[str, Any]] = []

            def is_asked(running: Session = running, found: list[dict[str, Any]] = found) -> bool:
                found[:] = shotclock(running, "inbox", "list")["proposals"]
                return bool(found)

            assert wait_until(is_asked, START_S)
            assert "touch made" in found[0]["title"]
            shotclock(running, "inbox", verb, found[0]["id"], "--notes", notes)
            result = running.result(START_S)
            assert result is not None
            assert (running.place.project / "made").exists() == (verb == "approve")
            assert notes in result
            observe(agent, "approvals", True, f"{verb}: {result[-200:]}")
