"""The tabs of a browser, and the things that pages open: tabs, dialogs, downloads and file choosers.

Each opened thing is noted for the result of the step. A dialog blocks its page, and other pages of the same process:
`confirm` and `prompt` stay open while an order runs or no action does, so that the next action can answer them; others
are answered at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from ..core.errors import Failure
from ..core.value_types import JsonObject
from ..core.visible_text import one_line
from ..supervise.clock import monotonic_ns
from .device import Countdown, Place

T = TypeVar("T")

MAX_NOTES = 20  # the most notes of one kind: a page can open dialogs, tabs and downloads without end
MAX_TITLE = 200
MAX_ADDRESS = 2_048
MAX_MESSAGE = 500
TITLE_MS = 150  # less than the time between the end of an action and its cancellation
LATE_MS = 150  # an order may report its own timeout this much later; as TITLE_MS, this is less than GUARD_MS
ANSWER_MS = 1_000  # the answer to a dialog, and other orders that no script can delay
OPENED_MS = 1_000  # a tab that an order opened is awaited this long; a slower one is reported as loading
CHOOSER = {"kind": "file chooser"}
KEPT = ("confirm", "prompt")  # the dialogs whose answer matters to the page


class Tab:
    def __init__(self, page: Any, name: str) -> None:
        self.page = page
        self.name = name
        self.session: Any = None
        self.target_id = ""
        self.ready: asyncio.Event = asyncio.Event()
        self.document: str = f"page {id(page)}"
        self.leaving: tuple[str, int] | None = None  # the address of a pending navigation, and when it began
        self.order: asyncio.Future[Any] | None = None  # an order that waits for the answer to a dialog
        self._title = ("", "")  # a document and its title

    @property
    def where(self) -> str:
        return str(self.page.url)[:MAX_ADDRESS]

    @property
    def title(self) -> str:
        return self._title[1] if self._title[0] == self.document else ""

    async def read_title(self) -> None:
        """Read the title of a new document. It is left out where the page does not answer at once."""
        document = self.document
        if self._title[0] != document and self.leaving is None:
            with contextlib.suppress(Exception):
                self._title = (document, one_line(await bounded(self.page.title(), TITLE_MS), MAX_TITLE))


class Tabs:
    def __init__(self, browser: Any, context: Any, error: Any, *, is_own: bool) -> None:
        """`error` is the class of Playwright's errors."""
        self._browser, self._context, self._error, self._is_own = browser, context, error, is_own
        self._tabs: list[Tab] = []  # the active one last, before it the one that was active before
        self._count = 0
        self._targets: dict[str, str] = {}  # the pages that the browser has, with their addresses
        self._coming: dict[str, None] = {}
        """Targets of tabs that the browser has created and Playwright not yet reported: they load."""
        self._pending: list[tuple[Any, Tab, dict[str, str]]] = []
        self.keeps_dialogs: bool = True  # False while an action looks or waits, which a dialog would block
        self._met = asyncio.Event()  # a dialog was left open
        self._arrived = asyncio.Event()  # no tab is coming any more
        self._notes: dict[str, list[JsonObject]] = {}
        self._opened: list[Tab] = []
        self._tasks: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        with contextlib.suppress(Exception):  # an attached app may not have it; slow tabs are not reported then
            session = await bounded(self._browser.new_browser_cdp_session(), ANSWER_MS)
            for event in ("Target.targetCreated", "Target.targetInfoChanged"):
                session.on(event, lambda message, event=event: self._handle_target(event, message["targetInfo"]))
            session.on("Target.targetDestroyed", lambda message: self._forget_target(message["targetId"]))
            await bounded(session.send("Target.setDiscoverTargets", {"discover": True}), ANSWER_MS)
        for page in list(self._context.pages) or [await self._context.new_page()]:
            await self.adopt(page)
        self._opened.clear()
        self._coming.clear()
        self._context.on("page", lambda page: self.later(self.adopt(page)))

    def _handle_target(self, event: str, info: JsonObject) -> None:
        if info["type"] != "page":
            return
        target, known = info["targetId"], {tab.target_id for tab in self._tabs}
        if event == "Target.targetCreated" and info.get("openerId") in known and target not in known:
            self._coming[target] = None
        self._targets[target] = info["url"]

    def _forget_target(self, target: str) -> None:
        self._targets.pop(target, None)
        self._arrive(target)

    def _arrive(self, target: str) -> None:
        self._coming.pop(target, None)
        if not self._coming:
            self._arrived.set()

    async def adopt(self, page: Any) -> None:
        known = next((tab for tab in self._tabs if tab.page is page), None)
        if known is not None:
            await known.ready.wait()  # bounded by the caller
            return
        self._count += 1
        tab = Tab(page, f"t{self._count}")
        self._tabs.append(tab)
        self._opened.append(tab)
        page.on("close", lambda _: self.forget(tab))
        page.on("crash", lambda _: self.forget(tab))
        page.on("dialog", lambda dialog: self._meet(dialog, tab))
        page.on("download", lambda download: self.later(self._refuse_download(download)))
        if self._is_own:  # an attached app shows its file choosers to its user
            page.on("filechooser", lambda _: self.add_note("opened", CHOOSER))
        try:
            await self._follow(tab)
        finally:
            tab.ready.set()

    async def _follow(self, tab: Tab) -> None:
        page = tab.page
        tab.session = await self._context.new_cdp_session(page)
        target = (await tab.session.send("Target.getTargetInfo"))["targetInfo"]
        tab.target_id = target["targetId"]
        self._arrive(tab.target_id)
        self._targets.setdefault(tab.target_id, target["url"])

        def note_document(event: JsonObject) -> None:
            frame = event["frame"]
            if not frame.get("parentId"):
                tab.document = f"page {id(page)} document {frame['loaderId']}"
                tab.leaving = None

        def note_leaving(event: JsonObject) -> None:
            if event["frameId"] == tab.target_id and "same" not in event["navigationType"].lower():
                tab.leaving = (event["url"], monotonic_ns())

        def note_stop(event: JsonObject) -> None:
            if event["frameId"] == tab.target_id:
                tab.leaving = None

        tab.session.on("Page.frameNavigated", note_document)
        tab.session.on("Page.frameStartedNavigating", note_leaving)
        tab.session.on("Page.frameStoppedLoading", note_stop)
        await tab.session.send("Page.enable")

    def forget(self, tab: Tab) -> None:
        if tab in self._tabs:
            self._tabs.remove(tab)
        self._opened = [each for each in self._opened if each is not tab]
        self._pending = [each for each in self._pending if each[1] is not tab]

    @property
    def active(self) -> Tab | None:
        return self._tabs[-1] if self._tabs else None

    def __len__(self) -> int:
        return len(self._tabs)

    def find(self, name: str) -> Tab:
        found = next((tab for tab in self._tabs if tab.name == name), None)
        if found is None:
            names = ", ".join(sorted(tab.name for tab in self._tabs))
            raise Failure("NODE_NOT_FOUND", f"there is no tab {name!r:.40}; the tabs are {names}")
        return found

    def activate(self, tab: Tab) -> None:
        self._tabs.remove(tab)
        self._tabs.append(tab)

    def place_of(self, tab: Tab) -> Place:
        to = None if tab.leaving is None else tab.leaving[0]
        return Place(tab.where, tab.document, to, tab.title)

    async def list(self) -> list[dict[str, object]]:
        tabs = sorted(self._tabs, key=lambda tab: int(tab.name[1:]))
        await self._read_titles(tabs)
        return [self._describe(tab) | ({"active": True} if tab is self.active else {}) for tab in tabs]

    def _describe(self, tab: Tab) -> dict[str, object]:
        return {"tab": tab.name, "where": tab.where[:MAX_MESSAGE], "title": tab.title}

    async def finish(self) -> None:
        """Read the titles for the result of an action: of the active tab, and of those that it opened."""
        await self._read_titles([tab for tab in self._tabs if tab is self.active or tab in self._opened])

    async def _read_titles(self, tabs: Iterable[Tab]) -> None:
        if not self._pending:
            await asyncio.gather(*(tab.read_title() for tab in tabs))

    async def settle(self, within_ms: int) -> None:
        """Wait for the tabs that an order opened, and that have not yet loaded."""
        self._arrived.clear()
        if self._coming:
            with contextlib.suppress(TimeoutError):
                await bounded(self._arrived.wait(), min(within_ms, OPENED_MS))

    def add_note(self, kind: str, note: JsonObject) -> None:
        found = self._notes.setdefault(kind, [])
        if len(found) < MAX_NOTES:
            found.append(note)

    def take_notes(self) -> dict[str, object]:
        for tab in self._opened:
            self.add_note("opened", {"kind": "tab", **self._describe(tab)})
        for target in self._coming:
            address = one_line(self._targets.get(target, ""), MAX_MESSAGE)
            self.add_note("opened", {"kind": "tab", "where": address, "state": "loading"})
        self._opened.clear()
        self._coming.clear()
        notes: dict[str, object] = {kind: found[:] for kind, found in self._notes.items() if found}
        self._notes.clear()
        return notes

    def forget_dialogs(self) -> None:
        self._notes.pop("dialogs", None)

    def forget_chooser(self) -> None:
        if CHOOSER in self._notes.get("opened", []):
            self._notes["opened"].remove(CHOOSER)

    @property
    def has_dialog(self) -> bool:
        return bool(self._pending)

    def _meet(self, dialog: Any, tab: Tab) -> None:
        note = {"type": dialog.type, "message": one_line(dialog.message, MAX_MESSAGE), "answer": "pending"}
        if dialog.type == "prompt" and dialog.default_value:
            note["default"] = one_line(dialog.default_value, MAX_MESSAGE)
        if dialog.type in KEPT and self.keeps_dialogs and tab is self.active:
            self._pending.append((dialog, tab, note))
            self.add_note("dialogs", note)
            self._met.set()
            return
        self.later(self._answer(dialog, tab, note, accept=dialog.type == "beforeunload"))

    async def _answer(self, dialog: Any, tab: Tab, note: dict[str, str], *, accept: bool) -> None:
        """Note the answer to a dialog, and give it. A page that asks whether it may be left is left."""
        if tab in self._tabs:
            self._note_answer(note, accept)
        with contextlib.suppress(Exception):  # the page is gone
            await (dialog.accept() if accept else dialog.dismiss())

    def _note_answer(self, note: dict[str, str], accept: bool) -> None:
        self.add_note("dialogs", {**note, "answer": "accepted" if accept else "dismissed"})

    async def dismiss_dialogs(self) -> None:
        pending, self._pending = self._pending, []
        for dialog, tab, note in pending:
            with contextlib.suppress(TimeoutError):
                await bounded(self._answer(dialog, tab, note, accept=False), ANSWER_MS)

    async def answer_dialog(self, accept: bool, text: str | None, time: Countdown) -> dict[str, object]:
        while not self._pending:
            if time.is_over:
                raise Failure("WAIT_TIMEOUT", f"no confirm or prompt dialog opened within {time.limit_ms} ms")
            self._met.clear()
            with contextlib.suppress(TimeoutError):
                await bounded(self._met.wait(), time.left_ms)
        dialog, tab, note = self._pending[0]
        if text is not None and dialog.type != "prompt":
            raise Failure("ACTION_UNSUPPORTED", f"a {dialog.type} dialog takes no text: {note['message']}")
        self._pending.pop(0)
        order, tab.order = tab.order, None
        self._met.clear()
        answering = dialog.dismiss() if not accept else dialog.accept() if text is None else dialog.accept(text)
        try:
            await bounded(answering, min(ANSWER_MS, time.left_ms))
        except TimeoutError:
            raise Failure("OPERATION_TIMEOUT", f"the dialog took no answer within {time.limit_ms} ms") from None
        except self._error as error:
            raise Failure("ACTION_FAILED", f"the dialog could not be answered: {error}"[:MAX_MESSAGE]) from None
        self._note_answer(note, accept)
        if order is not None:  # the rest of the click, and all that it opens
            await self._until_done(order, tab, time.left_ms - LATE_MS)
        await self.settle(time.left_ms)
        return {"where": (self.active or tab).where}

    async def run_order(self, order: Awaitable[T], within_ms: int) -> T | None:
        """Await an order, or the dialog that it opens. In that case the order ends after the answer to the dialog."""
        tab, time = self.active, Countdown(within_ms)
        task = asyncio.ensure_future(order)
        self.keeps_dialogs = True
        self._met.clear()
        try:
            await self._until_done(task, tab, within_ms + LATE_MS)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self.keeps_dialogs = False
        if not task.done() and not self._pending:
            raise TimeoutError
        result = await task if task.done() else None
        await self.settle(time.left_ms)
        return result

    async def _until_done(self, order: asyncio.Future[Any], tab: Tab | None, within_ms: int) -> None:
        met = asyncio.ensure_future(self._met.wait())
        try:
            await asyncio.wait([order, met], timeout=max(0, within_ms) / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            met.cancel()
        if not order.done():
            self.later(order)
            if tab is not None:
                tab.order = order

    async def _refuse_download(self, download: Any) -> None:
        """Cancel a download, which no action could use and which holds a connection to its server, and note it."""
        self.add_note(
            "downloads", {"url": download.url[:MAX_MESSAGE], "name": one_line(download.suggested_filename, MAX_TITLE)}
        )
        with contextlib.suppress(Exception):
            await download.cancel()

    def later(self, work: Awaitable[object]) -> None:
        """Run work in the background. Its error is ignored: a page may close at any time."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def bounded(answer: Awaitable[T], within_ms: int) -> T:
    async with asyncio.timeout(max(1, within_ms) / 1000):
        return await answer
