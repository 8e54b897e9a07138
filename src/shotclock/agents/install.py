"""The installation in front of a coding agent: the plan of a change, and the change itself.

`remove` restores the kept text of the file. After a change by the user it removes only its own entries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from ..calls.call import Outcome
from ..core.errors import Failure
from ..core.value_types import replace
from ..store.home import make_private_directory, state_home
from . import json_text
from ._status import every_entry
from .coding_agents import CodingAgent, ConfigScope, Programs, drop_entry, put_entry
from .config_files import FOLDER, ConfigChange, KeptText, read_text, unwritable, write_change

WRITTEN_BY = "Written by `shotclock agent install"


def find_programs() -> Programs:
    """Return the paths of our programs. Raises Failure where an agent could not use them."""
    folder = program_folder()
    shell = os.path.join(folder, "shotclock-sh")
    bash = str(state_home(os.environ) / FOLDER / "bin" / "bash")
    for path in (shell, bash):
        if shlex.quote(path) != path:
            raise Failure("PRECONDITION", f"{path} has to be quoted in a shell, which agents do not do")
    return Programs(os.path.join(folder, "shotclock"), shell, bash)


def program_folder() -> str:
    """Return the folder of our programs. Raises Failure where `shotclock-sh` is not installed beside `shotclock`."""
    found = shutil.which("shotclock-sh")
    places = [os.path.dirname(os.path.abspath(sys.argv[0])), os.path.dirname(sys.executable)]
    places += [os.path.dirname(found)] if found else []
    folder = next((place for place in places if _has_both(place)), None)
    if folder is None:
        raise Failure("PRECONDITION", "shotclock-sh is not installed beside shotclock", suggestion="install it again")
    return folder


def _has_both(folder: str) -> bool:
    return all(os.access(os.path.join(folder, name), os.X_OK) for name in ("shotclock", "shotclock-sh"))


def plan_install(agent: CodingAgent, scope: ConfigScope, *, approvals: bool) -> ConfigChange:
    programs, file = find_programs(), agent.file(scope, os.environ, Path.cwd())
    before, record = read_text(file), KeptText.read(agent.name, file)
    notes = (*agent.notes, *([f"{agent.needs_acceptance}."] if agent.needs_acceptance else []))
    plan = replace(_plan(agent, scope, file, before), after=None, keeps=True, original=before, notes=notes)
    if agent.plugin is not None:
        if before is not None and WRITTEN_BY not in before:
            raise Failure("CONFLICT", f"{file} exists and is not ours", suggestion="move it away first")
        if before is not None and record is not None and not record.describes(before):
            raise _changed_plugin(file)
        return replace(plan, after=agent.plugin(programs), original=None)
    after = _check(agent, file, json_text.with_object(before, agent.fresh))
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
    before, record = read_text(file), KeptText.read(agent.name, file)
    plan = _plan(agent, scope, file, before)
    if before is None:
        return plan
    if record is not None and record.describes(before):
        return replace(plan, after=record.before)
    if agent.plugin is not None:
        if WRITTEN_BY in before and record is None:
            return replace(plan, after=None)
        raise _changed_plugin(file)
    after = _without_ours(agent, _check(agent, file, before))
    note = "The file was changed since its installation: only the entries of shotclock are removed."
    return replace(plan, after=after, notes=(note,) if after != before else ())


def _changed_plugin(file: Path) -> Failure:
    return Failure("CONFLICT", f"{file} was changed since its installation", suggestion=f"delete {file} yourself")


def _without_ours(agent: CodingAgent, text: str) -> str:
    for entry in every_entry(agent):
        text = drop_entry(text, entry)
    return text


def _plan(agent: CodingAgent, scope: ConfigScope, file: Path, before: str | None) -> ConfigChange:
    details: dict[str, object] = {"agent": agent.name, "scope": scope.value}
    return ConfigChange(str(file), before, before, agent.name, details)


def write_plan(plan: ConfigChange) -> Outcome:
    """Write the file, the text for a removal, and the link that the file names."""
    try:
        if plan.keeps and plan.after is not None:
            _link_bash(plan.after)
    except OSError as error:
        raise unwritable(error, Path(plan.file)) from None
    return write_change(plan)


def _link_bash(text: str) -> None:
    """Make the link that the text names, if it does."""
    programs = find_programs()
    if programs.bash not in text:
        return
    folder = make_private_directory(Path(programs.bash).parent)
    fresh = folder / f"bash.{os.getpid()}"
    os.symlink(programs.shell, fresh)
    os.replace(fresh, programs.bash)


def _check(agent: CodingAgent, file: Path, text: str) -> str:
    """Return the text if it is a JSON object that the agent reads. Raises Failure with its mistake."""
    try:
        if isinstance(agent.parse(text), dict):
            return text
        problem = "it is not an object"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    message = f"{file} was left as it is, because {agent.title} does not read it: {problem}"
    raise Failure("CONFLICT", message, suggestion="correct it first")
