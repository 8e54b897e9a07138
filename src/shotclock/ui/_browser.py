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

from ..core.errors import Failure
from ..core.limits import NS_PER_MS
from ..supervise.clock import monotonic_ns
from . import _page_scripts as page_scripts
from . import payload
from ._nodes import MAX_FRAMES, answer_of, await_hidden, await_node, no_ref, read_texts
from ._tabs import Tab, Tabs, bounded
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
    "--site-per-process",  # a frame of another site that hangs does not freeze its page
)  # fmt: skip
SCHEMES = ("http", "https", "file", "about", "data")
DOUBT_MS = 250  # this long before the end of a wait the page is asked whether it answers at all
TERMINATE_MS = 400  # the page must answer within this time after its loading and its script were stopped
NAVIGATION_MS = 30_000  # the default budget of open_uri
DISCARD_MS = 1_000  # an abandoned page may take this long to close; then it dies with its browser
GLANCE_MS = 250
LONG_CLICK_MS = 700
HISTORY_PAUSE_MS = 50
MAX_NODES = 3_000  # larger pages are cut to this before Playwright writes their snapshot: more fit into no answer
MAX_DEPTH = 50  # Playwright cannot write much more than this
COUNT_MS = 1_000  # a frame that has not counted its nodes by then is silent
SILENT_MS = 2_000  # a snapshot of a page with a silent frame, which Playwright awaits until the end of its time
END_CUT_MS = 500
CUT = "shotclock-cut"
VIEWPORT: Any = {"width": 1280, "height": 800}

_KEYS = {
    "enter": "Enter", "tab": "Tab", "escape": "Escape", "backspace": "Backspace", "delete": "Delete", "space": "Space",
    "arrow_up": "ArrowUp", "arrow_down": "ArrowDown", "arrow_left": "ArrowLeft", "arrow_right": "ArrowRight",
    "page_up": "PageUp", "page_down": "PageDown", "move_home": "Home", "move_end": "End",
    "ctrl": "Control", "alt": "Alt", "shift": "Shift", "meta": "Meta",
}  # fmt: skip


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
        await driver.selectors.register(CUT, page_scripts.CUT, content_script=True)
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
    """A browser. Actions apply to its active tab: the newest one, or the one that was switched to."""

    def __init__(self, api: Any, driver: Any, browser: Any, *, is_own: bool) -> None:
        self._error, self._timeout = api.Error, api.TimeoutError
        self._driver, self._browser, self._is_own = driver, browser, is_own
        self._context: Any = None
        self._tabs = Tabs(browser, None, self._error, is_own=is_own)
        self.is_fresh: bool = False
        self._may_have_acted = False

    async def open_page(self) -> None:
        if self._is_own:
            self._context = await self._browser.new_context(viewport=VIEWPORT)
        else:
            self._context = self._browser.contexts[0] if self._browser.contexts else await self._browser.new_context()
        self._tabs = Tabs(self._browser, self._context, self._error, is_own=self._is_own)
        await self._tabs.open()

    def take_notes(self) -> dict[str, object]:
        return self._tabs.take_notes()

    @property
    def _tab(self) -> Tab:
        if not self._browser.is_connected():
            raise Failure("DEVICE_LOST", "the browser is gone")
        if (tab := self._tabs.active) is None:
            raise Failure("DEVICE_LOST", "the page is gone: it crashed, or was closed")
        return tab

    @property
    def _page(self) -> Any:
        return self._tab.page

    def place_seen(self) -> Place | None:
        try:
            return self._tabs.place_of(self._tab)
        except Failure:
            return None

    async def look(self, within_ms: int) -> Place:
        tab = self._tab
        # A page that is navigating or shows a dialog does not answer, and is not frozen: it is left alone for a while.
        is_leaving = tab.leaving is not None and monotonic_ns() - tab.leaving[1] <= NAVIGATION_MS * NS_PER_MS
        if not is_leaving and not self._tabs.has_dialog:
            async with self._explained("look", within_ms, "EVAL_TIMEOUT"):
                await self._ask(tab, within_ms)
        place = self.place_seen()
        if place is None:
            raise Failure("DEVICE_LOST", "the page is gone")
        return place

    async def _ask(self, tab: Tab, within_ms: int) -> None:
        """Ask the page for any answer, without Playwright's own evaluation, which waits for a navigation to end."""
        session = tab.session
        answer = tab.page.evaluate("1") if session is None else session.send("Runtime.evaluate", {"expression": "1"})
        await bounded(answer, within_ms)

    async def _answers(self, within_ms: int = DOUBT_MS) -> bool:
        with contextlib.suppress(Exception):
            await self._ask(self._tab, within_ms)
            return True
        return False

    async def _answers_near_end(self, within_ms: int) -> bool:
        doubt_ms = min(DOUBT_MS, within_ms // 4)
        await asyncio.sleep((within_ms - doubt_ms) / 1000)
        return await self._answers(doubt_ms)

    def _stop_loading(self, tab: Tab) -> None:
        if tab.session is not None:
            self._tabs.later(tab.session.send("Page.stopLoading"))
            tab.leaving = None

    async def recover(self, within_ms: int) -> Place:
        """Stop the loading and the script of the page, or replace it."""
        time = Countdown(within_ms)
        if not self._browser.is_connected():
            raise Failure("DEVICE_LOST", "the browser is gone")
        tab = self._tabs.active
        if tab is not None and tab.session is not None:
            # If no script runs, the next one is ended, perhaps one of Playwright's that it needs for ever.
            ends_script = [True] if tab.leaving is None else [False, True]
            self._stop_loading(tab)
            for ends in ends_script:
                if ends:
                    self._tabs.later(tab.session.send("Runtime.terminateExecution"))
                with contextlib.suppress(Failure):
                    place = await self.look(TERMINATE_MS)
                    self._tabs.forget_dialogs()  # they belong to the stopped script, not to the next step
                    return place
        if not self._is_own:
            raise Failure("DEVICE_LOST", "the page does not answer, and an attached app's page is never replaced")
        async with self._explained("recover", within_ms, "DEVICE_LOST"):
            await self._replace_page(time)
        return await self.look(time.left_ms)

    async def _replace_page(self, time: Countdown) -> None:
        old, keeps_dialogs, self.is_fresh = self._context, self._tabs.keeps_dialogs, True
        self._tabs = Tabs(self._browser, None, self._error, is_own=True)
        with contextlib.suppress(TimeoutError):
            await bounded(old.close(), DISCARD_MS)
        await bounded(self.open_page(), time.left_ms)
        self._tabs.keeps_dialogs = keeps_dialogs

    async def close(self) -> None:
        if self._is_own:
            with contextlib.suppress(Exception):
                await bounded(self._browser.close(), DISCARD_MS)
        await bounded(self._driver.stop(), DISCARD_MS)

    async def _await_node(self, matcher: Matcher, time: Countdown) -> Any:
        return await await_node(lambda: self._page, matcher, time, self._error, self._timeout)

    @contextlib.asynccontextmanager
    async def _explained(
        self, what: str, within_ms: int, silent: str = "OPERATION_TIMEOUT", matcher: Matcher | None = None
    ) -> AsyncIterator[None]:
        doubting = None if matcher is None else asyncio.ensure_future(self._answers_near_end(within_ms))
        self._may_have_acted = False
        try:
            self._tabs.keeps_dialogs = False  # before one is dismissed, which may open the next
            await self._tabs.dismiss_dialogs()
            yield
            await self._tabs.finish()
        except (self._timeout, TimeoutError) as error:
            waited, place = f"within {within_ms} ms", self.place_seen()
            to = None if place is None else place.navigating_to
            why = _reason_in(str(error)) if to is None else f": the page is navigating to {to[:200]}"
            if matcher is None or doubting is None or not (to or await doubting):
                raise Failure(silent, f"the page did not answer {what} {waited}{'' if to is None else why}") from None
            if self._may_have_acted:  # its effect is unknown
                raise Failure(silent, f"{what} did not end {waited}") from None
            raise Failure("WAIT_TIMEOUT", f"no node with {matcher.describe()} could be used {waited}{why}") from None
        except self._error as error:
            text = _first_line(error)
            gone = ("has been closed", "crashed", "Connection closed", "Browser closed", "disconnected")
            if any(sign in str(error) for sign in gone):
                raise Failure("DEVICE_LOST", f"the page or the browser went away: {text}") from None
            if matcher is not None and "Invalid frame in aria-ref" in text and not self._may_have_acted:
                raise no_ref(matcher) from None
            raise Failure("ACTION_FAILED", text) from None
        finally:
            self._tabs.keeps_dialogs = True
            if doubting is not None:
                doubting.cancel()

    async def _order(self, order: Awaitable[T], time: Countdown) -> T | None:
        """Await a click or a key. A page that begins to navigate has received it; Playwright waits for its load."""
        tab, began_ns = self._tab, monotonic_ns()
        try:
            done = await self._tabs.run_order(order, time.left_ms)
            self._may_have_acted = True
            return done
        except self._timeout as error:
            self._may_have_acted = self._may_have_acted or not _waited_only(str(error))
            was_received = "performing" in str(error) or "elementHandle.press" in str(error)
            if not was_received or tab.leaving is None or tab.leaving[1] < began_ns:
                raise
        return None

    async def open_app(self, params: payload.OpenApp, time: Countdown) -> dict[str, object]:
        raise Failure(
            "ACTION_UNSUPPORTED", f"a browser has no apps; to open a page write https://{params.application_id}"
        )

    async def open_uri(self, params: payload.OpenUri, time: Countdown) -> dict[str, object]:
        uri = params.uri
        _check_scheme(uri)
        async with self._explained(f"opening {uri[:200]}", time.limit_ms):
            # A frozen page could block the navigation, and is replaced. One that is navigating could not.
            if self._is_own and self._tab.leaving is None and not await self._answers():
                await self._replace_page(time)
            return await self._go_to(uri, time)

    async def _go_to(self, uri: str, time: Countdown) -> dict[str, object]:
        tab = self._tab
        try:
            answer = await tab.page.goto(uri, wait_until="domcontentloaded", timeout=time.left_ms)
        except Exception as error:
            self._stop_loading(tab)  # or the page would change some time later
            if "Download is starting" not in str(error):
                raise
            return {"where": tab.where, "download": True}
        return {"where": tab.where} | ({} if answer is None else {"status": answer.status})

    async def close_app(self, params: payload.CloseApp, time: Countdown) -> dict[str, object]:
        async with self._explained("closing", time.limit_ms):
            await self._close(self._tab, time)
        return {}

    async def _close(self, tab: Tab, time: Countdown) -> None:
        if self._is_own and len(self._tabs) == 1:
            await bounded(self._tabs.adopt(await bounded(self._context.new_page(), time.limit_ms)), time.left_ms)
        await bounded(tab.page.close(), time.limit_ms)
        self._tabs.forget(tab)

    async def list_tabs(self, params: payload.ListTabs, time: Countdown) -> dict[str, object]:
        return {"tabs": await self._tabs.list()}

    async def open_tab(self, params: payload.OpenTab, time: Countdown) -> dict[str, object]:
        _check_scheme(params.uri or "about:blank")
        async with self._explained("open_tab", time.limit_ms):
            await bounded(self._tabs.adopt(await bounded(self._context.new_page(), time.limit_ms)), time.left_ms)
            gone_to = {} if params.uri is None else await self._go_to(params.uri, time)
        return {"tab": self._tab.name, **gone_to}

    async def switch_tab(self, params: payload.SwitchTab, time: Countdown) -> dict[str, object]:
        async with self._explained("switch_tab", time.limit_ms):
            tab = self._tabs.find(params.tab)
            await bounded(tab.page.bring_to_front(), time.left_ms)
            self._tabs.activate(tab)
        return {"tab": tab.name, "where": tab.where}

    async def close_tab(self, params: payload.CloseTab, time: Countdown) -> dict[str, object]:
        async with self._explained("close_tab", time.limit_ms):
            await self._close(self._tab if params.tab is None else self._tabs.find(params.tab), time)
        return {"tabs": await self._tabs.list()}

    async def answer_dialog(self, params: payload.AnswerDialog, time: Countdown) -> dict[str, object]:
        return await self._tabs.answer_dialog(params.accept, params.text, time)

    async def click(self, params: payload.Click, time: Countdown) -> dict[str, object]:
        page, delay = self._page, LONG_CLICK_MS if params.click_type == "long_click" else 0
        async with self._explained("click", time.limit_ms, matcher=params.matcher):
            if params.coordinate is not None:
                clicking = page.mouse.click(params.coordinate.x, params.coordinate.y, delay=delay)
                await self._order(bounded(clicking, time.limit_ms), time)
            elif params.matcher is not None:
                node = await self._await_node(params.matcher, time)
                if params.click_type == "focus":
                    await self._order(node.focus(timeout=time.left_ms), time)
                else:
                    await self._order(node.click(timeout=time.left_ms, delay=delay), time)
        return {"where": self._tab.where}

    async def enter_text(self, params: payload.EnterText, time: Countdown) -> dict[str, object]:
        done: dict[str, object] = {"length": len(params.text)}
        async with self._explained("enter_text", time.limit_ms, matcher=params.matcher):
            node = await self._await_node(params.matcher, time)
            if params.clear:
                await self._order(node.fill(params.text, timeout=time.left_ms), time)
            else:
                await self._order(node.press_sequentially(params.text, timeout=time.left_ms), time)
            if params.submit and self._tabs.has_dialog:
                done["submitted"] = False
            elif params.submit:
                await self._order(node.press("Enter", timeout=time.left_ms), time)
        return done

    async def select_option(self, params: payload.SelectOption, time: Countdown) -> dict[str, object]:
        async with self._explained("select_option", time.limit_ms, matcher=params.matcher):
            node = await self._await_node(params.matcher, time)
            selected = await self._order(node.select_option(params.options, timeout=time.left_ms), time)
        return {"selected": selected or params.options}

    async def hover(self, params: payload.Hover, time: Countdown) -> dict[str, object]:
        async with self._explained("hover", time.limit_ms, matcher=params.matcher):
            node = await self._await_node(params.matcher, time)
            await self._order(node.hover(timeout=time.left_ms), time)
        return {"where": self._tab.where}

    async def upload_file(self, params: payload.UploadFile, time: Countdown) -> dict[str, object]:
        _find_missing(params.paths)
        async with self._explained("upload_file", time.limit_ms, matcher=params.matcher):
            node = await self._await_node(params.matcher, time)
            if await node.evaluate(page_scripts.TAKES_FILES, timeout=time.left_ms):
                await self._order(node.set_input_files(params.paths, timeout=time.left_ms), time)
            else:
                async with self._page.expect_file_chooser(timeout=time.left_ms) as asked:
                    await self._order(node.click(timeout=time.left_ms), time)
                chooser = await asked.value
                self._tabs.forget_chooser()
                await self._order(chooser.set_files(params.paths, timeout=time.left_ms), time)
        return {"files": [os.path.basename(path) for path in params.paths]}

    async def press_key(self, params: payload.PressKey, time: Countdown) -> dict[str, object]:
        key, page = params.key, self._page
        if key.lower() in ("home", "recents"):
            raise Failure("ACTION_UNSUPPORTED", f"a browser has no key {key!r}; move_home is Home")
        async with self._explained(f"press_key {key}", time.limit_ms):
            if key.lower() in ("back", "forward"):
                await self._go(page.go_back if key.lower() == "back" else page.go_forward, time)
            else:
                words = [key] if len(key) == 1 else key.split("+")
                keys = "+".join(_KEYS.get(word.lower(), word) for word in words)
                await self._order(bounded(page.keyboard.press(keys), time.limit_ms), time)
        return {"where": self._tab.where}

    async def _go(self, go: Any, time: Countdown) -> None:
        """Go through the history. A page that has just arrived may not have one yet, and nothing was done then."""
        while True:
            try:
                await go(timeout=time.left_ms, wait_until="commit")
                return
            except self._error as error:
                if "Not attached to an active page" not in str(error) or time.is_over:
                    raise
            await asyncio.sleep(min(HISTORY_PAUSE_MS, time.left_ms) / 1000)

    async def scroll(self, params: payload.Scroll, time: Countdown) -> bool:
        page, ratio = self._page, params.distance_ratio
        x, y = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[params.direction]
        step, script = [x * ratio, y * ratio], page_scripts.SCROLL
        async with self._explained("scroll", time.limit_ms, matcher=params.container):
            if params.container is None:
                return bool(await bounded(page.evaluate(f"step => ({script})(null, step)", step), time.limit_ms))
            node = await self._await_node(params.container, time)
            return bool(await node.evaluate(script, step, timeout=time.left_ms))

    async def read_text(self, matcher: Matcher, time: Countdown) -> list[str]:
        async with self._explained("read_text", time.limit_ms, "EVAL_TIMEOUT", matcher):
            node = await self._await_node(matcher, time)
            texts, silent = await read_texts(self._page, node, matcher, time)
        for address in silent:
            self._tabs.add_note("silentFrames", {"where": address})
        return texts

    async def read_key_value_pair(self, label: Matcher, time: Countdown) -> tuple[str, str] | None:
        async with self._explained("read_key_value_pair", time.limit_ms, "EVAL_TIMEOUT", label):
            node = await self._await_node(label, time)
            pair = await node.evaluate(page_scripts.READ_PAIR, timeout=time.left_ms)
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
        else:
            async with self._explained("wait_for_node", time.limit_ms, "WAIT_TIMEOUT", params.matcher):
                await await_hidden(self._page, params.matcher, time, self._timeout)
        return {"where": self._tab.where, "state": params.state}

    async def _await_visible(self, matcher: Matcher, time: Countdown) -> None:
        async with self._explained("wait_for_node", time.limit_ms, "WAIT_TIMEOUT", matcher):
            await self._await_node(matcher, time)

    async def wait_for_navigation(self, params: payload.WaitForNavigation, time: Countdown) -> dict[str, object]:
        if params.expected_package is not None:
            raise Failure("ACTION_UNSUPPORTED", "a browser has no packages: use expectedUrl or expectedNode")
        tab = self._tab
        if params.expected_url is not None:
            pattern = ".*".join(re.escape(part) for part in params.expected_url.split("*"))
            try:
                async with self._explained("wait_for_navigation", time.limit_ms, "WAIT_TIMEOUT"):
                    await tab.page.wait_for_url(re.compile(pattern + r"\Z"), timeout=time.limit_ms, wait_until="commit")
            except Failure as failure:
                if failure.code != "WAIT_TIMEOUT":
                    raise
                message = f"the address is {tab.where[:200]}, not {params.expected_url} within {time.limit_ms} ms"
                raise Failure("WAIT_TIMEOUT", message) from None
        if params.expected_node is not None:
            await self._await_visible(params.expected_node, Countdown(time.left_ms))
        return {"where": tab.where}

    async def snapshot(self, matcher: Matcher | None, time: Countdown) -> Snapshot:
        async with self._explained("snapshot_ui", time.limit_ms, "EVAL_TIMEOUT", matcher):
            root = self._page if matcher is None else await self._await_node(matcher, time)
            left_out, silent = await self._cut(root, time)
            for address in silent:
                self._tabs.add_note("silentFrames", {"where": address})
            limit_ms = min(SILENT_MS, time.left_ms) if silent else time.left_ms
            text = await root.aria_snapshot(mode="ai", depth=MAX_DEPTH, timeout=limit_ms)
            for frame in self._page.frames if left_out else ():
                with contextlib.suppress(Exception):  # it ends by itself as well
                    await bounded(frame.locator(f"{CUT}=0 0").count(), END_CUT_MS)
        is_deep = any(line.startswith("  " * (MAX_DEPTH - 1)) for line in text.splitlines())
        return Snapshot(text, self._tabs.place_of(self._tab), left_out, MAX_DEPTH if is_deep else 0)

    async def _cut(self, root: Any, time: Countdown) -> tuple[int, list[str]]:
        """Limit the next snapshot to `MAX_NODES`.

        Return the number of nodes that are left out, and the addresses of frames that do not answer.
        """
        whole_ms = time.left_ms // 2
        frames = self._page.frames[1:MAX_FRAMES]
        limits_ms = [whole_ms, *(min(COUNT_MS, whole_ms) for _ in frames)]
        asked = zip([root, *frames], limits_ms, strict=True)
        count, *counts = await asyncio.gather(
            *(answer_of(each.evaluate(page_scripts.COUNT_NODES), limit_ms, 0) for each, limit_ms in asked)
        )
        silent = [str(each.url)[:500] for each, found in zip(frames, counts, strict=True) if found is None]
        left, left_out = MAX_NODES, 0
        for each, found in zip([root, *frames], [MAX_NODES + 1 if count is None else count, *counts], strict=True):
            if found is not None and found > left:
                kept = await bounded(each.locator(f"{CUT}={max(1, left)} {time.left_ms}").count(), time.left_ms)
                left_out += found - kept
            left = max(0, left - (found or 0))
        return left_out, silent

    async def screenshot(self, time: Countdown) -> bytes:
        page = self._page
        async with self._explained("take_screenshot", time.limit_ms, "EVAL_TIMEOUT"):
            image: bytes = await page.screenshot(timeout=time.limit_ms, type="png")
        return image


def _check_scheme(uri: str) -> None:
    if uri.strip().partition(":")[0].lower() not in SCHEMES:
        raise Failure("ACTION_UNSUPPORTED", f"a browser opens {', '.join(SCHEMES)} addresses, not {uri!r:.80}")


def _find_missing(paths: list[str]) -> None:
    for path in paths:
        if not os.path.isabs(path) or not os.path.isfile(path):
            raise Failure("ACTION_UNSUPPORTED", f"{path!r:.300} is not the absolute path of a file: nothing was given")


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


def _waited_only(log: str) -> bool:
    """Return whether the log of an order ends in the wait for its node."""
    if "waiting for" not in log or "elementHandle." in log:  # keys were pressed; the log has them
        return False
    if log.partition(":")[0].endswith((".click", ".hover")):
        return "performing" not in log
    last = log.rstrip(" -\n").rpartition("\n")[2]
    return "locator resolved" not in log or bool(re.match(r"\W*(waiting \d+ms|element is not|did not find)", last))
