"""The command line of an App: words in, one envelope out, on the clock.

Built from the app's catalogue alone. The program forks a zygote of itself before anything else, so the commands run in
killable processes with everything imported, and this process only holds the clock and writes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from .._version import __version__
from ..core.catalogue import BUDGET_VARIABLE, CONFIRMATION, DEFAULT_BUDGET_MS, Catalogue, CommandSpec, hyphenate
from ..core.clocks import Clocks, format_duration, parse_duration_ms
from ..core.envelope import Envelope, Problem, stop_problem
from ..core.errors import Ending, Failure
from ..core.manifest import build_manifest, choices_of, flag_name, option_flags, resolve_schema
from ..core.value_types import replace, value
from ..dispatch.dispatcher import Dispatcher
from ..process.clock import monotonic_ns, process_began_ns
from ..process.foreground import fill_standard_descriptors
from ..runtime.call import CallRequest, Outcome, Tool
from ..runtime.outcomes import outcome_of_error
from ..runtime.preloaded_zygote import Preloaded, Program
from ..runtime.runtime import Runtime
from .output import (
    Signalled,
    StopSignal,
    emit_help,
    flush_quietly,
    is_terminal,
    note_stops,
    say_line,
    signals_heard,
    wants_json,
    write_quietly,
)
from .parser import (
    Command,
    CommandTable,
    Mistakes,
    Parameter,
    Reading,
    command_help,
    duration,
    flag,
    option,
    read_command,
    table_help,
)
from .subcommand import answer_at_once, deliver, problem_of

if TYPE_CHECKING:
    from ..dispatch.invocation import Stdin


STDIN_LIMIT = 256 * 1024 * 1024
CHUNK = 64 * 1024
# Where the command itself has no timeout, somebody who never closes the pipe runs this out.
LONGEST_WAIT_MS = 3_600_000


class CommandLineApp(Protocol):
    """What the command line needs of an App."""

    workers: int | None

    def catalogue(self) -> Catalogue: ...
    @property
    def program(self) -> Program: ...


@value
class Request:
    """A call of a command, as its command line asks for it."""

    spec: CommandSpec
    arguments: dict[str, object]
    clocks: Clocks
    budget_ms: int | None = None
    validate_only: bool = False
    dry_run: bool = False
    resume_from: str | None = None
    idempotency_key: str | None = None
    heartbeat: Heartbeat | None = None
    justification: str = ""
    confirmed: bool = False
    words: tuple[str, ...] = ()
    """As it was written."""


def main(app: CommandLineApp, words: list[str]) -> int:
    catalogue = app.catalogue()
    if "--debug" in words:
        catalogue = replace(catalogue, debug=True)
    as_json = wants_json("--json" in words)
    fill_standard_descriptors()
    try:
        return _main(app, catalogue, words, as_json)
    except Signalled as signalled:
        return _deliver_unstarted(catalogue, catalogue.name, stop_problem(signalled.name), as_json)
    except Exception as error:  # ours: whoever called still gets an envelope
        outcome = outcome_of_error(error)
        outcome.ending = Ending.KILLED  # what had begun dies with us; how far it was nobody knows here
        return deliver(_answer(catalogue, catalogue.name, outcome), as_json, _show)


def _main(app: CommandLineApp, catalogue: Catalogue, words: list[str], as_json: bool) -> int:
    table = table_of(catalogue)
    reading = read_command(table, words)
    command, mistakes = reading.command, reading.mistakes
    if reading.wants == "help" or not words:
        if command is not None and command.main is not None:
            return command.main(["--help"])
        emit_help(table_help(table) if command is None else command_help(table, command))
        if words:
            return 0
    if command is None:
        is_version = reading.wants == "version" and not mistakes
        return _version(catalogue, as_json) if is_version else _refuse(catalogue, catalogue.name, mistakes, as_json)
    if command.main is not None:
        return command.main(reading.words)
    spec = catalogue.find(command.name)
    if spec is None:
        return _refuse(catalogue, "manifest", mistakes, as_json) if mistakes else _manifest(catalogue, as_json)
    request = replace(_request(spec, reading), words=(command.name, *reading.words))
    return _perform(app, catalogue, request, mistakes, as_json)


# --- understanding ----------------------------------------------------------------------------------------

_JSON = flag("--json", "The envelope alone on stdout, also on a terminal.")


def table_of(catalogue: Catalogue) -> CommandTable:
    """Make the table of an App's commands, of what the catalogue says about them."""
    commands = [_command(spec) for spec in catalogue.commands]
    summary = "Describe every command, flag and exit code, for programs."
    commands.append(Command("manifest", summary, (_JSON, duration("--timeout", default="30s"))))
    if any(spec.interruption for spec in catalogue.commands):
        summary = "List, look at, wait for and cancel work that goes on after its caller left: list|status|wait|cancel."
        commands.append(Command("job", summary, main=lambda words: _job(catalogue, words)))
    return CommandTable(
        catalogue.name,
        catalogue.summary,
        tuple(commands),
        epilogue="Off a terminal every command prints one JSON envelope on stdout.",
        has_version=True,
        spelling=hyphenate,
    )


def _job(catalogue: Catalogue, words: list[str]) -> int:
    from .job_and_token import job_main

    return job_main(words, app=catalogue.name, command=own_command(), tool=_tool(catalogue))


def _command(spec: CommandSpec) -> Command:
    """Describe one command: all that is typed arrives as text, and is checked by the real types where it runs."""
    definitions = spec.input_schema.get("$defs", {})
    required = spec.input_schema.get("required", ())
    parameters = [
        _parameter(name, resolve_schema(schema, definitions), name in spec.positionals, name in required)
        for name, schema in spec.input_schema.get("properties", {}).items()
        if name != "dry_run"
    ]
    parameters.sort(key=lambda parameter: not parameter.by_place)
    timeout = f"Stop the work after this time (500ms, 30s, 5m; 0: none). [{_default_timeout(spec)}]"
    common = [duration("--timeout", timeout), _JSON]
    common.append(flag("--debug", "Put the traceback of what the command raised into the envelope."))
    for name, described in option_flags(spec).items():
        if described["type"] == "boolean":
            common.append(flag(f"--{name}", described["description"]))
        else:
            common.append(option(f"--{name}", _METAVARS.get(name, "TEXT"), described["description"], **_read_as(name)))
    heading = "Options of every command"
    places = [
        (f"{each.field.upper()}{'…' * each.repeats}", each.key in required) for each in parameters if each.by_place
    ]
    usage = ["[OPTIONS]", *(name if is_required else f"[{name}]" for name, is_required in places)]
    return Command(
        spec.hyphenated,
        spec.summary,
        (*parameters, *(replace(each, heading=heading) for each in common)),
        usage=" ".join(usage),
        description=spec.description,
    )


_METAVARS = {
    "idempotency-key": "KEY",
    "heartbeat-interval": "D",
    "heartbeat-ms": "N",
    "budget": "D",
    "resume-from": "STEP",
}


def _read_as(name: str) -> dict[str, Any]:
    if _METAVARS.get(name) == "D":
        return {"read": parse_duration_ms}
    return {"read": _milliseconds} if name == "heartbeat-ms" else {}


def _milliseconds(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be a whole number of milliseconds above 0")
    return int(text)


def _parameter(name: str, schema: dict[str, Any], is_positional: bool, is_required: bool) -> Parameter:
    typed, text, kind = f"--{flag_name(name)}", _help_on(schema, is_required), schema.get("type")
    if kind == "boolean":
        return flag(typed, text, negatable=True, default=None, key=name, heading="Parameters")
    metavar = {"integer": "N", "number": "N", "object": "JSON", "array": "ITEM"}.get(str(kind), "TEXT")
    repeats = kind == "array"
    return option(typed, metavar, text, repeats=repeats, by_place=is_positional, key=name, heading="Parameters")


def _default_timeout(spec: CommandSpec) -> str:
    return format_duration(spec.clocks.timeout_ms) if spec.clocks.timeout_ms else "none"


def _help_on(schema: dict[str, Any], required: bool) -> str:
    text = str(schema.get("description") or "")
    notes = []
    if (choices := choices_of(schema)) is not None:
        notes.append("one of " + ", ".join(choices))
    elif schema.get("type") in ("integer", "number"):
        notes.append(str(schema["type"]))
    elif schema.get("type") == "object":
        notes.append("JSON")
    if required:
        notes.append("required")
    elif schema.get("default") not in (None, [], {}, ""):
        notes.append(f"default {json.dumps(schema['default'])}")
    return " ".join([text, *(f"[{note}]" for note in notes)]).strip()


def _request(spec: CommandSpec, reading: Reading) -> Request:
    given, mistakes = reading.given, reading.mistakes
    definitions = spec.input_schema.get("$defs", {})
    properties = spec.input_schema.get("properties", {})
    arguments = {}
    for name, value in {**reading.guessed, **given}.items():
        if name in properties and name != "dry_run":
            try:
                arguments[name] = from_words(value, resolve_schema(properties[name], definitions), definitions)
            except ValueError as error:
                reading.refuse(flag_name(name), str(error))
    heartbeat = None
    if "heartbeat_ms" in given:
        heartbeat = Heartbeat(spec.name, given["heartbeat_ms"], as_json=True)
    elif "heartbeat_interval" in given:
        heartbeat = Heartbeat(spec.name, given["heartbeat_interval"], as_json=False)
    resume_from = given.get("resume_from")
    if resume_from is not None and resume_from not in spec.steps:
        mistakes.append({"field": "resume-from", "message": f"its steps are {', '.join(spec.steps)}"})
        resume_from = None
    return Request(
        spec,
        arguments,
        Clocks(timeout_ms=given.get("timeout")),
        _budget(spec, given.get("budget"), mistakes),
        bool(given.get("validate_only")),
        bool(given.get("dry_run")),
        resume_from,
        given.get("idempotency_key"),
        heartbeat,
        str(given.get("justification", "")) if spec.approval is not None else "",
        spec.needs_confirmation and bool(given.get(CONFIRMATION)),
    )


def _budget(spec: CommandSpec, asked_ms: int | None, mistakes: Mistakes) -> int | None:
    """Return how long we wait for a command that may outlive us: what was said, what the environment says, or 30 s
    where no person waits. Zero waits for as long as it takes; for a person, as long as the response budget allows."""
    if spec.interruption is None:
        return asked_ms or None
    if asked_ms is None and (written := os.environ.get(BUDGET_VARIABLE, "").strip()):
        if written.isdecimal():
            asked_ms = int(written)
        else:
            mistakes.append({"field": BUDGET_VARIABLE, "message": f"{written!r} is not a whole number of milliseconds"})
    if asked_ms is None and not is_terminal(sys.stdout):
        asked_ms = DEFAULT_BUDGET_MS
    return asked_ms or None


def from_words(value: object, schema: dict[str, Any], definitions: dict[str, Any]) -> object:
    """Return a word as the JSON value it stands for, where its type is not text. What does not fit stays as it is: the
    real types say what is wrong with it. Raise ValueError for a list or an object that is no JSON."""
    if isinstance(value, list):
        if len(value) == 1 and value[0].startswith("["):
            return _list_from_json(value[0])
        items = resolve_schema(schema.get("items", {}), definitions)
        kinds = [resolve_schema(item, definitions) for item in schema.get("prefixItems", ())]
        kinds += [items] * max(0, len(value) - len(kinds))
        for item, kind in zip(value, kinds, strict=False):
            if item.startswith("[") and kind.get("type", "array") != "array":
                raise ValueError(f"{item[:40]!r} begins with [ and is not alone: {_ONE_LIST}")
        return [from_words(item, kind, definitions) for item, kind in zip(value, kinds, strict=False)]
    if not isinstance(value, str):
        return value
    for choice in schema.get("enum", [schema["const"]] if "const" in schema else []):
        if str(choice) == value:
            return choice
    kind = schema.get("type", "array or object" if value[:1] in ("{", "[") else "string")
    if (kind, value[:1]) in (("object", "{"), ("array", "[")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{value[:40]!r} is not JSON: {_trouble_with_json(error)}") from None
    return _from_json(value, kind, value) if kind in _JSON_TYPES else value


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "array or object": (list, dict),
}


_ONE_LIST = """write all items as one JSON list, such as '["a", "[b]"]', also where a text itself begins with ["""


def _list_from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        trouble = _trouble_with_json(error)
        raise ValueError(f"{text[:40]!r} begins with [ and is not JSON ({trouble}): {_ONE_LIST}") from None


def _trouble_with_json(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _from_json(text: str, kind: str, otherwise: object) -> object:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    fits = isinstance(read, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(read, bool))  # a bool is an int
    return read if fits else otherwise


# --- doing ------------------------------------------------------------------------------------------------


def _perform(app: CommandLineApp, catalogue: Catalogue, request: Request, mistakes: Mistakes, as_json: bool) -> int:
    spec = request.spec
    if mistakes:
        request = replace(request, validate_only=True)  # nothing runs; what else is wrong is told as well
    elif spec.requires_person is not None and not request.validate_only and not request.dry_run:
        refusal = _ask_person(spec, request.arguments)
        if refusal is not None:
            return _deliver_unstarted(catalogue, spec.name, refusal, as_json, request.clocks)
        request = replace(request, confirmed=True)
    with contextlib.ExitStack() as stack:
        stdin = None
        if spec.reads_stdin and not request.validate_only:
            limit_ms = spec.clocks.timeout_ms if request.clocks.timeout_ms is None else request.clocks.timeout_ms
            spooled = stack.enter_context(spool_stdin(limit_ms or None))
            if isinstance(spooled, Problem):
                return _deliver_unstarted(catalogue, spec.name, spooled, as_json, request.clocks)
            stdin = spooled
        envelope = _call(app, catalogue, request, stdin)
    if mistakes:
        found: Any = (envelope.error or {}).get("errors", []) if envelope.code == "ARG_ERROR" else []
        # A value that was not understood was left out: that it is missing is no news.
        known = {mistake["field"].lstrip("-").replace("-", "_") for mistake in mistakes}
        others = [problem for problem in found if problem["field"].partition(".")[0] not in known]
        return _refuse(catalogue, spec.name, mistakes + others, as_json, request.clocks)
    return deliver(envelope, as_json, _show)


def _call(app: CommandLineApp, catalogue: Catalogue, request: Request, stdin: Stdin | None) -> Envelope:
    for stream in (sys.stdout, sys.stderr):
        flush_quietly(stream)
    note_stops()  # in a fork hook an exception would be lost; whoever listens next finds what came
    preloaded = Preloaded.fork_here()
    runtime = Runtime(
        # No state outlives a command line: everything runs where it can be killed.
        operations=[replace(each.operation(), isolation="process") for each in catalogue.commands],
        workers=1,
        preloaded=preloaded,
        program=app.program if preloaded is None else None,
    )
    try:
        dispatcher = Dispatcher(catalogue, runtime, program=app.program, command=own_command())
    except Failure as failure:
        return _answer(catalogue, request.spec.name, outcome_of_error(failure), request.clocks)
    return asyncio.run(_await_call(dispatcher, request, stdin))


async def _await_call(dispatcher: Dispatcher, request: Request, stdin: Stdin | None) -> Envelope:
    heartbeat = request.heartbeat
    beating: Coroutine[Any, Any, None] | None = heartbeat.beat() if heartbeat is not None else None
    beats = None if beating is None else asyncio.ensure_future(beating)
    try:
        with StopSignal() as stop:
            async with dispatcher:
                return await dispatcher.call(
                    CallRequest(
                        request.spec.name,
                        request.arguments,
                        request.clocks,
                        budget_ms=request.budget_ms,
                        idempotency_key=request.idempotency_key,
                        validate_only=request.validate_only,
                        dry_run=request.dry_run,
                        resume_from=request.resume_from,
                        on_progress=None if heartbeat is None else heartbeat.progress,
                        stop=stop,
                        stdin=stdin,
                        justification=request.justification,
                        confirmed=request.confirmed,
                        repeat_hint=None if request.spec.approval is None else _write_command_line(request),
                        began_ns=process_began_ns(),
                    )
                )
    finally:
        if beats is not None:
            beats.cancel()


def _write_command_line(request: Request) -> str:
    """Return the command line that makes the same call again."""
    import shlex

    return shlex.join([*own_command(), *request.words])


def _ask_person(spec: CommandSpec, arguments: dict[str, object]) -> Problem | None:
    """Have a person at a terminal type back what is expected. No flag answers for them."""
    from .output import confirm

    assert spec.requires_person is not None
    properties = spec.input_schema.get("properties", {})
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    missing = [name for name in spec.input_schema.get("required", ()) if name not in arguments]
    if missing:  # nobody is asked about a call that cannot be made
        return problem_of([{"field": name, "message": "Field required"} for name in missing])
    expected = spec.requires_person.format_map({name: str(value) for name, value in {**defaults, **arguments}.items()})
    return confirm(spec.name, expected)


def _manifest(catalogue: Catalogue, as_json: bool) -> int:
    made = Outcome(Ending.FINISHED, data=build_manifest(catalogue, __version__))
    return deliver(_answer(catalogue, "manifest", made, mutates=False), as_json, _show)


def _version(catalogue: Catalogue, as_json: bool) -> int:
    version = Outcome(Ending.FINISHED, data={"version": catalogue.version})
    return deliver(_answer(catalogue, catalogue.name, version, mutates=False), as_json, _show)


def own_command() -> list[str]:
    """Return how the program that runs here is called once more."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    file = os.path.abspath(getattr(main, "__file__", None) or sys.argv[0])
    return [file] if os.access(file, os.X_OK) else [sys.executable, file]


# --- answering --------------------------------------------------------------------------------------------


def _tool(catalogue: Catalogue) -> Tool:
    return Tool(catalogue.semantic_version, catalogue.debug)


def _answer(
    catalogue: Catalogue, name: str, outcome: Outcome, clocks: Clocks | None = None, *, mutates: bool = True
) -> Envelope:
    """Return an answer that no call of the command makes: with its clocks all the same, and since we began."""
    spec = catalogue.find(name)
    defaults = catalogue.clocks if spec is None else spec.clocks
    return answer_at_once(name, outcome, clocks or Clocks(), defaults=defaults, mutates=mutates, tool=_tool(catalogue))


def _refuse(catalogue: Catalogue, name: str, mistakes: Mistakes, as_json: bool, clocks: Clocks | None = None) -> int:
    return _deliver_unstarted(catalogue, name, problem_of(mistakes), as_json, clocks)


def _deliver_unstarted(
    catalogue: Catalogue, name: str, problem: Problem, as_json: bool, clocks: Clocks | None = None
) -> int:
    return deliver(_answer(catalogue, name, Outcome(Ending.NOT_STARTED, problem), clocks), as_json, _show)


def _show(envelope: Envelope) -> None:
    if envelope.data:
        write_quietly(sys.stdout, _readable(envelope.data) + "\n", signals_heard)


def _readable(data: object) -> str:
    if isinstance(data, dict) and list(data) == ["result"]:
        data = data["result"]
    return data if isinstance(data, str) else json.dumps(data, indent=2, ensure_ascii=False)


# --- beside the work ------------------------------------------------------------------------------------------


class Heartbeat:
    """Lines on stderr that say, while a command runs, that it does: in words for a log, as JSON for a program."""

    def __init__(self, name: str, interval_ms: int, *, as_json: bool) -> None:
        self._name = name
        self._interval_s = max(interval_ms, 1) / 1000
        self._as_json = as_json
        self._started_ns = monotonic_ns()
        self._progress: dict[str, object] = {}

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        said = {"done": done, "total": total, "unit": unit}
        self._progress = {key: value for key, value in said.items() if value is not None}

    async def beat(self) -> None:
        """Write a line each time, until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            say_line(self.line())

    def line(self) -> str:
        elapsed_ms = (monotonic_ns() - self._started_ns) // 1_000_000
        if self._as_json:
            beat = {"type": "heartbeat", "command": self._name, "elapsed_ms": elapsed_ms, "progress": self._progress}
            return json.dumps(beat, separators=(",", ":"))
        text = f"{self._name}: running for {format_duration(elapsed_ms)}"
        if self._progress:
            of = f" of {self._progress['total']}" if "total" in self._progress else ""
            unit = f" {self._progress['unit']}" if "unit" in self._progress else ""
            text += f", {self._progress['done']}{of}{unit}"
        return text


@contextlib.contextmanager
def spool_stdin(limit_ms: int | None) -> Iterator[Stdin | Problem]:
    """Read stdin to its end into a file, so that the work can be killed, repeated and identified.

    The file is gone afterwards. A problem says why there is none.
    """
    import hashlib
    import tempfile

    from ..dispatch.invocation import Stdin

    fd, path = tempfile.mkstemp(prefix="shotclock-stdin-")
    try:
        digest = hashlib.sha256()
        problem = _copy_stdin(fd, digest, limit_ms or LONGEST_WAIT_MS)
        yield Stdin(path, digest.hexdigest()) if problem is None else problem
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _copy_stdin(file: int, digest: Any, limit_ms: int) -> Problem | None:
    until_ns = monotonic_ns() + limit_ms * 1_000_000
    poller = select.poll()
    poller.register(0, select.POLLIN)
    size = 0
    while True:
        left_ms = (until_ns - monotonic_ns()) // 1_000_000
        if left_ms <= 0:
            message = f"stdin was not closed within {format_duration(limit_ms)}"
            return Problem("INPUT_REQUIRED", message, "validation", suggestion="close it, or give it /dev/null")
        if not poller.poll(min(left_ms, 60_000)):
            continue
        try:
            chunk = os.read(0, CHUNK)
        except OSError as error:  # it was closed before we began
            return None if error.errno == 9 else Problem("INPUT_REQUIRED", f"stdin: {error.strerror}", "validation")
        if not chunk:
            return None
        size += len(chunk)
        if size > STDIN_LIMIT:
            errors = [{"field": "stdin", "message": f"more than {STDIN_LIMIT} bytes"}]
            return Problem("ARG_ERROR", "stdin: more than is taken", "validation", errors=errors)
        digest.update(chunk)
        while chunk:
            chunk = chunk[os.write(file, chunk) :]
