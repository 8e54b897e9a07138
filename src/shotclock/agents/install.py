"""The installation in front of a coding agent: the plan of a change, and the change itself.

`remove` restores the kept text of the file. After a change by the user it removes only its own entries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

from ..calls.call import Outcome
from ..core.errors import Failure
from ..core.value_types import replace
from ..store.home import make_private_directory, state_home
from ._hook_entries import drop_entry, put_entry
from ._status import every_entry
from .config_editor import ConfigEditor
from .config_files import FOLDER, Backup, ConfigChange, ConfigPlace, read_text, unwritable, write_change
from .known_agents import CodingAgent, ConfigScope, Programs

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
    both = ("shotclock", "shotclock-sh")
    usable = (place for place in places if all(os.access(os.path.join(place, name), os.X_OK) for name in both))
    folder = next(usable, None)
    if folder is None:
        raise Failure("PRECONDITION", "shotclock-sh is not installed beside shotclock", suggestion="install it again")
    return folder


def plan_install(agent: CodingAgent, scope: ConfigScope, *, approvals: bool) -> ConfigChange:
    programs, place = find_programs(), _place(agent, scope)
    notes = (*agent.notes, *([f"{agent.needs_acceptance}."] if agent.needs_acceptance else []))
    if agent.plugin is not None:
        before, backup = read_text(place.file), Backup.read(agent.name, place.file)
        if before is not None and WRITTEN_BY not in before:
            raise Failure("CONFLICT", f"{place.file} exists and is not ours", suggestion="move it away first")
        if before is not None and backup is not None and not backup.matches(before):
            raise _changed_plugin(place.file)
        plan = ConfigChange(str(place.file), before, agent.plugin(programs), agent.name, keeps=True)
    else:

        def put(editor: ConfigEditor) -> None:
            for entry in agent.entries(programs):
                put_entry(editor, entry)
            for entry in agent.approvals(programs) if agent.approvals is not None else ():
                put_entry(editor, entry) if approvals else drop_entry(editor, entry)

        plan = place.plan_install(put, partial(_drop_ours, agent))
    return replace(plan, details={"agent": agent.name, "scope": scope.value}, notes=notes)


def plan_remove(agent: CodingAgent, scope: ConfigScope) -> ConfigChange:
    place = _place(agent, scope)
    if agent.plugin is None:
        plan = place.plan_remove(partial(_drop_ours, agent))
    else:
        before, backup = read_text(place.file), Backup.read(agent.name, place.file)
        is_ours = backup.matches(before) if backup is not None else WRITTEN_BY in (before or "")
        if before is not None and not is_ours:
            raise _changed_plugin(place.file)
        plan = ConfigChange(str(place.file), before, None, agent.name)
    return replace(plan, details={"agent": agent.name, "scope": scope.value})


def _place(agent: CodingAgent, scope: ConfigScope) -> ConfigPlace:
    file = agent.file.path(scope, os.environ, Path.cwd())
    return ConfigPlace(agent.name, agent.title, file, agent.syntax, agent.fresh)


def _changed_plugin(file: Path) -> Failure:
    return Failure("CONFLICT", f"{file} was changed since its installation", suggestion=f"delete {file} yourself")


def _drop_ours(agent: CodingAgent, editor: ConfigEditor) -> None:
    for entry in every_entry(agent):
        drop_entry(editor, entry)


def write_plan(plan: ConfigChange) -> Outcome:
    """Write the file, the text for a removal, and the link that the file names."""
    try:
        if plan.keeps and plan.after is not None:
            programs = find_programs()
            if programs.bash in plan.after:
                folder = make_private_directory(Path(programs.bash).parent)
                fresh = folder / f"bash.{os.getpid()}"
                os.symlink(programs.shell, fresh)
                os.replace(fresh, programs.bash)
    except OSError as error:
        raise unwritable(error, Path(plan.file)) from None
    return write_change(plan)
