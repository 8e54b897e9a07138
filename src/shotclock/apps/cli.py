"""The command line of an App: words in, one envelope out.

The program forks a zygote of itself before anything else, so the commands run in killable processes with everything
imported, and this process only keeps the time and writes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from .._version import __version__
from ..calls.call import CallRequest, Outcome, Stdin, Tool, tool_of
from ..calls.outcomes import outcome_of_error
from ..calls.preloaded_zygote import Preloaded, Program
from ..calls.runtime import Runtime
from ..core.catalogue import Catalogue, CommandSpec, hyphenate
from ..core.content_blocks import blocks_of, describe_block
from ..core.envelope import Envelope, Problem, refusal, stop_problem
from ..core.errors import Ending, Failure
from ..core.limits import MAX_MS, Clocks, format_duration, parse_duration_ms
from ..core.value_types import JsonObject, replace
from ..core.visible_text import visible
from ..dispatch.dispatcher import Dispatcher
from ..supervise.clock import monotonic_ns, process_began_ns
from ..supervise.foreground import fill_standard_descriptors
from ..terminal.output import (
    Screen,
    Signalled,
    StopListener,
    confirm,
    emit_text,
    read_stdin,
    say_line,
    wants_json,
    write_quietly,
)
from ..terminal.parser import (
    CommandTable,
    Mistakes,
    Option,
    ParsedLine,
    Subcommand,
    number_between,
    read_command,
)
from ..terminal.results import ProgressBar, render_value, show_item
from ..terminal.subcommand import (
    Mistaken,
    answer_at_once,
    deliver,
    problem_in,
    problem_of,
    read_budget_ms,
    run_subcommand,
    run_table,
)
from ._manifest import CONFIRM_FLAG, build_manifest, choices_of, flag_name, option_flags, resolve_schema

STDIN_LIMIT = 256 * 1024 * 1024
LONGEST_SECRET = 64 * 1024
SECRET_WAIT_MS = 30_000  # for a writer that never closes the pipe
LONGEST_WAIT_MS = 3_600_000  # a writer that never closes the pipe exhausts it, where the command itself has no timeout


class CommandLineApp(Protocol):
    workers: int | None

    def catalogue(self) -> Catalogue: ...
    @property
    def program(self) -> Program: ...


def main(app: CommandLineApp, words: list[str]) -> int:
    catalogue = app.catalogue()
    fill_standard_descriptors()
    line = ParsedLine()
    try:
        table = table_of(catalogue)
        line = read_command(table, words)
        if line.typed.get("--debug"):
            catalogue = replace(catalogue, debug=True)
        return _main(app, catalogue, table, line)
    except Signalled as signalled:
        problem = stop_problem(signalled.name)
        return _deliver_unstarted(catalogue, catalogue.name, problem, wants_json(line.format))
    except Exception as error:  # a bug of ours: the caller still gets an envelope
        outcome = outcome_of_error(error)
        outcome.ending = Ending.KILLED  # running work dies with us, at a point that is not known here
        return deliver(_answer(catalogue, catalogue.name, outcome), wants_json(line.format), _show, catalogue.name)


def _main(app: CommandLineApp, catalogue: Catalogue, table: CommandTable, line: ParsedLine) -> int:
    command, mistakes, as_json = line.command, line.mistakes, wants_json(line.format)
    if command is not None and command.main is not None:
        return command.main(line.words)
    if line.wants == "help":
        return emit_text(table.help() if command is None else command.help(table.name), 0)
    if command is None and not line.words:
        write_quietly(sys.stderr, table.help())
    spec = None if command is None else catalogue.find(command.name)
    if command is None or spec is None:
        name = catalogue.name if command is None else command.name
        if mistakes:
            return _deliver_unstarted(catalogue, name, problem_of(mistakes, line.suggestion), as_json)
        version: dict[str, object] = {"version": catalogue.version}
        data = version if command is None else build_manifest(catalogue, __version__)
        envelope = _answer(catalogue, name, Outcome(Ending.FINISHED, data=data), mutates=False)

        def show_version(_: Envelope) -> None:
            write_quietly(sys.stdout, f"{catalogue.name} {catalogue.version}\n")

        return deliver(envelope, as_json, show_version if command is None else _show, catalogue.name)
    return _perform(app, catalogue, spec, line, as_json)


def table_of(catalogue: Catalogue) -> CommandTable:
    commands = [_describe_command(spec) for spec in catalogue.commands]
    summary = "Describe every command, flag and exit code, for programs."
    commands.append(Subcommand("manifest", summary, (Option.json(), Option.timeout())))
    if any(spec.interruption for spec in catalogue.commands):
        summary = "List, inspect, wait for, extend and stop work that outlives its caller."
        commands.append(Subcommand("job", summary, main=lambda words: _run_job(catalogue, words)))
    if catalogue.find("completion") is None:
        summary = "Print a script that completes commands and options in bash, zsh or fish."
        commands.append(Subcommand("completion", summary, main=lambda words: _run_completion(catalogue, words)))
    return CommandTable(
        catalogue.name,
        catalogue.summary,
        tuple(commands),
        epilogue="Off a terminal every command prints one JSON envelope on stdout.",
        has_version=True,
        spelling=hyphenate,
    )


def _run_completion(catalogue: Catalogue, words: list[str]) -> int:
    from ..terminal.completion import completion_command, places_of

    def find(command: Subcommand) -> Subcommand | CommandTable:
        return _job_table(catalogue, []) if command.name == "job" else command if command.main is None else completion

    program = own_command()
    name = os.path.basename(program[0]) if len(program) == 1 else catalogue.name
    completion = completion_command(name, lambda: places_of(table_of(catalogue), find))
    return run_subcommand(name, completion, words, tool=tool_of(catalogue))


def _job_table(catalogue: Catalogue, words: list[str]) -> CommandTable:
    from ..commands.jobs import JobScope, job_table

    return job_table(JobScope(own_command(), catalogue.name, _job_tool(catalogue, words)))


def _job_tool(catalogue: Catalogue, words: list[str]) -> Tool:
    return tool_of(replace(catalogue, debug=catalogue.debug or "--debug" in words))


def _run_job(catalogue: Catalogue, words: list[str]) -> int:
    return run_table(_job_table(catalogue, words), words, tool=_job_tool(catalogue, words))


def _describe_command(spec: CommandSpec) -> Subcommand:
    """Return the options of a command. Values stay text here; the worker checks them by the real types."""
    definitions = spec.input_schema.get("$defs", {})
    required = spec.input_schema.get("required", ())
    parameters = [
        _describe_parameter(name, resolve_schema(schema, definitions), name in spec.positionals, name in required)
        for name, schema in spec.input_schema.get("properties", {}).items()
        if name != "dry_run"
    ]
    for secret in spec.secrets:  # there is no option for its value: every user sees command lines
        text = f"File with the secret, - for stdin [else: {secret.variable}]"
        name = f"--{flag_name(secret.name)}-file"
        parameters.append(Option.taking(name, "FILE", text, key=name, heading="Parameters"))
    parameters.sort(key=lambda parameter: not parameter.by_place)
    default = format_duration(spec.clocks.timeout_ms) if spec.clocks.timeout_ms else "none"
    common = [
        Option.duration("--timeout", f"Stop the work after this time (500ms, 30s, 5m; 0: none). [{default}]"),
        Option.json(),
        Option.flag("--debug", "Add the traceback of an exception to the envelope."),
    ]
    for name, described in option_flags(spec).items():
        if described["type"] == "boolean":
            common.append(Option.flag(f"--{name}", described["description"]))
        else:
            metavar, read = _VALUES.get(name, ("TEXT", None))
            common.append(Option.taking(f"--{name}", metavar, described["description"], read=read))
    taken = {parameter.name for parameter in parameters}
    own = [replace(each, key=each.name, is_outer=each.name in taken) for each in common]
    outer = [replace(each, heading="Options before the command") for each in own if each.is_outer]
    own = [replace(each, heading="Options of every command") for each in own if not each.is_outer]
    return Subcommand(spec.hyphenated, spec.summary, (*parameters, *own, *outer), description=spec.description)


_VALUES = {
    "idempotency-key": ("KEY", None),
    "heartbeat-interval": ("D", parse_duration_ms),
    "heartbeat-ms": ("N", number_between(1, MAX_MS)),
    "budget": ("D", parse_duration_ms),
    "resume-from": ("STEP", None),
}


def _describe_parameter(name: str, schema: JsonObject, is_positional: bool, is_required: bool) -> Option:
    flag_text, text, kind = f"--{flag_name(name)}", _describe_schema(schema, is_required), schema.get("type")
    if kind == "boolean":
        return Option.flag(flag_text, text, negatable=True, default=None, key=name, heading="Parameters")
    suggestions = tuple(choices_of(schema) or choices_of(schema.get("items", {})) or ())
    metavar = {"integer": "N", "number": "N", "object": "JSON", "array": "ITEM"}.get(str(kind), "TEXT")
    return Option.taking(
        flag_text,
        metavar,
        text,
        repeats=kind == "array",
        by_place=is_positional,
        is_required=is_required,
        suggestions=suggestions,
        key=name,
        heading="Parameters",
    )


def _read_secrets(spec: CommandSpec, line: ParsedLine) -> None:
    """Put the secrets of files into the environment, which the process of the command inherits."""
    from_stdin = 0
    for secret in spec.secrets:
        option_name = f"--{flag_name(secret.name)}-file"
        path = line.typed.get(option_name)
        if path is None:
            continue
        from_stdin += path == "-"
        if path == "-" and (spec.reads_stdin or from_stdin > 1):
            line.refuse(option_name[2:], "stdin can be read once: name a file")
            continue
        try:
            if path == "-":
                data = b"".join(read_stdin(SECRET_WAIT_MS))
            else:
                with open(path, "rb") as file:
                    data = file.read(LONGEST_SECRET + 1)
            os.environ[secret.variable] = data[: LONGEST_SECRET + 1].decode().strip("\r\n")
        except (OSError, ValueError, Failure) as error:
            line.refuse(option_name[2:], f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        if not os.environ[secret.variable] or len(data) > LONGEST_SECRET:
            message = "it is empty" if len(data) <= LONGEST_SECRET else f"it has more than {LONGEST_SECRET} bytes"
            line.refuse(option_name[2:], f"{path}: {message}")


def _describe_schema(schema: JsonObject, required: bool) -> str:
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
    return " ".join([str(schema.get("description") or ""), *(f"[{note}]" for note in notes)]).strip()


def _read_call(spec: CommandSpec, line: ParsedLine) -> CallRequest:
    typed = line.typed
    resume_from = typed.get("--resume-from")
    if resume_from is not None and resume_from not in spec.steps:
        line.refuse("resume-from", f"its steps are {', '.join(spec.steps)}")
        resume_from = None
    budget_ms = typed.get("--budget")
    if spec.interruption is not None:
        try:
            budget_ms = read_budget_ms(budget_ms)
        except Mistaken as mistaken:
            line.mistakes += mistaken.mistakes
    return CallRequest(
        spec.name,
        _read_arguments(spec, line),
        Clocks(timeout_ms=typed.get("--timeout")),
        budget_ms=budget_ms or None,
        validate_only=bool(typed.get("--validate-only")),
        dry_run=bool(typed.get("--dry-run")),
        resume_from=resume_from,
        idempotency_key=typed.get("--idempotency-key"),
        justification=str(typed.get("--justification", typed.get("justification", "")))
        if spec.approval is not None
        else "",
        confirmed=spec.needs_confirmation and bool(typed.get(f"--{CONFIRM_FLAG}")),
        repeat_hint=None if spec.approval is None else _repeat(spec, line),
        began_ns=process_began_ns(),
    )


def _repeat(spec: CommandSpec, line: ParsedLine) -> str:
    """Return the command line that makes the same call."""
    before, after = line.words[: line.before], line.words[line.before :]
    return shlex.join([*own_command(), *before, spec.hyphenated, *after])


def _read_arguments(spec: CommandSpec, line: ParsedLine) -> dict[str, object]:
    definitions = spec.input_schema.get("$defs", {})
    arguments = {}
    for name, schema in spec.input_schema.get("properties", {}).items():
        if name in line.typed and name != "dry_run":
            try:
                arguments[name] = from_words(line.typed[name], resolve_schema(schema, definitions), definitions)
            except ValueError as error:
                line.refuse(flag_name(name), str(error))
    return arguments


def from_words(value: object, schema: JsonObject, definitions: JsonObject) -> object:
    """Convert a word to a JSON value where its type is not text. Other misfits stay: the worker reports them."""
    if isinstance(value, list):
        if len(value) == 1 and value[0].startswith("["):
            return _parse_json(value[0], "begins with [ and is not JSON", f"; {_ONE_LIST}")
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
        return _parse_json(value, "is not JSON")
    return _convert(value, kind) if kind in _JSON_TYPES else value


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "array or object": (list, dict),
}
_ONE_LIST = """write all items as one JSON list, such as '["a", "[b]"]', also where a text itself begins with ["""


def _parse_json(text: str, mistake: str, hint: str = "") -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{text[:40]!r} {mistake}: {why}{hint}") from None


def _convert(text: str, kind: str) -> object:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    fits = isinstance(read, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(read, bool))  # a bool is an int
    return read if fits else text


def _perform(app: CommandLineApp, catalogue: Catalogue, spec: CommandSpec, line: ParsedLine, as_json: bool) -> int:
    _read_secrets(spec, line)
    request, clocks = _read_call(spec, line), Clocks(timeout_ms=line.typed.get("--timeout"))
    if line.mistakes:
        request = replace(request, validate_only=True)  # nothing runs; the other mistakes are reported as well
    elif spec.requires_person is not None and not request.validate_only and not request.dry_run:
        refusal = _ask_person(spec, request.arguments)
        if refusal is not None:
            return _deliver_unstarted(catalogue, spec.name, refusal, as_json, clocks)
        request = replace(request, confirmed=True)
    with contextlib.ExitStack() as stack:
        if spec.reads_stdin and not request.validate_only:
            limit_ms = spec.clocks.timeout_ms if clocks.timeout_ms is None else clocks.timeout_ms
            try:
                request = replace(request, stdin=stack.enter_context(_spool_stdin(limit_ms or LONGEST_WAIT_MS)))
            except Failure as failure:
                return _deliver_unstarted(catalogue, spec.name, problem_in(failure), as_json, clocks)
        if spec.streams and not as_json:
            request = replace(request, on_item=show_item)
        envelope = _call(app, catalogue, request, line.typed)
    if not line.mistakes:
        show = None if request.on_item is not None and not request.validate_only else _show
        return deliver(envelope, as_json, show, catalogue.name)
    mistakes = line.mistakes + _find_other_mistakes(line, envelope)
    return _deliver_unstarted(catalogue, spec.name, problem_of(mistakes), as_json, clocks)


def _find_other_mistakes(line: ParsedLine, envelope: Envelope) -> Mistakes:
    found: Any = (envelope.error or {}).get("errors", []) if envelope.code == "ARG_ERROR" else []
    names = [*(mistake["field"] for mistake in line.mistakes), *line.suggested]
    unread = {name.lstrip("-").replace("-", "_") for name in names} - line.typed.keys()
    return [mistake for mistake in found if mistake["field"].partition(".")[0] not in unread]


def _call(app: CommandLineApp, catalogue: Catalogue, request: CallRequest, typed: JsonObject) -> Envelope:
    for stream in (sys.stdout, sys.stderr):
        write_quietly(stream, "")
    StopListener.record_only()  # an exception in a fork hook would be lost; the next listener finds the signal
    preloaded = Preloaded.fork_here()
    runtime = Runtime(
        # No state outlives a command line: everything runs where it can be killed.
        operations=[
            replace(each.operation(), isolation="shared" if each.uses_state else "process")
            for each in catalogue.commands
        ],
        workers=1,
        preloaded=preloaded,
        program=app.program if preloaded is None else None,
    )
    try:
        dispatcher = Dispatcher(catalogue, runtime, program=app.program, command=own_command())
    except Failure as failure:
        return _answer(catalogue, request.name, outcome_of_error(failure), request.clocks)
    return asyncio.run(_await_call(dispatcher, request, typed))


async def _await_call(dispatcher: Dispatcher, request: CallRequest, typed: JsonObject) -> Envelope:
    progress: dict[str, object] = {}

    def on_progress(done: float, total: float | None, unit: str | None) -> None:
        values = {"done": done, "total": total, "unit": unit}
        progress.clear()
        progress.update({key: value for key, value in values.items() if value is not None})

    def print_log(level: str, message: str, logger: str | None) -> None:
        where = f"{request.name} ({logger})" if logger else request.name
        write_quietly(sys.stderr, f"{where}: {level}: {visible(message)}\n")

    interval_ms, beats = typed.get("--heartbeat-ms", typed.get("--heartbeat-interval")), None
    if interval_ms is not None:
        as_json = "--heartbeat-ms" in typed
        beats = asyncio.ensure_future(_beat(request.name, interval_ms, progress, as_json=as_json))
        request = replace(request, on_progress=on_progress)
    screen = Screen.find() if beats is None and request.on_item is None else None
    bar = None if screen is None else ProgressBar(request.name, screen)
    if bar is not None:
        request = replace(request, on_progress=bar.show)
    try:
        with StopListener() as stop:
            async with dispatcher:
                return await dispatcher.call(replace(request, stop=stop, on_log=print_log))
    finally:
        if beats is not None:
            beats.cancel()
        if bar is not None:
            bar.close()


def _ask_person(spec: CommandSpec, arguments: Mapping[str, object]) -> Problem | None:
    """Have a person at a terminal type the confirmation. No flag replaces it."""
    missing = [name for name in spec.input_schema.get("required", ()) if name not in arguments]
    if missing:  # a call that cannot be made needs no confirmation
        return problem_of([{"field": name, "message": "Field required"} for name in missing])
    values = {name: str(value) for name, value in {**spec.defaults, **arguments}.items()}
    return confirm(spec.name, str(spec.requires_person).format_map(values))


def own_command() -> list[str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    file = os.path.abspath(getattr(main, "__file__", None) or sys.argv[0])
    return [file] if os.access(file, os.X_OK) else [sys.executable, file]


def _answer(
    catalogue: Catalogue, name: str, outcome: Outcome, clocks: Clocks | None = None, *, mutates: bool = True
) -> Envelope:
    spec = catalogue.find(name)
    defaults = catalogue.clocks if spec is None else spec.clocks
    return answer_at_once(
        name, outcome, clocks or Clocks(), defaults=defaults, mutates=mutates, tool=tool_of(catalogue)
    )


def _deliver_unstarted(
    catalogue: Catalogue, name: str, problem: Problem, as_json: bool, clocks: Clocks | None = None
) -> int:
    return deliver(
        _answer(catalogue, name, Outcome(Ending.NOT_STARTED, problem), clocks), as_json, _show, catalogue.name
    )


def _show(envelope: Envelope) -> None:
    data: object = envelope.data
    if not data:
        return
    if isinstance(data, dict) and list(data) == ["result"]:
        data = data["result"]
    if isinstance(data, dict) and envelope.code == "INCOMPLETE" and "continue_command" in data:
        lines = (f"to {word}: {data[key]}\n" for word in ("continue", "cancel") if (key := f"{word}_command") in data)
        write_quietly(sys.stdout, "".join(lines))
        return
    blocks = blocks_of(data)
    text = render_value(data) if blocks is None else "\n".join(map(describe_block, blocks))
    write_quietly(sys.stdout, f"{text}\n")


async def _beat(name: str, interval_ms: int, progress: dict[str, object], *, as_json: bool) -> None:
    """Write lines to stderr while a command runs: in words for a log, as JSON for a program."""
    started_ns = monotonic_ns()
    while True:
        await asyncio.sleep(max(interval_ms, 1) / 1000)
        elapsed_ms = (monotonic_ns() - started_ns) // 1_000_000
        if as_json:
            beat = {"type": "heartbeat", "command": name, "elapsed_ms": elapsed_ms, "progress": progress}
            say_line(json.dumps(beat, separators=(",", ":")))
            continue
        of = f" of {progress['total']}" if "total" in progress else ""
        unit = f" {progress['unit']}" if "unit" in progress else ""
        done = f", {progress['done']}{of}{unit}" if progress else ""
        say_line(f"{name}: running for {format_duration(elapsed_ms)}{done}")


@contextlib.contextmanager
def _spool_stdin(limit_ms: int) -> Iterator[Stdin]:
    """Copy stdin to a file, so that the work can be killed, repeated and identified. Raises Failure if it cannot."""
    import tempfile  # takes 2 ms, which most commands of an App do not need

    fd, path = tempfile.mkstemp(prefix="shotclock-stdin-")
    try:
        digest, size = hashlib.sha256(), 0
        with open(fd, "wb") as file:
            for chunk in read_stdin(limit_ms):
                size += len(chunk)
                if size > STDIN_LIMIT:
                    raise refusal([{"field": "stdin", "message": f"more than {STDIN_LIMIT} bytes"}])
                digest.update(chunk)
                file.write(chunk)
        yield Stdin(path, digest.hexdigest())
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
