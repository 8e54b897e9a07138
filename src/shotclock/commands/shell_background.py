"""Commands that an agent puts in the background: a hook, which is told, leaves a note that `shotclock-sh` takes.

The note is a file named after the session and the command. The command itself stays as it would be, because Gemini CLI
applies its rules to `bash -c "…"` and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping

from ..supervise.command_task import make_private_directory, state_directory

# Gemini CLI gives its session only to hooks.
_SESSION_VARIABLES = ("CLAUDE_CODE_SESSION_ID", "COPILOT_AGENT_SESSION_ID")
_FOLDER = "background"


def note_command(session: str, command: str, *, in_background: bool) -> None:
    """Note whether the next command with this text in this session is put in the background."""
    file = _file_of(session, command)
    with contextlib.suppress(OSError):  # without a note it has the limits of other commands
        if in_background:
            make_private_directory(os.path.dirname(file))
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        else:  # a command with the same text may have been denied
            os.unlink(file)


def take_note(environ: Mapping[str, str], line: str) -> bool:
    """Return whether a command is noted as one in the background, and remove the note."""
    # The line of Claude Code 2.1.326 has the command in it.
    quoted = line.partition(" && eval ")[2].rpartition(" && pwd -P >| ")[0].removesuffix(" < /dev/null")
    command = quoted[1:-1].replace("'\"'\"'", "'") if quoted[:1] == "'" else quoted or line
    for session in ("", *filter(None, map(environ.get, _SESSION_VARIABLES))):  # one agent may run another
        with contextlib.suppress(OSError):
            os.unlink(_file_of(session, command))
            return True
    return False


def _file_of(session: str, command: str) -> str:
    text = f"{session}\0{command}".encode("utf-8", "surrogatepass")
    return f"{state_directory()}/{_FOLDER}/{zlib.crc32(text):08x}-{len(text)}"
