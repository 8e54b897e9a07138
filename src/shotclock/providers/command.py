"""`command` and `tool`: a shell command in a tree of its own. What it prints is its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from ..core.envelope import Envelope
from ..runtime.runtime import Runtime
from .provider import StepCall, StepResult, envelope_left_by, hand_over

SHELL = ["/bin/sh"]
# Not every sh knows it. On the script's own first line, so that the shell's messages count lines as the file does.
PIPEFAIL = "command set -o pipefail 2>/dev/null || :; "
STDIN_VARIABLE = "SHOTCLOCK_STDIN"


class CommandProvider:
    """Runs `exec`. The rule of a failure is `KIND/timeout`, `KIND/stalled` or `KIND/failed`."""

    def __init__(self, kind: str = "command") -> None:
        self._kind = kind

    async def run(self, call: StepCall, runtime: Runtime) -> StepResult:
        script = call.settings["exec"]
        # Our own environment needs no looking through for each step, and gives way to what keeps a child quiet.
        around, asked = ({}, call.env) if call.asked is None else (call.env, call.asked)
        env = {**asked, **call.values}
        with _spooled(call.settings.get("stdin")) as stdin:
            if stdin is not None:
                env[STDIN_VARIABLE] = stdin
                script = f'exec <"${STDIN_VARIABLE}"; {script}'
            shell = call.settings.get("shell") or SHELL
            if shell[0].rpartition("/")[2] == "bash":
                argv = [*shell, "-o", "pipefail", "-c", script]
            else:
                argv = [*shell, "-c", PIPEFAIL + script]
            try:
                envelope = await runtime.run(
                    argv, call.clocks, env=env, base_env=around, cwd=call.folder, name=call.name
                )
            except asyncio.CancelledError as cancelled:
                if (left := envelope_left_by(cancelled)) is not None:
                    hand_over(cancelled, self._result(left))
                raise
        return self._result(envelope)

    def _result(self, envelope: Envelope) -> StepResult:
        data = envelope.data if isinstance(envelope.data, dict) else {}
        return StepResult(envelope, data.get("stdout", ""), self._rule(envelope))

    def _rule(self, envelope: Envelope) -> str | None:
        match envelope.code:
            case None:
                return None
            case "TIMEOUT" | "NO_TIME_LEFT":
                return f"{self._kind}/timeout"
            case "STALLED":
                return f"{self._kind}/stalled"
            case "CANCELLED":
                return f"{self._kind}/cancelled"
            case _:
                return f"{self._kind}/failed"

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def _spooled(text: Any) -> Iterator[str | None]:
    """A file that holds it while the command runs."""
    if text is None:
        yield None
        return
    fd, path = tempfile.mkstemp(prefix="shotclock-stdin-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(str(text))
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
