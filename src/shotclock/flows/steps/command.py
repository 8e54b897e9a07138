"""`command` and `tool`: a shell command in a process tree of its own. Its stdout is the output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...core.envelope import Envelope, warning
from ...core.validation import After, Before, field
from ...core.value_types import JsonObject, replace
from ._output_file import VARIABLE, output_file, read_output_file
from .provider import Provider, StepCall, StepPart, StepResult, StepType, as_list

if TYPE_CHECKING:
    from ...calls.call import Call
    from ...calls.runtime import Runtime

SHELL = ["/bin/sh"]
# Not every sh has it. On the script's first line, so that line numbers in messages are those of the file.
PIPEFAIL = "command set -o pipefail 2>/dev/null || :; "
STDIN_VARIABLE = "SHOTCLOCK_STDIN"

# Shells whose `[ … ]`, `printf` and `exit` do not evaluate a value, as ksh and zsh do.
SHELLS = ("sh", "dash", "ash", "bash")


def shell_argv(words: list[str] | None) -> list[str]:
    """Return the argv of a shell that ends at the first failure (`-e`), in `bash` also inside pipes."""
    shell, *options = words or SHELL
    strict = ["-e", "-o", "pipefail"] if shell.rpartition("/")[2] == "bash" else ["-e"]
    # bash requires long options first.
    first = next((place for place, word in enumerate(options) if not word.startswith("--")), len(options))
    return [shell, *options[:first], *strict, *options[first:]]


def _known_shell(words: list[str]) -> list[str]:
    name = words[0].rpartition("/")[2] if words else ""
    if name not in SHELLS:
        raise ValueError(f"{name!r} cannot be the shell: write one of {', '.join(SHELLS)}, also with its path")
    if any(set(word[1:]) & set("cs") for word in words[1:] if word.startswith("-") and not word.startswith("--")):
        raise ValueError("shotclock sets -c and -s: leave them out")
    return words


Shell = Annotated[list[str], Before(as_list, str | list[str]), After(_known_shell)]


class CommandStep(StepPart):
    type: Literal["command"] = "command"
    exec: str = field(min_length=1)
    shell: Shell | None = None
    stdin: str | None = None
    output_format: Literal["auto", "json", "text"] = "auto"
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"


class ToolStep(StepPart):
    type: Literal["tool"]
    tool: str = field(min_length=1)
    arguments: JsonObject = field(default={}, keys=("arguments", "args"))


COMMAND: StepType = StepType(
    "command",
    "shell command in its own tree",
    CommandStep,
    lambda services: CommandProvider(COMMAND),
    default_ms=60_000,
    prints_text=True,
)
TOOL: StepType = StepType(
    "tool",
    "custom tool from the file's `tools:`",
    ToolStep,
    lambda services: CommandProvider(TOOL),
    default_ms=30_000,
    unit="ms",
    prints_text=True,
    value_keys=frozenset({"arguments"}),
)
STEP_TYPES = (COMMAND, TOOL)


class CommandProvider(Provider):
    def __init__(self, step_type: StepType = COMMAND) -> None:
        self.step_type = step_type

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from asyncio import CancelledError

        script = step.settings["exec"]
        # The inherited environment is passed apart: it is not scanned for each step, and the variables that keep a
        # child quiet override it.
        base_env, own_env = ({}, step.env) if step.own_env is None else (step.env, step.own_env)
        env = {**own_env, **step.values}
        with _spool(step.settings.get("stdin")) as stdin, output_file(call.request_id) as written:
            env[VARIABLE] = written
            if stdin is not None:
                env[STDIN_VARIABLE] = stdin
                script = f'exec <"${STDIN_VARIABLE}"; {script}'
            shell = as_list(step.settings.get("shell") or shell_argv(None))
            if shell[0].rpartition("/")[2] != "bash":
                script = PIPEFAIL + script
            try:
                envelope = await runtime.run(
                    [*shell, "-c", script],
                    env=env,
                    base_env=base_env,
                    cwd=step.folder,
                    call=call,
                    stop_signal=step.settings.get("stop_signal") or "SIGTERM",
                    on_output=step.on_output,
                )
                result = _make_result(envelope)
                return _with_written(result, written) if envelope.ok else result
            except CancelledError:
                if (left := call.cancellation.envelope) is not None:
                    step.cancelled.result = _make_result(left)
                raise


def _with_written(result: StepResult, path: str) -> StepResult:
    """Return the result with the values in the output file, if there are any, in place of the printed output."""
    try:
        values = read_output_file(path)
    except ValueError as wrong:
        return replace(result, output=None, cut=str(wrong), is_long=False)
    return replace(result, output=values, cut=None, is_long=False) if values else result


def _make_result(envelope: Envelope) -> StepResult:
    """Return the result with the whole output, which may be in a file."""
    data: JsonObject = envelope.data if isinstance(envelope.data, dict) else {}
    total = data.get("stdout_bytes")
    if total is None:
        return StepResult(envelope, data.get("stdout", ""))
    try:
        with open(data["stdout_file"] or "", "rb") as file:
            written = file.read()
    except OSError:
        written = b""
    if len(written) != total:
        cut = f"it printed {total} bytes, of which {len(written)} are in a file, and 60 MB are the most"
        return StepResult(envelope, cut=cut, is_long=True)
    with contextlib.suppress(OSError):
        os.unlink(data["stdout_file"])
    envelope.warnings = [note for note in envelope.warnings if note.get("context") != {"stream": "stdout"}]
    try:
        return StepResult(envelope, written.decode())
    except UnicodeDecodeError:
        envelope.warnings.append(warning("OUTPUT_NOT_UTF8", stream="stdout"))
        return StepResult(envelope, written.decode(errors="replace"))


@contextlib.contextmanager
def _spool(text: Any) -> Iterator[str | None]:
    """Keep the text in a file while the command runs, and yield its path."""
    if text is None:
        yield None
        return
    import tempfile

    fd, path = tempfile.mkstemp(prefix="shotclock-stdin-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(str(text))
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
