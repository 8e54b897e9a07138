"""Every subcommand but `exec`: words in, one envelope out, on the clock.

The parser only understands; it neither runs nor prints. What it understood becomes a `Work`, which goes through
the same two doors as everything else (`admit`, `answer`) with its body in a child that can be killed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import Annotated, Literal

from .. import __version__
from ..core.clocks import Clocks
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, warning
from ..core.errors import Failure
from ..core.records import changed, value
from ..enforce.admission import Outcome, admit, answer, inherited_deadline, no_time_left
from ..enforce.clock import monotonic_ns, process_began_ns
from ..enforce.forked import carry_out
from .asked import RunAsked
from .output import emit, emit_help, emit_text, say_line, summary_line, wants_json
from .parsing import Mistakes, parse, print_help
from .serve import Serve
from .words import Parameter, Words

SUBCOMMANDS = (
    *("exec", "run", "check", "plan", "schema", "report", "serve", "job", "inbox", "token", "prune"),
    *("errors", "doctor", "help"),
)  # fmt: skip
DEFAULT_TIMEOUT = "30s"

FLAG = Parameter(negative="", show_default=False)
Format = Literal["json", "markdown", "junit"]
# What every subcommand takes.
Json = Annotated[
    bool, Parameter(negative="", show_default=False, help="The envelope alone on stdout, also on a terminal.")
]
Timeout = Annotated[str, Parameter(metavar="D", help="Answer within this time (500ms, 30s, 5m; 0 means none).")]


@value
class Work:
    """A subcommand that was understood."""

    name: str
    body: Callable[[], Outcome]
    timeout: str = DEFAULT_TIMEOUT
    mutates: bool = False
    afterwards: Callable[[Outcome], None] | None = None
    """When it went well; outside of the work, for what is meant to outlive it."""


@value
class Page:
    """A reference page, asked for by name: the one thing besides envelopes that goes to stdout."""

    text: str
    timeout: str = DEFAULT_TIMEOUT


@value
class Help:
    """Help on a subcommand, or on all of them."""

    subcommand: str | None = None


def main(words: list[str]) -> int:
    as_json = wants_json("--json" in words, even_without_colour=words[:1] != ["run"])
    try:
        return _main(words, as_json)
    except KeyboardInterrupt:  # before or after the work, which hears signals itself
        problem = Problem("CANCELLED", "stopped by SIGINT", context={"signal": "SIGINT"}, exit_code=130)
        return _deliver_unstarted("shotclock", problem, as_json)


def _main(words: list[str], as_json: bool) -> int:
    if not words:
        _print_help(None)
        if not as_json:
            return 2
        return _refuse("shotclock", [{"field": "subcommand", "message": f"none given; {_listed()}"}], as_json)
    if words[0] not in (*SUBCOMMANDS, "-h", "--help", "--version"):
        return _refuse("shotclock", [_unknown(words)], as_json, suggestion=_nearest(words[0]))
    if words[0] in _ELSEWHERE:
        return _ELSEWHERE[words[0]](words[1:])
    name = words[0] if words[0] in SUBCOMMANDS else "shotclock"
    try:
        understood, mistakes = _understand(words)
    except Failure as failure:  # to serve others, tokens are looked for
        return _deliver_unstarted(name, Problem(failure.code, str(failure), "validation"), as_json)
    clocks = Clocks()
    if isinstance(understood, Work | Page):
        try:
            clocks = Clocks.of(timeout=understood.timeout)
        except DurationError as error:
            mistakes.append({"field": "timeout", "message": str(error).removeprefix("timeout: ")})
    if understood is None or mistakes:
        return _refuse(name, mistakes, as_json)
    if isinstance(understood, Work):
        return _perform(understood, clocks, as_json)
    if isinstance(understood, Serve):
        return _serve(understood, as_json)
    if isinstance(understood, RunAsked):
        from .run import main as run_main

        return run_main(understood, as_json, is_asked_for="--json" in words)
    if isinstance(understood, Page):
        return emit_text(understood.text, 0)
    _print_help(understood.subcommand)
    return 0


# --- understanding ----------------------------------------------------------------------------------------

WORDS = Words(
    name="shotclock",
    help="Nothing an agent starts can hang: every call on the clock, really stopped, answered with one envelope.",
    version=__version__,
    usage="Usage: shotclock SUBCOMMAND [OPTIONS]",
    epilogue="Off a terminal each subcommand prints one JSON envelope on stdout; `shotclock help exec` says more.",
)


@WORDS.command(name="exec")
def _exec() -> Help:
    """Run one command on the clock; when it hangs, it is really stopped."""
    return Help("exec")  # only listed here: `shotclock exec` itself never comes this way


@WORDS.command()
def run(
    flow: str | None = None,
    /,
    *,
    timeout: Annotated[str | None, Parameter(metavar="D")] = None,
    input: Annotated[list[str] | None, Parameter(metavar="NAME=VALUE", negative="")] = None,
    run_id: Annotated[str | None, Parameter(metavar="ID")] = None,
    resume: Annotated[str | None, Parameter(metavar="RUN_ID")] = None,
    events: Annotated[str | None, Parameter(metavar="FILE")] = None,
    output: Annotated[Format | None, Parameter(metavar="FORMAT")] = None,
    output_file: Annotated[str | None, Parameter(metavar="FILE")] = None,
    budget: Annotated[str | None, Parameter(metavar="D")] = None,
    force: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
) -> RunAsked:
    """Run a workflow, each step on the clock, every change written down.

    Parameters
    ----------
    flow
        The file.
    timeout
        Of the whole run (5m; 1000 or more without a unit is milliseconds); the file's own if it is shorter.
    input
        A value for one of its inputs; may be given several times.
    run_id
        The name of this run, instead of a made-up one.
    resume
        Go on with a run that waits for a person, or whose process died. Finished steps are not run again.
    events
        Write a line of JSON to this file for every change.
    output
        What to print at the end: json (the envelope), markdown or junit.
    output_file
        Write that to this file instead.
    budget
        How long to wait once all that is left needs a person; then the run is parked and the exit code is 14 (0: for
        as long as it takes, which is what happens on a terminal; otherwise SHOTCLOCK_RESPONSE_TIMEOUT, or 30s).
    force
        Run it even if its clocks cannot fit.
    json
        The envelope alone on stdout, also on a terminal.
    """
    mistakes: Mistakes = []
    if (flow is None) == (resume is None):
        mistakes.append({"field": "flow", "message": "name a file, or a run to --resume"})
    inputs = {}
    for word in input or []:
        name, equals, value = word.partition("=")
        if not equals:
            mistakes.append({"field": "input", "message": f"{word!r} is not NAME=VALUE"})
        inputs[name] = value
    try:
        limit_ms = _run_timeout(timeout, "timeout")
    except _Mistaken as mistaken:
        raise _Mistaken(mistakes + mistaken.mistakes) from None
    budget_ms = None
    if budget is not None:
        try:
            budget_ms = parse_duration_ms(budget)
        except DurationError as error:
            mistakes.append({"field": "budget", "message": str(error)})
    if mistakes:
        raise _Mistaken(mistakes)
    return RunAsked(flow, run_id, resume, limit_ms, inputs, force, events, output, output_file, budget_ms)


@WORDS.command()
def check(
    flow: str,
    /,
    *,
    run_timeout: Annotated[str | None, Parameter(metavar="D")] = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Work:
    """Look a workflow file over: its shape, its dependencies, and whether its clocks can fit.

    Parameters
    ----------
    flow
        The file.
    run_timeout
        As if the run had this long (5m; 1000 or more without a unit is milliseconds).
    """
    from .flow import check

    limit_ms = _run_timeout(run_timeout)
    return Work("check", lambda: check(flow, limit_ms), timeout)


@WORDS.command()
def plan(
    flow: str,
    /,
    *,
    run_timeout: Annotated[str | None, Parameter(metavar="D")] = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Work:
    """Say what a workflow would take: order, clocks after nesting, the longest way through. Nothing runs.

    Parameters
    ----------
    flow
        The file.
    run_timeout
        As if the run had this long (5m; 1000 or more without a unit is milliseconds).
    """
    from .flow import plan

    limit_ms = _run_timeout(run_timeout)
    return Work("plan", lambda: plan(flow, limit_ms), timeout)


@WORDS.command()
def schema(*, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT) -> Work:
    """Print the JSON Schema of workflow files, for editors."""
    from .flow import schema

    return Work("schema", schema, timeout)


def _run_timeout(written: str | None, field: str = "run-timeout") -> int | None:
    if written is None:
        return None
    try:
        # Scripts write 300000; `timeout: 5` in a file is seconds, so a small number may be meant either way.
        is_plain = written.strip().isascii() and written.strip().isdecimal() and len(written.strip()) > 3
        return parse_duration_ms(written, bare="ms" if is_plain else None)
    except DurationError as error:
        raise _Mistaken([{"field": field, "message": str(error)}]) from None


@WORDS.command()
def report(
    run_id: str | None = None,
    /,
    *,
    html: Annotated[str | None, Parameter(metavar="FILE")] = None,
    open: Annotated[bool, FLAG] = False,
    output: Annotated[Format, Parameter(metavar="FORMAT")] = "json",
    output_file: Annotated[str | None, Parameter(metavar="FILE")] = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Work:
    """Show what became of a run, step by step; without an id, list the last runs.

    Parameters
    ----------
    run_id
        The run, or the beginning of its id.
    html
        Write a page with the timeline to this file. It needs nothing else.
    open
        Show the page in a browser, if there is a terminal and a browser here; say where it is otherwise.
    output
        What to print: json (the envelope; a timeline on a terminal), markdown or junit.
    output_file
        Write that to this file instead.
    """
    from .report import listed, show
    from .report import report as made

    if run_id is None:
        if html is not None or open or output_file is not None or output != "json":
            raise _Mistaken([{"field": "run-id", "message": "which run? `shotclock report` lists the last ones"}])
        return Work("report", listed, timeout)

    def body() -> Outcome:
        return made(run_id, html=html, output=output, output_file=output_file, keeps=open)

    writes = html is not None or open or output_file is not None
    says = output != "json" or wants_json(json)  # then nothing else does, to a person
    return Work("report", body, timeout, writes, (lambda outcome: show(outcome, says=says)) if open else None)


@WORDS.command(name="job")
def _job() -> Help:
    """List, look at, wait for and cancel work that goes on after its caller left."""
    return Help("job")  # only listed here, like exec


@WORDS.command(name="inbox")
def _inbox() -> Help:
    """Decide what agents propose, or propose something: a person's yes or no, waited for but never for long."""
    return Help("inbox")  # like job


@WORDS.command(name="token")
def _token() -> Help:
    """Make, list and revoke the tokens with which agents and operators come over the network."""
    return Help("token")  # like job


@WORDS.command()
def serve(
    target: str | None = None,
    /,
    *,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None,
    require_token: Annotated[bool, FLAG] = False,
    operation_timeout: Annotated[str | None, Parameter(metavar="D")] = None,
    operation_timeout_ms: Annotated[str | None, Parameter(metavar="N")] = None,
    elicitation: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
) -> Serve:
    """Serve an App's commands as MCP tools, on stdin and stdout.

    Parameters
    ----------
    target
        package.module:app or path/to/file.py:app (`:app` may be left out).
    http
        Serve on this address of this machine instead; port 0 is any free one.
    require_token
        With --http: let nobody in without an access token, on this machine either.
    operation_timeout
        The backstop above every tool's own timeout; the app's own if not given, 0 means none.
    operation_timeout_ms
        The same in milliseconds.
    elicitation
        Let a client that can ask its own person decide what is not destructive. Nothing proves that a person answered.
    json
        If it cannot be served: the envelope alone on stdout, also on a terminal. Without it and without --http it is
        the last line of stderr, because stdout is the protocol's.
    """
    from .serve import understood

    asked, mistakes = understood(target, http, operation_timeout, operation_timeout_ms, require_token, elicitation)
    if target is None:
        message = "serve needs a TARGET, such as tool.py:app (`shotclock inbox serve` serves the operators' page alone)"
        mistakes.insert(0, {"field": "target", "message": message})
    if mistakes:
        raise _Mistaken(mistakes)
    return changed(asked, json=json)


@WORDS.command()
def prune(
    *,
    older_than: Annotated[str | None, Parameter(metavar="D")] = None,
    keep: Annotated[str | None, Parameter(metavar="N")] = None,
    max_size: Annotated[str | None, Parameter(metavar="SIZE")] = None,
    dry_run: Annotated[bool, FLAG] = False,
    json: Json = False,
    timeout: Timeout = "5m",
) -> Work:
    """Delete runs, proposals and jobs that ended long ago. What is under way, parked or waiting stays.

    Parameters
    ----------
    older_than
        What ended this long ago (7d, 12h), instead of 30d for runs and 90d for proposals.
    keep
        So many ended runs at most, the newest, instead of 1000.
    max_size
        So much for ended runs at most (20MB), instead of 1GB.
    dry_run
        Say what would go, and delete nothing.
    """
    from ..store.retention import parse_size
    from .prune import prune_store

    changes: dict[str, int] = {}
    mistakes: Mistakes = []
    try:
        if older_than is not None:
            age_ms = parse_duration_ms(older_than)
            changes |= {"runs_ms": max(1, age_ms), "proposals_ms": max(1, age_ms)}
    except DurationError as error:
        mistakes.append({"field": "older-than", "message": str(error)})
    if keep is not None and (not keep.isdecimal() or len(keep) > 15):
        mistakes.append({"field": "keep", "message": f"{keep[:40]!r} is no whole number; 0 is no limit"})
    elif keep is not None:
        changes["runs"] = int(keep)
    try:
        if max_size is not None:
            changes["runs_bytes"] = parse_size(max_size)
    except ValueError as error:
        mistakes.append({"field": "max-size", "message": str(error)})
    if mistakes:
        raise _Mistaken(mistakes)
    return Work("prune", lambda: prune_store(changes, dry_run=dry_run), timeout, mutates=not dry_run)


@WORDS.command()
def errors(
    code: str | None = None,
    /,
    *,
    markdown: Annotated[bool, FLAG] = False,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Work | Page:
    """List every error and warning code, or look one up.

    Parameters
    ----------
    code
        Only this one, as in `shotclock errors TIMEOUT`.
    markdown
        Print the reference page instead of an envelope.
    """
    from .errors import look_up
    from .errors import markdown as page

    if markdown:
        return Page(page(), timeout)
    return Work("errors", lambda: look_up(code), timeout)


@WORDS.command()
def doctor(
    *,
    sweep: Annotated[bool, FLAG] = False,
    trace: Annotated[str | None, Parameter(metavar="ID")] = None,
    json: Json = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Work:
    """Look at this machine: what stops work here, tried on a live process tree.

    Parameters
    ----------
    sweep
        Stop leftovers: this user's, overdue, unguarded. Look at the list first.
    trace
        Only leftovers of this trace (meta.trace_id of the envelope).
    """
    from .doctor import check_up

    return Work("doctor", lambda: check_up(sweep=sweep, trace_id=trace), timeout, mutates=sweep)


@WORDS.command(name="help")
def _help(
    subcommand: str | None = None,
    /,
    *,
    markdown: Annotated[bool, FLAG] = False,
) -> Help | Page:
    """Say more about one subcommand, as in `shotclock help exec`.

    Parameters
    ----------
    subcommand
        The one to say more about.
    markdown
        With exec: print its reference page.
    """
    if subcommand == "exec" and markdown:
        return Page(exec_page())
    if subcommand is not None and subcommand not in SUBCOMMANDS:
        raise _Mistaken([_unknown([subcommand])])
    if markdown:
        raise _Mistaken([{"field": "markdown", "message": "only exec has a page: shotclock help exec --markdown"}])
    return Help(subcommand)


class _Mistaken(Exception):
    def __init__(self, mistakes: Mistakes) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes


def _understand(words: list[str]) -> tuple[Work | Page | Help | Serve | RunAsked | None, Mistakes]:
    parsed, mistakes = parse(WORDS, words, help_hint=f"shotclock help {words[0]}")
    if parsed is None:
        return None, mistakes
    if parsed.wants_help:
        return Help(parsed.words[0] if parsed.words[0] in SUBCOMMANDS else None), mistakes
    if parsed.wants_version:
        return Work("shotclock", _version), mistakes
    try:
        assert parsed.function is not None
        return parsed.function(*parsed.arguments.args, **parsed.arguments.kwargs), mistakes
    except _Mistaken as mistaken:
        return None, mistakes + mistaken.mistakes


def _unknown(words: list[str]) -> dict[str, str]:
    word = words[0]
    if word.startswith("-"):
        named = [later for later in words if later in SUBCOMMANDS]
        example = f"shotclock {named[0] if named else 'SUBCOMMAND'} {word}"
        return {"field": word, "message": f"options come after the subcommand, as in `{example}`"}
    return {"field": "subcommand", "message": f"{word!r} is no subcommand; {_nearest(word) or _listed()}"}


def _nearest(word: str) -> str | None:
    close = difflib.get_close_matches(word.lower(), SUBCOMMANDS, n=1)
    return f"did you mean {close[0]}?" if close else None


def _listed() -> str:
    return f"there are {', '.join(SUBCOMMANDS[:-1])} and {SUBCOMMANDS[-1]}"


def _version() -> Outcome:
    return Outcome(Ending.FINISHED, data={"version": __version__})


# --- doing ------------------------------------------------------------------------------------------------


def _perform(work: Work, clocks: Clocks, as_json: bool) -> int:
    inherited = inherited_deadline(os.environ, monotonic_ns())
    admission = admit(work.name, clocks, parent=inherited.deadline, mutates=work.mutates)
    admission.warnings += tuple(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings)
    outcome = no_time_left(admission) if admission.no_time_left else carry_out(admission, work.body)
    if outcome.problem is None and work.afterwards is not None:
        work.afterwards(outcome)
    return _deliver(answer(admission, outcome), as_json)


def _job_main(words: list[str]) -> int:
    from .job import main

    return main(words, app=None, command=["shotclock"])


def _inbox_main(words: list[str]) -> int:
    from .inbox import main

    return main(words)


def _token_main(words: list[str]) -> int:
    from .token import main

    return main(words)


# Subcommands with verbs of their own, which they understand themselves.
_ELSEWHERE: dict[str, Callable[[list[str]], int]] = {"job": _job_main, "inbox": _inbox_main, "token": _token_main}


def _serve(asked: Serve, as_json: bool) -> int:
    from .serve import run

    ended = run(asked)
    if not isinstance(ended, Failure):
        return ended
    problem = Problem(ended.code, str(ended), "validation", context=ended.context or None, suggestion=ended.suggestion)
    if as_json:  # who started us as a server reads stderr, if anything
        say_line(f"shotclock: {ended.code}: {ended}")
    return _deliver_unstarted("serve", problem, as_json, to_stderr=asked.options.address is None and not asked.json)


def _refuse(name: str, mistakes: Mistakes, as_json: bool, *, suggestion: str | None = None) -> int:
    message = "; ".join(f"{mistake['field']}: {mistake['message']}" for mistake in mistakes)
    problem = Problem("ARG_ERROR", message, "validation", errors=mistakes, suggestion=suggestion)
    return _deliver_unstarted(name, problem, as_json)


def _deliver_unstarted(name: str, problem: Problem, as_json: bool, *, to_stderr: bool = False) -> int:
    # A server has no clock of its own; what the others say is what they would have had.
    timeout = "0" if name == "serve" else DEFAULT_TIMEOUT
    admission = admit(name, Clocks.of(timeout=timeout), began_ns=process_began_ns())
    envelope = answer(admission, Outcome(Ending.NOT_STARTED, problem))
    if as_json and to_stderr:
        say_line(envelope.to_json())
        return envelope.exit_code
    return _deliver(envelope, as_json)


def _deliver(envelope: Envelope, as_json: bool) -> int:
    if envelope.ok and isinstance(envelope.value, str):  # a text was asked for by name: it is the data
        return emit_text(envelope.value, envelope.exit_code)
    if as_json:
        return emit(envelope)
    if envelope.data is not None and envelope.ending == Ending.FINISHED:
        from rich.console import Console

        from .shown import render

        render(envelope, Console(highlight=False))
    if envelope.error is not None or envelope.warnings:
        say_line(summary_line(envelope))
    return envelope.exit_code


# --- help -------------------------------------------------------------------------------------------------


def _print_help(subcommand: str | None) -> None:
    """To stdout only where a person reads it; then with colour, elsewhere plain."""
    if subcommand == "exec":
        from .exec import HELP

        emit_help(HELP)
        return
    if subcommand in _ELSEWHERE:
        _ELSEWHERE[subcommand](["--help"])
        return
    print_help(WORDS, [] if subcommand is None else [subcommand])


def exec_page() -> str:
    """docs/reference/exec.md: `shotclock help exec --markdown`. A test compares the two."""
    from .exec import HELP

    return (
        "<!-- Generated by `shotclock help exec --markdown`. Do not edit. -->\n\n"
        "# shotclock exec\n\n"
        f"```text\n{HELP.rstrip()}\n```\n\n"
        "How to use it: [the tutorial](../tutorial.md), [before every command of an agent](../howto/agents.md), "
        "[choosing clocks](../howto/clocks.md). Its answer: [the envelope](envelope.md).\n"
    )
