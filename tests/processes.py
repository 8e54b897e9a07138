"""Whether processes of a test still run."""

import time

import psutil

GONE_WITHIN_S = 10.0
POLL_S = 0.02


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie; one may end between two looks."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids: int, within_s: float = GONE_WITHIN_S) -> None:
    give_up_at = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < give_up_at, f"{left} still run after {within_s} s"
        time.sleep(POLL_S)
