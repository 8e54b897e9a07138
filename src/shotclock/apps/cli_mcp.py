"""`shotclock mcp`: one question to an MCP server that is gone afterwards, and the log of past calls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calls import commands
from ..calls.call import Call, Outcome
from ..calls.runtime import Runtime
from ..core.envelope import Envelope, Problem, stop_problem
from ..core.errors import Ending
from ..core.limits import ClockKind, Clocks, WallTime, in_seconds
from ..core.value_types import as_dict, replace, value
from ..core.visible_text import one_line, visible
from ..net.tool_call import CLOSE_LIMIT_S, ToolAnswer, ToolRequest, load_client
from ..net.tool_hints import annotations_of
from ..store.call_spool import add_spooled
from ..store.store import Store, read_retention
from ..store.wrapped_calls import PENDING, RUNNING, SUCCEEDED, UNKNOWN, WAITING, CallFilter, LoggedCall
from ..supervise.clock import monotonic_ns, process_began_ns, wall_time
from ..supervise.command_task import CommandReport
from ..supervise.kernel import can_see, is_alive
from ..terminal.drawing import age, short_size, styled, table, time_left
from ..terminal.output import StopListener, brief, write_quietly
from ..terminal.parser import CommandTable, Option, Subcommand, expand, name_and_value
from ..terminal.subcommand import ChildWork, Mistaken, deliver, draw_answer, run_subcommand

if TYPE_CHECKING:
    from rich.console import Console

MOST_LISTED = 10_000
WIDE = 100
LONGEST_SERVER = 16


def _list_calls(
    server: str | None,
    tool: str | None,
    running: bool,
    failed: bool,
    timeouts: bool,
    slowest: bool,
    since: int | None,
    limit: int,
) -> Outcome:
    began = None if since is None else WallTime(max(0, wall_time().ms - since))
    wanted = CallFilter(server, tool, failed, timeouts, began)
    with Store.open() as store:
        add_spooled(store, read_retention(os.environ).calls, wait_ms=None)
        found = store.calls.look(wanted, 0 if running else limit + 1, is_alive, slowest=slowest)
    now = wall_time()
    rows = [] if failed or timeouts else found.describe_open(now, can_see)
    over = [(call.started_at + call.duration_ms, _row(call)) for call in found.ended]
    if not running and not timeouts:
        over += zip((call.started_at for call in found.lost), found.describe_lost(now), strict=True)
    rows += [row for _, row in sorted(over, key=itemgetter(0), reverse=True)]
    if slowest:
        rows.sort(key=_duration, reverse=True)
    return Outcome(Ending.FINISHED, data={"calls": rows[:limit], "more": len(rows) > limit})


def _row(call: LoggedCall) -> dict[str, object]:
    return {**as_dict(call), "started_at": call.started_at.iso()}


def _duration(row: dict[str, object]) -> int:
    duration_ms = row["duration_ms"]
    return duration_ms if isinstance(duration_ms, int) else -1


def _draw_calls(data: Any, console: Console) -> None:
    if not data["calls"]:
        console.print("no calls")
        return
    sizes = {"sent": "request_bytes", "received": "answer_bytes"}
    limit = ["limit"] if any(call.get("due_at") for call in data["calls"]) else []
    if console.width < WIDE:
        sizes = {} if limit else {"received": "answer_bytes"}
    rows = table("age", "server", "tool", "took", "outcome", *sizes, *limit, wraps=2)
    for column in (rows.columns[3], *rows.columns[5:]):
        column.justify = "right"
    for call in data["calls"]:
        colour = "green" if call["outcome"] in SUCCEEDED else "red"
        colour = "yellow" if call["outcome"] in (RUNNING, WAITING, UNKNOWN, PENDING) else colour
        names = (styled(one_line(call[name], 60), no_wrap=True, overflow="ellipsis") for name in ("server", "tool"))
        outcome = styled(call["outcome"], colour)
        took = "" if call["duration_ms"] is None else brief(call["duration_ms"])
        shown = [short_size(call[name]) for name in sizes.values()]
        if limit:
            shown.append(f"{call['due_by']} in {time_left(call['due_at'])}" if call.get("due_at") else "")
        rows.add_row(age(call["started_at"]), *names, took, outcome, *shown)
    rows.columns[1].max_width = LONGEST_SERVER
    console.print(rows)
    if data["more"]:
        console.print("there are more: --limit", style="dim")


LOG = Subcommand(
    "log",
    "List the calls of tools that passed through `shotclock wrap`.",
    options=(
        Option.taking("--server", "NAME", "List only calls of this server: its --name, or the name of its program."),
        Option.taking("--tool", "PATTERN", "List only calls of the tools of that name, as in 'read_*'."),
        Option.flag("--running", "List only calls that have not ended.", excludes=("--failed", "--timeouts")),
        Option.flag("--failed", "List only calls that failed, by an error of the tool or of Shotclock."),
        Option.flag("--timeouts", "List only calls that reached a limit."),
        Option.flag("--slowest", "The slowest first, instead of the newest."),
        Option.duration("--since", "List only calls that began within this time (1h, 7d)."),
        Option.number("--limit", "List at most this many.", 1, MOST_LISTED, default="20"),
        Option.timeout(),
    ),
    run=ChildWork.looking("mcp log", _list_calls, _draw_calls),
)


CONFIGURATION = ".mcp.json"
LARGEST_FILE = 10_000_000
STDERR_LINES = 10
TABLE_NAME = "shotclock mcp"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")

Ask = Callable[[Call, Runtime], Awaitable[ToolAnswer]]


@value
class StdioServer:
    """The command of a server that speaks over stdin and stdout."""

    argv: list[str]
    env: Mapping[str, str]
    folder: Path


# --- the server ---------------------------------------------------------------------------------------------------


def find_server(name: str | None, command: list[str] | None, config: str | None) -> StdioServer:
    """Return the server of a command line, or of a name in a client's configuration. Raises Mistaken."""
    if command is not None:
        if name is not None:
            raise Mistaken({"server": f"{name!r} and a command after -- exclude each other: leave one out"})
        if not command:
            raise Mistaken({"server": "missing COMMAND after --"})
        return StdioServer(command, {}, Path.cwd())
    if name is None:
        raise Mistaken({"server": f"missing SERVER: a name from {config or CONFIGURATION}, or -- COMMAND"})
    servers = _read_configuration(config or CONFIGURATION)
    if name not in servers:
        known = ", ".join(servers) or "none"
        raise Mistaken({"server": f"{config or CONFIGURATION} has no server {name!r}; it has: {known}"})
    return _read_server(name, servers[name])


def _read_configuration(path: str) -> dict[str, object]:
    try:
        if os.path.getsize(path) > LARGEST_FILE:
            raise ValueError("the file is too large")
        content = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        hint = "name another with --config FILE, or write the command of the server after --"
        raise Mistaken({"config": f"there is no file {path!r}: {hint}"}) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Mistaken({"config": f"{path!r} cannot be read: {error}"}) from None
    found = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise Mistaken({"config": f"{path!r} has no object mcpServers"})
    return found


def _read_server(name: str, entry: object) -> StdioServer:
    if isinstance(entry, dict) and "command" not in entry and isinstance(entry.get("url"), str):
        return _read_remote_server(name, entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("command"), str):
        raise Mistaken({"server": f"{name!r} has neither a command nor a url"})
    args, env, folder = entry.get("args", []), entry.get("env", {}), entry.get("cwd", ".")
    words = [entry["command"], *(args if isinstance(args, list) else [None])]
    if not isinstance(env, dict) or not all(isinstance(each, str) for each in [*words, *env.values(), folder]):
        raise Mistaken({"server": f"{name!r} needs args as a list of texts, env as an object of texts, cwd as a text"})
    variables = {key: _expand(name, text) for key, text in env.items()}
    return StdioServer([_expand(name, word) for word in words], variables, Path(_expand(name, folder)))


def _read_remote_server(name: str, entry: dict[str, object]) -> StdioServer:
    """Return the command that reaches a server over HTTP. Its headers pass in variables: others see command lines."""
    headers, kind = entry.get("headers", {}), entry.get("type", "http")
    if kind not in ("http", "streamable-http", "streamableHttp"):
        raise Mistaken({"server": f"{name!r} is of the type {kind!r}; only streamable HTTP is supported"})
    if not isinstance(headers, dict) or not all(isinstance(each, str) for each in headers.values()):
        raise Mistaken({"server": f"{name!r} needs headers as an object of texts"})
    env = {"SHOTCLOCK_CALL_URL": _expand(name, str(entry["url"]))}
    argv = [sys.executable, "-P", "-m", "shotclock", "wrap", "--no-log", "--url", "${SHOTCLOCK_CALL_URL}"]
    for number, (header, text) in enumerate(headers.items()):
        env[f"SHOTCLOCK_CALL_HEADER_{number}"] = _expand(name, text)
        argv += ["--header", f"{header}: ${{SHOTCLOCK_CALL_HEADER_{number}}}"]
    return StdioServer(argv, env, Path.cwd())


def _expand(name: str, text: str) -> str:
    try:
        return expand(text)
    except ValueError as error:
        raise Mistaken({"server": f"{name!r}: {error}"}) from None


# --- the question -------------------------------------------------------------------------------------------------


async def _call_tool(
    server: StdioServer, tool: str, arguments: dict[str, object], call: Call, runtime: Runtime
) -> ToolAnswer:
    def leave(outcome: Outcome) -> None:
        call.cancellation.outcome = outcome

    request = ToolRequest(tool, arguments, server.argv, server.env, os.environ, server.folder, leave)
    found = await request.send(call, runtime)
    if isinstance(found.outcome.data, dict) and isinstance(found.output, dict):
        found.outcome.data = {**found.outcome.data, "structured_content": found.output}
    return found


async def _list_tools(server: StdioServer, call: Call, runtime: Runtime) -> ToolAnswer:
    client = await load_client(call)
    if client is None:
        return ToolAnswer(Outcome(Ending.NOT_STARTED, _late(call)))
    talk = client.ServerConversation(call.trace)
    async with runtime.open(call, server.argv, env=server.env, base_env=os.environ, cwd=server.folder) as process:
        talking = asyncio.ensure_future(talk.talk(talk.over_pipes(process)))
        try:
            bell = call.bound.bell
            limit_s = None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
            await asyncio.wait([talk.listed, talking], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_late = bell is not None and bell.has_passed(monotonic_ns())  # its supervisor may have killed it by now
            talk.close()
            await asyncio.wait([talking], timeout=CLOSE_LIMIT_S)
        finally:
            talking.cancel()
        await process.close(politely=talk.listed.done())
    report = process.report or CommandReport()
    judged = commands.judge(call, process.task, report)
    if talk.listed.done():
        tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in talk.listed.result()]
        return ToolAnswer(Outcome(Ending.FINISHED, data={"tools": tools}, survivors=judged.survivors))
    if report.unstartable is not None:
        return ToolAnswer(Outcome(Ending.NOT_STARTED, judged.problem))
    problem = _late(call) if is_late or not talk.settled.done() else talk.settled.result()
    data = {"stderr": judged.data.get("stderr", "")} if isinstance(judged.data, dict) else None
    return ToolAnswer(Outcome(Ending.KILLED, problem, data, survivors=judged.survivors))


def _late(call: Call) -> Problem:
    fired = call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
    return Problem("TIMEOUT", f"the server did not list its tools within {in_seconds(fired.limit_ms)}", fired=fired)


async def _ask(name: str, ask: Ask, timeout_ms: int) -> Envelope:
    """Ask a server within the timeout. A signal stops the server with everything it has started."""
    with StopListener() as stop:
        async with Runtime() as runtime:
            clocks = Clocks(timeout_ms=timeout_ms)
            call = runtime.begin(name, {}, clocks, began_ns=process_began_ns(), is_command=True)
            working = asyncio.ensure_future(_answer(ask, call, runtime))

            def end(stopped: asyncio.Future[str]) -> None:
                if not stopped.cancelled():
                    call.cancellation.reason, call.cancellation.ending = (
                        stop_problem(stopped.result()),
                        Ending.CANCELLED,
                    )
                    working.cancel()

            stop.add_done_callback(end)
            return await working  # bounded by the call


async def _answer(ask: Ask, call: Call, runtime: Runtime) -> Envelope:
    rewrite = None
    async with runtime.answering(call) as answering:
        result = await ask(call, runtime)
        answering.outcome, rewrite = result.outcome, result.rewrite
    return answering.envelope if rewrite is None else rewrite(answering.envelope)


# --- the command line ---------------------------------------------------------------------------------------------


def _run_call(
    command: list[str] | None,
    server: str | None,
    tool: str | None,
    arg: list[tuple[str, object]],
    json_args: dict[str, object],
    config: str | None,
    timeout: int,
) -> Callable[[bool], int]:
    if command is not None and tool is None:
        server, tool = None, server  # the only word is the tool
    elif command is not None and tool is not None and "=" in tool:
        raise Mistaken({"tool": f"{tool!r} is an argument of the tool: write --arg {tool}"})
    if not tool:
        raise Mistaken({"tool": "missing TOOL; `shotclock mcp tools SERVER` lists them"})
    if len({name for name, _ in arg}) < len(arg):
        raise Mistaken({"arg": "an argument was given twice: leave one out"})
    ask = partial(_call_tool, find_server(server, command, config), tool, {**json_args, **dict(arg)})
    return lambda as_json: deliver(asyncio.run(_ask("mcp call", ask, timeout)), as_json, _show_result)


def _run_tools(
    command: list[str] | None, server: str | None, config: str | None, timeout: int
) -> Callable[[bool], int]:
    ask = partial(_list_tools, find_server(server, command, config))
    return lambda as_json: deliver(asyncio.run(_ask("mcp tools", ask, timeout)), as_json, _show_tools)


def _show_tools(envelope: Envelope) -> None:
    if envelope.ok:
        draw_answer(_draw_tools, envelope.data)
    else:
        _show_stderr(envelope.data)


def _draw_tools(data: Any, console: Console) -> None:
    if not data["tools"]:
        console.print("no tools")
    rows = table()
    for tool in data["tools"]:
        schema = tool.get("inputSchema") or {}
        required = schema.get("required") or ()
        names = " ".join(name if name in required else f"[{name}]" for name in schema.get("properties") or ())
        first, *_ = _SENTENCE_END.split((tool.get("description") or "").strip(), 1)
        about = styled(one_line(first, 200))
        words = " · ".join(filter(None, (one_line(names), ", ".join(annotations_of(tool.get("annotations") or {})))))
        about.append("\n" if about and words else "").append(words, "dim")
        rows.add_row(styled(one_line(tool["name"], 60), "bold", no_wrap=True), about)
    if data["tools"]:
        console.print(rows)


def _show_stderr(data: object) -> None:
    """Write the last lines of a server that failed."""
    text = data.get("stderr") if isinstance(data, dict) else None
    if isinstance(text, str) and text.strip():
        write_quietly(sys.stderr, visible("\n".join(text.rstrip().splitlines()[-STDERR_LINES:])) + "\n")


def _show_result(envelope: Envelope) -> None:
    """Write the texts of a result; of other content, its kind."""
    data = envelope.data
    if not envelope.ok:
        _show_stderr(data)
        return
    content = data.get("content") if isinstance(data, dict) else None
    if not isinstance(content, list):  # of a Shotclock server
        write_quietly(sys.stdout, visible(json.dumps(data, indent=2, ensure_ascii=False)) + "\n")
        return
    for block in content:
        kind, text = block.get("type"), block.get("text")
        shown = (
            visible(text).rstrip("\n")
            if isinstance(text, str)
            else f"[{kind} {block.get('mimeType', '')}".rstrip() + "]"
        )
        write_quietly(sys.stdout, shown + "\n")


def _read_argument(text: str) -> tuple[str, object]:
    """Read `name=text` or `name:=JSON`. Raises ValueError."""
    name, written = name_and_value(text)
    if not name.endswith(":"):
        return name, written
    try:
        return name[:-1], json.loads(written)
    except ValueError as error:
        raise ValueError(f"{written[:40]!r} is not JSON ({error}); name=TEXT passes a text") from None


def _read_arguments(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('should be a JSON object, as in \'{"path": "a.txt"}\'')
    return found


def _main(name: str, run: Callable[..., Callable[[bool], int]], words: list[str]) -> int:
    """Split the command of a server off, which may have options of its own."""
    command = words[words.index("--") + 1 :] if "--" in words else None
    before = words[: words.index("--")] if "--" in words else words
    command_of_verb = replace(VERBS[name], main=None, run=partial(run, command))
    return run_subcommand(TABLE_NAME, command_of_verb, before)


_SERVER = Option.argument(
    "server", "A name in the configuration. Left out if the command of the server follows after --."
)
_CONFIG = Option.taking("--config", "FILE", "The configuration of a client with the server, instead of ./.mcp.json.")
_EPILOGUE = (
    "SERVER is a name in the configuration of a client (mcpServers in ./.mcp.json), or a command after --. It is "
    "started for this, and stopped afterwards with everything it has started."
)
VERBS = {
    "tools": Subcommand(
        "tools",
        "List the tools of an MCP server, which is started for it and gone afterwards.",
        (_SERVER, _CONFIG, Option.json(), Option.timeout("1m")),
        main=partial(_main, "tools", _run_tools),
        usage="SERVER [OPTIONS] | [OPTIONS] -- COMMAND [ARGUMENTS…]",
        epilogue=_EPILOGUE,
    ),
    "call": Subcommand(
        "call",
        "Call one tool of an MCP server, which is started for it and gone afterwards.",
        (
            _SERVER,
            Option.argument("tool", "The tool to call."),
            Option.taking(
                "--arg",
                "NAME=TEXT",
                "An argument of the tool. NAME:=JSON passes a number, a list or any other JSON.",
                read=_read_argument,
                repeats=True,
            ),
            Option.taking(
                "--json-args", "JSON", "All arguments as one JSON object.", default="{}", read=_read_arguments
            ),
            _CONFIG,
            Option.json(),
            Option.timeout("1m"),
        ),
        main=partial(_main, "call", _run_call),
        usage="SERVER TOOL [OPTIONS] | TOOL [OPTIONS] -- COMMAND [ARGUMENTS…]",
        epilogue=_EPILOGUE,
    ),
    "log": LOG,
}
COMMANDS = {
    "mcp": CommandTable(
        TABLE_NAME, "Try the tools of an MCP server by hand, and list past calls.", tuple(VERBS.values()), "verb"
    )
}
