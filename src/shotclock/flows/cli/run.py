"""`shotclock run`: start a workflow, or resume a run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...calls.call import Outcome
from ...calls.outcomes import outcome_of_error
from ...core.envelope import EX_IOERR, Envelope, stop_problem, warning
from ...core.errors import Ending, Failure, SideEffects
from ...core.limits import Clocks
from ...core.value_types import JsonObject, field, replace, value
from ...core.visible_text import one_line, visible
from ...dispatch.engines import engine_options
from ...people.person_wait import read_response_budget_ms
from ...supervise import kernel
from ...supervise.clock import wall_time
from ...terminal.output import (
    Outlet,
    Screen,
    Signalled,
    StopListener,
    brief,
    emit,
    emit_text,
    is_terminal,
    say_line,
    summary_line,
    write_quietly,
)
from ...terminal.parser import Option, Subcommand, name_and_value, nearest_of
from ...terminal.subcommand import Mistaken, answer_at_once
from ..check.lint import lint
from ..engines import EmbeddedEngine, Engine, open_engine
from ..file.loader import judge, load_or_refuse
from ..report.report import unstarted
from ..report.words import MARKS, WORDS, artifacts_in_words
from ..run.rerun import refuse_open
from ..run.runs import RunCaller, RunRequest
from ..run.state import Status, StepState, read_record
from ..run.step_choice import StepChoice, choose, cut_down, leave_out
from .check import point_to_import, read_run_duration
from .report import FORMATS, ensure_writable, text_of, write_file
from .rerun import continue_run, file_of
from .run_lines import RunLines, is_part_of

if TYPE_CHECKING:
    from ...dispatch.engines import EngineAddress
    from .live_view import View

# An id is a word of commands that continue the run, and a part of other names.
RUN_ID = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,99}")


@value
class RunOptions:
    flow: str | None
    run_id: str | None = None
    resume: str | None = None
    timeout_ms: int | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    force: bool = False
    events: str | None = None
    output: str | None = None
    output_file: str | None = None
    budget_ms: int | None = None  # the wait for a person; 0 is without limit
    on: EngineAddress | None = None
    queue: str | None = None
    heartbeat_ms: int | None = None
    tags: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    rerun_failed: str | None = None
    start_from: tuple[str, ...] = ()
    quiet: bool = False
    follow: tuple[str, ...] | None = None  # the steps whose output is printed; empty: all


DESCRIPTORS_NEEDED = 10  # of the store, the loop and the first supervisor
NAMED = 10  # failed steps in the last lines of a run
SHORTEST_HEARTBEAT_MS = 1_000  # half of it is the time that a worker may be silent


def _run(
    input: list[tuple[str, str]], flow: str | None, json_only: bool, follow: list[tuple[str, ...]], **values: Any
) -> Callable[[bool], int]:
    if [flow, values["resume"], values["rerun_failed"]].count(None) == 3 and follow and follow[-1]:
        flow, follow = ",".join(follow[-1]), [*follow[:-1], ()]  # `--follow FLOW`: the word is no step
    if [flow, values["resume"], values["rerun_failed"]].count(None) != 2:
        message = "missing FLOW: a workflow file, --resume RUN_ID or --rerun-failed RUN_ID (one of them)"
        raise Mistaken({"flow": message})
    if values["rerun_failed"] is not None and values["on"] is not None:
        raise Mistaken({"rerun-failed": "only for runs of this machine, not with --on: start the file again there"})
    if values["skip"] and values["on"] is not None:
        raise Mistaken({"skip": "only for runs of this machine, not with --on; --only and --tags work there"})
    if follow and values["on"] is not None:
        hint = f"`shotclock logs RUN_ID -f {values['on'].on_command_line}` reads it"
        raise Mistaken({"follow": f"only for runs of this machine: what steps print stays with workers; {hint}"})
    if values["heartbeat_ms"] is not None and values["heartbeat_ms"] < SHORTEST_HEARTBEAT_MS:
        message = f"must be at least {SHORTEST_HEARTBEAT_MS} ms, or a busy worker would be taken for lost"
        raise Mistaken({"heartbeat": message})
    names = tuple(name for steps in follow for name in steps) if follow else None
    options = RunOptions(flow, inputs=dict(input), follow=names, **values)
    return lambda as_json: main(options, as_json, envelope_only=json_only)


def main(options: RunOptions, as_json: bool, *, envelope_only: bool) -> int:
    try:
        done = _perform(options, alone=envelope_only or options.output == "json", as_json=as_json)
    except Signalled as signalled:
        done = Outcome(Ending.NOT_STARTED, stop_problem(signalled.name))
    except Failure as failure:
        done = outcome_of_error(failure)
        done.ending = Ending.NOT_STARTED
    except Exception as error:  # a bug of ours: the caller still gets an envelope
        done = outcome_of_error(error)
    envelope = done if isinstance(done, Envelope) else answer_at_once("run", done, Clocks())
    StopListener.record_only()
    return _deliver(envelope, options, as_json or options.output == "json")


def _make_findable() -> None:
    """Put our own `shotclock` on the PATH of steps that find no other: it is often only in a venv."""
    beside = os.path.dirname(sys.executable)
    if shutil.which("shotclock") is None and shutil.which("shotclock", path=beside):
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{beside}"


def _perform(options: RunOptions, *, alone: bool, as_json: bool) -> Envelope | Outcome:
    StopListener.raise_at_once()
    try:
        kernel.check_descriptors(DESCRIPTORS_NEEDED)
    except OSError as error:
        raise Failure("SPAWN_FAILED", f"no step could be started: {error.strerror}") from None
    _make_findable()
    if options.output_file is not None:
        ensure_writable(options.output_file)  # before there is a result to lose
    budget_ms = _budget_ms(options)
    with open_engine(options.on, options.queue, options.heartbeat_ms) as engine:
        request: RunRequest | Outcome | str
        if options.rerun_failed is not None and isinstance(engine, EmbeddedEngine):
            request = _read_rerun(engine, options, shows=not alone or is_terminal(sys.stderr))
        else:
            request = options.resume if options.resume is not None else _read_request(options)
        if isinstance(request, Outcome):
            return request
        _check_followed(options.follow or (), engine, request)
        run_id = request if isinstance(request, str) else request.run_id
        with _Events(options, as_json, run_id) as events:
            return events.finish(asyncio.run(_carry_out(engine, request, events, alone, budget_ms)))


def _read_request(options: RunOptions) -> RunRequest | Outcome:
    file = Path(str(options.flow)).absolute()
    loaded = load_or_refuse(str(options.flow))
    if isinstance(loaded, Outcome):
        return loaded
    findings = lint(loaded, timeout_ms=options.timeout_ms, unattended=not is_terminal(sys.stdin))
    refused = judge(loaded, findings, may_be_tight=options.force)
    if refused.problem is not None or loaded.workflow is None:
        refused.ending = Ending.NOT_STARTED
        return point_to_import(str(options.flow), refused)
    workflow = loaded.workflow
    recorded: dict[str, StepState] = {}
    choice = StepChoice(options.only, options.skip, options.tags)
    if not choice.takes_all and options.on is not None:
        workflow = cut_down(workflow, choice)
    elif not choice.takes_all:
        workflow, recorded = leave_out(workflow, choose(workflow, choice))
    request = RunRequest(workflow, str(file), file.parent, inputs=options.inputs, timeout_ms=options.timeout_ms)
    return replace(request, recorded=recorded, **({"run_id": options.run_id} if options.run_id else {}))


def _read_rerun(engine: EmbeddedEngine, options: RunOptions, *, shows: bool) -> RunRequest | Outcome:
    old = engine.find_run(str(options.rerun_failed))
    refuse_open(old)
    request = _read_request(replace(options, flow=file_of(old)))
    if isinstance(request, Outcome):
        return request
    return continue_run(engine.store, old, request, options.inputs, options.start_from, shows=shows)


def _budget_ms(options: RunOptions) -> int | None:
    """Return the wait for a person; without limit on a terminal, where that person is."""
    if options.budget_ms is not None:
        return options.budget_ms or None
    return None if is_terminal(sys.stdin) else read_response_budget_ms()


def _check_followed(names: tuple[str, ...], engine: Engine, request: RunRequest | str) -> None:
    if not names or not isinstance(engine, EmbeddedEngine):
        return
    if isinstance(request, RunRequest):
        workflow = request.workflow
    else:
        workflow = read_record(engine.find_run(request), engine.store)[0]
    for name in names:
        if not any(is_part_of(name, step) for step in workflow.steps):
            nearest = nearest_of(name, workflow.steps)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(list(workflow.steps)[:20])}"
            raise Failure("ARG_ERROR", f"--follow {one_line(name, 40)}: there is no such step", suggestion=hint)


async def _carry_out(
    engine: Engine, request: RunRequest | str, events: _Events, alone: bool, budget_ms: int | None
) -> Envelope:
    with StopListener(events.leave_at_once) as stop:
        async with (None if events.follows else _find_view(engine, request)) or events.find_lines(alone) as events.view:
            stop.add_done_callback(lambda _: events.view.handle_stop())
            caller = RunCaller(
                stop,
                events.handle_change,
                events.handle_news,
                aside=events.view.aside,
                budget_ms=budget_ms,
                on_output=events.view.handle_output,
                on_end=events.handle_end,
            )
            if isinstance(request, str):
                return await engine.resume(request, caller)
            return await engine.start(request, caller)


def _find_view(engine: Engine, request: RunRequest | str) -> View | None:
    """Return a view of the run, if there is a terminal to draw on and the run is here."""
    if not isinstance(engine, EmbeddedEngine):
        return None
    if isinstance(request, RunRequest):
        run_id, name, workflow, recorded = request.run_id, request.name, request.workflow, request.recorded
    else:
        run = engine.store.runs.get(request)
        if run is None or run.ended_at is not None:
            return None
        run_id, name, (workflow, recorded) = request, run.name, read_record(run, engine.store)
    screen = Screen.find()
    if screen is None:
        return None
    from .live_view import View

    return View(screen, workflow, name, engine.store, run_id, recorded)


class _Events:
    def __init__(self, options: RunOptions, as_json: bool, run_id: str) -> None:
        path, self._options, self._as_json = options.events, options, as_json or options.output == "json"
        self._run_id = run_id
        self.view: View | RunLines = RunLines.unseen()
        self._ended: Envelope | None = None
        self._outlet: Outlet | None = None
        if path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            has_no_reader = isinstance(error, OSError) and error.errno == errno.ENXIO
            why = "it has no reader" if has_no_reader else getattr(error, "strerror", None) or str(error)
            raise Failure("FILE_UNWRITABLE", f"--events {path!r}: {why}") from None
        self._outlet = Outlet(self._fd)

    def __enter__(self) -> _Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outlet is not None:
            os.close(self._fd)

    @property
    def follows(self) -> bool:
        return self._options.follow is not None

    def find_lines(self, alone: bool) -> RunLines:
        if sys.stderr is None or (alone and not is_terminal(sys.stderr)):
            return RunLines.unseen()
        annotates = os.environ.get("GITHUB_ACTIONS") == "true"
        only = self._options.follow or ()
        where = "" if self._options.on is None else self._options.on.on_command_line
        return RunLines(Outlet(2), shows_output=not self._options.quiet, annotates=annotates, only=only, where=where)

    def handle_change(self, state: StepState) -> None:
        self._write("step", {"id": state.id, **state.to_answer()})
        self.view.handle_change(state)

    def handle_news(self, step: str, news: JsonObject) -> None:
        self._write(news["event"], {"id": step, **{name: value for name, value in news.items() if name != "event"}})
        self.view.handle_news(step, news)

    def handle_end(self, envelope: Envelope) -> None:
        self._ended = envelope

    def leave_at_once(self, signal_name: str) -> None:
        """Answer a second signal. The steps die with this process, so their end is not verified."""
        self.view.clear()
        if self._ended is not None:
            self._leave_ended(self._ended, signal_name)
        where = "" if self._options.on is None else f" {self._options.on.on_command_line}"
        again = f"shotclock run --resume {self._run_id}{where}"
        message = f"stopped at once by a second {signal_name}, without clean-up"
        problem = replace(stop_problem(signal_name), message=message, suggestion=f"continue with `{again}`")
        data: dict[str, object] = {"run_id": self._run_id, "partial": True, "continue_command": again}
        outcome = Outcome(Ending.ABANDONED, problem, data, side_effects=SideEffects.UNKNOWN)
        envelope = self.finish(answer_at_once("run", outcome, Clocks()))
        if self._as_json:
            emit(envelope)
        else:
            say_line(summary_line(envelope))

    def _leave_ended(self, envelope: Envelope, signal_name: str) -> NoReturn:
        """Answer with the end of the run, which is in the store. Only the sending of its messages is cut off."""
        message = f"a second {signal_name} ended the process while messages were sent: some may be missing"
        envelope.warnings.append(warning("NOT_NOTIFIED", message))
        self.finish(envelope)
        if self._as_json:
            emit(envelope)
        elif isinstance(envelope.data, dict):
            say_line(_closing_line(envelope, envelope.data, self._options))
            say_line(f"  NOT_NOTIFIED: {message}")
        os._exit(envelope.exit_code)

    def finish(self, envelope: Envelope) -> Envelope:
        """Write the last line. Adds a warning where the reader did not take all lines."""
        if self._outlet is None:
            return envelope
        try:
            self._write("run", {"ok": envelope.ok, "code": envelope.code, "exit_code": envelope.exit_code})
            is_taken = self._outlet.finish()
        except OSError:
            is_taken = False
        if not is_taken and not any(note["code"] == "NOT_TOLD" for note in envelope.warnings):
            envelope.warnings.append(warning("NOT_TOLD", "the last changes were not read"))
        return envelope

    def _write(self, event: str, data: JsonObject) -> None:
        if self._outlet is not None:
            line = {"event": event, "at": wall_time().iso(), "run_id": self._run_id, **data}
            self._outlet.write(json.dumps(line, default=str) + "\n")


def _deliver(envelope: Envelope, options: RunOptions, as_json: bool) -> int:
    data: JsonObject = envelope.data if isinstance(envelope.data, dict) else {}
    text, code = _text(envelope, options), envelope.exit_code
    if options.output_file is not None:
        try:
            write_file(options.output_file, text if text is not None else envelope.to_json() + "\n")
        except Failure as failure:
            say_line(f"shotclock: {failure.code}: {failure}")
            code = code or EX_IOERR
        text = None
    if text is not None:
        code = emit_text(text, code)
    elif as_json:
        return emit(envelope) or code
    elif data.get("outputs"):
        write_quietly(sys.stdout, json.dumps(data["outputs"], indent=2, ensure_ascii=False) + "\n")
    if as_json:  # the text is the whole answer
        return code
    if "run_id" in data:
        say_line(_closing_line(envelope, data, options))
    if envelope.error is not None and envelope.code != "STEPS_FAILED":  # the closing line says so
        say_line(summary_line(envelope))
    else:
        for notice in envelope.warnings:
            say_line(f"  {notice['code']}: {one_line(str(notice['message']), 1000)}")
    return code


def _closing_line(envelope: Envelope, data: JsonObject, options: RunOptions) -> str:
    if "continue_command" in data:
        name, waiting = one_line(str(data.get("name", data["run_id"])), 40), data.get("waiting", ())
        where = "" if options.on is None else f" {options.on.on_command_line}"
        asks = "".join(
            f"\n  {one_line(waits['title'], 80)}: shotclock inbox approve {waits['proposal_id']}{where}"
            for waits in waiting
        )
        asks += f"\n  then, until {data['continue_until']}:" if "continue_until" in data else "\n  then:"
        state = "keeps running" if envelope.ending == Ending.DETACHED else "has ended without an answer"
        return f"◌ {name} {f'waits for a person:{asks}' if waiting else state}\n  {data['continue_command']}"
    bad = Counter(WORDS[Status(data["steps"][name]["status"])] for name in data["failed"])
    may = " (may fail)" if envelope.ok else ""
    kinds = [(len(data["completed"]), "succeeded"), *((count, f"{word}{may}") for word, count in bad.items())]
    counts = ", ".join(f"{count} {word}" for count, word in [*kinds, (len(data["skipped"]), "skipped")] if count)
    kept = sum("kept_from" in data["steps"][name] for name in data["completed"])
    counts = counts.replace(" succeeded", f" succeeded ({kept} of them kept)", 1) if kept else counts
    mark = MARKS[Status.SUCCEEDED if envelope.ok else Status.FAILED]
    took = brief(int(str(envelope.meta["duration_ms"])))
    where = "" if options.on is None else f" {options.on.on_command_line}"
    artifacts = data.get("artifacts")
    files = "" if artifacts is None else f"\n  {artifacts_in_words(artifacts)}: {visible(artifacts['folder'])}"
    failed = [one_line(name, 40) for name in data["failed"]]
    label = next(iter(bad)) if len(bad) == 1 else "not succeeded"
    names = f"\n  {label}: {', '.join(failed[:NAMED])}" + (" …" if len(failed) > NAMED else "") if failed else ""
    lines = [f"{mark} {one_line(data['name'], 30)}: {counts} in {took}{names}{files}"]
    lines.append(f"  shotclock report {data['run_id']} --open{where}")
    return "\n".join([*lines, *([f"  {data['rerun_command']}"] if "rerun_command" in data else [])])


def _text(envelope: Envelope, options: RunOptions) -> str | None:
    """Return the report in its format. A refused run has one too, because CI expects it."""
    if options.output in (None, "json"):
        return None
    report = unstarted(options.flow or options.resume or options.rerun_failed or "run", envelope.to_dict(), wall_time())
    run_id = envelope.data.get("run_id") if isinstance(envelope.data, dict) else None
    if isinstance(run_id, str):
        try:
            with open_engine(options.on) as engine:
                report = asyncio.run(engine.report(run_id))
        except Failure as failure:
            say_line(f"shotclock: {failure.code}: {failure}")
    return text_of(report, str(options.output))


def _read_run_id(text: str) -> str:
    if not RUN_ID.fullmatch(text):
        raise ValueError(f"{one_line(text, 40)!r}: letters, digits, `.`, `_` and `-`, at most 100, no dash first")
    return text


def _read_words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError(f"{text[:40]!r} is not a list: write a,b")
    return words


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_RESUME = ("--resume",)  # a resumed run keeps the values that it began with
_CONTINUED = (*_RESUME, "--rerun-failed")  # both keep the choice of steps
COMMANDS = {
    "run": Subcommand(
        "run",
        options=(
            Option.argument("flow", "The workflow file."),
            Option.duration(
                "--timeout",
                "The timeout of the whole run (5m), if it is shorter than the file's. Without a unit it is "
                "milliseconds, from 1000 on.",
                read=read_run_duration,
                key="timeout_ms",
                excludes=_RESUME,
            ),
            Option.taking(
                "--input", "NAME=VALUE", "The value of an input.", read=name_and_value, repeats=True, excludes=_RESUME
            ),
            Option.taking(
                "--run-id",
                "ID",
                "The id of this run: letters, digits, `.`, `_` and `-`. RUN_TAKEN if it exists.",
                read=_read_run_id,
                excludes=_RESUME,
            ),
            Option.taking(
                "--resume",
                "RUN_ID",
                "Continue a run that is parked or whose process died, with its inputs and its deadline. Finished "
                "steps are not repeated.",
            ),
            Option.taking(
                "--rerun-failed",
                "RUN_ID",
                "Start a new run that continues an ended one, with the file as it is now: what had succeeded is kept, "
                "steps and items, and what failed, was changed or depends on such a step runs. The beginning of the "
                "id is enough.",
                excludes=_RESUME,
            ),
            Option.taking(
                "--from",
                "STEP,STEP",
                "With --rerun-failed: run these steps again, too, and all that depend on them.",
                read=_read_words,
                default=(),
                key="start_from",
                needs="--rerun-failed",
            ),
            Option.taking("--events", "FILE", "Write a line of JSON to this file for every change."),
            Option.taking(
                "--output",
                "FORMAT",
                "The format to print at the end: json (the envelope), markdown or junit.",
                choices=FORMATS,
            ),
            Option.taking("--output-file", "FILE", "Write it to this file instead."),
            Option.duration(
                "--budget",
                "Wait this long when only a person's decision is missing; then park the run with exit code 14. 0 waits "
                "without limit, as on a terminal. Otherwise SHOTCLOCK_RESPONSE_TIMEOUT, or 30s.",
                key="budget_ms",
            ),
            Option.taking(
                "--follow",
                "[STEP]",
                "Print what steps print, also on a terminal, and draw nothing. With names (--follow build,test) only "
                "what these steps print.",
                read=_read_names,
                repeats=True,
                implied=(),
                excludes=("--quiet",),
            ),
            Option.flag("--quiet", "Print no output of steps on stderr, and no sign of life, off a terminal."),
            Option.flag("--force", "Run it although its timeouts cannot fit (`budget/…`).", excludes=_RESUME),
            Option.taking(
                "--only",
                "STEP,STEP",
                "Run only these steps, the steps that they depend on or name in templates, and the steps that their "
                "reactions start. The others are skipped. --resume and --rerun-failed keep the choice.",
                read=_read_words,
                default=(),
                excludes=_CONTINUED,
            ),
            Option.taking(
                "--tags",
                "A,B",
                "Run only the steps with one of these tags, and what they need, as with --only.",
                read=_read_words,
                default=(),
                excludes=_CONTINUED,
            ),
            Option.taking(
                "--skip",
                "STEP,STEP",
                "Leave these steps out, as if their `if` did not hold: what depends on them is skipped as well, "
                "unless it has `accept_skipped`.",
                read=_read_words,
                default=(),
                excludes=_CONTINUED,
            ),
            Option.taking(
                "--queue", "NAME", "With --on: the queue of the workers that run it [shotclock].", needs="--on"
            ),
            Option.duration(
                "--heartbeat",
                "With --on: repeat the steps of a worker that is silent for this long [10s].",
                key="heartbeat_ms",
                needs="--on",
            ),
            Option.flag(
                "--json", f"{Option.json().help} No lines on stderr, unless it is a terminal.", key="json_only"
            ),
            *engine_options("Run it on Temporal: temporal://HOST:PORT[/NAMESPACE]. See `shotclock worker`."),
        ),
        run=_run,
        usage="FLOW | --resume RUN_ID | --rerun-failed RUN_ID [OPTIONS]",
    )
}
