"""Nodes of a page and of its frames: which nodes a matcher means, and the wait for one of them.

The frames of a page are searched at the same time, and each answers for itself: one that hangs or goes away has no
nodes. If several frames have a node, the main frame comes first, then the frames in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

from ..core.errors import Failure
from . import _page_scripts as page_scripts
from ._tabs import bounded
from .device import Countdown
from .payload import Matcher

FOLLOW_MS = 300  # a node is awaited this long in one main frame before frames and a newer page are looked at
LAST_LOOK_MS = 100
FRAME_LOOK_MS = 250  # a frame has this long to answer the first look; each further look has twice the time
MAX_FRAMES = 50  # the most frames of a page to look at


def find(root: Any, matcher: Matcher) -> Any:
    """Return the locator of the visible nodes below a page or frame. A ref is found from the page alone."""
    equals, contains = matcher.text_equals, matcher.text_contains
    found: list[Any] = [] if matcher.ref is None else [root.get_by_ref(matcher.ref)]
    if matcher.role is not None:
        name = equals or contains
        named = {} if name is None else {"name": name, "exact": equals is not None}
        found.append(root.get_by_role(matcher.role, **named))
    if matcher.resource_id is not None:
        quoted = matcher.resource_id.replace("\\", "\\\\").replace('"', '\\"')
        found.append(root.locator(f'[data-testid="{quoted}"], [id="{quoted}"]'))
    for label, exact in ((matcher.content_desc_equals, True), (matcher.content_desc_contains, False)):
        if label is not None:
            described = root.get_by_alt_text(label, exact=exact).or_(root.get_by_title(label, exact=exact))
            found.append(root.get_by_label(label, exact=exact).or_(described))
    if matcher.css is not None:
        found.append(root.locator(f"css={matcher.css}"))
    if not found:  # a text alone: the smallest nodes that have it
        found = [root.get_by_text(equals, exact=True)] if equals is not None else []
        found += [root.get_by_text(contains)] if contains is not None else []
        equals = contains = None
    locator = found[0]
    for other in found[1:]:
        locator = locator.and_(other)
    if matcher.role is None and equals is not None:
        locator = locator.filter(has_text=re.compile(rf"^\s*{re.escape(equals)}\s*$"))
    if contains is not None and (matcher.role is None or equals is not None):
        locator = locator.filter(has_text=contains)
    return locator.filter(visible=True)


def frames_of(page: Any, matcher: Matcher) -> list[Any]:
    """Return the frames to search, the main frame first. A ref names its frame."""
    return [page.main_frame] if matcher.ref is not None else page.frames[:MAX_FRAMES]


async def is_seen(node: Any, within_ms: int = LAST_LOOK_MS) -> bool | None:
    """Return whether a node is visible now; None: no answer. Playwright's own looks are up to half a second apart."""
    with contextlib.suppress(Exception):
        return bool(await bounded(node.is_visible(), within_ms))
    return None


async def looks_into(frames: list[Any], matcher: Matcher, within_ms: int) -> list[bool | None]:
    """Return for each frame whether it shows the node; None: it did not answer."""
    return list(await asyncio.gather(*(is_seen(find(frame, matcher).first, within_ms) for frame in frames)))


async def await_node(page_now: Callable[[], Any], matcher: Matcher, time: Countdown, error: Any, timeout: Any) -> Any:
    """Return the node once it is visible on the newest page, which a click may have just opened.

    Raises `timeout`, or another `error` of Playwright's.
    """
    if matcher.ref is not None and not await bounded(find(page_now(), matcher).count(), time.left_ms):
        raise no_ref(matcher)
    look_ms = FRAME_LOOK_MS
    while True:
        left_ms, page = time.left_ms, page_now()
        main, *others = frames_of(page, matcher)
        node = find(page if matcher.ref is not None else main, matcher).first
        try:
            # With frames, only what the main frame shows already comes before their nodes.
            await node.wait_for(timeout=min(left_ms, LAST_LOOK_MS if others else FOLLOW_MS))
            return node
        except timeout:
            seen = await looks_into(others, matcher, min(look_ms, left_ms)) if others else []
            look_ms *= 2 if None in seen else 1
            for frame, is_there in zip(others, seen, strict=True):
                if is_there:
                    return find(frame, matcher).first
            if time.is_over or (not others and left_ms <= FOLLOW_MS):
                if await is_seen(node):
                    return node
                raise
        except error:
            if not page.is_closed():  # it did not just close and leave another one
                raise


async def await_hidden(page: Any, matcher: Matcher, time: Countdown, timeout: Any) -> None:
    """Return once no frame shows such a node. A frame that does not answer may show one."""
    look_ms = FRAME_LOOK_MS
    while True:
        main, *others = frames_of(page, matcher)
        node = find(page if matcher.ref is not None else main, matcher).first
        try:
            await node.wait_for(state="hidden", timeout=time.left_ms)
        except timeout:
            if await is_seen(node) is not False:
                raise
        seen = await looks_into(others, matcher, min(look_ms, time.left_ms)) if others else []
        if not any(each is not False for each in seen):
            return
        if time.is_over:
            silent = sum(each is None for each in seen)
            why = f"{silent} frames did not answer" if silent else "a frame still shows it"
            raise Failure("WAIT_TIMEOUT", f"the node with {matcher.describe()} is not hidden: {why}")
        look_ms *= 2 if None in seen else 1
        await asyncio.sleep(min(LAST_LOOK_MS, time.left_ms) / 1000)


async def read_texts(page: Any, node: Any, matcher: Matcher, time: Countdown) -> tuple[list[str], list[str]]:
    own = f"n => ({page_scripts.READ_TEXTS})([n])[0]"
    if matcher.ref is not None:  # Playwright finds only one node at a time by its ref
        return [str(await node.evaluate(own, timeout=time.left_ms))], []
    main, *others = frames_of(page, matcher)
    texts: list[str] = await bounded(find(main, matcher).evaluate_all(page_scripts.READ_TEXTS), time.left_ms)
    within_ms = min(FRAME_LOOK_MS, time.left_ms)
    asked = (find(frame, matcher).evaluate_all(page_scripts.READ_TEXTS) for frame in others)
    found = await asyncio.gather(*(answer_of(each, within_ms, []) for each in asked))
    silent = [str(frame.url)[:500] for frame, each in zip(others, found, strict=True) if each is None]
    texts = [*texts, *(text for each in found for text in each or ())]
    return texts or [str(await node.evaluate(own, timeout=time.left_ms))], silent


async def answer_of(asked: Awaitable[Any], within_ms: int, gone: Any) -> Any:
    """Return the answer of a frame, `gone` if the frame went away, None if it does not answer."""
    try:
        return await bounded(asked, within_ms)
    except TimeoutError:
        return None
    except Exception:
        return gone


def no_ref(matcher: Matcher) -> Failure:
    return Failure("NODE_NOT_FOUND", f"the last snapshot of this page has no ref {matcher.ref!r:.40}: take another one")
