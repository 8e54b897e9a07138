"""Descriptors of a server: the standard ones, where it speaks over stdin and stdout, and how many it has for what."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
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


# For the store, the host of async commands, logs, and what is accepted or closed in the same moment.
KEPT_FOR_OURSELVES = 64
EACH_WORKER = 4
# Beyond this, memory is what runs out first.
MOST_CONNECTIONS = 16_384


def share_descriptors(most_workers: int) -> tuple[int, int]:
    """How many workers and how many connections there may be at once, so that neither takes the other's descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return most_workers, MOST_CONNECTIONS
    free = max(16, limit - KEPT_FOR_OURSELVES)
    workers = max(1, min(most_workers, free // 2 // EACH_WORKER))
    return workers, min(MOST_CONNECTIONS, free - workers * EACH_WORKER)
