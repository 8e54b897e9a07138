"""Names of devices: which kinds there are, by the part before the colon. Stands before every `shotclock ui click`."""

from __future__ import annotations

from ..core.errors import Failure

KINDS = {"browser": ".browser", "cdp": ".browser", "android": ".android"}
"""By the part of a device's name before the colon the module that knows it. A new kind is a module and a line here."""
DEFAULT_DEVICE = "browser"


def kind_of(name: str) -> str:
    """Return the kind of a device. Raises Failure DEVICE_UNAVAILABLE for a name of none."""
    kind = name.partition(":")[0]
    if kind not in KINDS:
        known = "browser, browser:NAME, cdp:http://127.0.0.1:9222, android, android:SERIAL"
        raise Failure("DEVICE_UNAVAILABLE", f"there is no device {name!r:.100}; write one of {known}")
    return kind
