"""The three installers, called in process: the plan of a change, and the change itself."""

import os
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shotclock.agents import install as agent_install
from shotclock.agents.config_files import ConfigChange, write_change
from shotclock.agents.known_agents import AGENTS, CLIENTS, EDITOR_JSON, ConfigScope
from shotclock.apps import cli_install as serve_install
from shotclock.wrap import cli_install as wrap_install

PLAIN = wrap_install.WrapOptions((), None, 2_000)


def options(*words: str, servers: tuple[str, ...] = ()) -> wrap_install.WrapOptions:
    return wrap_install._read_options(list(words), list(servers))


class Installer:
    """One installer for one agent. The project is the current folder."""

    def __init__(self, verb: str, name: str, *, project: bool = False, file: Path | None = None) -> None:
        self.verb, self.name = verb, name
        scope = ConfigScope.PROJECT if project else ConfigScope.USER
        self._write: Callable[[ConfigChange], object] = write_change
        if verb == "agent":
            agent, self._write = AGENTS[name], agent_install.write_plan
            self.file, self.table = agent.file.path(scope, os.environ, Path.cwd()), ""
            self._install: Any = partial(agent_install.plan_install, agent, scope)
            self._remove: Any = partial(agent_install.plan_remove, agent, scope)
        else:
            client = CLIENTS[name]
            self.file, self.table = file or client.file.path(scope, os.environ, Path.cwd()), client.table
            if verb == "serve":
                self._install = partial(serve_install.plan_entry, client, scope, "mine", ["tool.py:app"])
                self._remove = partial(serve_install.plan_removal, client, scope, None, "tool.py:app")
            else:
                servers = wrap_install.ServersFile.find(client, project=project, file=str(file) if file else None)
                self._install = lambda names=(), given=PLAIN: wrap_install.plan_install(servers, list(names), given)
                self._remove = lambda names=(): wrap_install.plan_remove(servers, list(names))

    def install(self, **more: Any) -> dict[str, Any]:
        """Install, and return the answer's data."""
        return self._change(self._install(**({"approvals": False} if self.verb == "agent" else {}) | more))

    def remove(self, **more: Any) -> dict[str, Any]:
        return self._change(self._remove(**more))

    def _change(self, plan: ConfigChange) -> dict[str, Any]:
        is_changed = plan.before != plan.after
        if is_changed:
            self._write(plan)
        return plan.as_data(changed=is_changed)

    def write(self, text: str | None) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.unlink(missing_ok=True)
        if text is not None:
            self.file.write_bytes(text.encode())

    @property
    def text(self) -> str | None:
        return self.file.read_bytes().decode() if self.file.exists() else None

    @property
    def data(self) -> Any:
        text = self.text or ""
        return tomllib.loads(text.removeprefix("\ufeff")) if self.file.suffix == ".toml" else EDITOR_JSON.parse(text)

    @property
    def servers(self) -> Any:
        return self.data.get(self.table, {})


def kept_texts(home: Path) -> list[Path]:
    return [path for path in (home / ".local").rglob("*.json") if path.is_file() and b'"after"' in path.read_bytes()]
