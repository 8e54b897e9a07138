"""`shotclock serve`, and the server behind `shotclock inbox serve`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from ..commands.exec import read_byte_count
from ..core.content_blocks import LONGEST_CONTENT
from ..core.errors import Failure
from ..core.value_types import replace
from ..dispatch.engines import engine_options
from ..terminal.output import say_line
from ..terminal.parser import Option, Subcommand
from ..terminal.subcommand import Mistaken, deliver, run_subcommand, unstarted
from .server.serve import Options, options_of, serve_inbox, serve_shell, serve_target
from .server.shell_jobs import ShellLimits

INSTALLABLE = ("claude", "codex", "cursor", "vscode", "gemini")
FILES_VARIABLE = "SHOTCLOCK_UI_FILES"  # read by shotclock.ui.tools, in another process


def read_serve_options(**values: Any) -> Options:
    options, found = options_of(**values)
    if found:
        raise Mistaken({field.replace("_", "-"): message for field, message in found.items()})
    return options


def serve(name: str, target: str | None, options: Options, as_json: bool, *, to_stderr: bool = False) -> int:
    """Serve an App, or without a target the operators' page, until a signal. `to_stderr`: stdout is the protocol's."""
    try:
        return asyncio.run(serve_inbox(options)) if target is None else serve_target(target, options)
    except Failure as failure:
        if as_json and name == "serve":  # a client that started a server reads stderr, if anything
            say_line(f"shotclock: {failure.code}: {failure}")
        envelope = unstarted(name, failure, timeout_ms=0)
    if as_json and to_stderr:
        say_line(envelope.to_json())
        return envelope.exit_code
    return deliver(envelope, as_json)


def _serve(target: str, http: str | None, json_only: bool, files: str | None, **values: Any) -> Callable[[bool], int]:
    entry = {each: values.pop(each) for each in ("install", "remove", "user", "project", "name", "yes")}
    options = read_serve_options(http=http, **values)
    if files is not None:
        if target != "ui":
            raise Mistaken({"files": "belongs to the target ui"})
        if not os.path.isdir(files):
            raise Mistaken({"files": f"{files!r} is no folder"})
    if entry["install"] is None and entry["remove"] is None:
        if alone := [each for each, given in entry.items() if given not in (None, False)]:
            raise Mistaken({each: f"--{each} needs --install or --remove" for each in alone})
    else:
        words = [f"--{each}" for each in ("elicitation", "reload") if values[each]]
        words += [] if files is None else ["--files", os.path.abspath(files)]
        for option_name in ("operation_timeout", "operation_timeout_ms"):
            if values[option_name] is not None:
                words += [f"--{option_name.replace('_', '-')}", str(values[option_name])]
        if values["result_limit"] != LONGEST_CONTENT:
            words += ["--result-limit", str(values["result_limit"])]
        from .cli_install import change_entry  # a server does without it

        verb = "remove" if entry["install"] is None else "install"
        about = {each: entry[each] for each in ("project", "yes")}
        work = change_entry(verb, entry[verb], entry["name"], target, words, **about)
        return lambda as_json: work(as_json or json_only)
    if target == "ui":
        os.environ.pop(FILES_VARIABLE, None)  # only the option opens a folder
        os.environ |= {} if files is None else {FILES_VARIABLE: os.path.abspath(files)}
        target = "shotclock.ui.tools:app"
    return lambda as_json: serve("serve", target, options, as_json, to_stderr=http is None and not json_only)


def _serve_shell(timeout: int, idle: int, budget: int, cwd: str) -> Callable[[bool], int]:
    def run(as_json: bool) -> int:
        try:
            if not os.path.isdir(cwd):  # reported on stderr: the client that started us reads the protocol on stdout
                raise Failure("CWD_UNUSABLE", f"--cwd: {cwd!r} is not a directory")
            return asyncio.run(serve_shell(ShellLimits(timeout, idle, budget), os.path.abspath(cwd)))
        except Failure as failure:
            say_line(f"shotclock: {failure.code}: {failure}")
            return unstarted("serve shell", failure, timeout_ms=0).exit_code

    return run


SHELL = Subcommand(
    "shell",
    "Serve a shell whose commands always end, to an agent that has no hook for `exec`.",
    options=(
        Option.duration("--timeout", "The timeout of `run` where a call names none; 0 means no limit.", default="2m"),
        Option.duration(
            "--idle", "Stop a command of `run` that writes nothing for this long; 0 means no limit.", default="0"
        ),
        Option.duration(
            "--budget",
            "The longest wait of a call. Keep it below the timeout of the client, which is often 60 s.",
            default="45s",
            is_positive=True,
        ),
        Option.taking("--cwd", "DIR", "The folder of commands; a call may name another.", default="."),
    ),
    run=_serve_shell,
    description="Serve a shell as MCP tools, on stdin and stdout: run, start, logs, wait, send_input, stop and list. "
    "Every call answers within the budget: a command that takes longer continues as a job, and the answer says how to "
    "wait for it. When a command ends or is stopped, all processes that it has started are stopped as well.\n\n"
    "Jobs belong to the connection: they are stopped when the client leaves, also if this server is killed. A client "
    "starts its own server, so that it sees no jobs of others.\n\n"
    "Commands run with your rights in bash (sh, if there is no bash). Your agent's rules for its own shell "
    "do not apply to them, only its rules for MCP tools.",
    epilogue="For a client with a list of servers in JSON:\n\n"
    '  {"mcpServers": {"shell": {"command": "shotclock", "args": ["serve", "shell"]}}}\n\n'
    "Output that is longer than an answer is kept in a private file below SHOTCLOCK_HOME, up to 32 MiB, for a day.",
)


def _main(words: list[str]) -> int:
    if "shell" not in words:
        return run_subcommand("shotclock", replace(COMMANDS["serve"], main=None), words)
    words = list(words)
    words.remove("shell")
    return run_subcommand("shotclock serve", SHELL, words)


COMMANDS = {
    "serve": Subcommand(
        "serve",
        options=(
            Option.argument(
                "target",
                "package.module:app or path/to/file.py:app (`:app` may be omitted; `:create()` calls the function that "
                "makes the App); ui: browser and phone; shell: commands (`shotclock serve shell --help`).",
                suggestions=("ui", "shell"),
                missing="missing TARGET, such as tool.py:app (`shotclock inbox serve` serves the operators' page)",
            ),
            Option.taking("--http", "HOST:PORT", "Serve over HTTP on this address; port 0 is any free port."),
            Option.taking(
                "--files", "DIR", "With the target ui: clients may upload the files of this folder, and no others."
            ),
            Option.flag("--require-token", "With --http: require an access token, also from this machine."),
            Option.taking(
                "--issuer",
                "URL",
                "With --http: also accept access tokens of this OAuth issuer, and require a token from every client.",
            ),
            Option.taking(
                "--resource",
                "URL",
                "With --issuer: the URL by which clients reach /mcp. Default: the address of --http, on this machine.",
            ),
            Option.taking(
                "--audience", "NAME", "With --issuer: the `aud` that tokens must have. Default: the resource."
            ),
            Option.taking("--require-scope", "NAME", "With --issuer: a scope that tokens must have.", repeats=True),
            Option.taking(
                "--operation-timeout",
                "D",
                "The limit above every tool's own timeout, instead of the app's; 0 means no limit.",
            ),
            Option.taking("--operation-timeout-ms", "N", "The same in milliseconds."),
            Option.taking(
                "--pass-header",
                "NAME",
                "With --http: functions see this header of a request in ctx.headers. Not one with credentials.",
                repeats=True,
            ),
            Option.taking(
                "--result-limit",
                "SIZE",
                "Answer a call whose result is longer than this (64k, 1M), as JSON, with RESULT_TOO_LARGE.",
                default="8M",
                read=read_byte_count,
            ),
            Option.flag(
                "--elicitation",
                "Let clients that can ask their user decide proposals that are not destructive. Nothing proves that a "
                "person answered.",
            ),
            Option.flag(
                "--reload",
                "Import the program anew when one of its files changes, and inform clients of changed lists. For "
                "authors: memory shared by calls is lost.",
            ),
            Option.flag(
                "--json",
                "Print the envelope of a refusal alone on stdout, also on a terminal. Without --json and --http it is "
                "the last line of stderr, because stdout belongs to the protocol.",
                key="json_only",
            ),
            Option.taking(
                "--install",
                "CLIENT",
                "Do not serve: show the entry of this server in the configuration of an MCP client (claude, codex, "
                "cursor, vscode or gemini), ask, and write it.",
                choices=INSTALLABLE,
                excludes=("--http", "--on"),
            ),
            Option.taking(
                "--remove",
                "CLIENT",
                "Do not serve: restore the configuration of the client as it was before --install.",
                choices=INSTALLABLE,
                excludes=("--install", "--http", "--on"),
            ),
            Option.flag("--user", "With --install and --remove: the configuration for all projects (the default)."),
            Option.flag("--project", "With --install and --remove: the one of this folder.", excludes=("--user",)),
            Option.taking("--name", "NAME", "With --install and --remove: the server's name. Default: the App's."),
            Option.flag("--yes", "With --install and --remove: do not ask."),
            *engine_options(
                "With --http: show and decide the proposals of runs on Temporal as well: "
                "temporal://HOST:PORT[/NAMESPACE]."
            ),
        ),
        run=_serve,
        main=_main,
        usage="TARGET [OPTIONS]",
    )
}
