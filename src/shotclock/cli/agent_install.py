"""The installation in front of a coding agent: the plan of a change, and the change itself.

The old text is kept in the state directory: `remove` restores it byte for byte, as long as the file is as it was
written. After a change by the user it removes only its own entries.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from ..core.errors import Ending, Failure
from ..core.value_types import replace, value
from ..runtime.call import Outcome
from ..store.home import create_private_file, make_private_directory, state_home
from .agent_status import every_entry
from .coding_agents import AGENTS, CodingAgent, ConfigScope, Programs, drop_entry, put_entry

FOLDER = "agents"
WRITTEN_BY = "Written by `shotclock agent install"


@value
class ConfigChange:
    """A change of one file. None is a file that does not exist."""

    agent: str
    scope: ConfigScope
    file: str
    before: str | None
    after: str | None
    installs: bool = False
    original: str | None = None
    """The text that a removal restores."""
    notes: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        old, new = ((text or "").splitlines(keepends=True) for text in (self.before, self.after))
        old_name, new_name = (self.file if text is not None else "/dev/null" for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, old_name, new_name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def as_data(self, *, changed: bool) -> dict[str, object]:
        return {
            "agent": self.agent,
            "scope": self.scope.value,
            "file": self.file,
            "changed": changed,
            "diff": self.diff,
            "notes": list(self.notes),
        }


@value
class KeptText:
    """The text of a file before an installation, and the digest of the text after it."""

    folder: Path
    before: str | None
    after_digest: str

    @classmethod
    def read(cls, agent: CodingAgent, file: Path) -> KeptText | None:
        folder = _record_folder(agent, file)
        try:
            kept = json.loads((folder / "record.json").read_text("utf-8"))
            before = _read_text(folder / "before") if kept["existed"] else None
            return None if kept["existed"] and before is None else cls(folder, before, kept["after"])
        except (OSError, ValueError, KeyError):
            return None

    def describes(self, text: str | None) -> bool:
        """Return whether this is the text that the installation wrote."""
        return text is not None and _digest(text) == self.after_digest

    def write(self, file: Path) -> None:
        make_private_directory(self.folder)
        if self.before is not None:
            _write_private(self.folder / "before", self.before)
        content = {"file": str(file), "existed": self.before is not None, "after": self.after_digest}
        _write_private(self.folder / "record.json", json.dumps(content, indent=2) + "\n")


def find_programs() -> Programs:
    """Return the paths of our programs. Raises Failure where `shotclock-sh` is not installed beside `shotclock`."""
    found = shutil.which("shotclock-sh")
    places = [os.path.dirname(os.path.abspath(sys.argv[0])), os.path.dirname(sys.executable)]
    places += [os.path.dirname(found)] if found else []
    folder = next((place for place in places if _has_both(place)), None)
    if folder is None:
        raise Failure("PRECONDITION", "shotclock-sh is not installed beside shotclock", suggestion="install it again")
    shell = os.path.join(folder, "shotclock-sh")
    bash = str(state_home(os.environ) / FOLDER / "bin" / "bash")
    for path in (shell, bash):
        if shlex.quote(path) != path:
            raise Failure("PRECONDITION", f"{path} has to be quoted in a shell, which agents do not do")
    return Programs(os.path.join(folder, "shotclock"), shell, bash)


def _has_both(folder: str) -> bool:
    return all(os.access(os.path.join(folder, name), os.X_OK) for name in ("shotclock", "shotclock-sh"))


def plan_install(agent: CodingAgent, scope: ConfigScope, *, approvals: bool) -> ConfigChange:
    programs, file = find_programs(), agent.file(scope, os.environ, Path.cwd())
    before, record = _read_text(file), KeptText.read(agent, file)
    notes = (*agent.notes, *([f"{agent.needs_acceptance}."] if agent.needs_acceptance else []))
    plan = ConfigChange(agent.name, scope, str(file), before, None, installs=True, original=before, notes=notes)
    if agent.plugin is not None:
        if before is not None and WRITTEN_BY not in before:
            raise Failure("CONFLICT", f"{file} exists and is not ours", suggestion="move it away first")
        return replace(plan, after=agent.plugin(programs), original=None)
    after = _check(file, before if before is not None and before.strip() else agent.fresh)
    if record is not None and record.describes(before):
        plan = replace(plan, original=record.before)
    elif before is not None and before.strip():
        plan = replace(plan, original=_without_ours(agent, after))
    for entry in agent.entries(programs):
        after = put_entry(after, entry)
    for entry in agent.approvals(programs) if agent.approvals is not None else ():
        after = put_entry(after, entry) if approvals else drop_entry(after, entry)
    return replace(plan, after=after)


def plan_remove(agent: CodingAgent, scope: ConfigScope) -> ConfigChange:
    file = agent.file(scope, os.environ, Path.cwd())
    before, record = _read_text(file), KeptText.read(agent, file)
    plan = ConfigChange(agent.name, scope, str(file), before, before)
    if before is None:
        return plan
    if record is not None and record.describes(before):
        return replace(plan, after=record.before)
    if agent.plugin is not None:
        if WRITTEN_BY in before and record is None:
            return replace(plan, after=None)
        raise Failure("CONFLICT", f"{file} was changed since its installation", suggestion=f"delete {file} yourself")
    after = _without_ours(agent, _check(file, before))
    note = "The file was changed since its installation: only the entries of shotclock are removed."
    return replace(plan, after=after, notes=(note,) if after != before else ())


def _without_ours(agent: CodingAgent, text: str) -> str:
    for entry in every_entry(agent):
        text = drop_entry(text, entry)
    return text


def write_plan(plan: ConfigChange) -> Outcome:
    """Write the file and what `remove` needs. Raises Failure where the file was changed since the plan."""
    file = Path(plan.file)
    folder = _record_folder(AGENTS[plan.agent], file)
    if _read_text(file) != plan.before:
        raise Failure("CONFLICT", f"{file} was changed meanwhile; nothing was written", suggestion="try again")
    try:
        if plan.installs and plan.after is not None:
            _link_bash(plan.after)
            KeptText(folder, plan.original, _digest(plan.after)).write(file)
        _replace_file(file, plan.after)
        if not plan.installs:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise Failure("FILE_UNWRITABLE", f"{error.filename or file}: {error.strerror}") from None
    return Outcome(Ending.FINISHED, data=plan.as_data(changed=True))


def _link_bash(text: str) -> None:
    """Make the link that the text names, if it does."""
    programs = find_programs()
    if programs.bash not in text:
        return
    folder = make_private_directory(Path(programs.bash).parent)
    fresh = folder / f"bash.{os.getpid()}"
    os.symlink(programs.shell, fresh)
    os.replace(fresh, programs.bash)


def _read_text(file: Path) -> str | None:
    """Return the text of a file, or None where there is none. Raises Failure where it cannot be read."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Failure("CONFLICT", f"{file} is not UTF-8: {error}") from None


def _check(file: Path, text: str) -> str:
    """Return the text if it is a JSON object. Raises Failure with its mistake."""
    try:
        if isinstance(json.loads(text), dict):
            return text
        problem = "it is not an object"
    except ValueError as error:
        problem = str(error)
    hint = "correct it first; a file with comments has to be changed by hand, see the page on agents"
    raise Failure("CONFLICT", f"{file} is not JSON and was left as it is: {problem}", suggestion=hint)


def _replace_file(file: Path, text: str | None) -> None:
    """Write a file at once as a whole, or delete it. A link stays a link, and the mode stays."""
    target = Path(os.path.realpath(file))
    if text is None:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    mode = target.stat().st_mode & 0o7777 if target.exists() else None
    try:
        _write_private(fresh, text)
        os.chmod(fresh, 0o644 if mode is None else mode)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(create_private_file(path), "wb") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def _record_folder(agent: CodingAgent, file: Path) -> Path:
    return state_home(os.environ) / FOLDER / f"{agent.name}-{_digest(os.path.abspath(file))[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
