"""Signs of life on stderr while a command runs: in words for a log, or as JSON lines for a program."""

from __future__ import annotations

import asyncio
import json

from ..core.durations import format_duration
from ..enforce.clock import monotonic_ns
from .output import say_line


class Heartbeat:
    def __init__(self, name: str, interval_ms: int, *, as_json: bool) -> None:
        self._name = name
        self._interval_s = max(interval_ms, 1) / 1000
        self._as_json = as_json
        self._started_ns = monotonic_ns()
        self._progress: dict[str, object] = {}

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        said = {"done": done, "total": total, "unit": unit}
        self._progress = {key: value for key, value in said.items() if value is not None}

    async def beat(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            say_line(self.line())

    def line(self) -> str:
        elapsed_ms = (monotonic_ns() - self._started_ns) // 1_000_000
        if self._as_json:
            beat = {"type": "heartbeat", "command": self._name, "elapsed_ms": elapsed_ms, "progress": self._progress}
            return json.dumps(beat, separators=(",", ":"))
        text = f"{self._name}: running for {format_duration(elapsed_ms)}"
        if self._progress:
            of = f" of {self._progress['total']}" if "total" in self._progress else ""
            unit = f" {self._progress['unit']}" if "unit" in self._progress else ""
            text += f", {self._progress['done']}{of}{unit}"
        return text
