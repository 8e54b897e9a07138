"""`shotclock errors`, `doctor`, `prune` and `token`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..calls.call import Outcome
from ..calls.principal import Principal, Role
from ..core.envelope import Envelope, Problem, warning
from ..core.errors import Ending, Failure, error_entries, warning_entries
from ..core.limits import WallTime, format_duration
from ..core.value_types import as_dict, replace
from ..core.visible_text import one_line, visible
from ..people.access import Access
from ..people.person_wait import refusal_outcome
from ..store.audit import Token
from ..store.home import state_home
from ..store.store import Store, move_aside, parse_count, parse_size, prune, read_retention
from ..supervise.clock import wall_time
from ..supervise.kernel import is_alive
from ..terminal.drawing import age, file_size, styled, table, time_left
from ..terminal.output import ask_person, is_terminal, say_line, write_quietly
from ..terminal.parser import CommandTable, Option, Subcommand
from ..terminal.subcommand import ChildWork
from .doctor import Check, examine

if TYPE_CHECKING:
    from rich.console import Console

PARTS = {"ui": "shotclock.ui.daemon"}
"""What else `doctor` can look at: the module of the product, whose `examine` returns PartFindings. Opened by name."""


class PartFindings(Protocol):
    @property
    def failed(self) -> Sequence[Check]: ...

    def as_data(self) -> dict[str, object]: ...


def _look_up(code: str | None) -> Outcome:
    errors, warnings = {entry.code: entry for entry in error_entries()}, warning_entries()
    if code is not None:
        wanted = code.upper().replace("-", "_")
        if wanted not in errors and wanted not in warnings:
            close = difflib.get_close_matches(wanted, [*errors, *warnings], n=1)
            hint = f"did you mean {close[0]}?" if close else None
            message = f"there is no error or warning {code!r}"
            return Outcome(Ending.FINISHED, Problem("UNKNOWN_CODE", message, suggestion=hint))
        errors = {wanted: errors[wanted]} if wanted in errors else {}
        warnings = {wanted: warnings[wanted]} if wanted in warnings else {}
    data: dict[str, object] = {
        "errors": [{**as_dict(entry), "side_effects": entry.side_effects.value} for entry in errors.values()],
        "warnings": [{"code": name, "summary": summary} for name, summary in warnings.items()],
    }
    return Outcome(Ending.FINISHED, data=data)


def _run_doctor(about: str | None, sweep: bool, trace: str | None, timeout: int) -> ChildWork:
    if sweep and is_terminal(sys.stdin) and is_terminal(sys.stderr):
        whose = f"of trace {trace}" if trace else "of all your work on this machine, also of other projects and stores"
        if (ask_person(f"Kill the leftovers {whose}? [y/N] ") or "").strip().lower() not in ("y", "yes"):
            hint = "answer y to kill them; without --sweep they are only listed"
            raise Failure("PERSON_REQUIRED", "nothing was stopped: the answer was not yes", suggestion=hint)
    return ChildWork("doctor", lambda: _examine(about, sweep, trace), timeout, mutates=sweep, draw=draw_checks)


def _examine(about: str | None, sweep: bool, trace: str | None) -> Outcome:
    findings: PartFindings
    if about is None:
        findings = examine(sweep=sweep, trace_id=trace)
    else:
        findings = import_module(PARTS[about]).examine()
    problem = None
    if findings.failed:
        message = "; ".join(f"{check.name}: {check.detail}" for check in findings.failed)
        problem = Problem("MACHINE_UNFIT", message)
    return Outcome(Ending.FINISHED, problem, findings.as_data())


def _run_prune(
    older_than: int | None, keep: int | None, max_size: int | None, dry_run: bool, reset: bool, timeout: int
) -> ChildWork:
    ended_ms = None if older_than is None else max(1, older_than)
    ages = {"runs_ms": ended_ms, "proposals_ms": ended_ms, "calls_ms": ended_ms}
    limits = {**ages, "runs": keep, "runs_bytes": max_size}
    changes = {name: limit for name, limit in limits.items() if limit is not None}
    if reset:
        return ChildWork("prune", reset_store, timeout, mutates=True, draw=draw_pruned)
    return ChildWork(
        "prune", lambda: prune_store(changes, dry_run=dry_run), timeout, mutates=not dry_run, draw=draw_pruned
    )


def prune_store(changes: dict[str, int], *, dry_run: bool) -> Outcome:
    from ..dispatch.job_client import JobClient  # imports asyncio

    retention = replace(read_retention(os.environ), **changes)
    with Store.open() as store:
        before = _size(store.path)
        pruned = prune(store, retention, wall_time(), is_alive, dry_run=dry_run)
        shrunk = True
        if not dry_run:
            JobClient(store, ["shotclock"]).forget_old()
            shrunk = store.shrink()
        after = _size(store.path)
    data: dict[str, object] = {
        "dry_run": dry_run,
        "deleted": pruned.as_data(),
        "keeps": as_dict(retention),
        "file": str(store.path),
        "file_bytes_before": before,
        "file_bytes": after,
    }
    notes = () if shrunk else (warning("STORE_NOT_SHRUNK"),)
    return Outcome(Ending.FINISHED, data=data, warnings=notes)


def reset_store() -> Outcome:
    """Move the store aside, so that the next command starts a new one."""
    moved_to = move_aside(state_home(os.environ), wall_time(), is_alive)
    return Outcome(Ending.FINISHED, data={"moved_to": str(moved_to)})


def _size(path: Path) -> int:
    return sum(os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name))


def _run_create(name: str, role: str, ttl: int | None) -> ChildWork:
    def body(access: Access, now: WallTime) -> dict[str, object]:
        issued = access.issue(name, Role(role), Principal.local(), now, ttl_ms=ttl)
        return {"token": issued.text, **_describe_token(issued.token, now)}

    return _token_work("create", body)


def _run_list() -> ChildWork:
    def body(access: Access, now: WallTime) -> dict[str, object]:
        return {"tokens": [_describe_token(token, now) for token in access.tokens()]}

    return _token_work("list", body)


def _run_revoke(name: str) -> ChildWork:
    def body(access: Access, now: WallTime) -> dict[str, object]:
        ended = {token.id for token in access.revoke(name, Principal.local(), now)}
        if not ended:
            raise Failure("TOKEN_NOT_FOUND", f"there is no token {name!r} to revoke")
        return {"revoked": [_describe_token(token, now) for token in access.tokens() if token.id in ended]}

    return _token_work("revoke", body)


def _token_work(verb: str, body: Callable[[Access, WallTime], dict[str, object]]) -> ChildWork:
    def perform() -> Outcome:
        with Store.open() as store:
            return Outcome(Ending.FINISHED, data=body(Access(store), wall_time()))

    show = _show_token if verb == "create" else None
    return ChildWork(
        f"token {verb}",
        perform,
        mutates=verb != "list",
        show=show,
        draw=None if show else draw_tokens,
        on_failure=refusal_outcome,
    )


def _describe_token(token: Token, now: WallTime) -> dict[str, object]:
    status = "active" if token.is_active(now) else "expired" if token.revoked_at is None else "revoked"
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "status": status,
        "created_at": token.created_at.iso(),
        "expires_at": None if token.expires_at is None else token.expires_at.iso(),
        "revoked_at": None if token.revoked_at is None else token.revoked_at.iso(),
    }


def _show_token(envelope: Envelope) -> None:
    data: Any = envelope.data
    if envelope.ok:
        # Alone on stdout, so that a script can capture it.
        write_quietly(sys.stdout, f"{data['token']}\n")
        say_line(f"this is the only time it is shown; {data['name']} is {data['role']}, token {data['id']}")


_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def draw_pruned(data: Any, console: Console) -> None:
    if "moved_to" in data:
        console.print(f"the store was moved to {data['moved_to']}", soft_wrap=True)
        return
    gone = data["deleted"]
    verb = "would delete" if data["dry_run"] else "deleted"
    size = f" ({file_size(gone['runs_bytes'])})" if gone["runs"] else ""
    console.print(f"{verb} {gone['runs']} runs{size}, {gone['proposals']} proposals and {gone['calls']} calls")
    after = "" if data["dry_run"] else f", now {file_size(data['file_bytes'])}"
    console.print(f"{data['file']}: {file_size(data['file_bytes_before'])}{after}", soft_wrap=True)


def draw_errors(data: Any, console: Console) -> None:
    if data["errors"]:
        rows = table("error", "exit", "HTTP", "retry", "effects", "what it means")
        for column in rows.columns[1:3]:
            column.justify = "right"
        for entry in data["errors"]:
            meaning = styled(entry["summary"]).append(f"\n→ {entry['hint']}", style="dim")
            retry = "no" if not entry["retryable"] else "yes" if entry["side_effects"] == "none" else "yes*"
            numbers = (str(entry["exit_code"]), str(entry["http_status"]), retry)
            rows.add_row(styled(entry["code"], style="bold"), *numbers, entry["side_effects"], meaning)
        console.print(rows)
        if any(entry["retryable"] and entry["side_effects"] != "none" for entry in data["errors"]):
            console.print(styled("* only if nothing was changed: `error.retryable` of the answer says so", style="dim"))
    if data["errors"] and data["warnings"]:
        console.print()
    if data["warnings"]:
        rows = table("warning", "what it means")
        for entry in data["warnings"]:
            rows.add_row(styled(entry["code"], style="bold"), entry["summary"])
        console.print(rows)


def draw_checks(data: Any, console: Console) -> None:
    rows = table()
    for check in data["checks"]:
        mark, style = _MARKS[check["status"]]
        name = styled(check["name"].replace("_", " "), style="bold", no_wrap=True)
        rows.add_row(styled(mark, style=style), name, visible(check["detail"]))
    console.print(rows)
    if "cannot_catch" not in data:  # `doctor ui`
        return
    swept = {each["pid"]: each["gone"] for each in data["swept"]}
    if data["leftovers"]:
        console.print("\nleftovers", style="bold")
    for left in data["leftovers"]:
        overdue = format_duration(left["overdue_ms"] // 1000 * 1000)
        if left["pid"] in swept:
            fate = "stopped" if swept[left["pid"]] else "still there"
        else:
            fate = f"kept: {left['kept']}" if left["kept"] else "see --sweep"
        console.print(f"  {left['pid']}  {one_line(left['command'])}  ({overdue} overdue, {fate})")
    console.print("\nwhat it cannot catch", style="bold")
    escapes = table()
    for escape in data["cannot_catch"]:
        escapes.add_row(" •", escape)
    console.print(escapes)


def draw_tokens(data: Any, console: Console) -> None:
    tokens = data.get("tokens", data.get("revoked"))
    if not tokens:
        console.print("no tokens")
        return
    rows = table("id", "name", "role", "status", "age", "expires in", wraps=1)
    for token in tokens:
        colour = {"active": "green", "expired": "magenta", "revoked": "bright_black"}[token["status"]]
        left = time_left(token["expires_at"]) if token["expires_at"] else "–"
        status = styled(token["status"], style=colour)
        rows.add_row(
            styled(token["id"], style="bold"), token["name"], token["role"], status, age(token["created_at"]), left
        )
    console.print(rows)


COMMANDS: dict[str, Subcommand | CommandTable] = {
    "errors": Subcommand(
        "errors",
        options=(Option.argument("code", "Show only this code, as in `shotclock errors TIMEOUT`."), Option.timeout()),
        run=ChildWork.looking("errors", _look_up, draw_errors),
    ),
    "doctor": Subcommand(
        "doctor",
        options=(
            Option.argument(
                "about", "ui: check the devices of `shotclock ui` instead of the machine.", choices=tuple(PARTS)
            ),
            Option.flag(
                "--sweep",
                "Kill the leftovers of all your work on this machine, also of other projects and stores, and remove "
                "empty cgroups. Asks on a terminal. Look at the list first.",
                excludes=("about",),
            ),
            Option.taking(
                "--trace",
                "ID",
                "List only leftovers of this trace (meta.trace_id of an envelope).",
                excludes=("about",),
            ),
            Option.timeout(),
        ),
        run=_run_doctor,
    ),
    "prune": Subcommand(
        "prune",
        options=(
            Option.duration(
                "--older-than",
                "Delete runs, proposals and logged calls that ended this long ago (7d, 12h; 0: all that have ended), "
                "instead of 30d, for proposals 90d.",
            ),
            Option.taking(
                "--keep", "N", "Keep at most this many ended runs, the newest, instead of 1000.", read=parse_count
            ),
            Option.taking(
                "--max-size",
                "SIZE",
                "Keep at most this much of ended runs (500kB, 20MB), instead of 1GB.",
                read=parse_size,
            ),
            Option.flag("--dry-run", "Show what would be deleted, and delete nothing."),
            Option.flag(
                "--reset",
                "Move the whole store aside and start a new one. Refused while work runs.",
                excludes=("--older-than", "--keep", "--max-size", "--dry-run"),
            ),
            Option.timeout("5m"),
        ),
        run=_run_prune,
        description="Delete runs, proposals, jobs and logged calls that ended long ago. Those that run, are parked or "
        "wait are kept.",
    ),
    "token": CommandTable(
        "shotclock token",
        "Access to the inbox over the network: agents propose, operators decide.",
        (
            Subcommand(
                "create",
                "Create a token and print it once: only its hash is stored.",
                (
                    Option.argument(
                        "name",
                        "The name on its proposals and decisions: 1 to 64 letters, digits or ._@+-.",
                        missing="missing NAME of the agent or operator",
                    ),
                    Option.taking(
                        "--role",
                        "ROLE",
                        "agent (proposes) or operator (decides).",
                        choices=("agent", "operator"),
                        missing="missing --role: agent or operator",
                    ),
                    Option.duration("--ttl", "The token expires after this time (30d, 12h; without it, never)."),
                ),
                _run_create,
                usage="--role agent|operator NAME [--ttl D]",
            ),
            Subcommand("list", "List all tokens, the oldest first, also revoked and expired ones.", (), _run_list),
            Subcommand(
                "revoke",
                "Revoke a token for good.",
                (
                    Option.argument(
                        "name",
                        "The name or the id of the token.",
                        missing="missing NAME or id; see `shotclock token list`",
                    ),
                ),
                _run_revoke,
                usage="NAME|ID",
            ),
        ),
        "verb",
    ),
}
