"""The browser as a device, driven by Playwright: the system's Chromium with a profile of its own, or a Chromium-based
app that is reached over its debugging port (`cdp:http://127.0.0.1:9222`).

Playwright gets the limit of every action, and is not trusted with it: a frozen page gives no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable
from importlib.util import find_spec
from typing import Any, TypeVar

from ..core.clocks import NS_PER_MS
from ..core.errors import Failure
from ..process.clock import monotonic_ns
from . import payload
from .device import Countdown, DeviceEntry, DeviceServices, Place, Snapshot
from .payload import Matcher

T = TypeVar("T")

CHROMIUM_VARIABLE = "SHOTCLOCK_CHROMIUM"
NO_PLAYWRIGHT = "Playwright is not installed: pip install 'shotclock[browser]'"
NO_CHROMIUM = (
    "no Chromium is on PATH: install one (Debian: apt install chromium-headless-shell), or name it in "
    f"{CHROMIUM_VARIABLE}"
)
# The headless shell is the same engine and starts with half the work, so it comes first.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCHEMES = ("http", "https", "file", "about", "data")
DOUBT_MS = 250  # this long before the end of a wait the page is asked whether it answers at all
LAST_LOOK_MS = 100
TERMINATE_MS = 400  # the page must answer within this time after its loading and its script were stopped
NAVIGATION_MS = 30_000  # the default budget of open_uri
DISCARD_MS = 1_000  # an abandoned page may take this long to close; then it dies with its browser
GLANCE_MS = 250
LONG_CLICK_MS = 700
FOLLOW_MS = 300  # a node is awaited this long on one page before a newer page is looked for
MAX_NOTES = 20  # the most dialogs and downloads to report: a page can open them without end
VIEWPORT: Any = {"width": 1280, "height": 800}

_KEYS = {
    "enter": "Enter", "tab": "Tab", "escape": "Escape", "backspace": "Backspace", "delete": "Delete", "space": "Space",
    "arrow_up": "ArrowUp", "arrow_down": "ArrowDown", "arrow_left": "ArrowLeft", "arrow_right": "ArrowRight",
    "page_up": "PageUp", "page_down": "PageDown", "move_home": "Home", "move_end": "End",
    "ctrl": "Control", "alt": "Alt", "shift": "Shift", "meta": "Meta",
}  # fmt: skip

_READ_TEXTS = "nodes => nodes.map(n => /^(INPUT|TEXTAREA|SELECT)$/.test(n.tagName) ? n.value : n.innerText)"
# Scrolls the given node or its first scrollable ancestor; without a node, the page.
_SCROLL = """(node, [x, y]) => {
  let box = node ?? document.scrollingElement ?? document.documentElement;
  const can = n => y ? n.scrollHeight > n.clientHeight : n.scrollWidth > n.clientWidth;
  while (node && !can(box) && box.parentElement) box = box.parentElement;
  const before = [box.scrollLeft, box.scrollTop];
  box.scrollBy({left: x * box.clientWidth, top: y * box.clientHeight, behavior: "instant"});
  return box.scrollLeft !== before[0] || box.scrollTop !== before[1];
}"""
# The value of a label: its control, the cell or definition beside it, or the text after its colon.
_READ_PAIR = """node => {
  const text = n => (/^(INPUT|TEXTAREA|SELECT)$/.test(n.tagName) ? n.value : n.innerText).trim();
  const label = text(node);
  const control = node.closest("label")?.control;
  if (control) return [label, text(control)];
  const cell = node.closest("dt, th, td");
  const beside = cell?.nextElementSibling ?? node.nextElementSibling ?? node.parentElement?.nextElementSibling;
  const [key, ...rest] = label.split(":");
  if (rest.join(":").trim()) return [key.trim(), rest.join(":").trim()];
  return beside ? [label.replace(/:$/, ""), text(beside)] : null;
}"""


def find_chromium() -> str | None:
    named = os.environ.get(CHROMIUM_VARIABLE)
    return shutil.which(named) if named else next(filter(None, map(shutil.which, _NAMES)), None)


def require_chromium() -> str:
    if (chromium := find_chromium()) is None:
        raise Failure("DEVICE_UNAVAILABLE", NO_CHROMIUM)
    return chromium


def _require_playwright() -> None:
    if find_spec("playwright") is None:
        raise Failure("DEVICE_UNAVAILABLE", NO_PLAYWRIGHT)


async def find_devices(services: DeviceServices) -> list[DeviceEntry]:
    _require_playwright()
    return [DeviceEntry("browser", True, f"{require_chromium()}, headless")]


async def open_device(name: str, services: DeviceServices) -> BrowserDevice:
    kind, _, rest = name.partition(":")
    _require_playwright()
    from playwright import async_api

    driver = await async_api.async_playwright().start()
    try:
        if kind == "cdp":
            browser = await driver.chromium.connect_over_cdp(rest)
        else:
            browser = await driver.chromium.launch(
                executable_path=require_chromium(), chromium_sandbox=os.geteuid() != 0, args=list(FLAGS)
            )
        device = BrowserDevice(async_api, driver, browser, is_own=kind != "cdp")
        await device.open_page()
        return device
    except async_api.Error as error:
        raise Failure("DEVICE_UNAVAILABLE", f"{name} cannot be started: {_first_line(error)}") from error


class BrowserDevice:
    """A browser. Actions apply to its newest page."""

    def __init__(self, api: Any, driver: Any, browser: Any, *, is_own: bool) -> None:
        self._error, self._timeout = api.Error, api.TimeoutError
        self._driver, self._browser, self._is_own = driver, browser, is_own
        self._context: Any = None
        self._pages: list[Any] = []  # the newest last, without crashed ones
        self._sessions: dict[Any, Any] = {}
        self._documents: dict[Any, str] = {}
        self._leaving: dict[Any, tuple[str, int]] = {}
        """For each page with a pending navigation: its address, and when it began."""
        self.is_fresh = False
        self._notes: dict[str, list[dict[str, str]]] = {"dialogs": [], "downloads": []}
        self._tasks: set[asyncio.Future[Any]] = set()

    async def open_page(self) -> None:
        if self._is_own:
            self._context = await self._browser.new_context(viewport=VIEWPORT)
        else:
            self._context = self._browser.contexts[0] if self._browser.contexts else await self._browser.new_context()
        for page in list(self._context.pages) or [await self._context.new_page()]:
            await self._adopt(page)
        self._context.on("page", lambda page: self._later(self._adopt(page)))

    async def _adopt(self, page: Any) -> None:
        if page in self._pages:
            return
        self._pages.append(page)
        self._documents[page] = f"page {id(page)}"
        page.on("close", lambda _: self._forget(page))
        page.on("crash", lambda _: self._forget(page))
        page.on("dialog", lambda dialog: self._later(self._dismiss(dialog, page)))
        page.on("download", lambda download: self._later(self._refuse_download(download)))
        session = self._sessions[page] = await self._context.new_cdp_session(page)
        frame_id = (await session.send("Target.getTargetInfo"))["targetInfo"]["targetId"]

        def note_document(event: dict[str, Any]) -> None:
            frame = event["frame"]
            if not frame.get("parentId"):
                self._documents[page] = f"page {id(page)} document {frame['loaderId']}"
                self._leaving.pop(page, None)

        def note_leaving(event: dict[str, Any]) -> None:
            if event["frameId"] == frame_id and "same" not in event["navigationType"].lower():
                self._leaving[page] = (event["url"], monotonic_ns())

        def note_stop(event: dict[str, Any]) -> None:
            if event["frameId"] == frame_id:
                self._leaving.pop(page, None)

        session.on("Page.frameNavigated", note_document)
        session.on("Page.frameStartedNavigating", note_leaving)
        session.on("Page.frameStoppedLoading", note_stop)
        await session.send("Page.enable")

    def _forget(self, page: Any) -> None:
        if page in self._pages:
            self._pages.remove(page)
        for known in (self._sessions, self._documents, self._leaving):
            known.pop(page, None)

    async def _dismiss(self, dialog: Any, page: Any) -> None:
        """Answer a dialog, which blocks its page, and note it. A page that asks whether it may be left is left."""
        answer = "accepted" if dialog.type == "beforeunload" else "dismissed"
        if page in self._pages:
            self._note("dialogs", {"type": dialog.type, "message": dialog.message[:500], "answer": answer})
        with contextlib.suppress(Exception):  # the page is gone
            await (dialog.accept() if answer == "accepted" else dialog.dismiss())

    async def _refuse_download(self, download: Any) -> None:
        """Cancel a download, which no action could use and which holds a connection to its server, and note it."""
        self._note("downloads", {"url": download.url[:500], "name": download.suggested_filename[:200]})
        with contextlib.suppress(Exception):
            await download.cancel()

    def _note(self, kind: str, note: dict[str, str]) -> None:
        if len(self._notes[kind]) < MAX_NOTES:
            self._notes[kind].append(note)

    def take_notes(self) -> dict[str, object]:
        notes: dict[str, object] = {kind: found[:] for kind, found in self._notes.items() if found}
        for found in self._notes.values():
            found.clear()
        return notes

    def _later(self, work: Awaitable[object]) -> None:
        """Run work in the background. Its error is ignored: a page may close at any time."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    @property
    def _page(self) -> Any:
        if not self._browser.is_connected():
            raise Failure("DEVICE_LOST", "the browser is gone")
        if not self._pages:
            raise Failure("DEVICE_LOST", "the page is gone: it crashed, or was closed")
        return self._pages[-1]

    def place_seen(self) -> Place | None:
        try:
            page = self._page
        except Failure:
            return None
        return Place(page.url, self._documents[page], self._leaving.get(page, (None, 0))[0])

    async def look(self, within_ms: int) -> Place:
        page = self._page
        leaving = self._leaving.get(page)
        # A page that is navigating does not answer, and is not frozen: it is left alone for a while.
        if leaving is None or monotonic_ns() - leaving[1] > NAVIGATION_MS * NS_PER_MS:
            async with self._explained("look", within_ms, "EVAL_TIMEOUT"):
                await self._ask(page, within_ms)
        place = self.place_seen()
        if place is None:
            raise Failure("DEVICE_LOST", "the page is gone")
        return place

    async def _ask(self, page: Any, within_ms: int) -> None:
        """Ask the page for any answer, without Playwright's own evaluation, which waits for a navigation to end."""
        session = self._sessions.get(page)
        answer = page.evaluate("1") if session is None else session.send("Runtime.evaluate", {"expression": "1"})
        await _bounded(answer, within_ms)

    async def _answers(self, within_ms: int = DOUBT_MS) -> bool:
        with contextlib.suppress(Exception):
            await self._ask(self._page, within_ms)
            return True
        return False

    async def _answers_near_end(self, within_ms: int) -> bool:
        doubt_ms = min(DOUBT_MS, within_ms // 4)
        await asyncio.sleep((within_ms - doubt_ms) / 1000)
        return await self._answers(doubt_ms)

    def _stop_loading(self, page: Any) -> None:
        if (session := self._sessions.get(page)) is not None:
            self._later(session.send("Page.stopLoading"))
            self._leaving.pop(page, None)

    async def recover(self, within_ms: int) -> Place:
        """Stop the loading and the script of the page, or replace it."""
        time = Countdown(within_ms)
        if not self._browser.is_connected():
            raise Failure("DEVICE_LOST", "the browser is gone")
        session = self._sessions.get(self._pages[-1]) if self._pages else None
        if session is not None:
            self._stop_loading(self._pages[-1])
            self._later(session.send("Runtime.terminateExecution"))
            with contextlib.suppress(Failure):
                place = await self.look(TERMINATE_MS)
                self._notes["dialogs"].clear()  # they belong to the stopped script, not to the next step
                return place
        if not self._is_own:
            raise Failure("DEVICE_LOST", "the page does not answer, and an attached app's page is never replaced")
        async with self._explained("recover", within_ms, "DEVICE_LOST"):
            await self._replace_page(time)
        return await self.look(time.left_ms)

    async def _replace_page(self, time: Countdown) -> None:
        old, self._pages, self.is_fresh = self._context, [], True
        self._notes["dialogs"].clear()
        with contextlib.suppress(TimeoutError):
            await _bounded(old.close(), DISCARD_MS)
        await _bounded(self.open_page(), time.left_ms)

    async def close(self) -> None:
        if self._is_own:
            with contextlib.suppress(Exception):
                await _bounded(self._browser.close(), DISCARD_MS)
        await _bounded(self._driver.stop(), DISCARD_MS)

    def _find(self, matcher: Matcher) -> Any:
        page, equals, contains = self._page, matcher.text_equals, matcher.text_contains
        found: list[Any] = [] if matcher.ref is None else [page.get_by_ref(matcher.ref)]
        if matcher.role is not None:
            name = equals or contains
            named = {} if name is None else {"name": name, "exact": equals is not None}
            found.append(page.get_by_role(matcher.role, **named))
        if matcher.resource_id is not None:
            quoted = matcher.resource_id.replace("\\", "\\\\").replace('"', '\\"')
            found.append(page.locator(f'[data-testid="{quoted}"], [id="{quoted}"]'))
        for label, exact in ((matcher.content_desc_equals, True), (matcher.content_desc_contains, False)):
            if label is not None:
                described = page.get_by_alt_text(label, exact=exact).or_(page.get_by_title(label, exact=exact))
                found.append(page.get_by_label(label, exact=exact).or_(described))
        if matcher.css is not None:
            found.append(page.locator(f"css={matcher.css}"))
        if not found:  # a text alone: the smallest nodes that have it
            found = [page.get_by_text(equals, exact=True)] if equals is not None else []
            found += [page.get_by_text(contains)] if contains is not None else []
            equals = contains = None
        locator = found[0]
        for other in found[1:]:
            locator = locator.and_(other)
        if matcher.role is None and equals is not None:
            locator = locator.filter(has_text=re.compile(rf"^\s*{re.escape(equals)}\s*$"))
        if contains is not None and (matcher.role is None or equals is not None):
            locator = locator.filter(has_text=contains)
        return locator.filter(visible=True)

    async def _await_node(self, matcher: Matcher, time: Countdown) -> Any:
        """Return the node once it is visible on the newest page, which a click may have just opened."""
        if matcher.ref is not None and not await _bounded(self._find(matcher).count(), time.left_ms):
            raise _no_ref(matcher)
        while True:
            left_ms, page, node = time.left_ms, self._page, self._find(matcher).first
            try:
                await node.wait_for(timeout=min(left_ms, FOLLOW_MS))
                return node
            except self._timeout:
                if left_ms <= FOLLOW_MS:
                    if await _is_seen(node):
                        return node
                    raise
            except self._error:
                if page in self._pages or not self._pages:  # it did not just close and leave another one
                    raise

    @contextlib.asynccontextmanager
    async def _explained(
        self, what: str, within_ms: int, silent: str = "OPERATION_TIMEOUT", matcher: Matcher | None = None
    ) -> AsyncIterator[None]:
        doubting = None if matcher is None else asyncio.ensure_future(self._answers_near_end(within_ms))
        try:
            yield
        except (self._timeout, TimeoutError) as error:
            waited, place = f"within {within_ms} ms", self.place_seen()
            to = None if place is None else place.navigating_to
            why = _reason_in(str(error)) if to is None else f": the page is navigating to {to[:200]}"
            if matcher is None or doubting is None or not (to or await doubting):
                raise Failure(silent, f"the page did not answer {what} {waited}{'' if to is None else why}") from None
            if "performing" in str(error):  # its effect is unknown
                raise Failure(silent, f"{what} did not end {waited}") from None
            raise Failure("WAIT_TIMEOUT", f"no node with {matcher.describe()} could be used {waited}{why}") from None
        except self._error as error:
            text = _first_line(error)
            gone = ("has been closed", "crashed", "Connection closed", "Browser closed", "disconnected")
            if any(sign in str(error) for sign in gone):
                raise Failure("DEVICE_LOST", f"the page or the browser went away: {text}") from None
            if matcher is not None and "Invalid frame in aria-ref" in text:
                raise _no_ref(matcher) from None
            raise Failure("ACTION_FAILED", text) from None
        finally:
            if doubting is not None:
                doubting.cancel()

    async def _order(self, order: Awaitable[None]) -> None:
        """Await a click or a key. A page that begins to navigate has received it; Playwright waits for its load."""
        page, began_ns = self._page, monotonic_ns()
        try:
            await order
        except self._timeout as error:
            was_received = "performing" in str(error) or "elementHandle.press" in str(error)
            if not was_received or self._leaving.get(page, ("", 0))[1] < began_ns:
                raise

    async def open_app(self, params: payload.OpenApp, time: Countdown) -> dict[str, object]:
        raise Failure(
            "ACTION_UNSUPPORTED", f"a browser has no apps; to open a page write https://{params.application_id}"
        )

    async def open_uri(self, params: payload.OpenUri, time: Countdown) -> dict[str, object]:
        uri = params.uri
        if uri.strip().partition(":")[0].lower() not in SCHEMES:
            raise Failure("ACTION_UNSUPPORTED", f"a browser opens {', '.join(SCHEMES)} addresses, not {uri!r:.80}")
        async with self._explained(f"opening {uri[:200]}", time.limit_ms):
            # A frozen page could block the navigation, and is replaced. One that is navigating could not.
            if self._is_own and self._page not in self._leaving and not await self._answers():
                await self._replace_page(time)
            page = self._page
            try:
                answer = await page.goto(uri, wait_until="domcontentloaded", timeout=time.left_ms)
            except Exception as error:
                self._stop_loading(page)  # or the page would change some time later
                if "Download is starting" not in str(error):
                    raise
                return {"where": page.url, "download": True}
        return {"where": page.url} | ({} if answer is None else {"status": answer.status})

    async def close_app(self, params: payload.CloseApp, time: Countdown) -> dict[str, object]:
        page = self._page
        async with self._explained("closing", time.limit_ms):
            if self._is_own and len(self._pages) == 1:
                await _bounded(self._context.new_page(), time.limit_ms)
            await _bounded(page.close(), time.limit_ms)
        self._forget(page)
        return {}

    async def click(self, params: payload.Click, time: Countdown) -> dict[str, object]:
        page, delay = self._page, LONG_CLICK_MS if params.click_type == "long_click" else 0
        async with self._explained("click", time.limit_ms, matcher=params.matcher):
            if params.coordinate is not None:
                await _bounded(page.mouse.click(params.coordinate.x, params.coordinate.y, delay=delay), time.limit_ms)
            elif params.matcher is not None:
                node = await self._await_node(params.matcher, time)
                if params.click_type == "focus":
                    await node.focus(timeout=time.left_ms)
                else:
                    await self._order(node.click(timeout=time.left_ms, delay=delay))
        return {"where": self._page.url}

    async def enter_text(self, params: payload.EnterText, time: Countdown) -> dict[str, object]:
        async with self._explained("enter_text", time.limit_ms, matcher=params.matcher):
            node = await self._await_node(params.matcher, time)
            if params.clear:
                await node.fill(params.text, timeout=time.left_ms)
            else:
                await node.press_sequentially(params.text, timeout=time.left_ms)
            if params.submit:
                await self._order(node.press("Enter", timeout=time.left_ms))
        return {"length": len(params.text)}

    async def press_key(self, params: payload.PressKey, time: Countdown) -> dict[str, object]:
        key = params.key
        page = self._page
        if key.lower() in ("home", "recents"):
            raise Failure("ACTION_UNSUPPORTED", f"a browser has no key {key!r}; move_home is Home")
        async with self._explained(f"press_key {key}", time.limit_ms):
            if key.lower() == "back":
                await page.go_back(timeout=time.limit_ms, wait_until="commit")
            else:
                words = [key] if len(key) == 1 else key.split("+")
                keys = "+".join(_KEYS.get(word.lower(), word) for word in words)
                await _bounded(page.keyboard.press(keys), time.limit_ms)
        return {"where": page.url}

    async def scroll(self, params: payload.Scroll, time: Countdown) -> bool:
        page, ratio = self._page, params.distance_ratio
        x, y = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[params.direction]
        step = [x * ratio, y * ratio]
        async with self._explained("scroll", time.limit_ms, matcher=params.container):
            if params.container is None:
                return bool(await _bounded(page.evaluate(f"step => ({_SCROLL})(null, step)", step), time.limit_ms))
            return bool(await self._find(params.container).first.evaluate(_SCROLL, step, timeout=time.limit_ms))

    async def read_text(self, matcher: Matcher, time: Countdown) -> list[str]:
        async with self._explained("read_text", time.limit_ms, "EVAL_TIMEOUT", matcher):
            node = await self._await_node(matcher, time)
            if matcher.ref is not None:  # Playwright finds only one node at a time by its ref
                return [str(await node.evaluate(f"n => ({_READ_TEXTS})([n])[0]", timeout=time.left_ms))]
            texts: list[str] = await _bounded(self._find(matcher).evaluate_all(_READ_TEXTS), time.left_ms)
        if not texts:
            raise Failure("WAIT_TIMEOUT", f"the node with {matcher.describe()} went away while it was read")
        return texts

    async def read_key_value_pair(self, label: Matcher, time: Countdown) -> tuple[str, str] | None:
        async with self._explained("read_key_value_pair", time.limit_ms, "EVAL_TIMEOUT", label):
            node = await self._await_node(label, time)
            pair = await node.evaluate(_READ_PAIR, timeout=time.left_ms)
        return None if pair is None else (str(pair[0]), str(pair[1]))

    async def sees(self, matcher: Matcher, within_ms: int) -> bool:
        try:
            await self._await_visible(matcher, Countdown(min(GLANCE_MS, within_ms)))
        except Failure as failure:
            if failure.code != "WAIT_TIMEOUT":
                raise
            return False
        return True

    async def wait_for_node(self, params: payload.WaitForNode, time: Countdown) -> dict[str, object]:
        if params.state == "visible":
            await self._await_visible(params.matcher, time)
            return {"where": self._page.url, "state": params.state}
        async with self._explained("wait_for_node", time.limit_ms, "WAIT_TIMEOUT", params.matcher):
            node = self._find(params.matcher).first
            try:
                await node.wait_for(state="hidden", timeout=time.limit_ms)
            except self._timeout:
                if await _is_seen(node) is not False:
                    raise
        return {"where": self._page.url, "state": params.state}

    async def _await_visible(self, matcher: Matcher, time: Countdown) -> None:
        async with self._explained("wait_for_node", time.limit_ms, "WAIT_TIMEOUT", matcher):
            await self._await_node(matcher, time)

    async def wait_for_navigation(self, params: payload.WaitForNavigation, time: Countdown) -> dict[str, object]:
        if params.expected_package is not None:
            raise Failure("ACTION_UNSUPPORTED", "a browser has no packages: use expectedUrl or expectedNode")
        page = self._page
        if params.expected_url is not None:
            pattern = ".*".join(re.escape(part) for part in params.expected_url.split("*"))
            try:
                async with self._explained("wait_for_navigation", time.limit_ms, "WAIT_TIMEOUT"):
                    await page.wait_for_url(re.compile(pattern + r"\Z"), timeout=time.limit_ms, wait_until="commit")
            except Failure as failure:
                if failure.code != "WAIT_TIMEOUT":
                    raise
                message = f"the address is {page.url[:200]}, not {params.expected_url} within {time.limit_ms} ms"
                raise Failure("WAIT_TIMEOUT", message) from None
        if params.expected_node is not None:
            await self._await_visible(params.expected_node, Countdown(time.left_ms))
        return {"where": page.url}

    async def snapshot(self, time: Countdown) -> Snapshot:
        page = self._page
        async with self._explained("snapshot_ui", time.limit_ms, "EVAL_TIMEOUT"):
            text = await page.aria_snapshot(mode="ai", timeout=time.limit_ms)
        return Snapshot(text, Place(page.url, self._documents.get(page, "")))

    async def screenshot(self, time: Countdown) -> bytes:
        page = self._page
        async with self._explained("take_screenshot", time.limit_ms, "EVAL_TIMEOUT"):
            image: bytes = await page.screenshot(timeout=time.limit_ms, type="png")
        return image


async def _bounded(answer: Awaitable[T], within_ms: int) -> T:
    async with asyncio.timeout(max(1, within_ms) / 1000):
        return await answer


async def _is_seen(node: Any) -> bool | None:
    """Return whether a node is visible now; None: no answer. Playwright's own looks are up to half a second apart."""
    with contextlib.suppress(Exception):
        return bool(await _bounded(node.is_visible(), LAST_LOOK_MS))
    return None


def _no_ref(matcher: Matcher) -> Failure:
    return Failure("NODE_NOT_FOUND", f"the last snapshot of this page has no ref {matcher.ref!r:.40}: take another one")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _reason_in(text: str) -> str:
    reasons = [
        line.strip(" -")
        for line in text.splitlines()
        if any(sign in line for sign in ("intercepts pointer events", "is not visible", "is not enabled", "not stable"))
    ]
    return f": {reasons[-1][:300]}" if reasons else ""
