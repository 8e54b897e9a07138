"""What tests of executions share: payloads, and a device in memory for what is about order and budgets alone."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.ui._execution import ExecutionRun
from shotclock.ui.device import Countdown, Place, Snapshot
from shotclock.ui.payload import Scroll, read_execution

from .pages import Session, session_in

Script = dict[str, Callable[[int], Any]]


class MemoryDevice:
    """A device whose nodes do what the test says: by the text of a matcher a function of `within_ms`."""

    kind = "memory"
    is_fresh = False

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or {}
        self.place: Place | None = Place("memory:start", "d1")
        self.asked: list[tuple[str, int]] = []
        self.answers = True
        self.recovers_to: Place | None = None

    def place_seen(self) -> Place | None:
        return self.place

    def take_notes(self) -> dict[str, object]:
        return {}

    async def look(self, within_ms: int) -> Place:
        if not self.answers:
            await asyncio.sleep(within_ms / 1000)
            raise Failure("EVAL_TIMEOUT", "no answer")
        if self.place is None:
            raise Failure("DEVICE_LOST", "gone")
        return self.place

    async def recover(self, within_ms: int) -> Place:
        if self.recovers_to is None:
            raise Failure("DEVICE_LOST", "gone for good")
        self.answers, self.place = True, self.recovers_to
        return self.place

    async def _do(self, name: str, within_ms: int) -> Any:
        self.asked.append((name, within_ms))
        done = self.script[name](within_ms) if name in self.script else {}
        return await done if asyncio.iscoroutine(done) else done

    async def click(self, params: Any, time: Countdown) -> Any:
        return await self._do(params.matcher.text_equals, time.limit_ms)

    async def press_key(self, params: Any, time: Countdown) -> Any:
        return await self._do(params.key, time.limit_ms)

    async def read_text(self, matcher: Any, time: Countdown) -> Any:
        return await self._do(matcher.text_equals, time.limit_ms)

    async def sees(self, matcher: Any, within_ms: int) -> bool:
        try:
            await self._do(matcher.text_equals, within_ms)
        except Failure:
            return False
        return True

    async def wait_for_node(self, params: Any, time: Countdown) -> Any:
        return await self._do(params.matcher.text_equals, time.limit_ms)

    async def scroll(self, params: Scroll, time: Countdown) -> Any:
        return await self._do("scroll", time.limit_ms)

    async def snapshot(self, matcher: Any, time: Countdown) -> Snapshot:
        return Snapshot(await self._do("snapshot", time.limit_ms) or "- text", Place("memory:start", "d1"))


def fail(code: str) -> Callable[[int], Any]:
    def failing(within_ms: int) -> Any:
        raise Failure(code, f"{code} it is")

    return failing


async def hang(within_ms: int) -> None:
    await asyncio.sleep(3600)


def execution(*actions: Any, timeout_ms: int = 30000, mode: str = "direct") -> dict[str, Any]:
    head = {"commandId": "c-1", "taskId": "t-1", "source": "test", "expectedFormat": "android-ui-automator"}
    return {**head, "timeoutMs": timeout_ms, "mode": mode, "actions": list(actions)}


def act(action_type: str, action_id: str, text: str | None = None, **params: Any) -> dict[str, Any]:
    matcher = {} if text is None else {"matcher": {"textEquals": text}}
    return {"id": action_id, "type": action_type, "params": {**matcher, **params}}


def run_on(
    device: Any, payload: dict[str, Any], events: list[Any] | None = None, within_ms: int | None = None
) -> dict[str, Any]:
    told = events if events is not None else []
    return asyncio.run(ExecutionRun(read_execution(payload), device, told.append, within_ms).run())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_in(tmp_path_factory.mktemp("ui") / "home") as found:
        told = found.run(found.open("/"))
        assert told["ok"], told
        yield found


def data_of(envelope: dict[str, Any], action_id: str) -> dict[str, Any]:
    """The data of one step that went well."""
    assert envelope["data"], envelope
    steps = {step["id"]: step for step in envelope["data"]["stepResults"]}
    assert steps[action_id]["success"], steps[action_id]
    found: dict[str, Any] = steps[action_id]["data"]
    return found
