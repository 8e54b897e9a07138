"""`shotclock serve`, and the server behind `shotclock inbox serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import Failure
from ..server.serve import Options, options_of, serve_inbox, serve_target
from .output import say_line
from .parser import Subcommand, argument, flag, option
from .subcommand import Mistaken, deliver, engine_options, problem_in, unstarted


def read_serve_options(**values: Any) -> Options:
    options, found = options_of(**values)
    if found:
        raise Mistaken({each["field"].replace("_", "-"): each["message"] for each in found})
    return options


def serve(name: str, target: str | None, options: Options, as_json: bool, *, to_stderr: bool = False) -> int:
    """Serve an App, or without a target the operators' page, until a signal. `to_stderr`: stdout is the protocol's."""
    try:
        return serve_inbox(options) if target is None else serve_target(target, options)
    except Failure as failure:
        if as_json and name == "serve":  # a client that started a server reads stderr, if anything
            say_line(f"shotclock: {failure.code}: {failure}")
        envelope = unstarted(name, problem_in(failure), timeout_ms=0)
    if as_json and to_stderr:
        say_line(envelope.to_json())
        return envelope.exit_code
    return deliver(envelope, as_json)


def _serve(target: str, http: str | None, json_only: bool, **values: Any) -> Callable[[bool], int]:
    options = read_serve_options(http=http, **values)
    target = "shotclock.ui_tools:app" if target == "ui" else target
    return lambda as_json: serve("serve", target, options, as_json, to_stderr=http is None and not json_only)


COMMANDS = {
    "serve": Subcommand(
        "serve",
        options=(
            argument(
                "target",
                "package.module:app or path/to/file.py:app (`:app` may be omitted), or ui: browser and phone.",
                missing="missing TARGET, such as tool.py:app (`shotclock inbox serve` serves the operators' page)",
            ),
            option("--http", "HOST:PORT", "Serve over HTTP on this address; port 0 is any free port."),
            flag("--require-token", "With --http: require an access token, also from this machine."),
            option(
                "--operation-timeout",
                "D",
                "The limit above every tool's own timeout, instead of the app's; 0 means no limit.",
            ),
            option("--operation-timeout-ms", "N", "The same in milliseconds."),
            flag(
                "--elicitation",
                "Let clients that can ask their user decide proposals that are not destructive. Nothing proves that a "
                "person answered.",
            ),
            flag(
                "--json",
                "Print the envelope of a refusal alone on stdout, also on a terminal. Without --json and --http it is "
                "the last line of stderr, because stdout belongs to the protocol.",
                key="json_only",
            ),
            *engine_options(
                "With --http: show and decide the proposals of runs on Temporal as well: "
                "temporal://HOST:PORT[/NAMESPACE]."
            ),
        ),
        run=_serve,
        usage="TARGET [OPTIONS]",
    )
}
