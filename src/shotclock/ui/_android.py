"""An Android phone as a device, over adb: `uiautomator dump` and `dumpsys` to look, `input` for touch and keys.

A phone changes by itself. So every search for a node takes a new dump, and an earlier one is never reused. Noise around
the XML of a dump, characters that are illegal in XML, and cut-off or empty dumps are expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TypeVar
from xml.parsers import expat

from ..core.errors import Failure
from ..core.limits import NS_PER_MS
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import make_private_directory
from . import client, payload
from ._adb import CONNECT_MS, NO_PHONE, STATE_MS, Adb, choose_phone
from .device import Countdown, DeviceEntry, DeviceServices, Place, Snapshot
from .payload import Matcher

T = TypeVar("T")
NodeKey = tuple[object, ...]

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
    "back": 4, "forward": 125, "home": 3, "recents": 187, "enter": 66, "tab": 61, "escape": 111, "backspace": 67,
    "delete": 112, "space": 62, "arrow_up": 19, "arrow_down": 20, "arrow_left": 21, "arrow_right": 22, "page_up": 92,
    "page_down": 93, "move_home": 122, "move_end": 123, "ctrl": 113, "alt": 57, "shift": 59, "meta": 117,
}  # fmt: skip
_DELETE, _DELETE_FORWARD, _ENTER = 67, 112, 66

MAX_NODES = 100_000
MAX_DEPTH = 500
MAX_NAME_LENGTH = 200

_ROLES = {
    "Button": "button", "ImageButton": "button", "FloatingActionButton": "button", "Chip": "button",
    "EditText": "textbox", "AutoCompleteTextView": "textbox", "MultiAutoCompleteTextView": "textbox",
    "CheckBox": "checkbox", "RadioButton": "radio", "Switch": "switch", "ToggleButton": "switch",
    "TextView": "text", "CheckedTextView": "text", "ImageView": "img", "Image": "img", "SeekBar": "slider",
    "ProgressBar": "progressbar", "RatingBar": "slider", "Spinner": "combobox", "ListView": "list",
    "RecyclerView": "list", "GridView": "list", "TabWidget": "tablist", "WebView": "document", "Dialog": "dialog",
}  # fmt: skip
_STATES = ("checkable", "checked", "clickable", "enabled", "focused", "scrollable", "password", "selected")
_CLICKED = ("button", "textbox", "checkbox", "radio", "switch", "combobox", "slider")
_BOUNDS = re.compile(r"\[(-?\d+),(-?\d+)\]\[(-?\d+),(-?\d+)\]")
# Some versions of Android write a pair of UTF-16 surrogates as two references.
_PAIR = re.compile(r"&#(5[5-6]\d{3});&#(5[6-7]\d{3});")
_REFERENCE = re.compile(r"&#(x[0-9a-fA-F]+|\d+);")
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


async def find_devices(services: DeviceServices) -> list[DeviceEntry]:
    phones = await Adb.find(services).find_phones()
    entries = [DeviceEntry(f"android:{phone.serial}", phone.is_usable, phone.describe()) for phone in phones]
    return entries or [DeviceEntry("android", False, NO_PHONE)]


async def open_device(name: str, services: DeviceServices) -> AndroidDevice:
    adb = Adb.find(services, name.partition(":")[2] or os.environ.get("ANDROID_SERIAL", ""))
    await adb.start_server()
    if not adb.serial:
        adb = Adb.find(services, choose_phone(await adb.list_phones()))
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

    async def open_app(self, params: payload.OpenApp, time: Countdown) -> dict[str, object]:
        app = _check_app(params.application_id)
        package = app.partition("/")[0]
        start = f"am start -W -n {app}" if "/" in app else f"monkey -p {app} -c android.intent.category.LAUNCHER 1"
        await self._order(f"open_app {app}", start, time)

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

    async def open_uri(self, params: payload.OpenUri, time: Countdown) -> dict[str, object]:
        script = f"am start -W -a android.intent.action.VIEW -d {shlex.quote(params.uri)}"
        await self._order(f"open_uri {params.uri[:200]}", script, time)
        return {"where": (await self.look(time.left_ms)).where}

    async def close_app(self, params: payload.CloseApp, time: Countdown) -> dict[str, object]:
        named = params.application_id
        package = named.partition("/")[0] if named else _package_of(await self.look(time.limit_ms))
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

    async def click(self, params: payload.Click, time: Countdown) -> dict[str, object]:
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

    async def enter_text(self, params: payload.EnterText, time: Countdown) -> dict[str, object]:
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

    async def press_key(self, params: payload.PressKey, time: Countdown) -> dict[str, object]:
        key = params.key
        *modifiers, last = [key] if len(key) == 1 else key.lower().split("+")
        if not modifiers and len(last) == 1:
            script = " && ".join(_type(last))
        else:
            codes = " ".join(str(_code_of(each)) for each in (*modifiers, last))
            script = f"input {'keycombination' if modifiers else 'keyevent'} {codes}"
        await self._order(f"press_key {key}", script, time)
        return {}

    async def scroll(self, params: payload.Scroll, time: Countdown) -> bool:
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

    async def read_key_value_pair(self, label: Matcher, time: Countdown) -> tuple[str, str] | None:
        hierarchy, found = await self._find(label, time)
        return hierarchy.find_value(found[0])

    async def sees(self, matcher: Matcher, within_ms: int) -> bool:
        return any((await self._dump(Countdown(within_ms))).find(matcher, self._refs))

    async def wait_for_node(self, params: payload.WaitForNode, time: Countdown) -> dict[str, object]:
        if params.state == "visible":
            await self._find(params.matcher, time)
            return {"state": params.state}

        async def check() -> dict[str, object]:
            if await self.sees(params.matcher, time.left_ms):
                raise _NotYet(f"a node with {params.matcher.describe()} is still visible")
            return {"state": params.state}

        return await self._until(time, check)

    async def wait_for_navigation(self, params: payload.WaitForNavigation, time: Countdown) -> dict[str, object]:
        if params.expected_url is not None:
            raise Failure("ACTION_UNSUPPORTED", "a phone shows no address: use expectedPackage or expectedNode")
        node = params.expected_node

        async def check() -> dict[str, object]:
            place = await self.look(time.left_ms)
            if params.expected_package not in (None, _package_of(place)):
                raise _NotYet(f"{place.where} is in the foreground, not {params.expected_package}")
            if node is not None and not await self.sees(node, time.left_ms):
                raise _NotYet(f"no node with {node.describe()} is visible")
            return {"where": place.where}

        return await self._until(time, check)

    async def snapshot(self, matcher: Matcher | None, time: Countdown) -> Snapshot:
        if matcher is None:
            hierarchy, below = await self._dump(time), None
        else:
            hierarchy, found = await self._find(matcher, time)
            below = found[0]
        place = await self.look(time.left_ms)
        return Snapshot(hierarchy.write_snapshot(self._refs, self._next_ref, below), place)

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


class Node:
    def __init__(self, attributes: dict[str, str], parent: Node | None, place: int, position: int) -> None:
        """`place` is that among its siblings, `position` that in the list of all nodes."""
        self.parent = parent
        self.position = position
        self.path: tuple[int, ...] = (place,) if parent is None else (*parent.path, place)
        self.depth: int = len(self.path)
        self.text: str = attributes.get("text", "")
        self.description: str = attributes.get("content-desc", "")
        self.resource_id: str = attributes.get("resource-id", "")
        self.package: str = attributes.get("package", "")
        self.class_name: str = attributes.get("class", "")
        bounds = _BOUNDS.search(attributes.get("bounds", ""))
        self.box: tuple[int, int, int, int] = (0, 0, 0, 0)
        """Left, top, right and bottom, in pixels."""
        if bounds:
            self.box = (int(bounds[1]), int(bounds[2]), int(bounds[3]), int(bounds[4]))
        self.states: set[str] = {state for state in _STATES if attributes.get(state) == "true"}
        if "enabled" not in attributes:
            self.states.add("enabled")
        if attributes.get("visible-to-user") == "false":
            self.states.add("invisible")
        kind = self.class_name.rpartition(".")[2].removeprefix("AppCompat").removeprefix("Material")
        guess = "checkbox" if "checkable" in self.states else "button" if "clickable" in self.states else "generic"
        self.role: str = _ROLES.get(kind, guess)

    @property
    def is_seen(self) -> bool:
        left, top, right, bottom = self.box
        return right > left and bottom > top and "invisible" not in self.states

    @property
    def is_editable(self) -> bool:
        return self.role == "textbox"

    @property
    def label(self) -> str:
        return self.text or self.description

    @property
    def centre(self) -> tuple[int, int]:
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2

    @property
    def key(self) -> NodeKey:
        """Return the identity of the node across dumps. Typing into a text field does not change it."""
        text = "" if self.is_editable else self.text
        return self.path, self.class_name, self.resource_id, self.package, text, self.description


class Hierarchy:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def screen(self) -> tuple[int, int, int, int]:
        seen = [node.box for node in self.nodes if node.is_seen]
        if not seen:
            raise Failure("ACTION_FAILED", "the phone shows no node that could be touched")
        return min(b[0] for b in seen), min(b[1] for b in seen), max(b[2] for b in seen), max(b[3] for b in seen)

    @property
    def looks(self) -> list[tuple[object, ...]]:
        return [(node.box, node.text, node.description, node.class_name) for node in self.nodes if node.is_seen]

    def find(self, matcher: Matcher, refs: Mapping[str, NodeKey]) -> Iterator[Node]:
        if matcher.css is not None:
            raise Failure("ACTION_UNSUPPORTED", "a phone has no CSS: match by text, id, role or label")
        if matcher.ref is not None and matcher.ref not in refs:
            raise Failure("NODE_NOT_FOUND", f"the last snapshot has no ref {matcher.ref!r:.40}: take another one")
        return (node for node in self.nodes if node.is_seen and self._matches(node, matcher, refs))

    def _matches(self, node: Node, matcher: Matcher, refs: Mapping[str, NodeKey]) -> bool:
        if matcher.ref is not None and node.key != refs[matcher.ref]:
            return False
        if matcher.role is not None and matcher.role.lower() not in (node.role, node.class_name.lower()):
            return False
        text = self.text_of(node) if matcher.role is not None else node.text
        described = node.description
        return (
            (matcher.text_equals is None or text == matcher.text_equals)
            and (matcher.text_contains is None or matcher.text_contains.lower() in text.lower())
            and (matcher.resource_id is None or matcher.resource_id in (node.resource_id, _short(node.resource_id)))
            and (matcher.content_desc_equals is None or described == matcher.content_desc_equals)
            and (matcher.content_desc_contains is None or matcher.content_desc_contains.lower() in described.lower())
        )

    def text_of(self, node: Node) -> str:
        if node.label:
            return node.label
        return " ".join(each.label for each in self._inside(node) if each.is_seen and each.label)

    def _inside(self, node: Node) -> Iterator[Node]:
        return itertools.takewhile(lambda each: each.depth > node.depth, self.nodes[node.position + 1 :])

    def find_value(self, label: Node) -> tuple[str, str] | None:
        """Return a label and its value: the text after its colon, or the next text below its parent or grandparent."""
        key, _, rest = self.text_of(label).partition(":")
        if rest.strip():
            return key.strip(), rest.strip()
        for above in (label.parent, None if label.parent is None else label.parent.parent):
            for node in self.nodes[label.position + 1 :]:
                if above is None or node.depth <= above.depth:
                    break
                if node.is_seen and node.label:
                    return key.strip(), node.label
        return None

    def write_snapshot(self, refs: dict[str, NodeKey], next_ref: Iterator[int], below: Node | None = None) -> str:
        """Return a line per node with a role, a name or a text. A node keeps its ref from the last snapshot."""
        earlier = {key: ref for ref, key in refs.items()}
        refs.clear()
        lines: list[str] = []
        shown: list[int] = []
        nodes = self.nodes if below is None else [below, *self._inside(below)]
        for node in nodes:
            while shown and shown[-1] >= node.depth:
                shown.pop()
            if not node.is_seen or (node.role == "generic" and not node.label):
                continue
            value = f": {_quote(node.text)}" if node.is_editable and node.text else ""
            ref = earlier.get(node.key) or f"e{next(next_ref)}"
            refs[ref] = node.key
            lines.append(f"{'  ' * len(shown)}- {_describe(node)} [ref={ref}]{value}")
            shown.append(node.depth)
        return "\n".join(lines)


def _describe(node: Node) -> str:
    name = node.description if node.is_editable else node.label
    words = [node.role, *([_quote(name)] if name else [])]
    if node.resource_id:
        words.append(f"[id={_short(node.resource_id)}]")
    shown = ("checked", "selected", "focused", "scrollable", "password")
    words += [f"[{state}]" for state in shown if state in node.states]
    if "clickable" in node.states and node.role not in _CLICKED:
        words.append("[clickable]")
    if "enabled" not in node.states:
        words.append("[disabled]")
    return " ".join(words)


def _quote(text: str) -> str:
    short = text if len(text) <= MAX_NAME_LENGTH else text[: MAX_NAME_LENGTH - 1] + "…"
    return json.dumps(short, ensure_ascii=False)


def _short(resource_id: str) -> str:
    return resource_id.rpartition("/")[2]


def parse_dump(dump: bytes) -> Hierarchy:
    text = dump.decode("utf-8", "replace")
    start, end = text.find("<hierarchy"), text.rfind("</hierarchy>")
    if start < 0 or end < start:
        raise ValueError(_explain(text))
    nodes: list[Node] = []
    above: list[tuple[Node | None, Iterator[int]]] = [(None, itertools.count())]
    """The open elements: for each its node or the nearest one above it, and the places of its children."""

    def open_element(name: str, attributes: dict[str, str]) -> None:
        parent, places = above[-1]
        place, node = next(places), parent
        if name == "node" or "class" in attributes:
            if len(nodes) >= MAX_NODES or len(above) > MAX_DEPTH + 1:
                raise ValueError(f"the dump has more than {MAX_NODES} nodes, or more than {MAX_DEPTH} in each other")
            node = Node(attributes, parent, place, len(nodes))
            nodes.append(node)
        above.append((node, itertools.count()))

    def refuse(*_: object) -> None:
        raise ValueError("the dump declares a document type")

    parser = expat.ParserCreate()
    parser.StartElementHandler = open_element
    parser.EndElementHandler = lambda name: above.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(_clean(text[start : end + len("</hierarchy>")]), True)
    except expat.ExpatError as error:
        raise ValueError(f"the dump is not XML: {error}") from None
    if not nodes:
        raise ValueError("the dump has no nodes")
    return Hierarchy(nodes)


def _explain(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "its answer was empty"
    line = next((line for line in lines if "ERROR" in line or "rror:" in line), lines[-1])
    hints = {"null root": " (is the screen off?)", "idle": " (something moves all the time)"}
    return f"it answered {line[:200]!r}" + next((hint for sign, hint in hints.items() if sign in line), "")


def _clean(xml: str) -> str:
    xml = _PAIR.sub(lambda pair: chr(0x10000 + ((int(pair[1]) - 0xD800) << 10) + int(pair[2]) - 0xDC00), xml)

    def check(reference: re.Match[str]) -> str:
        number = int(reference[1][1:], 16) if reference[1][0] == "x" else int(reference[1])
        return reference[0] if number <= 0x10FFFF and not _ILLEGAL.match(chr(number)) else "\ufffd"

    return _ILLEGAL.sub("\ufffd", _REFERENCE.sub(check, xml))
