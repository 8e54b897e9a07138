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
import stat
import sys
from pathlib import Path

from ..core.errors import Ending, Failure
from ..core.value_types import replace, value
from ..runtime.call import Outcome
from ..store.home import FILE_MODE, make_private_directory, state_home
from .agent_status import every_entry
from .coding_agents import AGENTS, CodingAgent, ConfigScope, Programs, drop_entry, put_entry

FOLDER = "agents"
NEW_FILE_MODE = 0o666  # less the umask
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

    path: Path
    before: str | None
    after_digest: str

    @classmethod
    def read(cls, agent: CodingAgent, file: Path) -> KeptText | None:
        """Return the record of an installation, or None where it is missing or damaged."""
        path = _record_file(agent, file)
        try:
            kept = json.loads(path.read_bytes())
            before, after = kept["before"], kept["after"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path, before, after) if isinstance(before, str | None) else None

    def describes(self, text: str | None) -> bool:
        """Return whether this is the text that the installation wrote."""
        return text is not None and _digest(text) == self.after_digest

    def write(self, file: Path) -> None:
        make_private_directory(self.path.parent)
        content = {"file": str(file), "before": self.before, "after": self.after_digest}
        _replace_file(self.path, json.dumps(content, indent=2) + "\n", FILE_MODE)


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
        if before is not None and record is not None and not record.describes(before):
            raise _changed_plugin(file)
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
        raise _changed_plugin(file)
    after = _without_ours(agent, _check(file, before))
    note = "The file was changed since its installation: only the entries of shotclock are removed."
    return replace(plan, after=after, notes=(note,) if after != before else ())


def _changed_plugin(file: Path) -> Failure:
    return Failure("CONFLICT", f"{file} was changed since its installation", suggestion=f"delete {file} yourself")


def _without_ours(agent: CodingAgent, text: str) -> str:
    for entry in every_entry(agent):
        text = drop_entry(text, entry)
    return text


def write_plan(plan: ConfigChange) -> Outcome:
    """Write the file and what `remove` needs. Raises Failure where the file was changed since the plan."""
    file = Path(plan.file)
    record = _record_file(AGENTS[plan.agent], file)
    if _read_text(file) != plan.before:
        raise Failure("CONFLICT", f"{file} was changed meanwhile; nothing was written", suggestion="try again")
    try:
        if plan.installs and plan.after is not None:
            _link_bash(plan.after)
            KeptText(record, plan.original, _digest(plan.after)).write(file)
        _replace_file(file, plan.after)
        if not plan.installs:
            record.unlink(missing_ok=True)
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
    except (ValueError, RecursionError) as error:
        problem = str(error)
    hint = "correct it first; a file with comments has to be changed by hand, see the page on agents"
    raise Failure("CONFLICT", f"{file} is not JSON and was left as it is: {problem}", suggestion=hint)


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


def _record_file(agent: CodingAgent, file: Path) -> Path:
    return state_home(os.environ) / FOLDER / f"{agent.name}-{_digest(os.path.realpath(file))[:16]}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
