"""What steps can read of the processes above them: none of the secrets that they do not get themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

SECRET = "sekret-5f2c91"
# Every ancestor up to the test itself, with its name and what its environment shows.
LOOK = """
import os, sys
pid, shown = os.getppid(), []
while pid != int(sys.argv[1]):
    with open(f"/proc/{pid}/environ", "rb") as file:
        text = file.read()
    name = open(f"/proc/{pid}/comm").read().strip()
    shown.append(f"{name}:{'LEAK' if b'sekret' in text else 'clean'}")
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(" ".join(shown))
"""
APP = """
import os, subprocess, sys
from shotclock import App
app = App("tool")

@app.command
def look(script: str, until: str) -> str:
    assert os.environ["PLAIN"] == "seen"
    return subprocess.run([sys.executable, script, until], capture_output=True, text=True).stdout
"""


def run(tmp_path: Path, flow: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "tool.py").write_text(APP)
    (tmp_path / "flow.yaml").write_text(json.dumps(flow))
    environment = {
        **os.environ,
        "API_TOKEN": SECRET,
        "DB_PASSWORD": f"{SECRET}-2",
        "SHOTCLOCK_CODEC_KEY": f"{SECRET}-3",
        "HOMEBREW_GITHUB_API_TOKEN": f"{SECRET}-4",
        "LD_SDK_KEY": f"{SECRET}-5",
        "PLAIN": "seen",
        "SHOTCLOCK_HOME": str(tmp_path / "home"),
    }
    # Cold: a warm start shows the environment of the process that it was forked from.
    ran = subprocess.run(
        [*SHOTCLOCK, "run", "flow.yaml"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=60,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(ran.stdout)
    assert answer["ok"], answer["error"]
    return answer


def outputs(answer: dict[str, Any]) -> dict[str, str]:
    return {name: str(step["output"]).strip() for name, step in answer["data"]["steps"].items()}


def test_no_process_above_a_step_shows_a_secret(tmp_path: Path):
    look = f"{sys.executable} look.py {os.getpid()}"
    tool = {"type": "function", "target": "tool.py:app", "command": "look"}
    steps = {
        "first": {"exec": look},
        "second": {"exec": look, "depends_on": "first"},
        "function": {**tool, "arguments": {"script": "look.py", "until": str(os.getpid())}},
    }
    seen = outputs(run(tmp_path, {"steps": steps}))
    for name, shown in seen.items():
        assert "shotclock-sup" in shown and "clock-zygote" in shown, f"{name}: {shown}"
        assert "LEAK" not in shown, f"{name}: {shown}"


def test_a_step_that_asks_for_a_secret_still_has_it_and_the_others_have_the_rest(tmp_path: Path):
    check = f'test "$API_TOKEN" = {SECRET} && test -z "$DB_PASSWORD" && echo has it'
    steps = {
        "asks": {"exec": check, "env": {"API_TOKEN": "${API_TOKEN}"}},
        "does_not": {"exec": 'echo "$PLAIN$API_TOKEN"'},
        "parent": {"exec": "tr '\\0' '\\n' < /proc/$PPID/environ | grep -c sekret || true"},
    }
    assert outputs(run(tmp_path, {"steps": steps})) == {"asks": "has it", "does_not": "seen", "parent": "0"}


HIDE = """
import ctypes, os, subprocess
from shotclock.supervise.kernel import hide_variables
before = dict(os.environ)
hide_variables(lambda name: name.startswith("HIDDEN"))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
assert dict(os.environ) == before
assert getenv(b"HIDDEN_A") == b"1" * 5000 and getenv(b"HIDDEN_B") == b"" and getenv(b"SHOWN") == b"x=y"
child = subprocess.run(["env", "-0"], capture_output=True).stdout.split(b"\\0")
assert b"HIDDEN_A=" + b"1" * 5000 in child and b"HIDDEN_B=" in child
shown = open("/proc/self/environ", "rb").read()
assert b"HIDDEN" not in shown and b"1111" not in shown and b"SHOWN=x=y" in shown.split(b"\\0")
"""


def test_hidden_variables_stay_with_the_program_and_with_what_it_starts():
    environment = {**os.environ, "HIDDEN_A": "1" * 5000, "HIDDEN_B": "", "SHOWN": "x=y"}
    subprocess.run([sys.executable, "-c", HIDE], env=environment, check=True, timeout=60)
