"""What children find in their environment: the same for exec, for what an App's functions start, and for steps."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

LOUD = {"PAGER": "less", "GIT_PAGER": "less", "EDITOR": "vi", "VISUAL": "vi", "GIT_EDITOR": "vi", "TERM": "xterm"}
EXPECTED = {
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "EDITOR": "false",
    "VISUAL": "false",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
}
# What else `exec` sets. A value of the caller's own is never replaced.
UNATTENDED = {
    **EXPECTED,
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "SYSTEMD_PAGER": "",
    "AWS_PAGER": "",
    "MANPAGER": "cat",
    "SSH_ASKPASS": "false",
    "SSH_ASKPASS_REQUIRE": "force",
}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
DUMP = "import json, os; print(json.dumps(dict(os.environ)))"

APP = """
import asyncio, json, subprocess
from shotclock import App
app = App("tool")

def printed(words):
    return subprocess.run(words, capture_output=True, text=True).stdout

@app.command(timeout="20s")
def sync(words: str) -> str:
    return printed(json.loads(words))

@app.command(timeout="20s", name="async")
async def async_(words: str) -> str:
    process = await asyncio.create_subprocess_exec(*json.loads(words), stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode()

@app.command(timeout="20s", isolation="shared")
async def loop(words: str) -> str:
    process = await asyncio.create_subprocess_exec(*json.loads(words), stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode()

app()
"""

Printed = Callable[..., str]


@pytest.fixture(params=["exec", "sync", "async", "step"])
def surface(request: pytest.FixtureRequest, tmp_path: Path) -> Printed:
    """A function that runs a command below one of the surfaces, and returns what it prints."""
    return on(request.param, tmp_path)


def on(surface: str, tmp_path: Path) -> Printed:
    environment = {**os.environ, **(LOUD if surface != "exec" else {}), "SHOTCLOCK_HOME": str(tmp_path / "home")}
    environment["TRACEPARENT"] = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    for name in ("SHOTCLOCK_REMAINING_MS", "SHOTCLOCK_DEADLINE_NS"):
        environment.pop(name, None)
    (tmp_path / "tool.py").write_text(APP)

    def answered(*words: str) -> dict[str, Any]:
        ran = subprocess.run(
            words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        return json.loads(ran.stdout or ran.stderr.splitlines()[-1])

    def printed(*words: str) -> str:
        if surface == "exec":
            return str(answered(*SHOTCLOCK, "exec", "--json", "--timeout", "20s", "--", *words)["data"]["stdout"])
        if surface == "step":
            step = {"exec": "exec " + " ".join(f"'{word}'" for word in words), "timeout": 20}
            (tmp_path / "flow.yaml").write_text(json.dumps({"steps": {"a": {**step, "output_format": "text"}}}))
            output = answered(*SHOTCLOCK, "run", "flow.yaml")["data"]["steps"]["a"]["output"]
            return output if isinstance(output, str) else json.dumps(output)
        return str(answered(sys.executable, "tool.py", surface, json.dumps(words))["data"]["result"])

    return printed


def test_neither_pager_nor_editor_nor_colour_nor_question_waits_for_anybody(surface: Printed):
    variables = json.loads(surface(sys.executable, "-c", DUMP))
    assert {name: variables.get(name) for name in EXPECTED} == EXPECTED


def test_what_runs_on_the_loop_of_others_starts_quiet_children_as_well(tmp_path: Path):
    variables = json.loads(on("loop", tmp_path)(sys.executable, "-c", DUMP))
    assert {name: variables.get(name) for name in EXPECTED} == EXPECTED


def test_a_shotclock_further_down_has_the_deadline_and_the_trace_of_what_started_it(surface: Printed):
    inner = json.loads(surface(*SHOTCLOCK, "exec", "--json", "--timeout", "1h", "--", "true"))
    assert inner["ok"]
    assert 0 < inner["meta"]["timeout_ms"] < 20_000
    assert "DEADLINE_INHERITED" in [warning["code"] for warning in inner["warnings"]]
    assert inner["meta"]["trace_id"] == TRACE_ID


def test_git_commit_without_a_message_fails_at_once_instead_of_opening_an_editor(surface: Printed, tmp_path: Path):
    subprocess.run(["git", "init", "-q", tmp_path / "repository"], check=True, timeout=20)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    said = surface("sh", "-c", f"git -C {tmp_path}/repository {' '.join(who)} commit --allow-empty 2>&1 || echo failed")
    assert "problem with the editor" in said and said.strip().endswith("failed")


def test_what_is_given_for_the_command_wins(tmp_path: Path, shotclock: Any):
    ran = shotclock("exec", "--env", "EDITOR=ed", "--", "sh", "-c", "echo $EDITOR $VISUAL", env={"VISUAL": None})
    assert ran.stdout == b"ed false\n"
    (tmp_path / "flow.yaml").write_text("steps: {a: {exec: echo $EDITOR $VISUAL, env: {EDITOR: ed}}}")
    steps = shotclock("run", tmp_path / "flow.yaml", env={"SHOTCLOCK_HOME": str(tmp_path / "home")}).json()["data"]
    assert steps["steps"]["a"]["output"].strip() == "ed false"


def seen_by_exec(*options: str, env: dict[str, str], **streams: Any) -> dict[str, str | None]:
    """The quiet variables of a command below `exec`, which has no /dev/tty."""
    names = {*UNATTENDED, *LOUD}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    ran = subprocess.run(
        [*SHOTCLOCK, "exec", *options, "--", sys.executable, "-c", DUMP],
        env={**inherited, **env},
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=60,
        **streams,
    )
    variables = json.loads(ran.stdout)
    return {name: variables[name] for name in names if name in variables}


def test_exec_sets_quiet_variables_only_where_there_is_no_terminal_and_keeps_the_callers_own():
    away: dict[str, Any] = {"stdin": subprocess.DEVNULL}
    assert seen_by_exec(env={}, **away) == UNATTENDED
    assert seen_by_exec(env=LOUD, **away) == {**UNATTENDED, **LOUD}
    own = {"SSH_ASKPASS": "/usr/bin/ask"}
    assert "SSH_ASKPASS_REQUIRE" not in seen_by_exec(env=own, **away), "it would open a window"
    assert seen_by_exec("--no-quiet-env", env=LOUD, **away) == LOUD
    ours, theirs = pty.openpty()
    assert seen_by_exec(env=LOUD, stdin=theirs) == LOUD
    assert seen_by_exec("--quiet-env", env=LOUD, stdin=theirs) == {**UNATTENDED, **LOUD}
    os.close(ours)
    os.close(theirs)


def test_each_call_in_the_same_worker_has_its_own_deadline_and_trace():
    from shotclock.core.trace import TraceContext
    from shotclock.supervise.environment import set_call_variables

    names = ("SHOTCLOCK_DEADLINE_NS", "SHOTCLOCK_REMAINING_MS", "TRACEPARENT", "TRACESTATE")
    before = {name: os.environ.get(name) for name in names}
    try:
        for at_ns, state in ((5, ""), (123456789012345678, "a=b"), (7, "")):
            trace = TraceContext(TRACE_ID, "00f067aa0ba902b7", True, state)
            set_call_variables(at_ns, trace.traceparent, state)
            # What a child sees is C's environment; what our own code sees is Python's. Both are the call's.
            seen = subprocess.run(["env"], capture_output=True, text=True, timeout=20).stdout.splitlines()
            assert f"SHOTCLOCK_DEADLINE_NS={at_ns}" in seen and os.environ["SHOTCLOCK_DEADLINE_NS"] == str(at_ns)
            assert f"TRACEPARENT={trace.traceparent}" in seen
            assert [line for line in seen if line.startswith("TRACESTATE=")] == (
                [f"TRACESTATE={state}"] if state else []
            )
        set_call_variables(0, trace.traceparent, "")
        seen = subprocess.run(["env"], capture_output=True, text=True, timeout=20).stdout
        assert "SHOTCLOCK_DEADLINE_NS" not in seen and "SHOTCLOCK_REMAINING_MS" not in seen
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


CLEAR = "import ctypes; ctypes.CDLL(None).clearenv()"
DISTURBANCES = {
    "nothing": "",
    "another value": "os.environ['TRACEPARENT'] = 'mine'",
    "taken out": "del os.environ['TRACEPARENT'], os.environ['SHOTCLOCK_DEADLINE_NS']",
    "many more variables": "os.environ.update({f'MORE_{n}': 'x' for n in range(300)})",
    "one less variable": "del os.environ['FIRST']",
    "taken out behind Python's back": "import ctypes; ctypes.CDLL(None).unsetenv(b'SHOTCLOCK_REMAINING_MS')",
    "another value behind Python's back": "import ctypes; ctypes.CDLL(None).setenv(b'TRACEPARENT', b'mine', 1)",
    "no environment at all": CLEAR,
}


@pytest.mark.parametrize("disturbance", DISTURBANCES.values(), ids=DISTURBANCES)
def test_what_a_call_does_to_the_variables_is_not_what_the_next_one_has(disturbance: str):
    program = f"""
import json, os, subprocess
from shotclock.supervise.environment import set_call_variables
for number in (1, 2, 3):
    set_call_variables(number, f"00-parent-{{number}}", "")
    listed = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    assert listed.count(f"TRACEPARENT=00-parent-{{number}}") == 1, listed
    assert listed.count(f"SHOTCLOCK_DEADLINE_NS={{number}}") == listed.count("SHOTCLOCK_REMAINING_MS=0") == 1, listed
    assert sum(line.startswith(("TRACEPARENT=", "SHOTCLOCK_")) for line in listed) == 3, listed
    assert (os.environ["TRACEPARENT"], os.environ["SHOTCLOCK_DEADLINE_NS"]) == (f"00-parent-{{number}}", str(number))
    if number == 1:
        {disturbance or "pass"}
"""
    environment = {"FIRST": "x", "TRACEPARENT": "inherited", "PATH": os.environ["PATH"]}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
