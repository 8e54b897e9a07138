"""How much memory a worker may take for what a file makes us compute: a template, a condition, a JSON Schema.

Time is bounded by the clock of the call. Memory has to be bounded by itself, or the machine is on its knees before the
clock rings.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

# Beyond what the worker has: a few outputs several times over. `'a' * 9999999999` ends here.
MEMORY_LIMIT = 512 * 1024 * 1024
TOO_MUCH = f"it takes more than {MEMORY_LIMIT >> 20} MB of memory"


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Asking for more raises MemoryError. A worker does one thing at a time, so this bounds nobody else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
    except OSError:  # macOS has neither this nor a limit that holds
        limit = 0
    if not limit or (soft != resource.RLIM_INFINITY and soft <= limit):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
