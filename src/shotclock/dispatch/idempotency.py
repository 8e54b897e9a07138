"""Idempotency keys: a repeat gets the first call's answer instead of running a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..core.clocks import WallTime
from ..core.envelope import Envelope, Problem, stop_problem, warning
from ..core.errors import Ending, SideEffects
from ..core.proposal import digest
from ..process.clock import monotonic_ns, wall_time
from ..process.kernel import is_alive, this_process
from ..runtime.call import Call, Outcome
from ..runtime.outcomes import timeout_problem
from ..store.idempotency import Beginning, Finished, Fresh, Interrupted, Mismatch
from ..store.jobs import RETENTION_MS
from ..store.store import Store
from .invocation import Stdin

FIRST_LOOK_S = 0.02
LATER_LOOKS_S = 0.2


def find_other_work(store: Store, scope: str, key: str, digest: str) -> Outcome | None:
    """Bind a key to this work, or return the refusal if it is bound to other work."""
    beginning = store.idempotency.begin(scope, key, digest, this_process(), wall_time(), is_alive)
    return _key_reused(key, beginning.began_at) if isinstance(beginning, Mismatch) else None


def _key_reused(key: str, began_at: WallTime) -> Outcome:
    message = f"the key {key!r} was used for other arguments at {began_at}"
    return Outcome(Ending.NOT_STARTED, Problem("KEY_REUSED", message, "validation"))


class KeyedCall:
    """A call with a key: the first runs, the others wait for it."""

    def __init__(
        self, store: Store, scope: str, key: str, arguments: Mapping[str, object], stdin: Stdin | None = None
    ) -> None:
        self._store, self._scope, self._key = store, scope, key
        self._digest = digest([dict(arguments), None if stdin is None else stdin.digest])

    async def begin(self, call: Call) -> Outcome | Envelope | None:
        """Return None for the first call with its key, else the first call's answer, or why there is none."""
        pause_s = FIRST_LOOK_S
        stop = None if call.request is None else call.request.stop
        await asyncio.to_thread(self._forget_old)
        while True:
            beginning = await asyncio.to_thread(self._begin)
            if isinstance(beginning, Fresh):
                call.keep_answer = self._keep
                return None
            repeated = self._repeat(beginning)
            if repeated is not None:
                return repeated
            bell = call.bound.bell
            if bell is not None and bell.has_passed(monotonic_ns()):
                problem = timeout_problem(call, monotonic_ns() - call.started_ns)
                message = f"{problem.message}; the first call with this key is still running"
                return Outcome(Ending.DETACHED, Problem("TIMEOUT", message, fired=problem.fired))
            if stop is None:
                await asyncio.sleep(pause_s)
            elif (await asyncio.wait([stop], timeout=pause_s))[0]:
                return Outcome(Ending.NOT_STARTED, stop_problem(stop.result()), {"partial": True})
            pause_s = min(pause_s * 1.5, LATER_LOOKS_S)

    def _begin(self) -> Beginning:
        return self._store.idempotency.begin(
            self._scope, self._key, self._digest, this_process(), wall_time(), is_alive
        )

    def _forget_old(self) -> None:
        self._store.idempotency.forget_begun_before(WallTime(max(0, wall_time().ms - RETENTION_MS)), is_alive)

    def _repeat(self, beginning: Beginning) -> Outcome | Envelope | None:
        """Return the answer to a repeat, unless the first call is still running."""
        if isinstance(beginning, Finished):
            first = beginning.envelope
            again = warning("REPLAYED", finished_at=beginning.finished_at.iso())
            return Envelope(first["data"], first["error"], [*first["warnings"], again], first["meta"])
        if isinstance(beginning, Mismatch):
            return _key_reused(self._key, beginning.began_at)
        if isinstance(beginning, Interrupted):
            message = f"the first call with this key began at {beginning.began_at} and its process died"
            problem = Problem("INTERRUPTED", message, side_effects=SideEffects.UNKNOWN)
            return Outcome(Ending.NOT_STARTED, problem)
        return None

    def _keep(self, envelope: Envelope) -> None:
        """Keep the first answer, unless the call had no effect and may be repeated."""
        if envelope.ok or envelope.meta["side_effects"] != SideEffects.NONE.value:
            self._store.idempotency.finish(self._scope, self._key, envelope.to_dict(), wall_time())
        else:
            self._store.idempotency.drop(self._scope, self._key)
