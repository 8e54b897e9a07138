"""One app, described, before the runtime that its calls run on.

It adds to the clocks what else a command declared: steps, limits on how many run at once, keys that make a repeat
harmless, and the way out of a call that takes longer than its caller can wait. The command line, the MCP server and
the library differ only in how they read a call and how they show its envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

# These three are opened by the calls that need them: most commands declare nothing that is kept, shared or approved.
from ..core.arguments import NotSerializable, to_valid_json
from ..core.catalogue import CONFIRMATION, Catalogue, CommandSpec
from ..core.clocks import Clocks
from ..core.deadlines import NS_PER_MS, Bound, Deadline
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, stop_problem, warning
from ..core.errors import Failure
from ..core.operation import Operation
from ..core.records import replace_fields
from ..core.trace import TraceContext
from ..process.clock import monotonic_ns
from ..process.context import Progress
from ..runtime.call import Call, Outcome, Tool, admit, answer, invalid, new_request_id
from ..runtime.command_runner import run_shielded
from ..runtime.handlers import raised
from ..runtime.loop_call import current_scope
from ..runtime.preloaded_zygote import Program
from ..runtime.runtime import Runtime
from .checkpointing import Checkpointing

if TYPE_CHECKING:
    from ..core.exact_values import Look
    from ..inbox.access import Principal
    from ..inbox.approval import Approvals, Passed, RunWait
    from ..inbox.inbox import Inbox
    from ..store.store import Store
    from .invocation import Stdin
    from .job_client import JobClient

# How long a stopped call may take beyond its grace until its processes are reported gone.
STOP_LIMIT_S = 3.0
# The job commands other than `wait` take a moment; the store's own waits are shorter than this.
JOB_CLOCKS = Clocks(timeout_ms=30_000)


T = TypeVar("T")


class Dispatcher:
    """Use it as an async context manager. The store is opened when a call first needs it."""

    def __init__(
        self,
        catalogue: Catalogue,
        runtime: Runtime,
        *,
        program: Program | None = None,
        command: list[str] | None = None,
        inbox_of: Callable[[], Inbox] | None = None,
    ) -> None:
        """With a `program`, commands that declare it go on as jobs in a process that imports it. `command` is how
        the `job` commands are called, for the hints in their envelopes. `inbox_of` is where people are asked, and
        whoever gave it closes it; without one it is the store's."""
        self.catalogue = catalogue
        self.runtime = runtime
        runtime.tool = self.tool = Tool(catalogue.semantic_version, catalogue.debug)
        self._program = program
        self._command = command or ["shotclock"]
        self._checks = ArgumentChecks(runtime)
        self._opened: Store | None = None
        self._inbox: Inbox | None = None
        self._inbox_of = inbox_of
        self._approvals: Approvals | None = None
        if any(spec.approval is not None for spec in catalogue.commands):
            from ..inbox.approval import Approvals

            self._approvals = runtime.approvals = Approvals(
                catalogue, self.inbox, self._checks.look_at, None if program is None else program.place
            )
        if any(spec.single_flight is not None or spec.concurrency is not None for spec in catalogue.commands):
            from .concurrency_limits import ConcurrencyLimits

            runtime.limits = ConcurrencyLimits(catalogue, self.store, self._checks.look_at)

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.runtime.__aexit__(kind, error, trace)
        if self._inbox is not None:
            await self._inbox.close()
        if self._opened is not None:
            self._opened.close()

    def store(self) -> Store:
        """Raises StoreError, which is a Failure."""
        if self._opened is None:
            from ..store.store import Store

            self._opened = Store.open()
        return self._opened

    def inbox(self) -> Inbox:
        """Where its commands' proposals are. Raises StoreError."""
        if self._inbox_of is not None:
            return self._inbox_of()
        if self._inbox is None:
            from ..inbox.inbox import Inbox

            self._inbox = Inbox(self.store())
        return self._inbox

    def jobs(self) -> JobClient:
        from .job_client import JobClient

        return JobClient(self.store(), self._command)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        clocks: Clocks | None = None,
        *,
        budget_ms: int | None = None,
        idempotency_key: str | None = None,
        validate_only: bool = False,
        dry_run: bool = False,
        resume_from: str | None = None,
        parent: Deadline | None = None,
        on_progress: Progress | None = None,
        stop: asyncio.Future[str] | None = None,
        stdin: Stdin | None = None,
        caller: Principal | None = None,
        justification: str = "",
        confirmed: bool = False,
        again: str | None = None,
        began_ns: int = 0,
        run_wait: RunWait | None = None,
    ) -> Envelope:
        """Call a command: always one envelope, on time. A cancellation stops the work and is passed on; `stop`, once
        it holds the name of a signal, stops it as well, and what came of it until then is the answer.

        `parent` is the caller's own deadline, if it came with the call. `budget_ms` is how long this caller waits
        for a command that may outlive it, or for a person; None waits as long as the work takes. `caller` is who asks
        and owns what it starts, `justification` why a person should approve it, and `again` how this caller makes the
        same call once more. `confirmed` says that it may destroy what it destroys, as the argument
        `confirm_destructive` does; without either it is only shown. `began_ns` is when this caller began to wait, if
        that was earlier. `run_wait` is how a step of a run waits for a person.

        All of it is one call on one clock, from here on: looking at its arguments, waiting for a lock or for the first
        call with the same key, and the work. Only while a person is asked the clock stands still.
        """
        spec = self.catalogue.find(name)
        if spec is None:
            admission = self.runtime.admit(name, clocks, parent=parent, began_ns=began_ns)
            return await self.runtime.call(name, arguments, admission=admission)
        name = spec.name  # however it was spelt
        has_dry_run = "dry_run" in spec.input_schema["properties"]
        said: object = False
        if spec.needs_confirmation and CONFIRMATION in arguments:
            arguments = dict(arguments)
            said = arguments.pop(CONFIRMATION)
        if has_dry_run and arguments.get("dry_run") is True:
            dry_run = True
        operation = self.runtime.operation(name)
        if dry_run or validate_only:
            operation = replace(operation, mutates=False)  # by its own word
        admission = self.runtime.admit(operation, clocks, parent=parent, began_ns=began_ns)
        if not isinstance(said, bool):
            return answer(admission, invalid([{"field": CONFIRMATION, "message": "must be true or false"}]))
        admission.confirmed = spec.destructive and (confirmed or said) and not (dry_run or validate_only)
        if spec.needs_confirmation and not (admission.confirmed or dry_run or validate_only):
            preview = await self.call(name, arguments, clocks, dry_run=True, parent=parent, stop=stop, stdin=stdin)
            return _unconfirmed(spec, arguments, preview, admission) if preview.ok else _unshown(spec, preview)
        if validate_only or (dry_run and not has_dry_run):
            checked = await self._check(spec, arguments, admission, stop)
            if checked.ok:
                would = {"dry_run": True, "would_run": name, "arguments": _shown(arguments)}
                checked.data = would if dry_run else {"valid": True}
            return checked
        approvals = None if dry_run or self._approvals is None or not self._approvals.guards(name) else self._approvals
        if approvals is not None:
            try:
                from ..core.exact_values import copied

                arguments = copied(arguments)  # whoever calls must not change them while a person decides
            except NotSerializable as error:
                return answer(admission, invalid([{"field": "arguments", "message": str(error)}]))
        asked, owner = arguments, None if caller is None else caller.owner
        proposal_id: str | None = None

        async def unapproved(*, unless_known: bool = False) -> Envelope | None:
            """Return the answer where it may not run."""
            nonlocal arguments, proposal_id, budget_ms, admission
            if approvals is None or proposal_id is not None:
                return None
            passed = await self._approved(
                approvals,
                spec,
                arguments,
                admission,
                idempotency_key,
                justification,
                caller,
                budget_ms,
                parent,
                stop,
                stdin,
                again or f"call {name} again with the same arguments",
                run_wait,
                resume_from,
                unless_known,
            )
            if isinstance(passed, Envelope):
                return passed
            arguments, proposal_id = passed.arguments, passed.proposal_id
            budget_ms = None if budget_ms is None else max(0, budget_ms - passed.waited_ms)
            if passed.waited_ms:  # the clocks of the work stood still for a person
                admission = self.runtime.admit(operation, clocks, parent=parent, began_ns=admission.began_ns)
            return None

        if dry_run:
            arguments = {**arguments, "dry_run": True}
        if (refused := await unapproved(unless_known=True)) is not None:
            return refused

        async def carry_out() -> Envelope:
            if self._goes_on_as_job(spec) and not dry_run:

                async def as_job(*, may_start: bool) -> Envelope | None:
                    return await self._as_job(
                        spec,
                        arguments,
                        admission,
                        budget_ms,
                        idempotency_key,
                        resume_from,
                        on_progress,
                        stop,
                        stdin,
                        owner,
                        proposal_id,
                        may_start,
                    )

                ended = await as_job(may_start=approvals is None or proposal_id is not None)
                # The job that was under way, and had been approved, may have ended and been told meanwhile.
                ended = ended or await unapproved() or await as_job(may_start=True)
                assert ended is not None
                return ended

            def key() -> str:
                from .invocation import invocation_key

                return invocation_key(self.catalogue, name, arguments, idempotency_key, stdin, owner)

            attending = Attending(self.store, key, spec, on_progress, resume_from)
            attending.stdin_path = None if stdin is None else stdin.path

            async def run() -> Envelope:
                # The first call with the same key, which had been approved, may have failed without a trace meanwhile.
                if (refused := await unapproved()) is not None:
                    return refused
                return await self._here(spec, operation, arguments, admission, attending, stop)

            if idempotency_key is None or dry_run:  # a rehearsal uses no key up
                return await run()
            from .idempotency import Repeats

            repeats = Repeats(self.store(), self._scope(spec, owner), idempotency_key, asked, stdin)
            envelope = await repeats.call(admission, run, stop)
            return _stopped(admission, stop, Ending.NOT_STARTED) if envelope is None else envelope

        envelope: Envelope | None = None
        try:
            envelope = await carry_out()
        except Failure as failure:  # the store cannot be used
            envelope = answer(admission, raised(failure))
        except NotSerializable as error:  # what is kept or repeated has to be written down
            envelope = answer(admission, invalid([{"field": "arguments", "message": str(error)}]))
        finally:
            if self._approvals is not None:
                self._approvals.record(proposal_id, envelope)
        return envelope

    async def job(
        self,
        action: str,
        job_id: str | None = None,
        wait_ms: int | None = None,
        *,
        parent: Deadline | None = None,
        on_progress: Progress | None = None,
        caller: Principal | None = None,
    ) -> Envelope:
        """list, status, wait or cancel. Waiting without a limit takes as long as the job. To an agent, jobs of others
        are not there."""
        clocks = Clocks(timeout_ms=0) if action == "wait" else JOB_CLOCKS
        admission = admit(
            f"job {action}",
            clocks,
            parent=self._earlier(parent),
            caller=self._caller(),
            mutates=action == "cancel",
            tool=self.tool,
        )
        try:
            return await self.jobs().perform(
                action,
                job_id,
                admission,
                app=self.catalogue.name,
                of=None if caller is None else caller.sees_jobs_of,
                budget_ms=wait_ms,
                on_progress=on_progress,
            )
        except Failure as failure:
            return answer(admission, raised(failure))

    async def _approved(
        self,
        approvals: Approvals,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        admission: Call,
        idempotency_key: str | None,
        justification: str,
        caller: Principal | None,
        budget_ms: int | None,
        parent: Deadline | None,
        stop: asyncio.Future[str] | None,
        stdin: Stdin | None,
        again: str,
        run_wait: RunWait | None,
        resume_from: str | None,
        unless_known: bool,
    ) -> Passed | Envelope:
        """Nobody is asked about arguments that are wrong, nor, `unless_known`, about work that is under way or done: it
        has passed then without a proposal, and may be waited for but not begun."""
        owner = None if caller is None else caller.owner
        surroundings: dict[str, Any] = {} if stdin is None else {"stdin": {"sha256": stdin.digest}}
        if resume_from is not None:
            surroundings["resume from"] = resume_from
        try:
            if unless_known and await asyncio.to_thread(
                self._is_known, spec, arguments, admission, idempotency_key, stdin, owner
            ):
                from ..inbox.approval import Passed

                return Passed(arguments, 0)
            checked = await self._check(spec, arguments, _ahead(admission), stop)
            if not checked.ok:
                return checked
            if self._goes_on_as_job(spec) and (lost := _look_at(checked).lost_in_json):
                return answer(admission, _lost(lost, arguments))
            from ..inbox.access import Principal

            asking = asyncio.ensure_future(
                approvals.ask(
                    spec,
                    arguments,
                    caller or Principal.local(),
                    key=idempotency_key,
                    justification=justification,
                    budget_ms=budget_ms,
                    parent=self._earlier(parent),
                    again=again,
                    run_wait=run_wait,
                    look=_look_at(checked),
                    surroundings=surroundings,
                )
            )
            passed = await _unless_stopped(asking, stop, STOP_LIMIT_S)
        except Failure as failure:
            from ..inbox.outcomes import refused

            return answer(admission, refused(failure))
        except NotSerializable as error:
            return answer(admission, invalid([{"field": "arguments", "message": str(error)}]))
        if passed is None:
            return _stopped(admission, stop, Ending.NOT_STARTED)
        if isinstance(passed, Outcome):
            return answer(admission, passed)
        return passed

    def _is_known(
        self,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        admission: Call,
        idempotency_key: str | None,
        stdin: Stdin | None,
        owner: str | None,
    ) -> bool:
        """Whether the identical call was approved before, and its work is under way or its answer kept."""
        if self._goes_on_as_job(spec):
            assert self._program is not None
            timeout_ms = admission.clocks.timeout_ms or 0
            from .invocation import Invocation

            invocation = Invocation(
                self.catalogue, spec, self._program, arguments, timeout_ms, idempotency_key, None, stdin, owner
            )
            return self.jobs().attached(invocation) is not None
        return idempotency_key is not None and self.store().idempotency.is_known(
            self._scope(spec, owner), idempotency_key
        )

    def _scope(self, spec: CommandSpec, owner: str | None) -> str:
        """Where an idempotency key counts: for one command of one owner. No name of either has an @ in it."""
        scope = f"{self.catalogue.name}/{spec.name}"
        return scope if owner is None else f"{scope}@{owner}"

    def _goes_on_as_job(self, spec: CommandSpec) -> bool:
        return spec.interruption is not None and spec.interruption.detach and self._program is not None

    def _caller(self) -> TraceContext:
        scope = current_scope.get()
        return self.runtime.trace if scope is None else scope.span.trace

    def _earlier(self, parent: Deadline | None) -> Deadline | None:
        inherited = self.runtime.inherited
        if parent is None or inherited is None:
            return parent or inherited
        return min(parent, inherited, key=lambda deadline: deadline.at_ns)

    async def _here(
        self,
        spec: CommandSpec,
        operation: Operation,
        arguments: Mapping[str, object],
        admission: Call,
        attending: Attending,
        stop: asyncio.Future[str] | None,
    ) -> Envelope:
        call = self.runtime.call(operation, arguments, listener=attending, admission=admission)
        if stop is None:
            envelope = await call
        else:
            limit_s = STOP_LIMIT_S + (admission.clocks.grace_ms or 0) / 1000
            ended = await _unless_stopped(asyncio.ensure_future(call), stop, limit_s)
            envelope = _stopped(admission, stop) if ended is None else ended
        if not envelope.ok and spec.steps:
            envelope.data = attending.partial(envelope.data)
        envelope.warnings += attending.warnings
        if envelope.ok and attending.kept:
            await asyncio.to_thread(attending.clear)
        return envelope

    async def _as_job(
        self,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        admission: Call,
        budget_ms: int | None,
        idempotency_key: str | None,
        resume_from: str | None,
        on_progress: Progress | None,
        stop: asyncio.Future[str] | None,
        stdin: Stdin | None,
        owner: str | None,
        proposal_id: str | None,
        may_start: bool,
    ) -> Envelope | None:
        """The work belongs to its keeper; we only wait for it. Bad arguments are told before there is a job. None where
        it would have to be started and may not."""
        checked = await self._check(spec, arguments, _ahead(admission), stop)
        if not checked.ok:
            return checked
        if lost := _look_at(checked).lost_in_json:
            return answer(admission, _lost(lost, arguments))
        assert self._program is not None
        timeout_ms = admission.clocks.timeout_ms or 0  # its own: the caller's deadline ends the waiting, not the work
        from .invocation import Invocation

        invocation = Invocation(
            self.catalogue,
            spec,
            self._program,
            arguments,
            timeout_ms,
            idempotency_key,
            resume_from,
            stdin,
            owner,
            proposal_id,
        )
        front = self.jobs()
        if idempotency_key is not None:
            from .idempotency import reused

            scope = self._scope(spec, owner)
            problem = await asyncio.to_thread(reused, self.store(), scope, idempotency_key, invocation.key())
            if problem is not None:
                return answer(admission, Outcome(Ending.NOT_STARTED, problem))
        if may_start:
            job = await asyncio.to_thread(front.start_or_attach, invocation, admission.trace)
        elif (attached := await asyncio.to_thread(front.attached, invocation)) is not None:
            job = attached
        else:
            return None
        until_ns, waits_ms = front.patience(admission, budget_ms)
        waiting = asyncio.ensure_future(
            front.wait(job, admission, until_ns=until_ns, budget_ms=waits_ms, on_progress=on_progress)
        )
        envelope = await _unless_stopped(waiting, stop, STOP_LIMIT_S)
        if envelope is not None:
            if admission.confirmed:  # its keeper does not know
                envelope.meta["confirmed"] = True
            if job.delivered_at is not None and job.ended_at is not None:
                envelope.warnings.append(warning("REPLAYED", finished_at=job.ended_at.iso()))
            return envelope
        assert stop is not None
        if stop.result() == "SIGINT":  # a person at the keyboard means the work, not the waiting
            job = await front.cancel(job)
            if not job.is_active:
                ended = front.delivered(job)
                if ended.ok:
                    return ended
                data: dict[str, object] = {"partial": True, "job_id": job.id}
                return answer(admission, Outcome(Ending.KILLED, stop_problem("SIGINT"), data))
        current = await asyncio.to_thread(front.look, job.id)
        elapsed_ms = (monotonic_ns() - admission.started_ns) // NS_PER_MS
        return front.incomplete(current or job, admission, elapsed_ms)

    async def _check(
        self,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        admission: Call,
        stop: asyncio.Future[str] | None,
    ) -> Envelope:
        """Look at the arguments and run nothing. The types' own code does it, which may take any time: the call's."""
        call = self.runtime.call(self._checks.operation(spec), arguments, admission=admission)
        checked = await _unless_stopped(asyncio.ensure_future(call), stop, STOP_LIMIT_S)
        return _stopped(admission, stop) if checked is None else checked


# A look at the arguments before a job or a question to a person has no business to take long, and both may take days.
LOOK_LIMIT_MS = 30_000


def _ahead(admission: Call) -> Call:
    """The clocks of a call for a look at its arguments before the rest of it."""
    bound, latest = admission.bound, Deadline.after_ms(monotonic_ns(), LOOK_LIMIT_MS)
    if bound.bell is None or latest.at_ns < bound.bell.at_ns:
        bound = Bound(latest, bound.grace_ms, LOOK_LIMIT_MS, "look at the arguments")
    return replace_fields(admission, bound=bound, mutates=False, request_id=new_request_id())


class ArgumentChecks:
    """Looks at the arguments of commands without running any, where their types can be imported."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._operations: dict[str, Operation] = {}

    async def look_at(self, spec: CommandSpec, arguments: Mapping[str, object], admission: Call | None) -> Envelope:
        """For those who stand between a call and its work: on the clock of the call, where there is one."""
        check = self.operation(spec)
        admission = self._runtime.admit(check, None) if admission is None else _ahead(admission)
        return await self._runtime.call(check, arguments, admission=admission)

    def operation(self, spec: CommandSpec) -> Operation:
        if spec.name not in self._operations:
            reference = replace(spec.handler, qualname=f"{spec.handler.qualname}?", is_async=False)
            self._operations[spec.name] = Operation(
                spec.name, reference, isolation="process", mutates=False, idempotent=True, clocks=spec.clocks
            )
        return self._operations[spec.name]


class Attending(Checkpointing):
    """Listens to one call of a command that is run here and now."""

    def __init__(
        self,
        store: Callable[[], Store],
        key: Callable[[], str],
        spec: CommandSpec,
        on_progress: Progress | None,
        resume_from: str | None = None,
    ) -> None:
        super().__init__(store, key, spec.steps, resume_from)
        self._on_progress = on_progress

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total, unit)


async def _unless_stopped(working: asyncio.Future[T], stop: asyncio.Future[str] | None, limit_s: float) -> T | None:
    """What came of it, or None where the work was stopped before it had one."""
    try:
        if stop is None:
            return await working
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # bounded by the work's own clocks
        if working.done():
            return working.result()
    except asyncio.CancelledError as cancelled:
        working.cancel()
        await run_shielded(asyncio.wait([working], timeout=limit_s))
        if stop is not None and working.cancelled():
            try:
                working.result()
            except asyncio.CancelledError as theirs:  # the answer of the cancelled call goes along with it
                cancelled.envelope = getattr(theirs, "envelope", None)  # type: ignore[attr-defined]
        raise
    working.cancel()
    await asyncio.wait([working], timeout=limit_s)
    if working.done() and not working.cancelled() and working.exception() is None:
        return working.result()  # it ended by itself just then, and that is the truth
    return None


def _stopped(admission: Call, stop: asyncio.Future[str] | None, ending: Ending = Ending.KILLED) -> Envelope:
    assert stop is not None
    return answer(admission, Outcome(ending, stop_problem(stop.result()), {"partial": True}))


def _unconfirmed(spec: CommandSpec, arguments: Mapping[str, object], preview: Envelope, admission: Call) -> Envelope:
    """What would be done, by the command's own rehearsal where it has one. Nothing was."""
    data: dict[str, object] = {"would_run": spec.name, "arguments": _shown(arguments)}
    if "dry_run" in spec.input_schema["properties"]:
        data["preview"] = preview.data
    message = f"{spec.name} is destructive and was not confirmed; nothing was done"
    return answer(admission, Outcome(Ending.NOT_STARTED, Problem("CONFIRMATION_REQUIRED", message, "validation"), data))


def _lost(names: list[str], arguments: Mapping[str, object]) -> Outcome:
    """A job's arguments are kept as JSON: what it would run with has to be what was given."""
    message = "a {} does not stay what it is in JSON, and the arguments of a job are kept as JSON: pass plain data"
    return invalid([{"field": name, "message": message.format(type(arguments[name]).__name__)} for name in names])


def _unshown(spec: CommandSpec, preview: Envelope) -> Envelope:
    """The answer where what would be done could not be shown: the failure of the rehearsal, called that."""
    error = preview.error
    if error is not None and error["phase"] != "validation":
        error["message"] = f"{spec.name} was not confirmed, and its preview (dry_run) failed: {error['message']}"
        known = error.get("context")
        error["context"] = {**(known if isinstance(known, dict) else {}), "preview": True}
    return preview


def _shown(arguments: Mapping[str, object]) -> dict[str, object]:
    shown: dict[str, object] = {}
    for name, value in arguments.items():
        try:
            shown[name] = to_valid_json(value)[0]
        except NotSerializable:
            shown[name] = repr(value)
    return shown


def _look_at(checked: Envelope) -> Look:
    """Return what a look at the arguments has found."""
    from ..core.exact_values import Look

    return Look.of(checked.data)
