"""Admission of calls by the store: limits of calls that run at the same time, and idempotency keys.

The limits hold across all processes of this user. A place is a lock in the store. A holder that died, or whose limits
have long passed, loses it to the next call. A repeat under a key gets the first call's answer instead of running.

Contracts (AGENTS.md): places are in the path of every call; a key's first answer is its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from ..calls.call import Call, Outcome, Stdin
from ..calls.outcomes import timeout_problem
from ..calls.supervised_commands import run_in_thread
from ..core.catalogue import Catalogue, CommandSpec
from ..core.envelope import Envelope, Problem, stop_problem, warning
from ..core.errors import Ending, SideEffects
from ..core.limits import NS_PER_MS, ClockKind, WallTime, format_duration
from ..core.proposal import digest
from ..store.home import StoreBusy
from ..store.idempotency import Beginning, Finished, Fresh, Interrupted, Lock, Mismatch
from ..store.jobs import RETENTION_MS
from ..store.store import Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import is_alive, this_process

# Between two attempts to get a place, or two looks at the first call with a key.
FIRST_PAUSE_S = 0.01
LATER_PAUSES_S = 0.2
# Time beyond its timeout and grace after which a holder loses its place.
LEASE_MARGIN_MS = 10_000
RETRY_AFTER_MS = 1_000

Check = Callable[[Call, CommandSpec, Mapping[str, object]], Awaitable[Outcome]]


class ConcurrencyLimits:
    def __init__(self, catalogue: Catalogue, store: Callable[[], Store], check: Check | None = None) -> None:
        """`check` validates arguments without running anything."""
        self._check = check
        self._app = catalogue.name
        self._specs = {
            spec.name: spec
            for spec in catalogue.everything
            if spec.single_flight is not None or spec.concurrency is not None
        }
        self._store = store

    def guards(self, name: str) -> bool:
        return name in self._specs

    async def enter(self, call: Call) -> Callable[[], None] | Outcome:
        """Take the places of a call within its queue limit. Return their release, or the refusal."""
        spec, tokens = self._specs[call.name], list[str]()

        def leave() -> None:
            for token in tokens:
                with contextlib.suppress(Exception):  # the lease of the place ends it
                    try:
                        self._store().locks.release(token, wait_ms=0)
                    except StoreBusy:  # the loop does not wait
                        asyncio.get_running_loop().run_in_executor(None, self._store().locks.release, token)

        try:
            for lock, slots in self._places(spec, call.arguments):
                tokens.append(secrets.token_hex(8))
                conflict = await self._take(lock, slots, tokens[-1], call)
                if conflict is not None:
                    leave()
                    if self._check is not None:  # a retry would not help a call with wrong arguments
                        checked = await self._check(call, spec, call.arguments)
                        if isinstance(checked.problem, Problem) and checked.problem.code == "ARG_ERROR":
                            return checked
                    return _lock_held(lock, slots, conflict, call)
        except BaseException:
            leave()
            raise
        return leave

    def _places(self, spec: CommandSpec, arguments: Mapping[str, object]) -> list[tuple[str, int]]:
        places = []
        if spec.concurrency is not None:
            places.append((f"{self._app}/{spec.name}", spec.concurrency))
        if spec.single_flight is not None:
            # A missing argument is refused later, where its type is known.
            with contextlib.suppress(KeyError):
                known = {name: str(value) for name, value in {**spec.defaults, **arguments}.items()}
                places.append((f"{self._app}:{spec.single_flight.format_map(known)}", 1))
        return places

    async def _take(self, lock: str, slots: int, token: str, call: Call) -> Lock | None:
        bell, lease_ms = call.bound.bell, None
        until_ns = call.started_ns + (call.clocks.queue_ms or 0) * NS_PER_MS
        if bell is not None:
            until_ns = min(until_ns, bell.at_ns)
            lease_ms = bell.remaining_ms(monotonic_ns()) + call.bound.grace_ms + LEASE_MARGIN_MS
        pause_s = FIRST_PAUSE_S

        def attempt() -> Lock | None:
            acquire = partial(self._store().locks.acquire, lock, slots=slots, token=token, lease_ms=lease_ms)
            return acquire(holder=this_process(), label=call.name, now=wall_time(), is_alive=is_alive)

        while True:
            taken = await run_in_thread(attempt)
            if taken is None:
                return None
            left_s = (until_ns - monotonic_ns()) / 1e9
            if left_s <= 0:
                return taken
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LATER_PAUSES_S)


def _lock_held(lock: str, slots: int, oldest: Lock, call: Call) -> Outcome:
    now = wall_time()
    age_ms, expires_at, pid = now.since_ms(oldest.acquired_at), oldest.expires_at, oldest.holder.pid
    holder: dict[str, object] = {"pid": pid, "command": oldest.label, "age_ms": age_ms}
    waited_ms = (monotonic_ns() - call.started_ns) // NS_PER_MS
    message = f"{oldest.label} of process {pid} has held {lock.partition(':')[2] or lock} for {format_duration(age_ms)}"
    longest_ms = None if expires_at is None else max(0, expires_at - now)
    return Outcome(
        Ending.NOT_STARTED,
        Problem(
            "LOCK_HELD",
            message,
            "validation",
            fired=call.fired(ClockKind.QUEUE, waited_ms * NS_PER_MS) if call.clocks.queue_ms else None,
            context={"lock": lock, "slots": slots, "holder": holder},
            retry_after_ms=RETRY_AFTER_MS if longest_ms is None else max(1, min(RETRY_AFTER_MS, longest_ms)),
        ),
    )


def find_other_work(store: Store, scope: str, key: str, digest: str) -> Outcome | None:
    """Bind a key to this work, or return the refusal if it is bound to other work."""
    beginning = _begin(store, scope, key, digest)
    return _key_reused(key, beginning.began_at) if isinstance(beginning, Mismatch) else None


def _begin(store: Store, scope: str, key: str, digest: str) -> Beginning:
    return store.idempotency.begin(scope, key, digest, this_process(), wall_time(), is_alive)


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
        pause_s = FIRST_PAUSE_S
        stop = None if call.request is None else call.request.stop
        old = WallTime(max(0, wall_time().ms - RETENTION_MS))
        await asyncio.to_thread(self._store.idempotency.forget_begun_before, old, is_alive)
        while True:
            beginning = await run_in_thread(partial(self._begin, call))
            if isinstance(beginning, Fresh):
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
            pause_s = min(pause_s * 1.5, LATER_PAUSES_S)

    def _begin(self, call: Call) -> Beginning:
        beginning = _begin(self._store, self._scope, self._key, self._digest)
        if isinstance(beginning, Fresh):
            call.keep_answer = self._keep  # set here: it frees the key of a call that is cancelled meanwhile
        return beginning

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
