"""Servers over HTTP as processes of a test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SHOTCLOCK = str(Path(sys.executable).parent / "shotclock")
READY_S = 60.0  # of an interpreter or two on a busy machine
ENDED_S = 20.0
POLL_S = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def listening(argv: list[str], port: int, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server of that port, and yield its address and its process."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with open(log, "wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
    try:
        give_up_at = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < give_up_at, "the server does not listen"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(POLL_S)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.terminate()
        try:
            process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDED_S)
            raise
    assert "Exception in thread" not in log.read_text("utf-8", "replace")
