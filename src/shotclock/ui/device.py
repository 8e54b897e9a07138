"""Devices: their names, and the contract that a browser and a phone keep.

A device is used by one execution at a time, on one event loop, in a process of its own that is killed with all its
children when it does not answer. So a device has no clock over executions; each method keeps its own limit.

The contract of every method that takes a `Countdown` or `within_ms`:

- It returns or raises within that time. It is cancelled a little later (`execution.GUARD_MS`) and must obey.
- It raises `Failure` with one of these codes, and a message for the author of the payload:

      WAIT_TIMEOUT        the node, text or place did not appear in time; the device answers, and nothing was changed
      NODE_NOT_FOUND      waiting is useless: the ref is not in the last snapshot; nothing was changed
      EVAL_TIMEOUT        the device did not answer a question about its screen
      OPERATION_TIMEOUT   the device did not carry out an order in time
      DEVICE_LOST         the page, the browser, the link or the phone is gone
      ACTION_FAILED       the device refused: not editable, not an address, no such app
      ACTION_UNSUPPORTED  this kind of device cannot do that; nothing was tried

  Any other exception is a bug, and is reported as one.
- It waits for a node to appear, and uses a node that is there at once.
- A failed order may have had a part of its effect, so it is never retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..core.errors import Failure
from ..core.limits import NS_PER_MS, Deadline
from ..core.value_types import value
from ..supervise.clock import monotonic_ns
from .payload import Matcher, Scroll

KINDS = ("browser", "cdp", "android")  # the part of a device's name before the colon
DEFAULT_DEVICE = "browser"


def kind_of(name: str) -> str:
    kind = name.partition(":")[0]
    if kind not in KINDS:
        names = "browser, browser:NAME, cdp:http://127.0.0.1:9222, android, android:SERIAL"
        raise Failure("DEVICE_UNAVAILABLE", f"there is no device {name!r:.100}; use one of {names}")
    return kind


class Countdown:
    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self._deadline = Deadline.after_ms(monotonic_ns(), limit_ms)

    @property
    def left_ms(self) -> int:
        """Return the time left, rounded up: a wait that ends early has waited less than it reports."""
        return max(1, -(-self._deadline.remaining_ns(monotonic_ns()) // NS_PER_MS))

    @property
    def is_over(self) -> bool:
        return self._deadline.has_passed(monotonic_ns())


@value
class Place:
    """The page or activity that a device shows."""

    where: str  # The address of a page; package and activity of an app. For people: never compared.
    document: str
    """An id of the document or the instance of an activity. It changes with a navigation, a reload and a crash."""
    navigating_to: str | None = None  # The address of a pending navigation. Until it answers, the page does not answer.
    title: str = ""


@value
class Snapshot:
    """The visible nodes as compact text for models: a line per node, indented below its parent.

    `- button "Save" [disabled] [ref=e12]`: role, name in quotes, states in brackets, then the ref, which is valid in
    matchers until the next snapshot of this device. Nodes without role, name or text are left out.
    """

    text: str
    place: Place
    nodes_left_out: int = 0  # a page that is too large is cut before it is written
    depth: int = 0  # the depth below which nodes may be left out; 0: none are


@value
class ProgramOutput:
    exit_code: int
    stdout: bytes
    stderr: str


class DeviceServices(Protocol):
    """Services for a device, which starts no programs itself."""

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> ProgramOutput:
        """Run a program to its end, with all its children."""

    async def start_program(self, argv: Sequence[str]) -> None:
        """Start a server that the whole machine shares; it outlives the device."""


class Device(Protocol):
    """A browser's page or a phone.

    The actions that are not listed here are methods too. Each has the name of its action, takes the params and a
    `Countdown`, and returns the data of the step. `open_uri` returns once the document is there; `wait_for_navigation`
    once the expected package, node and address are there at once.
    """

    is_fresh: bool  # whether it has lost its earlier page, and no result has reported that yet

    def place_seen(self) -> Place | None:
        """Return the last known place, or None if it may be outdated."""

    def take_notes(self) -> dict[str, object]:
        """Return and forget the tabs, dialogs and downloads that were opened since the last call."""

    async def look(self, within_ms: int) -> Place:
        """Ask the device for its place. The answer proves that it still works."""

    async def recover(self, within_ms: int) -> Place:
        """Make a silent device usable again. Raises DEVICE_LOST where only a new process helps."""

    async def close(self) -> None:
        """Close the device. Its process ends next; anything that hangs is killed then."""

    async def scroll(self, params: Scroll, time: Countdown) -> bool:
        """Scroll by `distance_ratio` of the visible part. Return whether anything moved."""

    async def read_text(self, matcher: Matcher, time: Countdown) -> list[str]:
        """Return the texts of all nodes that match, at least one, in their order."""

    async def read_key_value_pair(self, label: Matcher, time: Countdown) -> tuple[str, str] | None: ...

    async def sees(self, matcher: Matcher, within_ms: int) -> bool: ...

    async def snapshot(self, matcher: Matcher | None, time: Countdown) -> Snapshot:
        """Return the visible nodes, or only those in the node that matches."""

    async def screenshot(self, time: Countdown) -> bytes: ...


@value
class DeviceEntry:
    name: str  # the value for `--device`
    usable: bool
    detail: str  # its version, or the reason why it is not usable
