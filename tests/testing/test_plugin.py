"""The pytest plugin, as it is installed from the wheel, names the processes that a test left behind."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.testing.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

LEAKS = """
import multiprocessing.shared_memory, os, subprocess, sys, time
import pytest

DAEMON = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(60)"

def test_clean():
    subprocess.run(["true"], check=True)

def test_child():
    subprocess.Popen(["sleep", "61"])

def test_zombie():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    kept.append(process)

kept = []

def test_resource_tracker():
    multiprocessing.shared_memory.SharedMemory(create=True, size=10).unlink()

def test_daemon():
    subprocess.run([sys.executable, "-c", DAEMON], check=True)

def test_bare_fork():
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.wait()

@pytest.mark.shotclock_leaks("off")
def test_allowed():
    subprocess.Popen(["sleep", "62"])

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sh", "-c", "while read line; do sleep 63 & done"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()

def test_first_user_of_a_server(server):
    assert server.poll() is None

def test_second_user_of_a_server(server):
    assert server.poll() is None
"""


def kill_named(text: str) -> None:
    """Kill the processes that a report names."""
    for pid in re.findall(r"pid (\d+) \(parent", text):
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


def pytest_words(*words: str) -> list[str]:
    unused = ("cacheprovider", "xdist", "pytest_cov", "hypothesispytest", "anyio", "timeout")
    return ["-m", "pytest", "-q", *(word for name in unused for word in ("-p", f"no:{name}")), *words]


def test_a_test_that_leaves_a_process_fails_and_the_process_is_named_and_killed(
    run_installed: Run, tmp_path: Path
) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS.replace('subprocess.Popen(["sleep", "62"])', "pass"))
    ran = run_installed(*pytest_words("--shotclock-leaks=fail"))
    assert "9 passed, 3 errors" in ran.stdout, ran.stdout
    assert re.search(r"test_child left 1 process behind:\n  pid \d+ \(parent \d+, state S\): sleep 61", ran.stdout)
    assert re.search(r"test_daemon left 1 process behind:\n  pid \d+ .*time\.sleep\(60\)", ran.stdout)
    assert "test_bare_fork left 1 process behind" in ran.stdout


def test_by_default_it_warns_and_leaves_the_process_alone(run_installed: Run, tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(
        "import subprocess\n\ndef test_child():\n    subprocess.Popen(['sleep', '61'])\n\ndef test_other(): pass\n"
    )
    ran = run_installed(*pytest_words())
    try:
        assert "2 passed, 1 warning" in ran.stdout, ran.stdout
        assert "ProcessesLeft: test_leaks.py::test_child left 1 process behind" in ran.stdout
    finally:
        kill_named(ran.stdout)


def test_the_ini_file_and_a_marker_choose_as_well(run_installed: Run, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nshotclock_leaks = fail\naddopts = --strict-markers\n")
    (tmp_path / "test_leaks.py").write_text(
        "import subprocess, pytest\n\n@pytest.mark.shotclock_leaks('warn')\ndef test_child():\n"
        "    process = subprocess.Popen(['sleep', '61'])\n\ndef test_other():\n    subprocess.Popen(['sleep', '64'])\n"
    )
    ran = run_installed(*pytest_words())
    try:
        assert "2 passed, 1 warning, 1 error" in ran.stdout, ran.stdout
        assert "ProcessesLeft: test_leaks.py::test_child left" in ran.stdout
        assert "test_other left 1 process behind" in ran.stdout
    finally:
        kill_named(ran.stdout)
    (tmp_path / "pytest.ini").write_text("[pytest]\nshotclock_leaks = maybe\n")
    assert "shotclock_leaks is one of fail, warn, off" in run_installed(*pytest_words()).stdout


def test_the_calls_of_a_test_leave_nothing_also_those_of_a_module_fixture(run_installed: Run, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import time\nfrom shotclock import App\n\napp = App('tool')\n\n\n"
        "@app.command(timeout='300ms')\ndef hang() -> None:\n    time.sleep(600)\n"
    )
    (tmp_path / "test_tool.py").write_text(
        "import pytest\nfrom shotclock import testing\nfrom tool import app\n\n"
        "@pytest.fixture(scope='module')\ndef call():\n    with testing.calls(app) as call:\n        yield call\n\n"
        "@pytest.mark.parametrize('n', range(3))\ndef test_shared(call, n):\n"
        "    testing.assert_failed(call('hang'), 'TIMEOUT')\n\n"
        "def test_alone():\n    with testing.calls(app) as call:\n"
        "        testing.assert_failed(call('hang'), 'TIMEOUT')\n"
    )
    ran = run_installed(*pytest_words("--shotclock-leaks=fail"))
    assert "4 passed" in ran.stdout and "error" not in ran.stdout, ran.stdout


def test_the_plugin_imports_little(run_installed: Run) -> None:
    program = (
        "import sys, pytest; known = set(sys.modules); import shotclock.testing.plugin\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - known}))\n"
        "assert not {'pydantic', 'mcp', 'anyio', 'rich', 'shotclock.apps.app', 'sqlite3'} & set(sys.modules)"
    )
    ran = run_installed("-c", program)
    assert ran.returncode == 0, ran.stdout
