"""The command line of an app: clocks per call, steps, rehearsals, heartbeats, help, and however it is started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import fields_of, warning_codes

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

# --- clocks -------------------------------------------------------------------------------------------


TIMEOUTS: list[tuple[list[str], int, int]] = [
    (["waits", "0"], 0, 700),
    (["waits", "60"], 10, 700),
    (["waits", "60", "--timeout", "300ms"], 10, 300),
    (["waits", "0.9", "--timeout", "PT10S"], 0, 10_000),
    (["echo", "x"], 0, 5_000),
    (["sell", "x"], 90, 5_000),
]


@pytest.mark.requirement("F-011")
def test_the_timeout_is_the_calls_or_the_commands_or_the_apps_and_always_said(tool: Any, validate_envelope: Any):
    runs = tool().each([words for words, _, _ in TIMEOUTS])
    for (words, code, timeout_ms), ran in zip(TIMEOUTS, runs, strict=True):
        assert ran.code == code, words
        assert validate_envelope(ran.json())["meta"]["timeout_ms"] == timeout_ms


@pytest.mark.requirement("F-011")
def test_every_answer_has_a_timeout_also_where_nothing_ran(tool: Any, validate_envelope: Any):
    for ran in tool().each([["types"], ["manifest"], ["--version"], ["nope"], []]):
        assert validate_envelope(ran.json())["meta"]["timeout_ms"] >= 0


@pytest.mark.requirement("C-012")
def test_no_timeout_is_only_what_was_asked_for(tool: Any, validate_envelope: Any):
    envelope = validate_envelope(tool().envelope("waits", "1", "--timeout", "0", code=0))
    assert envelope["meta"]["timeout_ms"] == 0
    assert "remaining_ms" not in envelope["meta"]


def test_the_callers_own_deadline_wins_over_any_timeout(tool: Any, validate_envelope: Any):
    program, env = tool(), {"SHOTCLOCK_REMAINING_MS": "2000"}
    envelope = validate_envelope(program.envelope("waits", "60", "--timeout", "0", env=env, code=10))
    assert envelope["meta"]["timeout_ms"] < 2000
    assert envelope["error"]["context"]["clock"]["owner"] == "caller"
    late = program.envelope("echo", "x", env={"SHOTCLOCK_REMAINING_MS": "0"}, code=10)
    assert late["error"]["code"] == "NO_TIME_LEFT" and late["meta"]["ending"] == "not_started"


def test_the_soft_clock_lets_it_wind_down(tool: Any):
    envelope = tool().envelope("winds-down", code=0)
    assert envelope["data"] == {"result": "wound down"}
    assert "SOFT_LIMIT" in warning_codes(envelope)


def test_a_call_inside_a_call_is_inside_its_deadline(tool: Any):
    program = tool()
    inner = program.envelope("nested", code=0)["data"]["inner"]
    assert inner["ok"] and inner["data"] == {"result": "waited 0"}
    inner = program.envelope("nested", "60", code=0)["data"]["inner"]
    assert inner["error"]["code"] == "TIMEOUT" and inner["meta"]["timeout_ms"] == 700


# --- steps --------------------------------------------------------------------------------------------

KEEPS = """
import time
from shotclock import App, Context

app = App("keeps", default_timeout="20s")

@app.command(steps=["fetch", "load"], soft="300ms", wind_down="300ms", grace="100ms", mutates=False)
def load(ctx: Context, as_list: bool = False) -> None:
    ctx.step("fetch")
    ctx.step("load")
    ctx.keep([1, 2] if as_list else {"rows": 2})
    time.sleep(15)

if __name__ == "__main__":
    app()
"""


@pytest.mark.parametrize("words, kept", [((), {"rows": 2}), (("--as-list",), {"result": [1, 2]})])
def test_what_was_kept_is_there_beside_the_steps(tool: Any, words: tuple[str, ...], kept: dict[str, Any]):
    envelope = tool("keeps.py", KEEPS).envelope("load", *words, code=10)
    steps = {"completed_steps": ["fetch"], "pending_steps": ["load"], "skipped_steps": []}
    assert envelope["data"] == {**kept, **steps, "failed_step": "load", "resume_from": "load"}
    assert envelope["meta"]["partial"] is True


@pytest.mark.requirement("F-012")
@pytest.mark.requirement("C-008")
def test_a_timeout_says_which_steps_were_done_and_where_to_go_on(tool: Any, tmp_path: Path, validate_envelope: Any):
    ran = tool()("stepped", tmp_path)
    envelope = validate_envelope(ran.json())
    assert ran.code == 10 and ran.stdout
    assert envelope["data"] == {
        "completed_steps": ["fetch"],
        "pending_steps": ["build", "publish"],
        "skipped_steps": [],
        "failed_step": "build",
        "resume_from": "build",
    }
    assert envelope["error"]["retryable"] is False
    assert {path.name for path in tmp_path.iterdir()} >= {"fetch", "stuck"}


@pytest.mark.requirement("C-008")
def test_a_failure_says_the_same_beside_its_own_data(tool: Any, tmp_path: Path):
    data = tool().envelope("stepped", tmp_path, "--stuck-at", "publish", "--fails", code=90)["data"]
    assert data["left"] == 0
    assert data["completed_steps"] == ["fetch", "build"] and data["resume_from"] == "publish"


@pytest.mark.requirement("O-010")
def test_resuming_from_a_step_skips_those_before_it(tool: Any, tmp_path: Path):
    program = tool()
    envelope = program.envelope("stepped", tmp_path, "--stuck-at", "never", "--resume-from", "build", code=0)
    assert envelope["data"] == ["build", "publish"]
    assert not (tmp_path / "fetch").exists()
    assert fields_of(program.envelope("stepped", tmp_path, "--resume-from", "nowhere", code=2)) == ["resume-from"]
    assert fields_of(program.envelope("echo", "x", "--resume-from", "fetch", code=2)) == ["--resume-from"]


# --- rehearsals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["wipe", "prune"])
def test_a_dry_run_says_what_would_be_done_and_does_nothing(command: str, tool: Any, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.touch()
    envelope = tool().envelope(command, precious, "--dry-run", code=0)
    if command == "wipe":
        assert envelope["data"] == {"dry_run": True, "would_run": "wipe", "arguments": {"path": str(precious)}}
    else:
        assert envelope["data"] == {"result": f"would prune {precious}"}
    assert precious.exists()


def test_only_destructive_commands_have_a_dry_run(tool: Any):
    assert fields_of(tool().envelope("echo", "x", "--dry-run", code=2)) == ["--dry-run"]


# --- signs of life ------------------------------------------------------------------------------------


@pytest.mark.requirement("O-038")
@pytest.mark.requirement("F-006")
def test_heartbeats_for_programs_are_json_lines_on_stderr(tool: Any, validate_envelope: Any):
    ran = tool()("progresses", "--heartbeat-ms", "100")
    validate_envelope(ran.json())
    beats = [json.loads(line) for line in ran.stderr.splitlines()]
    assert len(beats) >= 4
    assert all(beat["type"] == "heartbeat" and beat["command"] == "progresses" for beat in beats)
    done = [beat["progress"].get("done", 0) for beat in beats]
    assert done == sorted(done) and done[-1] > 0 and beats[-1]["progress"]["unit"] == "ms"
    elapsed = [beat["elapsed_ms"] for beat in beats]
    assert elapsed == sorted(elapsed)


@pytest.mark.requirement("O-012")
def test_heartbeats_for_people_are_words_on_stderr(tool: Any):
    ran = tool()("progresses", "--heartbeat-interval", "200ms")
    assert ran.code == 0 and len(ran.stdout.splitlines()) == 1
    lines = ran.stderr.decode().splitlines()
    assert len(lines) >= 2 and all(line.startswith("progresses: running for ") for line in lines)
    assert " of 1000 ms" in lines[-1]


@pytest.mark.requirement("O-012")
def test_a_heartbeat_nobody_reads_stops_nothing(tool: Any):
    theirs, ours = os.pipe()
    os.close(theirs)
    running = tool().start("progresses", "--heartbeat-interval", "50ms", stderr=ours)
    os.close(ours)
    assert running.ends().json()["data"] == {"result": "done"}


# --- help, version and what is no command -------------------------------------------------------------


@pytest.mark.requirement("F-048")
def test_help_that_was_asked_for_goes_to_stdout_as_plain_text(tool: Any):
    asked = [["--help"], ["-h"], ["help"], ["types", "--help"], ["help", "types"]]
    for words, ran in zip(asked, tool().each(asked), strict=True):
        assert ran.code == 0 and ran.stderr == b"", words
        text = ran.stdout.decode()
        assert "\x1b" not in text and "Usage" in text
        assert ("--colour" in text) == ("types" in words)


@pytest.mark.requirement("F-048")
@pytest.mark.requirement("F-006")
def test_no_command_at_all_gets_the_usage_on_stderr_and_an_envelope(tool: Any, validate_envelope: Any):
    ran = tool()()
    assert ran.code == 2 and b"Usage" in ran.stderr
    assert fields_of(validate_envelope(ran.json())) == ["command"]


def test_the_version_is_data(tool: Any, validate_envelope: Any):
    assert validate_envelope(tool().envelope("--version", code=0))["data"] == {"version": "1.2.3"}


@pytest.mark.requirement("C-001")
def test_a_failure_of_the_apps_own_has_the_exit_code_it_declared(tool: Any, validate_envelope: Any):
    envelope = validate_envelope(tool().envelope("sell", "tea", code=90))
    assert envelope["error"]["code"] == "SHOP_NO_STOCK" and envelope["error"]["message"] == "no tea"
    assert envelope["data"] == {"left": 0}


@pytest.mark.requirement("F-009")
def test_a_command_that_asks_is_not_left_waiting_for_an_answer(tool: Any, validate_envelope: Any):
    """Its stdin is not ours: a question finds the end of the file at once, whatever we were given."""
    running = tool("adversaries.py").start("asks", stdin=subprocess.PIPE)
    ran = running.ends(within_s=8)
    running.process.stdin.close()
    envelope = validate_envelope(ran.json())
    assert ran.code == 4 and envelope["error"]["code"] == "INPUT_REQUIRED"
    assert envelope["meta"]["side_effects"] == "unknown", "it had begun"


@pytest.mark.requirement("F-009")
@pytest.mark.requirement("F-013")
def test_input_that_never_ends_is_waited_for_no_longer_than_the_timeout_or_a_signal(tool: Any, validate_envelope: Any):
    program = tool(
        "reader.py",
        """
import sys
from shotclock import App

app = App("reader", default_timeout="60s")

@app.command(stdin=True)
def read() -> str:
    return sys.stdin.read()

app()
""",
    )
    late = program.start("read", "--timeout", "500ms", stdin=subprocess.PIPE)
    told = program.start("read", stdin=subprocess.PIPE)
    told.process.stdin.write(b"half a li")
    told.process.stdin.flush()
    ran = late.ends(within_s=15)
    assert ran.code == 4 and validate_envelope(ran.json())["error"]["code"] == "INPUT_REQUIRED"
    told.signal(signal.SIGTERM)
    ran = told.ends(within_s=5)
    assert ran.code == 143 and validate_envelope(ran.json())["error"]["code"] == "CANCELLED"
    for running in (late, told):
        running.process.stdin.close()
    with open(program.folder / "in", "w+") as stdin:
        stdin.write("all of it")
        stdin.seek(0)
        assert program.envelope("read", stdin=stdin, code=0)["data"] == {"result": "all of it"}


# --- ways to start it ---------------------------------------------------------------------------------

PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/cli.py": """
import os
from shotclock import App
from .work import helper

app = App("packaged", default_timeout="5s")

@app.command(mutates=False)
def where() -> list[str]:
    return [__name__, helper()]

@app.command(mutates=False, interruption=True)
def job() -> str:
    return __name__
""".replace("def job", "def long_job"),
    "pkg/work.py": "def helper() -> str:\n    return 'helped'\n",
    "pkg/__main__.py": "from .cli import app\napp()\n",
    "script.py": "from pkg.cli import app\nif __name__ == '__main__':\n    app()\n",
}


@pytest.mark.parametrize("way", [["-m", "pkg"], ["-c", "from pkg.cli import app; app()"], ["script.py"]], ids=str)
def test_an_app_may_live_in_another_module_than_the_program(way: list[str], tool: Any, tmp_path: Path):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    program = tool("pkg/cli.py", words=[sys.executable, *way])
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}}
    assert program.envelope("where", code=0, **options)["data"] == ["pkg.cli", "helped"]
    job = program.envelope("long-job", code=0, **options)
    assert job["data"] == {"result": "pkg.cli"} and "job_id" in job["meta"]


def test_a_program_with_threads_of_its_own_still_answers(tool: Any):
    """Threads cannot be forked, so its commands run in processes that import it once more."""
    program = tool(
        "threaded.py",
        """
import threading, time
from shotclock import App

threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
app = App("threaded", default_timeout="8s")

@app.command
def add(a: int, b: int) -> int:
    return a + b

app()
""",
    )
    assert program.envelope("add", "1", "2", code=0)["data"] == {"result": 3}


def test_what_the_program_prints_before_it_is_asked_is_its_own_affair(tool: Any):
    """Once: the forks of the program do not write its buffer a second time."""
    program = tool(
        "chatty.py",
        """
import sys
from shotclock import App

app = App("chatty")
sys.stderr.write("hello ")
print("warming up", file=sys.stderr, end="")

@app.command
def add(a: int) -> int:
    return a

app()
""",
    )
    ran = program("add", "1")
    assert ran.json()["data"] == {"result": 1}
    assert ran.stderr == b"hello warming up"


def test_the_program_may_call_its_app_with_words_of_its_own(tool: Any):
    program = tool(
        "fixed.py",
        """
from shotclock import App

app = App("fixed")

@app.command
def add(a: int) -> int:
    return a

if __name__ == "__main__":
    app(["add", "7"])
""",
    )
    assert program.envelope("ignored", code=0)["data"] == {"result": 7}


LEFT_RUNNING = """
import atexit, sys, threading, time
from shotclock import App

{left}
app = App("left", default_timeout="5s")

@app.command
def add(a: int) -> int:
    return a

def main():
    app()

if __name__ == "__main__":
    main()
"""


@pytest.mark.requirement("F-011")
@pytest.mark.parametrize(
    "left", ["threading.Thread(target=time.sleep, args=(300,)).start()", "atexit.register(time.sleep, 300)"], ids=str
)
def test_what_a_program_leaves_running_does_not_keep_it(left: str, tool: Any):
    ran = tool("left.py", LEFT_RUNNING.format(left=left))("add", "7", timeout=20)
    assert ran.code == 0 and ran.json()["data"] == {"result": 7}


def test_exit_hooks_run_and_a_larger_program_goes_on_after_its_app(tool: Any):
    hooked = tool("left.py", LEFT_RUNNING.format(left="atexit.register(print, 'bye', file=sys.stderr)"))("add", "7")
    assert hooked.stderr == b"bye\n"
    program = tool(
        "larger.py",
        """
import sys, time
from shotclock import App

app = App("larger")

@app.command
def add(a: int) -> int:
    return a

if __name__ == "__main__":
    try:
        app(["add", "7"])
    except SystemExit:
        pass
    time.sleep(4)  # longer than exit hooks may take
    print("still here", file=sys.stderr)
""",
    )
    assert program().stderr == b"still here\n"


@pytest.mark.requirement("F-011")
def test_a_program_that_hangs_when_it_is_imported_again_is_bounded_too(tool: Any, tmp_path: Path):
    """With threads the workers import the program anew; this one never ends that."""
    program = tool(
        "hangs.py",
        f"""
import pathlib, threading, time
from shotclock import App

mark = pathlib.Path({str(tmp_path)!r}) / "imported"
if mark.exists():
    time.sleep(300)
mark.touch()
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
app = App("hangs", default_timeout="1s")

@app.command
def add(a: int) -> int:
    return a

app()
""",
    )
    envelope = program.envelope("add", "1", code=10, timeout=8)
    assert envelope["error"]["code"] == "TIMEOUT"
