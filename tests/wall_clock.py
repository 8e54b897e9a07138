"""A wall clock that a test moves, for the programs that it starts with `environment`. The monotonic clock stays."""

import os
import struct
from pathlib import Path

HOUR_MS = 3_600_000
_SHIM = """
import mmap, struct, time
with open({path!r}, "rb") as file:
    offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real = time.time_ns
time.time_ns = lambda: real() + struct.unpack("q", offset)[0] * 1_000_000
time.time = lambda: time.time_ns() / 1e9
"""


class WallClock:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._path = folder / "offset"
        self._path.write_bytes(struct.pack("q", 0))
        self.by_ms = 0
        (folder / "sitecustomize.py").write_text(_SHIM.format(path=str(self._path)))
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}

    def move(self, by_ms: int) -> None:
        """Move the clock of all programs, also of those that run."""
        self.by_ms += by_ms
        with open(self._path, "r+b") as file:
            file.write(struct.pack("q", self.by_ms))
