"""What a device is: the contract that a browser and a phone keep, and where each kind of device is found.

A device is used by one execution at a time, on one event loop, in a process of its own that is killed with all it
started when it does not answer. So a device has no clock of its own over executions; it keeps the one that each of its
methods is given.

The contract of every method that takes `within_ms`:

- It returns or raises within that time. It is cancelled a little later (`execution.GUARD_MS`) and has to let itself be.
- It raises `Failure` with one of these codes, and a message for whoever wrote the payload:

      WAIT_TIMEOUT        the node, text or place did not come in that time; the device itself answers, and nothing
                          was changed
      NODE_NOT_FOUND      there is no use in waiting: the ref is none of the last snapshot; nothing was changed
      EVAL_TIMEOUT        the device did not answer a question about what it shows
      OPERATION_TIMEOUT   the device did not take an order in that time
      DEVICE_LOST         the page, the browser, the link or the phone is gone
      ACTION_FAILED       it was tried and refused: not editable, not an address, no such app
      ACTION_UNSUPPORTED  this kind of device cannot do that; nothing was tried

  Anything else that it raises is a bug, and is told as one.
- A node that is not there yet is waited for, up to `within_ms`; one that is there is used at once.
- What fails may have been done in part. A method never claims otherwise by trying again what changes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Literal, Protocol, cast

from ..core.errors import Failure
from ..core.value_types import value
from .device_names import KINDS, kind_of
from .payload import Click, EnterText, Matcher, Scroll, WaitForNavigation


@value
class Place:
    """What a device shows."""

    where: str
    """The address of a page; package and activity of an app. For people: never compared."""
    document: str
    """The same text for as long as the same document, or the same instance of an activity, is shown; another one after
    a navigation, a reload, a crash."""
    navigating_to: str | None = None
    """The address that the page is leaving for; None if it is not. Until that one answers, the page answers nothing."""


@value
class Snapshot:
    """What is to be seen, as compact text for models: a line per node, indented below its parent.

    `- button "Save" [disabled] [ref=e12]`: role, name in quotes, states in brackets, then the ref, which is valid in
    matchers until the next snapshot of this device. Nodes without role, name or text are left out.
    """

    text: str
    place: Place


@value
class CommandOutput:
    """The end of a program that a device was allowed to run."""

    exit_code: int
    stdout: bytes
    stderr: str


class DeviceServices(Protocol):
    """What a device may ask of the process that keeps it. A device starts no programs itself."""

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> CommandOutput:
        """Run a program to its end; whatever it does, it and all it started are gone by then. Raises Failure TIMEOUT,
        COMMAND_NOT_FOUND and the other codes of `shotclock exec`."""
        ...

    async def start_program(self, argv: Sequence[str]) -> None:
        """Start a program that is meant to outlive the device and its daemon: a server that all of this machine share.
        Raises Failure SPAWN_FAILED."""
        ...


class Device(Protocol):
    """A browser's page or a phone."""

    kind: str
    """`browser`, `android`: the first part of its name."""
    is_fresh: bool
    """Whether it has lost what it showed before, and no result has reported that yet."""

    def place_seen(self) -> Place | None:
        """Return what it is known to show without asking it; None where that is not known. Does not wait."""
        ...

    def take_notes(self) -> dict[str, object]:
        """Return, once, what came up by itself since it was last asked, for the data of a step: dialogs, downloads."""
        ...

    async def look(self, within_ms: int) -> Place:
        """Ask the device what it shows. That it answers is the proof that it still works."""
        ...

    async def recover(self, within_ms: int) -> Place:
        """Make the device usable again after it did not answer, and return what it shows then: the document that was
        there, where it answers again, else a fresh one. Raises DEVICE_LOST where only another process could help."""
        ...

    async def close(self) -> None:
        """Let go of the device and of all that was started for it. Its process ends next; what hangs is killed then."""
        ...

    async def open_app(self, application_id: str, within_ms: int) -> dict[str, object]:
        """Bring an app to the foreground."""
        ...

    async def open_uri(self, uri: str, within_ms: int) -> dict[str, object]:
        """Open an address, and return once its document is there."""
        ...

    async def close_app(self, application_id: str | None, within_ms: int) -> dict[str, object]:
        """End an app; without an id what is shown now."""
        ...

    async def click(self, params: Click, within_ms: int) -> dict[str, object]:
        """Click, click for long, or focus, the node or the point."""
        ...

    async def enter_text(self, params: EnterText, within_ms: int) -> dict[str, object]:
        """Put text into a node, in place of what is there or behind it, and press Enter where `submit` is said."""
        ...

    async def press_key(self, key: str, within_ms: int) -> dict[str, object]:
        """Press a key of `payload.KEYS` or a character, with its modifiers in front, as in `ctrl+a`."""
        ...

    async def scroll(self, params: Scroll, within_ms: int) -> bool:
        """Scroll by `distance_ratio` of what is seen. Return whether anything moved."""
        ...

    async def read_text(self, matcher: Matcher, within_ms: int) -> list[str]:
        """Return the texts of all nodes that match, at least one, in their order."""
        ...

    async def read_key_value_pair(self, label: Matcher, within_ms: int) -> tuple[str, str]:
        """Return the text of a label and of the value that belongs to it."""
        ...

    async def sees(self, matcher: Matcher, within_ms: int) -> bool:
        """Look once, without waiting for it, whether a node that matches is to be seen."""
        ...

    async def wait_for_node(
        self, matcher: Matcher, state: Literal["visible", "hidden"], within_ms: int
    ) -> dict[str, object]:
        """Wait until a node that matches is to be seen, or until none is."""
        ...

    async def wait_for_navigation(self, params: WaitForNavigation, within_ms: int) -> dict[str, object]:
        """Wait until all that is expected holds at once: package in the foreground, node, address."""
        ...

    async def snapshot(self, within_ms: int) -> Snapshot:
        """Return what is to be seen. How much of it goes into a result is not the device's to decide."""
        ...

    async def screenshot(self, within_ms: int) -> bytes:
        """Return what is to be seen as a PNG."""
        ...


@value
class DeviceEntry:
    """A device of this machine, as `shotclock ui devices` lists it."""

    name: str
    """What `--device` takes."""
    usable: bool
    detail: str
    """Its version; what is missing, where it is not usable."""


class DeviceModule(Protocol):
    """A module of `device_names.KINDS`: one kind of device."""

    async def open_device(self, name: str, services: DeviceServices) -> Device:
        """Start or reach the device of this name (`browser`, `android:SERIAL`). Raises Failure DEVICE_UNAVAILABLE with
        what is missing and how to get it. Its caller bounds it."""
        ...

    async def find_devices(self, services: DeviceServices) -> list[DeviceEntry]:
        """Return the devices of this kind, also those that are not usable and why. Starts none. Within 5 s."""
        ...


def module_of(name: str) -> DeviceModule:
    """Return the module of a device. Raises Failure DEVICE_UNAVAILABLE where it cannot be used."""
    kind = kind_of(name)
    try:
        return cast(DeviceModule, import_module(KINDS[kind], __package__))
    except ModuleNotFoundError as error:
        raise Failure("DEVICE_UNAVAILABLE", f"{kind} devices need {error.name}, which is not installed") from None
