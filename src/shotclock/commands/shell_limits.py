"""The limits of commands in `shotclock-sh`: from options, variables, the files of project and user, and the defaults.

A project's file may only shorten a limit: a cloned repository is not trusted.

Commands that an agent puts in the background have a limit of their own: a hook, which is told, leaves a note that
`shotclock-sh` takes. The note is a file named after the session and the command. The command itself stays as it would
be, because Gemini CLI applies its rules to `bash -c "…"` and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping

from ..core.limits import DurationError, format_duration, parse_duration_ms
from ..core.value_types import value
from ..supervise.command_task import make_private_directory, state_directory
from ..supervise.environment import config_file

KEYS = ("timeout", "idle", "lifetime", "input_wait", "background")
NOTIFY_KEYS = ("notify", "page")  # people/notify/entries.py reads them
PROJECT_FILES = ("shotclock.toml", "pyproject.toml")
NOT_OF_A_PROJECT = (
    "a checkout must not decide where messages go; write it into ~/.config/shotclock/config.toml, or `notify:` into a "
    "workflow file"
)
LONGEST_KEY = 40  # in a message
LARGEST_FILE = 1024 * 1024
PARSE_LIMIT_S = 1.0  # of CPU time; only a key of thousands of parts takes as long
_TABLE = b"tool.shotclock"  # the table in a pyproject.toml; without these bytes the file is not parsed


class BadSetting(Exception):
    """An option, a variable or a line of the user's file that is no limit."""


@value
class Limit:
    ms: int
    """0 for none."""
    source: str
    """The option, the variable, or the key and the file, that sets it."""

    def __str__(self) -> str:
        return format_duration(self.ms) if self.ms else "0"


def take_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the limits that the first words set, by their keys, and the rest. Raises BadSetting."""
    options = {}
    while words and words[0].startswith("--"):
        name, equals, text = words[0].partition("=")
        if (key := name[2:].replace("-", "_")) not in KEYS:
            break
        if not equals and len(words) < 2:
            raise BadSetting(f"{name} needs a duration")
        options[key], words = (text, words[1:]) if equals else (words[1], words[2:])
    return options, words


def read_limits(
    environ: Mapping[str, str], folder: str, defaults: Mapping[str, int], options: Mapping[str, str]
) -> tuple[dict[str, Limit], list[str]]:
    """Return the limits, and the mistakes in the project's file, which are ignored. Raises BadSetting for others."""
    limits = {key: Limit(defaults.get(key, 0), variable_of(key)) for key in KEYS}
    if path := config_file(environ):
        limits |= _read_file(path, _refuse, others=NOTIFY_KEYS) or {}
    mistakes: list[str] = []
    for key, limit in _read_project(folder, environ.get("HOME", ""), mistakes.append).items():
        if limit.ms and (not limits[key].ms or limit.ms < limits[key].ms):
            limits[key] = limit
    given = {key: (variable_of(key), text) for key in KEYS if (text := environ.get(variable_of(key)))}
    given |= {key: (f"--{key.replace('_', '-')}", text) for key, text in options.items()}
    for key, (source, text) in given.items():
        try:
            limits[key] = Limit(parse_duration_ms(text), source)
        except DurationError as error:
            raise BadSetting(f"{source}: {error}") from None
    return limits, mistakes


def variable_of(key: str) -> str:
    return f"SHOTCLOCK_{key.upper()}"


def _refuse(mistake: str) -> None:
    raise BadSetting(mistake)


def _read_project(folder: str, home: str, on_mistake: Callable[[str], None]) -> dict[str, Limit]:
    """Return the limits of the nearest project file: in this folder, or above it in the same repository.

    Never in the home directory, nor above it. Without a repository, a folder above may be shared, as /tmp is.
    """
    above, at = [], folder
    while at not in ("", os.sep, home and os.path.realpath(home)):
        above.append(at)
        if os.path.lexists(f"{at}/.git"):
            break
        at = os.path.dirname(at)
    else:
        above = above[:1]
    for at, name in ((at, name) for at in above for name in PROJECT_FILES):
        if (limits := _read_file(f"{at}/{name}", on_mistake)) is not None:
            return limits
    return {}


def _read_file(path: str, on_mistake: Callable[[str], None], others: tuple[str, ...] = ()) -> dict[str, Limit] | None:
    """Return the limits that a file sets; None if there is no such file, or it has no table of ours.

    `others` are keys that it may have for other readers.
    """
    text = _read_bytes(path)
    is_shared = path.endswith("/pyproject.toml")  # with other tools
    if text is None or (is_shared and _TABLE not in text):
        return None
    try:
        table = _parse(text)
    except ValueError as error:
        on_mistake(f"{path}: {error}")
        return {}
    for name in ("tool", "shotclock") if is_shared else ():
        table = table.get(name) if isinstance(table, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        on_mistake(f"{path}: tool.shotclock is not a table")
        return {}
    limits = {}
    for key, written in table.items():
        if key in others:
            continue
        if key in NOTIFY_KEYS:
            on_mistake(f"{path}: {key}: {NOT_OF_A_PROJECT}")
            continue
        if key not in KEYS:
            on_mistake(f"{path}: unknown key {key[:LONGEST_KEY]!r}; the keys are {', '.join(KEYS)}")
            continue
        try:
            limits[key] = Limit(parse_duration_ms(written), f"{key} in {path}")
        except DurationError as error:
            on_mistake(f"{path}: {key}: {error}")
    return limits


def _parse(text: bytes) -> object:
    """Return the content of a file. Raises ValueError, also if that takes too long: the command waits for it."""
    import tomllib  # takes as long as a tenth of a start

    try:
        with limited_cpu(PARSE_LIMIT_S):
            return tomllib.loads(text.decode())
    except TooSlow:
        raise ValueError("it takes too long to read") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class TooSlow(Exception):
    """The end of the processor time of `limited_cpu`."""


@contextlib.contextmanager
def limited_cpu(limit_s: float) -> Iterator[None]:
    """Raise TooSlow if the processor time is used up. Only for the main thread, which a signal interrupts."""

    def ring(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _read_bytes(path: str) -> bytes | None:
    """Return the content of a regular file; None if there is none that can be read. A named pipe blocks no command."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        return os.read(fd, min(status.st_size, LARGEST_FILE)) if stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)


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
