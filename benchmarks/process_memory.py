"""What the kernel says about this process's memory."""

from __future__ import annotations


def resident_kib() -> int:
    return _status("VmRSS")


def peak_kib() -> int:
    """The most it ever held since the last `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    raise LookupError(name)
