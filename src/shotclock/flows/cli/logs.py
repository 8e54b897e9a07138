"""`shotclock logs`: the output of the steps of a run, as it is kept, or followed until the run ends."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...calls.call import Outcome
from ...commands.job_logs import LOOK_S, spell_out
from ...core.envelope import Envelope, stop_problem
from ...core.errors import Ending, Failure
from ...core.value_types import field, record, replace, value
from ...dispatch.engines import engine_at, engine_options
from ...dispatch.job_log import Log
from ...store.runs import StoredRun
from ...store.store import Store
from ...supervise.clock import pause
from ...supervise.kernel import is_alive
from ...terminal.output import EarlyEnd, StopListener, say_line, write_quietly
from ...terminal.parser import Option, Subcommand, nearest_of
from ...terminal.subcommand import TIMEOUT_MS, admit_call, conclude, deliver, run_subcommand
from ..check.plan import is_per_item
from ..engines import EmbeddedEngine
from ..run.state import Status, StepState, read_record
from ..run.step_log import PRINTING, KeptLog, LogLine, list_logs, read_records
from .run_lines import LabelledLines, is_part_of, label_of

if TYPE_CHECKING:
    from ...dispatch.engines import EngineAddress
    from ..file.schema import WorkflowFile

STREAMS = {1: "stdout", 2: "stderr"}


@value
class _Wanted:
    step: str | None
    number: int | None

    def includes(self, log: KeptLog) -> bool:
        return (self.step is None or is_part_of(log.step, self.step)) and self.number in (None, log.number)

    def label(self, log: KeptLog) -> str:
        """Return the beginning of its lines; empty where it is the only log that can be shown."""
        if log.step == self.step and (self.number is not None or log.number == 1):
            return ""
        return label_of(log.step, 1 if self.number is not None else log.number)


@record
class _Reading:
    """A log that is followed, and how far it was read."""

    path: str
    end: int = 0
    state: tuple[int, int] = (-1, -1)

    def read(self) -> list[LogLine]:
        if self.state == (seen := Log(self.path).state()):
            return []
        part = Log(self.path).read(self.end)
        lines = [LogLine(1, "", left_out=part.offset - self.end)] if part.offset > self.end else []
        size = part.content.rfind(b"\n") + 1
        lines += read_records(part.content[:size])
        self.state, self.end = seen, part.offset + size
        return lines


@record
class _RunLogs:
    """The logs of a stored run and of the runs inside it."""

    store: Store
    run: StoredRun
    wanted: _Wanted
    readings: dict[str, _Reading] = field(default_factory=dict)

    def find_all(self) -> list[KeptLog]:
        own, begin = self.run.id, f"{self.run.id}."
        nested = tuple(
            f"{begin}{name}"
            for name, step in self.store.runs.steps(own).items()
            if step.record.get("type") in ("workflow", "ai")
        )
        logs = list_logs(self.store.home, own)
        if nested:
            inside = [id for _, id in self.store.runs.list_ids() if id.startswith(nested)]
            for id in inside:
                name = id.removeprefix(begin)
                logs += [replace(log, step=f"{name}.{log.step}") for log in list_logs(self.store.home, id)]
        return [log for log in logs if self.wanted.includes(log)]

    def read_new(self) -> list[tuple[KeptLog, list[LogLine]]]:
        found = []
        for log in self.find_all():
            if lines := self.readings.setdefault(log.path, _Reading(log.path)).read():
                found.append((log, lines))
        return found

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will be printed, unless the run is resumed."""
        run = self.store.runs.get(self.run.id)
        return run is None or run.ended_at is not None or run.parked_at is not None or not is_alive(run.holder)

    def explain_none(self) -> str:
        """Return why there is no output. Raises Failure where the step or the attempt does not exist."""
        step, number = self.wanted.step, self.wanted.number
        if step is None:
            return f"no step of run {self.run.id} has printed anything" + (
                "" if number is None else f" in attempt {number}"
            )
        workflow, states = read_record(self.run, self.store)
        state, name = states.get(step), step.partition("[")[0]
        if name not in workflow.steps:
            raise unknown_step(self.run.id, step, workflow.steps)
        if workflow.steps[name].type not in (*PRINTING, "workflow"):
            raise Failure("NOT_FOUND", f"step {step} is of type {workflow.steps[name].type}, which prints nothing")
        if name == step and (state is None or state.status in (Status.PENDING, Status.SKIPPED)):
            why = "was skipped" if state is not None and state.status is Status.SKIPPED else "has not begun"
            follow = "follow a run that is under way with -f" if why == "has not begun" else None
            raise Failure("NOT_FOUND", f"step {step} {why}", suggestion=follow)
        whole = states.get(name)
        if name != step and whole is not None:
            _check_item(step, name, whole, workflow)
        if whole is not None and (kept_from := _kept_from(step, whole)):
            return f"step {step} was kept from run {kept_from}: see `shotclock logs {kept_from} {shlex.quote(step)}`"
        if number is not None and state is not None and number > state.attempts:
            raise Failure("NOT_FOUND", f"step {step} has no attempt {number}, only {state.attempts}")
        return f"step {step} has printed nothing" + ("" if number is None else f" in attempt {number}")


def _item_number(step: str) -> int | None:
    number = step.partition("[")[2].removesuffix("]")
    return int(number) if number.isdecimal() else None


def _check_item(step: str, name: str, state: StepState, workflow: WorkflowFile) -> None:
    if not is_per_item(workflow, workflow.steps[name]):
        raise Failure("NOT_FOUND", f"step {name} has no items, so there is no {step}")
    number, items = _item_number(step), state.output
    if number is None or (isinstance(items, list) and number >= len(items)):
        known = f": {name} has {len(items)} items, from {name}[0] on" if isinstance(items, list) else ""
        raise Failure("NOT_FOUND", f"there is no {step}{known}")


def _kept_from(step: str, state: StepState) -> str | None:
    """Return the earlier run in which a step, or this item of it, ran."""
    number = _item_number(step)
    if state.kept_from is None and number is not None and number < len(state.parts):
        kept_from = state.parts[number].get("kept_from")
        return kept_from if isinstance(kept_from, str) else None
    return state.kept_from


def _run_logs(
    run_id: str, step: str | None, follow: bool, number: int | None, on: EngineAddress | None
) -> Callable[[bool], int]:
    wanted = _Wanted(step, number)
    body = partial(_follow if follow else _read, run_id, wanted)
    if on is not None:
        body = partial(_read_engine, on, run_id, wanted, follow)

    def start(as_json: bool) -> int:
        envelope = conclude(admit_call("logs", 0 if follow else TIMEOUT_MS), body)
        if follow and (envelope.ok or envelope.code == "CANCELLED"):  # Ctrl-C is the way to leave
            return envelope.exit_code
        return deliver(envelope, as_json, partial(_show, wanted))

    return start


def _read(run_id: str, wanted: _Wanted) -> Outcome:
    with Store.open() as store:
        logs = _RunLogs(store, EmbeddedEngine(store).find_run(run_id), wanted)
        is_over = logs.is_over  # before the logs, which are complete when the run has ended
        found = [{"step": log.step, "try": log.number, "lines": _join_lines(lines)} for log, lines in logs.read_new()]
        data: dict[str, object] = {"run_id": logs.run.id, "terminal": is_over, "logs": found}
        if not found:
            data["none"] = logs.explain_none()
    return Outcome(Ending.FINISHED, data=data)


def _join_lines(lines: Iterable[LogLine]) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = []
    unfinished: dict[int, dict[str, object]] = {}
    for line in lines:
        stream = STREAMS[line.stream]
        if line.left_out:
            unfinished.pop(line.stream, None)
            shown.append({"stream": stream, "left_out": line.left_out})
            continue
        begun = unfinished.pop(line.stream, None)
        if begun is None:
            begun = {"stream": stream, "text": ""}
            shown.append(begun)
        begun["text"] = f"{begun['text']}{line.text}"
        if not line.is_whole:
            unfinished[line.stream] = begun
    return shown


def _show(wanted: _Wanted, envelope: Envelope) -> None:
    data: Any = envelope.data
    if not envelope.ok:
        return
    for log in data["logs"]:
        label = wanted.label(KeptLog(log["step"], log["try"], ""))
        numbers = {name: number for number, name in STREAMS.items()}
        lines = (
            LogLine(numbers[each["stream"]], each.get("text", ""), left_out=each.get("left_out", 0))
            for each in log["lines"]
        )
        write_quietly(sys.stdout, LabelledLines().write(label, lines))
    if "none" in data:
        say_line(data["none"])


def _follow(run_id: str, wanted: _Wanted) -> Outcome:
    """Print the output until the run ends, which bounds it, or a signal comes."""
    with Store.open() as store:
        logs = _RunLogs(store, EmbeddedEngine(store).find_run(run_id), wanted)
        StopListener.raise_at_once()
        writer = LabelledLines()
        while True:
            is_over = logs.is_over  # before the logs, which are complete when the run has ended
            text = "".join(writer.write(wanted.label(log), lines) for log, lines in logs.read_new())
            if is_over:
                text += writer.finish()
            if text and write_quietly(sys.stdout, text) is not None:
                break  # the reader left
            if is_over:
                if not logs.readings:
                    say_line(logs.explain_none())
                break
            pause(LOOK_S)
    return Outcome(Ending.FINISHED)


def _read_engine(on: EngineAddress, run_id: str, wanted: _Wanted, follows: bool) -> Outcome:
    """Print or return what the engine has of the output: the ends that the workers have sent."""
    module: Any = engine_at(on)
    engine, writer = module.open_runs(on), LabelledLines()
    found: dict[tuple[str, int], list[LogLine]] = {}

    def take(log: KeptLog, lines: list[LogLine]) -> None:
        if wanted.includes(log):
            found.setdefault((log.step, log.number), []).extend(() if follows else lines)
            if follows:
                write_quietly(sys.stdout, writer.write(wanted.label(log), lines))

    async def main() -> tuple[str, bool]:
        id, is_over, steps = await engine.find_steps(run_id)
        if steps and wanted.step is not None and re.split(r"[.\[ ]", wanted.step)[0] not in steps:
            raise unknown_step(id, wanted.step, steps)
        await module.read_tails(engine, id, take, follows=follows)
        return id, is_over

    read = asyncio.run(StopListener.run(main(), None if follows else TIMEOUT_MS / 1000))
    if isinstance(read, EarlyEnd):
        if read.signal is None:
            raise Failure("CONNECT_FAILED", f"the engine did not answer within {TIMEOUT_MS // 1000} s")
        return Outcome(Ending.NOT_STARTED, stop_problem(read.signal))
    if follows:
        write_quietly(sys.stdout, writer.finish())
    logs = [{"step": step, "try": number, "lines": _join_lines(lines)} for (step, number), lines in found.items()]
    none = f"the engine has no output of {'this run' if wanted.step is None else f'step {wanted.step}'}"
    if follows and not found:
        say_line(none)
    data: dict[str, object] = {"run_id": read[0], "terminal": read[1], "logs": logs}
    return Outcome(Ending.FINISHED, data=data if found else {**data, "none": none})


def unknown_step(run_id: str, step: str, known: Iterable[str]) -> Failure:
    names, nearest = list(known), nearest_of(step, known)
    hint = f"it has {', '.join(names[:20])}" if nearest is None else f"did you mean {nearest}?"
    return Failure("NOT_FOUND", f"run {run_id} has no step {step!r} with output", suggestion=hint)


_COMMAND = Subcommand(
    "logs",
    "Print what the steps of a run print, while it runs and afterwards.",
    (
        Option.argument(
            "run-id", "The run, or the beginning of its id.", missing="missing RUN-ID; `shotclock report` lists runs"
        ),
        Option.argument(
            "step", "This step alone; an item of for_each is STEP[0], a step of a nested workflow OUTER.STEP."
        ),
        Option.flag("--follow", "-f: print further output until the run ends, always as text."),
        Option.number("--attempt", "This attempt alone, from 1.", 1, key="number"),
        *engine_options("A run on Temporal, of which the last 4 kB of each step are kept."),
    ),
    run=_run_logs,
    usage="RUN-ID [STEP] [-f] [--attempt N]",
)


def _main(words: list[str]) -> int:
    words = [re.sub("^--try(?==|$)", "--attempt", word) for word in words]  # its former name
    return run_subcommand("shotclock", _COMMAND, [long for word in words for long in spell_out(word)])


COMMANDS = {"logs": replace(_COMMAND, main=_main)}
