"""An Android phone as a device, over adb: `uiautomator dump` and `dumpsys` to look, `input` for touch and keys.

A phone changes by itself. So every search for a node takes a new dump, and an earlier one is never reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, TypeVar

from ..core.clocks import NS_PER_MS
from ..core.errors import Failure
from ..process.clock import monotonic_ns
from ..process.command_task import make_private_directory
from . import client
from .adb import CONNECT_MS, INSTALL, NO_PHONE, STATE_MS, Adb, choose_phone, find_adb
from .device import Countdown, DeviceEntry, DeviceServices, Place, Snapshot
from .hierarchy import Hierarchy, Node, NodeKey, parse_dump
from .payload import Click, EnterText, Matcher, Scroll, WaitForNavigation

T = TypeVar("T")

SEEN_MS = 2_000  # an older place is no longer known
LOOK_PAUSE_S = 0.15
DOUBT_MS = 4_000  # a phone that answered this recently is not silent
LOCK_MS = 3_000  # the wait for the end of the process that held the phone before
LONG_CLICK_MS = 700
SWIPE_MS = 400
SWIPE_SHARE = 0.8  # a swipe that begins at the edge of the screen is a gesture of Android's own
MAX_DELETED = 2_000

_DUMP_FILE = "/data/local/tmp/shotclock-window.xml"
_DUMP = f"rm -f {_DUMP_FILE}; uiautomator dump {_DUMP_FILE}; cat {_DUMP_FILE}"
_END_DUMP = "pkill -f '[u]iautomator.Launcher'; true"  # the pattern does not match its own shell
_FOREGROUND = (
    "dumpsys activity activities | grep ResumedActivity; "
    "dumpsys window | grep -E 'mCurrentFocus|mFocusedApp'; true"
)  # fmt: skip
_ACTIVITY = re.compile(r"ActivityRecord\{(\S+) u\d+ ([\w.]+)/([\w.$]+)")
_WINDOW = re.compile(r"mCurrentFocus=Window\{(\S+) u\d+ ([^}\s]+)")
_APP = re.compile(r"[A-Za-z][\w.]*(/[\w.$]+)?", re.ASCII)
_REFUSAL = re.compile(r"(\*\* )?(Error\b|No activities|[\w.]*Exception\b|Security exception)")
_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"

_CODES = {
    "back": 4, "home": 3, "recents": 187, "enter": 66, "tab": 61, "escape": 111, "backspace": 67, "delete": 112,
    "space": 62, "arrow_up": 19, "arrow_down": 20, "arrow_left": 21, "arrow_right": 22, "page_up": 92, "page_down": 93,
    "move_home": 122, "move_end": 123, "ctrl": 113, "alt": 57, "shift": 59, "meta": 117,
}  # fmt: skip
_DELETE, _DELETE_FORWARD, _ENTER = 67, 112, 66


async def find_devices(services: DeviceServices) -> list[DeviceEntry]:
    if find_adb() is None:
        return [DeviceEntry("android", False, INSTALL)]
    phones = await Adb.find(services).find_phones()
    entries = [DeviceEntry(f"android:{phone.serial}", phone.is_usable, phone.describe()) for phone in phones]
    return entries or [DeviceEntry("android", False, NO_PHONE)]


async def open_device(name: str, services: DeviceServices) -> AndroidDevice:
    adb = Adb.find(services)
    adb.serial = name.partition(":")[2] or os.environ.get("ANDROID_SERIAL", "")
    await adb.start_server()
    adb.serial = adb.serial or choose_phone(await adb.list_phones())
    lock = await _lock_phone(adb.serial)
    try:
        await adb.connect(CONNECT_MS)
    except BaseException:
        os.close(lock)
        raise
    return AndroidDevice(adb, lock)


async def _lock_phone(serial: str) -> int:
    """Lock the phone, which may have two names, and return the descriptor of the lock."""
    make_private_directory(client.folder())
    path = f"{client.stem_of(f'phone:{serial}')}.phone"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    time = Countdown(LOCK_MS)
    while not time.is_over:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            await asyncio.sleep(LOOK_PAUSE_S)
    os.close(lock)
    message = f"the phone {serial} is already used under another name: see `shotclock ui devices`"
    raise Failure("DEVICE_UNAVAILABLE", message)


class _NotYet(Exception):
    pass


class AndroidDevice:
    is_fresh = False  # a phone keeps its apps when its daemon ends

    def __init__(self, adb: Adb, lock: int) -> None:
        self._adb, self._lock = adb, lock
        self._seen: Place | None = None
        self._seen_ns = 0
        self._refs: dict[str, NodeKey] = {}
        self._next_ref = itertools.count(1)

    def place_seen(self) -> Place | None:
        is_fresh = monotonic_ns() - self._seen_ns <= SEEN_MS * NS_PER_MS
        return self._seen if is_fresh else None

    def take_notes(self) -> dict[str, object]:
        return {}

    async def look(self, within_ms: int) -> Place:
        async with _explained("the question for the foreground", within_ms):
            output = (await self._adb.shell(_FOREGROUND, within_ms))[1].decode("utf-8", "replace")
        self._seen, self._seen_ns = _read_place(output), monotonic_ns()
        return self._seen

    async def recover(self, within_ms: int) -> Place:
        time = Countdown(within_ms)
        try:
            await self._adb.start_server()
            await self._adb.connect(time.left_ms)
            with contextlib.suppress(Failure):
                await self._adb.shell(_END_DUMP, min(STATE_MS, time.left_ms))
            return await self.look(time.left_ms)
        except Failure as failure:
            raise Failure("DEVICE_LOST", str(failure)) from None

    async def close(self) -> None:
        os.close(self._lock)

    async def _dump(self, time: Countdown) -> Hierarchy:
        why = ""
        while True:
            try:
                return parse_dump((await self._adb.shell(_DUMP, time.left_ms))[1])
            except Failure as failure:
                if failure.code == "DEVICE_LOST":
                    raise
                if failure.code != "TIMEOUT":
                    why = str(failure)
            except ValueError as error:
                why = str(error)
            await _pause(time)
            if time.is_over:
                problem = f"gave no hierarchy within {time.limit_ms} ms: {why}"
                problem = problem if why else f"did not answer within {time.limit_ms} ms"
                raise Failure("EVAL_TIMEOUT", f"the phone's uiautomator dump {problem}")

    async def _until(self, time: Countdown, check: Callable[[], Awaitable[T]]) -> T:
        """Repeat a check until it holds. Raises WAIT_TIMEOUT, or EVAL_TIMEOUT if the phone was silent long before."""
        missing, answered_ns = "", 0
        while True:
            try:
                return await check()
            except _NotYet as not_yet:
                missing, answered_ns = str(not_yet), monotonic_ns()
            except Failure as failure:
                is_late = monotonic_ns() - answered_ns > DOUBT_MS * NS_PER_MS
                if failure.code != "EVAL_TIMEOUT" or is_late:
                    raise
            await _pause(time)
            if time.is_over:
                raise Failure("WAIT_TIMEOUT", f"{missing}, within {time.limit_ms} ms")

    async def _find(self, matcher: Matcher, time: Countdown, *, enabled: bool = False) -> tuple[Hierarchy, list[Node]]:
        async def check() -> tuple[Hierarchy, list[Node]]:
            hierarchy = await self._dump(time)
            found = list(hierarchy.find(matcher, self._refs))
            usable = [node for node in found if "enabled" in node.states] if enabled else found
            if not usable:
                raise _NotYet(f"{'only a disabled' if found else 'no'} node with {matcher.describe()} is visible")
            return hierarchy, usable

        return await self._until(time, check)

    async def _sees(self, matcher: Matcher, time: Countdown) -> bool:
        return any((await self._dump(time)).find(matcher, self._refs))

    async def open_app(self, application_id: str, time: Countdown) -> dict[str, object]:
        app, package = _check_app(application_id), application_id.partition("/")[0]
        start = f"am start -W -n {app}" if "/" in app else f"monkey -p {app} -c android.intent.category.LAUNCHER 1"
        await self._order(f"open_app {application_id}", start, time)

        async def check() -> dict[str, object]:
            place = await self.look(time.left_ms)
            if _package_of(place) != package:
                raise _NotYet(f"{package} was started, and {place.where} is in the foreground")
            return {"where": place.where}

        try:
            return await self._until(time, check)
        except Failure as failure:
            if failure.code != "WAIT_TIMEOUT":  # its meaning is that nothing was changed
                raise
            raise Failure("OPERATION_TIMEOUT", str(failure)) from None

    async def open_uri(self, uri: str, time: Countdown) -> dict[str, object]:
        script = f"am start -W -a android.intent.action.VIEW -d {shlex.quote(uri)}"
        await self._order(f"open_uri {uri[:200]}", script, time)
        return {"where": (await self.look(time.left_ms)).where}

    async def close_app(self, application_id: str | None, time: Countdown) -> dict[str, object]:
        package = application_id.partition("/")[0] if application_id else _package_of(await self.look(time.limit_ms))
        await self._order(f"close_app {package}", f"am force-stop {_check_app(package)}", time)
        return {"applicationId": package}

    async def _order(self, what: str, script: str, time: Countdown) -> None:
        self._seen = None
        async with _explained(what, time.left_ms, "OPERATION_TIMEOUT"):
            code, output = await self._adb.shell(script, time.left_ms)
        lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
        refusals = [line for line in lines if _REFUSAL.match(line)]
        if code or refusals:
            why = (refusals or lines or [f"exit code {code}"])[0][:300]
            raise Failure("ACTION_FAILED", f"{what}: the phone answered {why!r}")

    async def click(self, params: Click, time: Countdown) -> dict[str, object]:
        if params.matcher is not None:
            _, found = await self._find(params.matcher, time, enabled=True)
            if params.click_type == "focus" and not found[0].is_editable:
                raise Failure("ACTION_UNSUPPORTED", "a phone focuses text fields only: a touch clicks other nodes")
            x, y = found[0].centre
        elif params.coordinate is not None:
            x, y = round(params.coordinate.x), round(params.coordinate.y)
        is_long = params.click_type == "long_click"
        await self._order(
            "click", f"input swipe {x} {y} {x} {y} {LONG_CLICK_MS}" if is_long else f"input tap {x} {y}", time
        )
        return {"x": x, "y": y}

    async def enter_text(self, params: EnterText, time: Countdown) -> dict[str, object]:
        typed = _type(params.text)
        _, found = await self._find(params.matcher, time, enabled=True)
        if not found[0].is_editable:
            raise Failure("ACTION_FAILED", f"the node with {params.matcher.describe()} is not a text field")
        x, y = found[0].centre
        steps = [f"input tap {x} {y}"]
        if params.clear and (length := min(len(found[0].text), MAX_DELETED)):
            # For every position of the cursor and any number of lines.
            steps.append(f"input keyevent{f' {_DELETE}' * length}{f' {_DELETE_FORWARD}' * length}")
        elif not params.clear:
            steps.append(f"input keyevent {_CODES['move_end']}")
        steps += typed
        if params.submit:
            steps.append(f"input keyevent {_ENTER}")
        await self._order("enter_text", " && ".join(steps), time)
        return {"length": len(params.text)}

    async def press_key(self, key: str, time: Countdown) -> dict[str, object]:
        *modifiers, last = [key] if len(key) == 1 else key.lower().split("+")
        if not modifiers and len(last) == 1:
            script = " && ".join(_type(last))
        else:
            codes = " ".join(str(_code_of(each)) for each in (*modifiers, last))
            script = f"input {'keycombination' if modifiers else 'keyevent'} {codes}"
        await self._order(f"press_key {key}", script, time)
        return {}

    async def scroll(self, params: Scroll, time: Countdown) -> bool:
        if params.container is None:
            before = await self._dump(time)
            left, top, right, bottom = before.screen
        else:
            before, found = await self._find(params.container, time)
            left, top, right, bottom = found[0].box
        x, y = (left + right) // 2, (top + bottom) // 2
        # The finger moves the other way.
        along_x, along_y = {"up": (0, 1), "down": (0, -1), "left": (1, 0), "right": (-1, 0)}[params.direction]
        reach_x = round(along_x * (right - left) * params.distance_ratio * SWIPE_SHARE / 2)
        reach_y = round(along_y * (bottom - top) * params.distance_ratio * SWIPE_SHARE / 2)
        script = f"input swipe {x - reach_x} {y - reach_y} {x + reach_x} {y + reach_y} {SWIPE_MS}"
        await self._order("scroll", script, time)
        return (await self._dump(time)).looks != before.looks

    async def read_text(self, matcher: Matcher, time: Countdown) -> list[str]:
        hierarchy, found = await self._find(matcher, time)
        return [hierarchy.text_of(node) for node in found]

    async def read_key_value_pair(self, label: Matcher, time: Countdown) -> tuple[str, str]:
        hierarchy, found = await self._find(label, time)
        if (pair := hierarchy.find_value(found[0])) is None:
            raise Failure("ACTION_FAILED", f"the node with {label.describe()} has no value beside it")
        return pair

    async def sees(self, matcher: Matcher, within_ms: int) -> bool:
        return await self._sees(matcher, Countdown(within_ms))

    async def wait_for_node(
        self, matcher: Matcher, state: Literal["visible", "hidden"], time: Countdown
    ) -> dict[str, object]:
        if state == "visible":
            await self._find(matcher, time)
            return {"state": state}

        async def check() -> dict[str, object]:
            if await self._sees(matcher, time):
                raise _NotYet(f"a node with {matcher.describe()} is still visible")
            return {"state": state}

        return await self._until(time, check)

    async def wait_for_navigation(self, params: WaitForNavigation, time: Countdown) -> dict[str, object]:
        if params.expected_url is not None:
            raise Failure("ACTION_UNSUPPORTED", "a phone shows no address: use expectedPackage or expectedNode")
        node = params.expected_node

        async def check() -> dict[str, object]:
            place = await self.look(time.left_ms)
            if params.expected_package not in (None, _package_of(place)):
                raise _NotYet(f"{place.where} is in the foreground, not {params.expected_package}")
            if node is not None and not await self._sees(node, time):
                raise _NotYet(f"no node with {node.describe()} is visible")
            return {"where": place.where}

        return await self._until(time, check)

    async def snapshot(self, time: Countdown) -> Snapshot:
        hierarchy = await self._dump(time)
        place = await self.look(time.left_ms)
        return Snapshot(hierarchy.write_snapshot(self._refs, self._next_ref), place)

    async def screenshot(self, time: Countdown) -> bytes:
        async with _explained("take_screenshot", time.limit_ms):
            output = await self._adb.run("exec-out", "screencap -p", within_ms=time.left_ms)
            # Some phones write a warning first.
            start, end = output.stdout.find(_PNG), output.stdout.rfind(_PNG_END)
            if start < 0 or end < start:
                await self._adb.explain_failure(output, time)
        return output.stdout[start : end + len(_PNG_END)]


async def _pause(time: Countdown) -> None:
    await asyncio.sleep(min(LOOK_PAUSE_S, time.left_ms / 1000))


@contextlib.asynccontextmanager
async def _explained(what: str, within_ms: int, silent: str = "EVAL_TIMEOUT") -> AsyncIterator[None]:
    try:
        yield
    except Failure as failure:
        if failure.code != "TIMEOUT":
            raise
        raise Failure(silent, f"the phone did not answer {what} within {within_ms} ms") from None


def _read_place(output: str) -> Place:
    """Return the resumed activity, or the window that has the focus."""
    lines = output.splitlines()
    for sign in ("topResumedActivity", "ResumedActivity", "mFocusedApp"):
        for line in lines:
            if sign in line and (activity := _ACTIVITY.search(line)) is not None:
                where = f"{activity[2]}/{activity[3]}"
                return Place(where, f"activity {activity[1]} {where}")
    if (window := _WINDOW.search(output)) is not None:
        return Place(window[2], f"window {window[1]} {window[2]}")
    return Place("unknown", "unknown")


def _package_of(place: Place) -> str:
    return place.where.partition("/")[0]


def _check_app(application_id: str) -> str:
    if _APP.fullmatch(application_id) is None:
        message = f"{application_id!r:.80} is not an app: use its package, as in com.android.settings"
        raise Failure("ACTION_UNSUPPORTED", message)
    return application_id


def _type(text: str) -> list[str]:
    for position, character in enumerate(text):
        if not " " <= character <= "~":
            message = (
                f"`input text` types printable ASCII only, and character {position + 1} is {character!r}: "
                "nothing was typed (a new line is press_key enter)"
            )
            raise Failure("ACTION_UNSUPPORTED", message)
    # `input` reads `%s` as a space, so a literal `%s` is typed in two parts.
    parts = re.split(r"(?<=%)(?=s)", text)
    return [f"input text {shlex.quote(part.replace(' ', '%s'))}" for part in parts if part]


def _code_of(key: str) -> int:
    if key in _CODES:
        return _CODES[key]
    if "a" <= key <= "z":
        return 29 + ord(key) - ord("a")
    if "0" <= key <= "9":
        return 7 + int(key)
    raise Failure("ACTION_UNSUPPORTED", f"a phone cannot press {key!r} together with other keys")
