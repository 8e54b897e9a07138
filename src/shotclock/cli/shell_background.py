"""Commands that an agent puts in the background itself: how `shotclock-sh` learns of them.

A hook that rewrites commands writes an option. Claude Code's shell gets a line in which nothing says it, so there a
hook leaves a file, named after the session and the command, which the shell takes.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping

from ..process.command_task import make_private_directory, state_directory

IN_BACKGROUND = "--in-background"
SESSION_VARIABLE = "CLAUDE_CODE_SESSION_ID"
_FOLDER = "background"


def note_command(environ: Mapping[str, str], command: str, *, in_background: bool) -> None:
    """Note whether the next command with this text in this session is put in the background. Raises OSError."""
    file = _file_of(environ, command)
    if not in_background:
        with contextlib.suppress(FileNotFoundError):  # of a command that was denied
            os.unlink(file)
        return
    make_private_directory(os.path.dirname(file))
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def take_note(environ: Mapping[str, str], line: str) -> bool:
    """Return whether the command in a line of Claude Code is noted as one in the background, and remove the note."""
    quoted = line.partition(" && eval ")[2].rpartition(" && pwd -P >| ")[0].removesuffix(" < /dev/null")
    command = quoted[1:-1].replace("'\"'\"'", "'") if quoted[:1] == "'" else quoted
    try:
        os.unlink(_file_of(environ, command))
    except OSError:
        return False
    return True


def _file_of(environ: Mapping[str, str], command: str) -> str:
    text = f"{environ.get(SESSION_VARIABLE)}\0{command}".encode("utf-8", "surrogatepass")
    return f"{state_directory()}/{_FOLDER}/{zlib.crc32(text):08x}-{len(text)}"
