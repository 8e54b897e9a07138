"""The standard descriptors of a server that speaks over stdin and stdout."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def claimed_descriptors() -> Iterator[tuple[int, int]]:
    """The wire on descriptors that nobody else knows. Meanwhile stdin is empty, and what is printed goes to stderr."""
    wire_in, wire_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # somebody closed stderr
            os.dup2(null, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)
