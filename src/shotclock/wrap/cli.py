"""`shotclock wrap`: an MCP server over stdio, behind limits.

One such process runs before every server of every client, so it imports only what that needs.
"""

from __future__ import annotations

import os
import signal

from ..calls.commands import problems_with
from ..commands.exec import EXIT_CODES, NOT_DONE, read_byte_count
from ..core.limits import format_duration
from ..core.value_types import replace
from ..supervise import foreground
from ..supervise.foreground import TerminalSignals
from ..supervise.spans import are_wanted
from ..terminal.output import emit_text, say_line
from ..terminal.parser import (
    Option,
    ParsedLine,
    Subcommand,
    expand,
    name_and_value,
    nearest_of,
)
from ._asked_calls import DEFAULT_ASK_WAIT_MS
from ._call_log import CallLog
from ._catalogue import LastCatalogue
from ._front import Front
from ._gate import Policy
from ._large_results import LARGEST_LIMIT
from ._limits import (
    DEFAULT_GRACE_MS,
    DEFAULT_LIST_MS,
    DEFAULT_QUEUE_MS,
    DEFAULT_SHUTDOWN_MS,
    DEFAULT_START_UP_MS,
    DEFAULT_TIMEOUT_MS,
    CallLimits,
    ServerLimits,
    read_tool_limits,
)
from ._pins import LockFile
from ._requests import EndedRequest
from ._rules import CallVerdict, Rules, rule_reader
from ._server_process import AdapterCommand, ServerCommand
from .remote.endpoint import Endpoint, read_header, read_url


def main(words: list[str]) -> int:
    foreground.fill_standard_descriptors()
    line = COMMAND.read(words)
    if line.wants == "help":
        return emit_text(COMMAND.help(), 0)
    command = line.typed.get("command", [])
    env = dict(line.values["env"])
    limits = read_limits(line)
    server = read_server(line, command, env, limits.grace_ms)
    if command and "--" not in words and (verb := _mistyped_verb(command[0])) is not None:
        line.refuse("command", f"{command[0]!r} was not found; did you mean shotclock wrap {verb}?")
    policy = read_policy(line, command if line.values["url"] is None else server.identity, env)
    if line.mistakes:
        for mistake in line.mistakes:
            say_line(f"shotclock wrap: {mistake['field']}: {mistake['message']}")
        return NOT_DONE
    signals = TerminalSignals()
    catalogue = LastCatalogue(server) if line.values["cached_catalogue"] else None
    name = line.values["name"] or server.name
    log = None if line.values["no_log"] else CallLog(name)
    traced = None
    if are_wanted():
        from ..calls.telemetry import is_installed  # with threads and queues, which others need not load
        from ._call_spans import CallSpans

        traced = CallSpans(name) if is_installed() else None
    records = [each.add for each in (log, traced) if each is not None]

    def record_end(ended: EndedRequest) -> None:
        for record in records:
            record(ended)

    front = Front(
        server,
        limits,
        signals,
        is_lazy=line.values["lazy"],
        policy=policy,
        on_ended=record_end if records else None,
        on_open=None if log is None else log.record_open,
        catalogue=catalogue,
    )
    if os.isatty(0):
        say_line("shotclock wrap: waiting for a client on stdin; to try one by hand: shotclock mcp tools -- COMMAND")
    front.run()
    for each in (log, traced):
        if each is not None and (missing := each.close()):
            say_line(f"shotclock wrap: {missing}")
    if (problem := front.life.unstartable) is not None:
        say_line(f"shotclock wrap: {problem.message}; {problem.suggestion or problem.registered.hint}")
        return EXIT_CODES.get(problem.code, NOT_DONE)
    return -signal.Signals[signals.stopped_by] if signals.stopped_by is not None else 0


def read_server(line: ParsedLine, command: list[str], env: dict[str, str], grace_ms: int) -> ServerCommand:
    """Return the process to start: the server or, for a server over HTTP, our adapter. Adds the mistakes."""
    if line.values["url"] is None:
        if command:
            line.mistakes += problems_with(command, env, line.values["cwd"])
        elif not line.suggested:
            line.refuse("command", "missing: write the command of the server after --, or give --url")
        return ServerCommand(command, env, line.values["cwd"], grace_ms)
    if command:
        line.refuse("url", "--url and a command after -- exclude each other: leave one out")
    endpoint = Endpoint("http", "localhost", 80, "/")
    try:
        endpoint = read_url(expand(line.values["url"]))
    except ValueError as error:
        line.refuse("url", str(error))
    headers = dict(endpoint.headers)
    for text in line.values["header"]:
        try:
            name, content = read_header(expand(text))
        except ValueError as error:
            line.refuse("header", str(error))
        else:
            if name.lower() in map(str.lower, headers):
                line.refuse("header", f"{name} was given before, or is in the URL: leave one out")
            headers[name] = content
    return AdapterCommand(replace(endpoint, headers=tuple(headers.items())), grace_ms)


def read_policy(line: ParsedLine, command: list[str], env: dict[str, str]) -> Policy | None:
    """Return the policy that a command line sets, if any. Adds the mistakes to the line."""
    values = line.values
    rules = Rules(tuple(values["rules"]), values["read_only"])
    if not rules.rules and not rules.is_read_only and values["lock"] is None:
        return None
    try:
        lock = None if values["lock"] is None else LockFile(values["lock"])
    except ValueError as error:
        line.refuse("lock", str(error))
        return None
    asks_about_changes = values["on_change"] == "ask"
    approvals = None
    if rules.asks or asks_about_changes:
        from ._approvals import InboxThread  # with the store, which others need not load

        approvals = InboxThread(command, os.path.abspath(values["cwd"] or os.curdir), env)
    return Policy(rules, values["ask_wait"], lock, values["update_lock"], asks_about_changes, approvals)


def _rule(verdict: CallVerdict, help: str) -> Option:
    return Option.taking(f"--{verdict}", "RULE", help, read=rule_reader(verdict), repeats=True, key="rules")


def _under(heading: str, *options: Option) -> list[Option]:
    return [replace(each, heading=heading) for each in options]


def read_limits(line: ParsedLine) -> ServerLimits:
    values = line.values
    return ServerLimits(
        call=CallLimits(values["timeout"], values["idle"], values["queue"]),
        tools=tuple(values["tool"]),
        start_up_ms=values["start_up"],
        list_ms=values["list"],
        shutdown_ms=values["shutdown"],
        grace_ms=values["grace"],
        heartbeat_ms=values["heartbeat"],
        idle_shutdown_ms=values["idle_shutdown"],
        lifetime_ms=values["max_lifetime"],
        result_bytes=values["result_limit"],
    )


def _read_result_limit(text: str) -> int:
    count = read_byte_count(text)
    if count > LARGEST_LIMIT:
        raise ValueError(f"{text} is more than the {LARGEST_LIMIT // 1024 // 1024}M that may be kept in memory")
    return count


def _read_variable(text: str) -> tuple[str, str]:
    if "=" in text:
        return name_and_value(text)
    if text not in os.environ:
        raise ValueError(f"the variable {text!r} is not set, so write {text}=VALUE")
    return text, os.environ[text]


def _limit(name: str, help: str, default_ms: int = 0) -> Option:
    return Option.duration(name, help, default=format_duration(default_ms) if default_ms else "0")


_CALL = _under(
    "Limits of a call (500ms, 30s, 5m or PT30S; 0 means none)",
    _limit(
        "--timeout",
        "The time for a call. It is cancelled then, and answered at most a grace later.",
        DEFAULT_TIMEOUT_MS,
    ),
    _limit(
        "--idle",
        "Answer a call after this time without progress. Time in which a person answers the server does not count.",
    ),
    _limit(
        "--queue", "Answer a call that has waited this long for a server that is being started again.", DEFAULT_QUEUE_MS
    ),
    Option.taking(
        "--tool",
        "PATTERN=LIMITS",
        "Other limits for the tools of that name, as in 'build_*=timeout:30m,idle:2m'. The first match counts.",
        read=read_tool_limits,
        repeats=True,
    ),
    _limit(
        "--heartbeat",
        "Report progress to the client this often for a call with a progress token, while the server reports none.",
    ),
    Option.taking(
        "--result-limit",
        "N",
        "Cut larger results of calls to this many bytes (64k, 1M), head and tail; the result then links to a file "
        "with the whole.",
        default="0",
        read=_read_result_limit,
    ),
)
_SERVER = _under(
    "Limits of the server",
    _limit("--start-up", "The time for the first answer, downloads included.", DEFAULT_START_UP_MS),
    _limit("--list", "The time to list tools and the like.", DEFAULT_LIST_MS),
    _limit(
        "--grace", "The time to react to a cancellation or SIGTERM. After it the server is killed.", DEFAULT_GRACE_MS
    ),
    _limit("--shutdown", "The time to end after the client has gone.", DEFAULT_SHUTDOWN_MS),
)
_POLICY = _under(
    "Policy (the first rule that matches a call counts; without a match it is allowed)",
    _rule(
        CallVerdict.ALLOW,
        "Let such calls pass. A rule is a pattern of tools, as 'read_*', or destructive, read-only, idempotent or "
        "open-world, and patterns of arguments, as 'write_file path=/tmp/*'.",
    ),
    _rule(CallVerdict.ASK, "Ask a person in the inbox before such calls. A tool without hints is destructive."),
    _rule(CallVerdict.DENY, "Answer such calls with an error."),
    Option.flag("--read-only", "Deny every tool that does not declare readOnlyHint."),
    _limit(
        "--ask-wait",
        "How long a call waits for a person. The identical call picks a later decision up.",
        DEFAULT_ASK_WAIT_MS,
    ),
    Option.taking(
        "--lock",
        "FILE",
        "Pin the definitions of tools, prompts and resource templates, and the instructions of the server, in this "
        "file. The first start writes it; later, others are left out of lists and cannot be used.",
    ),
    Option.taking(
        "--on-change",
        "WHAT",
        "block, or ask a person in the inbox whether a changed definition may be pinned.",
        choices=("block", "ask"),
        default="block",
        needs="--lock",
    ),
    Option.flag("--update-lock", "Pin the definitions anew, as the server lists them.", needs="--lock"),
)
_LIFE = _under(
    "Life of the server",
    Option.flag("--lazy", "Start the server with the first message of the client."),
    Option.flag(
        "--cached-catalogue",
        "Until the server is ready, answer the greeting of the client and its list of tools as the server did the "
        "last time.",
    ),
    _limit("--idle-shutdown", "Stop the server after this time without messages; the next one starts it again."),
    _limit("--max-lifetime", "Stop the server at this age, once no call is open; the next message starts it again."),
    Option.taking("--cwd", "DIR", "Run the server in this directory.", excludes=("--url",)),
    Option.taking(
        "--env",
        "K[=V]",
        "Set a variable of the server. Without a value it is the one of the environment.",
        read=_read_variable,
        repeats=True,
        excludes=("--url",),
    ),
)
_REMOTE = _under(
    "A server over HTTP",
    Option.taking("--url", "URL", "Use the server at this address, over streamable HTTP, in place of a command."),
    Option.taking(
        "--header",
        "'NAME: VALUE'",
        "Send this header with every request, as in 'Authorization: Bearer ${TOKEN}', with a variable of the "
        "environment.",
        repeats=True,
        needs="--url",
    ),
)
_LOG = _under(
    "Log of calls",
    Option.taking("--name", "NAME", "The name of the server in `mcp log`, instead of its program."),
    Option.flag("--no-log", "Do not record calls for `shotclock mcp log`."),
)

COMMAND = Subcommand(
    "wrap",
    "Run an MCP server behind limits; restart it when it crashes, and leave nothing behind.",
    (*_CALL, *_SERVER, *_POLICY, *_LIFE, *_REMOTE, *_LOG),
    rest="command",
    usage="[OPTIONS] -- COMMAND [ARGUMENTS…] | [OPTIONS] --url URL",
    description="Run an MCP server that speaks over stdin and stdout, or use one over HTTP. Messages pass unchanged in "
    "both directions; a call that hangs is answered on time, and a server that crashes or hangs is replaced.",
    epilogue="""\
In the configuration of a client, put it in front of the server:

  "command": "shotclock",
  "args": ["wrap", "--", "npx", "-y", "@modelcontextprotocol/server-everything"]

`shotclock wrap install CLIENT` does that for every server of Claude Code, Codex, Cursor, VS Code or Gemini CLI, and
`shotclock wrap remove CLIENT` restores them; see their --help. `shotclock wrap status` lists them.

At a limit the server is asked to cancel the call. If it then answers nothing within the grace, not even a ping, it is
killed with everything it has started, and started again. The call is answered with an error that names the limit, and
whether it is safe to call again. Calls are repeated after a crash only if the tool declares readOnlyHint or
idempotentHint. After 5 crashes in a minute the server is not started for half a minute.

When the client goes, its stdin closed or its process killed, so does everything the server has started. Lines of the
server's stdout that are not JSON-RPC go to stderr.

Exit codes: 0 the client has gone; 125 bad options or a failure of ours; 126 the server cannot be executed; 127 it was
not found. A signal that stopped us also ends us.""",
    main=main,
)
FOR_EVERY_SERVER = (*_CALL, *_SERVER, *_LIFE, *_LOG, *_POLICY)
"""The options that suit every server over stdin and stdout."""
VERBS = ("install", "remove", "status")


def _mistyped_verb(word: str) -> str | None:
    """Return the verb that a word resembles which is no program on PATH."""
    if os.sep in word or any(os.access(os.path.join(folder, word), os.X_OK) for folder in os.get_exec_path()):
        return None
    return nearest_of(word, VERBS)


def names_verb(words: list[str]) -> bool:
    """Return whether the words begin with a verb of `shotclock wrap`. Only a format may precede it."""
    rest = words
    while rest and rest[0].partition("=")[0] in ("--json", "--format"):
        rest = rest[2:] if rest[0] == "--format" else rest[1:]
    return bool(rest) and rest[0] in VERBS
