"""The owner of a command: found by name, by an agent's variable or mark, and noticed when it is gone."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from shotclock.supervise.owner import OwnerWatch, UnknownOwner, find_owner

LIMIT_S = 30
FIND = (
    "import json, sys\n"
    "from shotclock.supervise.owner import UnknownOwner, find_owner\n"
    "try: found = find_owner(sys.argv[1] if sys.argv[1:] else None)\n"
    "except UnknownOwner as error: print(json.dumps(str(error)))\n"
    "else: print(json.dumps(found and found.pid))\n"
)
# The last command keeps the shell from becoming the program itself.
SHELL = 'echo $$; "$0" -c "$FIND" $CHOICE; true'


def found_below_shells(variables: dict[str, str], choice: str = "") -> tuple[list[int], object]:
    """Return the pids of two nested shells, and the owner that a program below them finds."""
    environment = {**os.environ, "FIND": FIND, "CHOICE": choice, "INNER": SHELL}
    for name in ("CLAUDECODE", "CLAUDE_PID", "OPENCODE_PID", "CODEX_THREAD_ID", "GEMINI_CLI", "COPILOT_CLI"):
        environment.pop(name, None)
    outer = f'echo $$; {variables.pop("OUTER", "")} sh -c "$INNER" "$0"; true'
    ran = subprocess.run(
        ["sh", "-c", outer, sys.executable],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=True,
    )
    *pids, owner = ran.stdout.splitlines()
    return [int(pid) for pid in pids], json.loads(owner)


def test_the_nearest_process_without_the_mark_of_an_agent_is_the_owner() -> None:
    (agent, _), owner = found_below_shells({"OUTER": "GEMINI_CLI=1"})
    assert owner == agent


def test_an_agent_that_names_its_own_ancestor_is_the_owner() -> None:
    (agent, _), owner = found_below_shells({"OUTER": "CLAUDE_PID=$$"})
    assert owner == agent


def test_a_named_process_that_is_no_ancestor_is_ignored() -> None:
    with subprocess.Popen(["sleep", str(LIMIT_S)]) as other:
        try:
            _, owner = found_below_shells({"CLAUDE_PID": str(other.pid)})
        finally:
            other.kill()
    assert owner is None


def test_without_an_agent_and_a_terminal_there_is_no_owner() -> None:
    assert found_below_shells({})[1] is None


def test_the_parent_can_be_the_owner() -> None:
    (_, parent), owner = found_below_shells({}, "parent")
    assert owner == parent


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("agent", "no coding agent runs this command"),
        ("terminal", "this command has no terminal"),
        ("nobody", "neither a pid nor one of agent, terminal, parent, none"),
        ("999999999", "there is no process 999999999 of this user"),
        ("1", "there is no process 1 of this user"),
    ],
)
def test_an_owner_that_cannot_be_found_is_refused(choice: str, message: str) -> None:
    assert message in str(found_below_shells({}, choice)[1])


def test_the_end_of_an_owner_is_noticed() -> None:
    with subprocess.Popen(["sleep", str(LIMIT_S)]) as process:
        owner = find_owner(str(process.pid))
        assert owner is not None
        watch = OwnerWatch(owner)
        try:
            assert not watch.is_gone
            process.send_signal(signal.SIGKILL)
            assert select.select([watch.fd], [], [], LIMIT_S)[0]
            assert watch.is_gone
        finally:
            watch.close()
    with pytest.raises(UnknownOwner):
        find_owner(str(process.pid))
