"""Changes to the configuration file of another program: planned, shown, confirmed, written, and taken back.

plan     read the file, compute its new text         a child
ask      show the difference, read the answer        here
write    keep the old text, replace the file         a child

The old text is kept in the state directory, so that a removal can restore it byte for byte as long as the file is as
it was written.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..calls.call import Outcome, no_time_left
from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..core.value_types import field, replace, value
from ..core.visible_text import visible
from ..store.home import FILE_MODE, make_private_directory, state_home
from ..terminal.drawing import Draw
from ..terminal.output import StopListener, ask_person, is_terminal, write_quietly
from ..terminal.parser import Option
from ..terminal.subcommand import TIMEOUT_MS, admit_call, carry_out_or_fail, conclude, deliver, draw_answer
from .config_editor import ConfigEditor, ConfigSyntax

if TYPE_CHECKING:
    from rich.console import Console

Edit = Callable[[ConfigEditor], None]

_CHANGED_SINCE = "The file was changed since its installation: only the entries of shotclock are removed."
FOLDER = "agents"
NEW_FILE_MODE = 0o666  # less the umask


# The options of every installer.
SCOPE = (
    Option.flag("--user", "Change the configuration of this user, for all projects (the default)."),
    Option.flag("--project", "Change the configuration of the project in this folder.", excludes=("--user",)),
)
YES = Option.flag("--yes", "Do not ask.")


@value
class ConfigChange:
    """A change of one file. None is a file that does not exist."""

    file: str
    before: str | None
    after: str | None
    owner: str
    """The name of the installation. With the file it names the kept text."""
    details: dict[str, object] = field(default_factory=dict)
    keeps: bool = False
    """Whether the text of `original` is kept for a later removal."""
    original: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        old, new = ((text or "").splitlines(keepends=True) for text in (self.before, self.after))
        old_name, new_name = (self.file if text is not None else "/dev/null" for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, old_name, new_name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def as_data(self, *, changed: bool) -> dict[str, object]:
        about = {"file": self.file, "changed": changed, "diff": self.diff, "notes": list(self.notes)}
        return {**self.details, **about}


@value
class Backup:
    """The text of a file before an installation, the digest of the text after it, and the folders made for it."""

    path: Path
    before: str | None
    after_digest: str
    folders: tuple[str, ...] = ()
    """The innermost first."""

    @classmethod
    def read(cls, owner: str, file: Path) -> Backup | None:
        """Return the record of an installation, or None where it is missing or damaged."""
        path = backup_path(owner, file)
        try:
            kept = json.loads(path.read_bytes())
            before, after = kept["before"], kept["after"]
            folders = tuple(str(folder) for folder in kept.get("folders", ()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path, before, after, folders) if isinstance(before, str | None) else None

    def matches(self, text: str | None) -> bool:
        """Return whether this is the text that the installation wrote."""
        return text is not None and _digest(text) == self.after_digest

    def write(self, file: Path) -> None:
        make_private_directory(self.path.parent)
        content = {"file": str(file), "before": self.before, "after": self.after_digest, "folders": self.folders}
        _replace_file(self.path, json.dumps(content, indent=2) + "\n", FILE_MODE)


def backup_path(owner: str, file: Path) -> Path:
    return state_home(os.environ) / FOLDER / f"{owner}-{_digest(os.path.realpath(file))[:16]}.json"


@value
class ConfigPlace:
    """A file of an agent with entries of an installation."""

    owner: str
    """The name of the installation. With the file it names the backup."""
    reader: str
    """The title of the agent."""
    file: Path
    syntax: ConfigSyntax
    fresh: str = ""
    """The text of a new file. Without one, an empty file stays empty."""

    def edit(self, text: str | None) -> ConfigEditor:
        return ConfigEditor(self.file, self.reader, text, self.syntax, self.fresh)

    def plan_install(self, put: Edit, drop: Edit) -> ConfigChange:
        """Plan to put entries in. `drop` takes all of them out again."""
        before, backup = read_text(self.file), Backup.read(self.owner, self.file)
        original = before
        if backup is not None and backup.matches(before):
            original = backup.before
        elif before is not None:
            original = self._changed(before, drop)
        editor = self.edit(before)
        put(editor)
        return ConfigChange(str(self.file), before, editor.text, self.owner, keeps=True, original=original)

    def plan_remove(self, drop: Edit, has_ours: Callable[[str], bool] = lambda text: False) -> ConfigChange:
        """Plan to restore the text from before, or to drop our entries where the file was changed since.

        `has_ours` returns whether a text still has entries, so that the backup is kept.
        """
        before, backup = read_text(self.file), Backup.read(self.owner, self.file)
        if before is None:
            return ConfigChange(str(self.file), None, None, self.owner)
        after = self._changed(before, drop)
        if backup is not None and backup.matches(before):
            keeps, original = has_ours(after), backup.before
            restored = after if keeps else original
            return ConfigChange(str(self.file), before, restored, self.owner, keeps=keeps, original=original)
        notes = (_CHANGED_SINCE,) if backup is not None and after != before else ()
        return ConfigChange(str(self.file), before, after, self.owner, notes=notes)

    def _changed(self, text: str, edit: Edit) -> str:
        editor = replace(self, fresh="").edit(text)
        edit(editor)
        return editor.text


def draw_change(data: Any, console: Console, verb: str = "wrote") -> None:
    done = verb if data["changed"] else "not written:" if data["diff"] else "nothing to change in"
    console.print(f"{done} {visible(data['file'])}", soft_wrap=True)
    for note in data["notes"] if data["changed"] else ():
        console.print(visible(note), soft_wrap=True)


def change_file(
    name: str, plan: Callable[[], ConfigChange], write: Callable[[ConfigChange], Outcome], how: Draw, *, yes: bool
) -> Callable[[bool], int]:
    """Return the work of a subcommand that changes a file: it asks a person, unless `yes` is given."""

    def start(as_json: bool) -> int:
        StopListener.raise_at_once()
        call = admit_call(name, 0, mutates=True)  # a person may take long; each child has its own limit

        def in_child(body: Callable[[], Outcome]) -> Outcome:
            return carry_out_or_fail(admit_call(name, TIMEOUT_MS, mutates=True), body)

        def work() -> Outcome:
            if call.no_time_left:
                return no_time_left(call)
            planned = in_child(lambda: Outcome(Ending.FINISHED, value=plan()))
            if planned.problem is not None:
                return planned
            found: Any = planned.value
            if found.before == found.after:
                return Outcome(Ending.FINISHED, data=found.as_data(changed=False))
            if not yes and not _ask(found):
                return Outcome(Ending.FINISHED, data=found.as_data(changed=False))
            if not yes and not as_json:
                found = replace(found, notes=())  # they were shown with the question
            return in_child(partial(write, found))

        def show(envelope: Envelope) -> None:
            if "diff" in cast("dict[str, object]", envelope.data):
                draw_answer(how, envelope.data)

        envelope = conclude(call, work)
        refused: Any = (envelope.error or {}).get("context") or {}
        if not as_json and "diff" in refused:
            write_quietly(sys.stderr, visible(f"{refused['diff']}\n"))
        return deliver(envelope, as_json, show)

    return start


def _ask(plan: ConfigChange) -> bool:
    """Show the change, and return whether a person agrees. Raises Failure where none answers."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        message = "there is no terminal to ask at, and nothing was written; give --yes to write this"
        context = {"diff": plan.diff, "notes": list(plan.notes)}
        raise Failure("ARG_ERROR", message, context=context, suggestion="look at the difference, then add --yes")
    notes = "".join(f"{note}\n" for note in plan.notes)
    write_quietly(sys.stderr, visible(f"{plan.diff}\n{notes}"))
    typed = ask_person("Write this? [y/N] ")
    if not typed:
        hint = "answer y to write it"
        raise Failure("PERSON_REQUIRED", "there was no answer, and nothing was written", suggestion=hint)
    return typed.strip().lower() in ("y", "yes")


def write_change(plan: ConfigChange) -> Outcome:
    """Write the file and the text for a removal. Raises Failure where the file was changed since the plan."""
    file = Path(plan.file)
    record, old = backup_path(plan.owner, file), Backup.read(plan.owner, file)
    made = old.folders if old is not None else ()
    if read_text(file) != plan.before:
        raise Failure("CONFLICT", f"{file} was changed meanwhile; nothing was written", suggestion="try again")
    try:
        if plan.keeps and plan.after is not None:
            made = tuple(str(folder) for folder in Path(os.path.realpath(file)).parents if not folder.exists()) or made
            Backup(record, plan.original, _digest(plan.after), made).write(file)
        _replace_file(file, plan.after)
        if not plan.keeps:
            for folder in made:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(folder)
            record.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error, file) from None
    return Outcome(Ending.FINISHED, data=plan.as_data(changed=True))


def unwritable(error: OSError, file: Path) -> Failure:
    return Failure("FILE_UNWRITABLE", f"{error.filename or file}: {error.strerror}")


def read_text(file: Path) -> str | None:
    """Return the text of a file, or None where there is none. Raises Failure where it cannot be read."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Failure("CONFLICT", f"{file} is not UTF-8: {error}") from None


def _replace_file(file: Path, text: str | None, mode: int = NEW_FILE_MODE) -> None:
    """Write a file at once as a whole, or delete it. A link stays a link, and the mode and the owner stay."""
    target = Path(os.path.realpath(file))
    if text is None:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    old = target.stat() if target.exists() else None
    fresh = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(fresh, flags, FILE_MODE if old is not None else mode), "wb") as opened:
            if old is not None:
                own = os.fstat(opened.fileno())
                if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
                    os.fchown(opened.fileno(), old.st_uid, old.st_gid)
                os.fchmod(opened.fileno(), stat.S_IMODE(old.st_mode))
            opened.write(text.encode("utf-8"))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
