"""The changes of an operator to a proposal, from a file or in an editor. The operator's text is never lost.

edit ── check ──┬── valid ── decide ── the copy is removed
 ↑              │              └──── another operator was first: the copy stays, and is named
 └── mistakes ──┘
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import stat
import sys
from pathlib import Path
from typing import NoReturn

from ..calls.commands import signal_name
from ..core.envelope import Problem, stop_problem
from ..core.errors import Failure
from ..core.limits import MAX_MS, NS_PER_MS
from ..core.proposal import Decision, Kind, Proposal, ProposalStatus, canonical
from ..core.visible_text import visible
from ..store.home import create_private_file
from ..store.store import Store
from ..supervise import forked
from ..supervise.clock import monotonic_ns, wall_ns, wall_time
from ..supervise.forked import Unfinished
from ..supervise.forked import run as run_forked
from ..terminal.output import ask_person, is_terminal, say_line
from .proposal_checks import ARGUMENTS_LIMIT, FILE_LIMIT, problems_with_decision
from .proposal_json import Compared, arguments_text, mistake, parse_exact_arguments

MISTAKES_SHOWN = 10
READ_LIMIT = 4 * max(FILE_LIMIT, ARGUMENTS_LIMIT)  # indented JSON is longer than the JSON that counts
KEPT_MS = 7 * 24 * 3600 * 1000  # undecided texts are kept this long for their author
DIFF_LIMIT_NS = 3_000_000_000  # texts of many thousand lines with little in common exhaust it
WHOLE_LINES = 1_000
_AGAIN = "edit it again, or pass the new text with --file"


def edit_proposal(proposal: Proposal, file: str | None, notes: str) -> tuple[Decision, Path | None]:
    """Return the checked decision, and the copy that was edited. The caller removes it once that is decided."""
    if proposal.ask.kind is Kind.QUESTION:
        _refuse("proposal-id", f"{proposal.id} is a question: `approve {proposal.id} --answer TEXT` answers it")
    if proposal.ask.kind is Kind.OPERATION and proposal.ask.arguments is None:
        _refuse("proposal-id", f"{proposal.id} has no arguments that could be modified: approve or reject it")
    if file is not None:
        return _decision(proposal, read_text(file, "file"), notes), None
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        message = "there is no terminal for an editor here: pass the new text with --file"
        raise Failure("INPUT_REQUIRED", message, suggestion=f"shotclock inbox modify {proposal.id} --file FILE")
    copy = _new_copy(proposal)
    try:
        return _edit_until_right(proposal, copy, notes), copy
    except Failure as failure:
        if not _was_touched(proposal, copy):
            copy.unlink(missing_ok=True)
            raise
        message = f"{failure}; your text is in {copy}"
        hint = f"shotclock inbox modify {proposal.id} --file {shlex.quote(str(copy))}"
        raise Failure(failure.code, message, context={**failure.context, "edit": str(copy)}, suggestion=hint) from None


def read_text(path: str, field: str) -> str:
    """Return the text of a regular file; never wait for a pipe without a writer."""
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Failure("FILE_UNREADABLE", f"--{field} {path!r} is not a regular file")
            content = file.read(READ_LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise Failure("FILE_NOT_FOUND", f"--{field}: there is no file {path!r}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Failure("FILE_UNREADABLE", f"--{field} {path!r}: {why}") from None
    if len(content) > READ_LIMIT:
        _refuse(field, f"{path!r} is too long: {FILE_LIMIT} bytes at most")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        _refuse(field, f"{path!r} is not text in UTF-8: byte {error.start}")


def _proposed_text(proposal: Proposal) -> str:
    if proposal.ask.file is not None:
        return proposal.ask.file.proposed
    return f"{arguments_text(proposal.ask.arguments or {})}\n"


def _decision(proposal: Proposal, text: str, notes: str) -> Decision:
    if proposal.ask.file is not None:
        decision = Decision(ProposalStatus.MODIFIED, notes, file_text=text)
        same = text == proposal.ask.file.proposed
    else:
        try:
            arguments = parse_exact_arguments(text)
        except ValueError as error:
            _refuse("file", str(error))
        decision = Decision(ProposalStatus.MODIFIED, notes, arguments=arguments)
        same = canonical(arguments) == canonical(dict(proposal.ask.arguments or {}))
    if same:
        _refuse("file", f"the text is unchanged: use `shotclock inbox approve {proposal.id}`")
    if problems := problems_with_decision(proposal.ask, decision):
        lines = [f"{each['field']}: {each['message']}" for each in problems]
        more = [f"and {len(lines) - MISTAKES_SHOWN} more"] if len(lines) > MISTAKES_SHOWN else []
        _refuse("file", "; ".join(lines[:MISTAKES_SHOWN] + more))
    return decision


def _edit_until_right(proposal: Proposal, copy: Path, notes: str) -> Decision:
    while True:
        _run_editor(proposal, copy)
        try:
            text = read_text(str(copy), "file")
            return _decision(proposal, text if _was_touched(proposal, copy) else _proposed_text(proposal), notes)
        except Failure as failure:
            wrong = failure
        if not copy.is_file():
            raise Failure("COMMAND_FAILED", "the editor left no file; nothing was decided", suggestion=_AGAIN)
        if not _was_touched(proposal, copy):
            raise wrong
        say_line(visible(f"✗ {wrong}"))
        typed = ask_person("Enter opens the editor again, q leaves it: ") or ""
        if not typed.endswith("\n") or typed.strip().lower().startswith("q"):
            raise wrong


def _was_touched(proposal: Proposal, copy: Path) -> bool:
    """Return whether the copy was changed. The line end that many editors add to the last line does not count."""
    proposed = _proposed_text(proposal).encode("utf-8", "surrogatepass")
    try:
        written = copy.read_bytes()
    except OSError:
        return False
    return written not in (proposed, proposed + b"\n")


def _run_editor(proposal: Proposal, copy: Path) -> None:
    """Run the editor until the proposal expires, which is the only limit of a person."""
    command = os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip() or "vi"
    try:
        words = shlex.split(command)
    except ValueError as error:
        _refuse("EDITOR", f"{command!r} cannot be used: {error}")
    left_ms = min(MAX_MS, proposal.expires_at - wall_time())
    edited = forked.run_editor([*words, str(copy)], until_ns=monotonic_ns() + max(0, left_ms) * NS_PER_MS)
    if not edited.is_well:
        raise _explain_end(edited, words[0], proposal)


def _explain_end(edited: forked.Edited, editor: str, proposal: Proposal) -> Failure:
    if edited.why_not is not None:
        missing = isinstance(edited.why_not, FileNotFoundError | NotADirectoryError)
        code = "COMMAND_NOT_FOUND" if missing else "COMMAND_NOT_EXECUTABLE"
        message = f"the editor {editor!r} cannot be started: {edited.why_not.strerror}"
        return Failure(code, message, suggestion="set VISUAL or EDITOR, or use --file")
    if edited.signal is not None:
        problem: Problem = stop_problem(edited.signal)
        return Failure(problem.code, f"{problem.message}; nothing was decided", context=problem.context)
    if edited.overdue:
        return Failure("PROPOSAL_EXPIRED", f"{proposal.id} expired at {proposal.expires_at} while it was edited")
    status = edited.status or 0
    how = f"was ended by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
    return Failure("COMMAND_FAILED", f"the editor {how}; nothing was decided", suggestion=_AGAIN)


def _new_copy(proposal: Proposal) -> Path:
    ending = re.search(r"\.[A-Za-z0-9]{1,10}$", proposal.ask.file.path) if proposal.ask.file is not None else None
    suffix = ".json" if proposal.ask.file is None else ending[0] if ending else ".txt"
    with Store.open() as store:
        folder = store.folder("edits")
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if wall_ns() // NS_PER_MS - old.stat().st_mtime_ns // NS_PER_MS > KEPT_MS:
                old.unlink()
    copy = folder / f"{proposal.id}-{os.getpid()}{suffix}"
    copy.unlink(missing_ok=True)  # of an earlier process with our pid
    descriptor = create_private_file(copy)
    with open(descriptor, "wb") as file:
        file.write(_proposed_text(proposal).encode("utf-8", "surrogatepass"))
    return copy


def _refuse(field: str, message: str) -> NoReturn:
    raise mistake(field, message) from None


def difference(proposal: Proposal, compared: Compared) -> str | None:
    """Return the change as a unified diff, if there is a file and time.

    Against the asker's claim a file that is not too long is shown whole: claimed lines may be new.
    """
    file = proposal.ask.file
    if file is None:
        return None

    def texts() -> str:
        before = [] if compared.before is None else _lines(compared.before)
        name = file.path.replace("\n", " ")
        old = "/dev/null" if compared.before is None else name
        after = _lines(file.proposed)
        is_whole = compared.source == "claim" and max(len(before), len(after)) <= WHOLE_LINES
        around = len(before) if is_whole else 3
        return "\n".join(difflib.unified_diff(before, after, old, name, lineterm="", n=around))

    try:
        return run_forked(texts, until_ns=monotonic_ns() + DIFF_LIMIT_NS)
    except Unfinished:
        return None


def _lines(text: str) -> list[str]:
    """Split a text, and mark a last line without an end, as diff(1) does."""
    lines = text.split("\n")
    if lines[-1] == "":
        return lines[:-1]
    return [*lines[:-1], f"{lines[-1]}\n\\ No newline at end of file"]
