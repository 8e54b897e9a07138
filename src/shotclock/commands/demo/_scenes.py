"""The scenes of the demo: their scripts without and with Shotclock. docs/howto/install.md describes each.

A line of a script that begins with `$ ` is shown and run; the other lines prepare it and are only run.
"""

from __future__ import annotations

import shlex
import shutil

from ...core.value_types import value

WITHOUT, WITH = "without Shotclock", "with Shotclock"


@value
class Pace:
    """The waits of a scene. `limit` is what a command or a call gets; `watch` how long a hang is watched at least."""

    limit_s: float
    watch_s: float
    settle_s: float  # for processes that end after their command


NORMAL = Pace(limit_s=1, watch_s=3, settle_s=1.5)
FAST = Pace(limit_s=0.5, watch_s=1, settle_s=0.5)


@value
class Scene:
    number: int
    title: str
    explains: str
    without: str
    with_shotclock: str
    needs: tuple[str, ...] = ()  # programs
    hangs: bool = False  # without Shotclock it has no end, and is watched for some time

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if shutil.which(name) is None]


def runnable(script: str, pace: Pace) -> str:
    """Return the script for sh, in which the shown lines are printed before they are run."""
    limit = f"{pace.limit_s:g}"
    script = script.replace("LIMIT", limit).replace("WATCH", f"{pace.watch_s:g}")
    lines = []
    for line in script.splitlines():
        if line.startswith("$ "):
            lines.append(f"printf '%s\\n' {shlex.quote(line)}")
        lines.append(line.removeprefix("$ "))
    return "\n".join(lines)


_EXIT_CODE = 'echo "exit code $?"\n'
_DAEMON = "LIMIT sh -c 'setsid sleep 600 & sleep 600'\n"

# The first call writes the pid of its server. The server is stopped then, in both runs alike.
_STOP_SERVER = """\
until [ -s calling ]; do sleep 0.05; done
kill -STOP "$(cat calling)"
echo "(the server is stopped: kill -STOP)"
"""
_CLOSE_CLIENT = """\
sleep WATCH
kill $client && echo "(no answer after WATCHs: the client is closed)"
wait $client 2>/dev/null
"""

_AGENT = """\
until [ -e running ]; do sleep 0.05; done
sleep LIMIT
echo "(the agent is killed: kill -9)"
kill -9 $agent
wait $agent 2>/dev/null
"""

# The update of the package brings a helper, which leaves the session of its server.
_UPDATE = """\
touch updated
echo "(the package of the server is updated)"
"""

SCENES = (
    Scene(
        1,
        "A command starts a daemon",
        "timeout(1) stops the command. The daemon is in a session of its own and lives on.",
        f"$ timeout {_DAEMON}{_EXIT_CODE}",
        f"$ shotclock timeout {_DAEMON}{_EXIT_CODE}",
        needs=("timeout", "setsid"),
    ),
    Scene(
        2,
        "A command waits for ever",
        "Nothing is ever written to this fifo, so the command never ends.",
        f"$ mkfifo fifo\n$ cat fifo\n{_EXIT_CODE}",
        f"$ mkfifo fifo\n$ shotclock exec --idle LIMITs -- cat fifo\n{_EXIT_CODE}",
        needs=("mkfifo",),
        hangs=True,
    ),
    Scene(
        3,
        "An MCP server stops in the middle of a call",
        "The client is built on the official SDK, which waits without a limit.",
        f"$ mcp-client search -- notes-server &\nclient=$!\n{_STOP_SERVER}{_CLOSE_CLIENT}",
        "$ mcp-client search -- shotclock wrap --no-log --timeout LIMITs --grace 300ms -- notes-server &\nclient=$!\n"
        f"{_STOP_SERVER}wait $client\n",
    ),
    Scene(
        4,
        "An agent is killed while its command runs",
        "SIGKILL leaves the agent no time to clean up.",
        f"$ AGENT_SHELL=sh my-agent &\nagent=$!\n{_AGENT}",
        f"$ AGENT_SHELL=shotclock-sh my-agent &\nagent=$!\n{_AGENT}",
    ),
    Scene(
        5,
        "An MCP server changes a tool after you have approved it",
        "The new description instructs the model, and the update starts a helper.",
        f"$ mcp-client list -- notes-server\n{_UPDATE}$ mcp-client list -- notes-server\n",
        "$ mcp-client list -- shotclock wrap --lock notes.lock -- notes-server\n"
        f"{_UPDATE}$ mcp-client list -- shotclock wrap --lock notes.lock -- notes-server\n",
        needs=("setsid",),
    ),
)
