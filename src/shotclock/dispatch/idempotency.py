"""Idempotency keys: a repeat gets the first call's answer instead of running a second time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping

from ..core.effects import Ending, SideEffects
from ..core.envelope import Envelope, Problem, warning
from ..core.exact_values import identity
from ..core.walltime import WallTime
from ..process.clock import monotonic_ns, wall_time
from ..process.identity import is_alive, this_process
from ..runtime.call import Call, Outcome, answer
from ..runtime.outcomes import timeout_problem
from ..store.idempotency import Beginning, Finished, Fresh, Interrupted, Mismatch
from ..store.jobs import RETENTION_MS
from ..store.store import Store
from .invocation import Stdin

FIRST_LOOK_S = 0.02
LATER_LOOKS_S = 0.2


def reused(store: Store, scope: str, key: str, digest: str) -> Problem | None:
    """Why this key cannot stand for this work: it stands for other work. From here on it stands for this."""
    beginning = store.idempotency.begin(scope, key, digest, this_process(), wall_time(), is_alive)
    return _reused(key, beginning.began_at) if isinstance(beginning, Mismatch) else None


def _reused(key: str, began_at: WallTime) -> Problem:
    return Problem("KEY_REUSED", f"the key {key!r} was used for other arguments at {began_at}", "validation")


class Repeats:
    """One call with a key: runs if it is the first, waits for the first otherwise."""

    def __init__(
        self, store: Store, scope: str, key: str, arguments: Mapping[str, object], stdin: Stdin | None = None
    ) -> None:
        self._store, self._scope, self._key = store, scope, key
        text = json.dumps([identity(arguments), None if stdin is None else stdin.digest], sort_keys=True)
        self._digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    async def call(
        self,
        admission: Call,
        first: Callable[[], Awaitable[Envelope]],
        stop: asyncio.Future[str] | None = None,
    ) -> Envelope | None:
        """None where the waiting for the first call was stopped; the first call itself listens to `stop` on its own."""
        pause_s = FIRST_LOOK_S
        await asyncio.to_thread(self._forget_old)
        while True:
            beginning = await asyncio.to_thread(self._begin)
            if isinstance(beginning, Fresh):
                return await self._run(admission, first)
            told = self._told(admission, beginning)
            if told is not None:
                return told
            bell = admission.bound.bell
            if bell is not None and bell.has_passed(monotonic_ns()):
                problem = timeout_problem(admission, monotonic_ns() - admission.started_ns)
                message = f"{problem.message}; the first call with this key goes on"
                return answer(admission, Outcome(Ending.DETACHED, Problem("TIMEOUT", message, fired=problem.fired)))
            if stop is None:
                await asyncio.sleep(pause_s)
            elif (await asyncio.wait([stop], timeout=pause_s))[0]:
                return None
            pause_s = min(pause_s * 1.5, LATER_LOOKS_S)

    def _begin(self) -> Beginning:
        return self._store.idempotency.begin(
            self._scope, self._key, self._digest, this_process(), wall_time(), is_alive
        )

    def _forget_old(self) -> None:
        self._store.idempotency.forget_begun_before(WallTime(max(0, wall_time().ms - RETENTION_MS)), is_alive)

    def _told(self, admission: Call, beginning: Beginning) -> Envelope | None:
        if isinstance(beginning, Finished):
            first = beginning.envelope
            again = warning("REPLAYED", finished_at=beginning.finished_at.iso())
            return Envelope(first["data"], first["error"], [*first["warnings"], again], first["meta"])
        if isinstance(beginning, Mismatch):
            return answer(admission, Outcome(Ending.NOT_STARTED, _reused(self._key, beginning.began_at)))
        if isinstance(beginning, Interrupted):
            message = f"the first call with this key began at {beginning.began_at} and its process died"
            problem = Problem("INTERRUPTED", message, side_effects=SideEffects.UNKNOWN)
            return answer(admission, Outcome(Ending.NOT_STARTED, problem))
        return None

    async def _run(self, admission: Call, first: Callable[[], Awaitable[Envelope]]) -> Envelope:
        """What may be repeated without harm is forgotten; everything else is the answer from now on."""
        try:
            envelope = await first()
        except BaseException:
            problem = Problem("CANCELLED", "the first call with this key was cancelled")
            self._finish(answer(admission, Outcome(Ending.CANCELLED, problem)))
            raise
        if envelope.ok or envelope.meta["side_effects"] != SideEffects.NONE.value:
            await asyncio.to_thread(self._finish, envelope)
        else:
            await asyncio.to_thread(self._store.idempotency.drop, self._scope, self._key)
        return envelope

    def _finish(self, envelope: Envelope) -> None:
        self._store.idempotency.finish(self._scope, self._key, envelope.to_dict(), wall_time())
