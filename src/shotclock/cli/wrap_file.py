"""The file of `shotclock wrap --config`: each of its servers becomes the words of one command line of `wrap`.

The parser of `wrap` then checks them, so a key of the file is an option without its dashes. The configuration of a
client is read, too; of that only the keys that clients share.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence

from ..core.value_types import field, record
from ..process.foreground import TerminalSignals
from ..wrap.asked_calls import STORE_LIMIT_MS
from ..wrap.limits import ServerLimits
from ..wrap.rules import Rules
from ..wrap.several.front import MergedFront
from ..wrap.several.server import ConfiguredServer
from .exec import NOT_DONE
from .output import say_line
from .parser import Option, ParsedLine, Subcommand, expand, nearest_of, read

LARGEST_FILE = 1_000_000
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
# Keys that are no options of `wrap`.
_OWN_KEYS = ("command", "args", "env", "prefix", "tools", "rules", "headers")
_OF_ONE_SERVER = ("command", "args", "url", "headers", "prefix", "lock", "name")
_OF_A_CLIENT = ("command", "args", "env", "cwd", "url", "headers")
# Options beside --config, which are no keys of the file.
_BESIDE = ("config", "server", "http", "require-token", "session-idle", "max-sessions")
# Options whose values are written in another form in the file.
_INSTEAD = {"tool": "tools", "allow": "rules", "ask": "rules", "deny": "rules", "header": "headers"}
_VERDICTS = ("allow", "ask", "deny")
_LIMITS = ("timeout", "idle", "queue")
# Read by the loader and by Python itself, so they must reach the server and not our own process before it.
_READ_AT_START = ("PYTHON", "LD_")

# Checks a command line beyond its options, adds the mistakes, and returns its limits.
Check = Callable[[ParsedLine], ServerLimits]


@record
class ServersFile:
    """The servers of a file, with all mistakes in it."""

    path: str
    servers: list[ConfiguredServer] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_of_client: bool = False

    def refuse(self, where: str, message: str) -> None:
        self.mistakes.append(f"{self.path}: {where}: {message}" if where else f"{self.path}: {message}")


def run_servers(line: ParsedLine, command: Subcommand, check: Check, words_of_child: list[str]) -> int:
    """Run the servers of a file as one, or offer them over HTTP by such children. Return the exit code."""
    for key, given in line.typed.items():
        if (name := key.replace("_", "-")) not in _BESIDE and given != []:
            line.refuse(name, "write it into the file of --config, under defaults or a server")
    mistakes = [f"{mistake['field']}: {mistake['message']}" for mistake in line.mistakes]
    file = read_servers(line.values["config"], line.values["server"], command, check)
    for text in [*file.notes, *mistakes, *file.mistakes]:
        say_line(f"shotclock wrap: {text}")
    if mistakes or file.mistakes:
        return NOT_DONE
    if line.values["http"] is not None:
        from .wrap_http import offer_over_http  # with a server, which others need not load

        limits = [server.limits for server in file.servers]
        return offer_over_http(line.values, limits, words_of_child, os.path.basename(file.path))
    signals = TerminalSignals()
    front = MergedFront(file.servers, signals)
    front.run()
    return -signal.Signals[signals.stopped_by] if signals.stopped_by is not None else front.exit_code


def read_servers(path: str, chosen: Sequence[str], command: Subcommand, check: Check) -> ServersFile:
    """Read the servers of a file, or those that were chosen, for the command `wrap`."""
    file = ServersFile(path)
    content = _read_content(file)
    found = _find_servers(file, content) if isinstance(content, dict) else None
    if found is None or content is None:
        if not file.mistakes:
            file.refuse("", "should be an object with the key servers, or mcpServers as in the file of a client")
        return file
    for name in chosen:
        if name not in found:
            file.refuse("", f"has no server {name!r}; it has {', '.join(found) or 'none'}")
    defaults = {} if file.is_of_client else _read_object(file, "defaults", content.get("defaults"))
    for key in [each for each in defaults if each in _OF_ONE_SERVER]:
        file.refuse(f"defaults.{key}", "belongs to one server")
        del defaults[key]
    for name, entry in found.items():
        if not chosen or name in chosen:
            reader = _ServerReader(file, name, command, check)
            reader.read(_read_object(file, f"servers.{name}", entry), defaults)
    _refuse_equal_prefixes(file)
    if not file.servers and not file.mistakes:
        file.refuse("servers", "has no server")
    return file


def _refuse_equal_prefixes(file: ServersFile) -> None:
    """Refuse two servers with one prefix, because each could take the calls of the other by the names that it lists."""
    first: dict[str, str] = {}
    for server in file.servers:
        if (other := first.setdefault(server.prefix, server.name)) != server.name:
            file.refuse(f"servers.{server.name}.prefix", f"{server.prefix!r} is the prefix of {other}, too")


def _read_content(file: ServersFile) -> dict[str, object] | None:
    try:
        with open(file.path, "rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        text = data.decode()
        if file.path.endswith((".yaml", ".yml")):
            content = _read_yaml(file, text)
        else:
            content = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except FileNotFoundError:
        file.refuse("", "there is no such file")
        return None
    except (OSError, ValueError, RecursionError) as error:
        file.refuse("", f"cannot be read: {error}")
        return None
    return content if isinstance(content, dict) else None


def _read_yaml(file: ServersFile, text: str) -> object:
    from ..workflow.yaml_reader import read_tree  # with ruamel.yaml

    tree = read_tree(text)
    for flaw in tree.flaws:
        hint = f"; {flaw.suggestion}" if flaw.suggestion else ""
        file.refuse(f"line {flaw.place.line}", f"{flaw.message}{hint}")
    return tree.value


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for name, item in pairs:
        if name in content:
            raise ValueError(f"the key {name!r} is there twice")
        content[name] = item
    return content


def _find_servers(file: ServersFile, content: dict[str, object]) -> dict[str, object] | None:
    """Return the object of servers. Other keys are refused, unless the file is a client's."""
    file.is_of_client = not file.path.endswith((".yaml", ".yml"))
    key = "mcpServers" if file.is_of_client and "mcpServers" in content else "servers"
    if not file.is_of_client:
        for other in content:
            if other not in ("servers", "defaults"):
                nearest = nearest_of(other, ("servers", "defaults"))
                file.refuse(
                    other, f"unknown key; {f'did you mean {nearest}?' if nearest else 'there are servers and defaults'}"
                )
    found = content.get(key)
    return found if isinstance(found, dict) else None


def _read_object(file: ServersFile, where: str, found: object) -> dict[str, object]:
    if found is None and where == "defaults":
        return {}
    if isinstance(found, dict):
        return dict(found)
    file.refuse(where, "should be an object")
    return {}


class _ServerReader:
    """The reader of one server."""

    def __init__(self, file: ServersFile, name: str, command: Subcommand, check: Check) -> None:
        self._file = file
        self._name = name
        self._command = command
        self._options: dict[str, Option] = {each.field: each for each in command.options if each.name[:2] == "--"}
        self._keys = [*_OWN_KEYS, *(each for each in self._options if each not in (*_BESIDE, *_INSTEAD))]
        self._folder = os.path.dirname(os.path.abspath(file.path))
        self._check = check
        self._prefix = _NOT_IN_A_NAME.sub("_", name) + "_"
        self._env: dict[str, str] = {}
        self._shown: dict[str, str] = {}  # words of the command line, by those that were checked
        self._count = 0

    def _refuse(self, key: str, message: str) -> None:
        self._count += 1
        self._file.refuse(f"servers.{self._name}.{key}" if key else f"servers.{self._name}", message)

    def read(self, entry: dict[str, object], defaults: Mapping[str, object]) -> None:
        if self._file.is_of_client:
            if entry.get("disabled") is True:
                self._file.notes.append(f"{self._file.path}: servers.{self._name}: is disabled there")
                return
            ignored = [key for key in entry if key not in (*_OF_A_CLIENT, "type")]
            if ignored:
                self._file.notes.append(f"{self._file.path}: servers.{self._name}: ignored {', '.join(ignored)}")
            entry = {key: item for key, item in entry.items() if key in _OF_A_CLIENT}
        words = self._options_of({**defaults, **entry})
        command = self._command_of(entry)
        if self._count:
            return
        line = read(self._command, [*words, "--", *command], hint="see shotclock wrap --help")
        limits = self._check(line)
        for mistake in line.mistakes:
            self._refuse(_INSTEAD.get(mistake["field"], mistake["field"]), mistake["message"])
        if not self._count:
            words = [*(self._shown.get(word, word) for word in words), "--", *command]
            asks = Rules(tuple(line.values["rules"]), False).asks
            ask_ms = line.values["ask_wait"] + STORE_LIMIT_MS if asks else 0
            self._file.servers.append(ConfiguredServer(self._name, self._prefix, words, self._env, limits, ask_ms))

    def _options_of(self, entry: Mapping[str, object]) -> list[str]:
        """Return the words of all keys but the command."""
        words: list[str] = []
        if "name" not in entry:
            words.append(f"--name={self._name}")
        for key, item in entry.items():
            if key in ("command", "args"):
                continue
            if key not in self._keys:
                nearest = _INSTEAD.get(key) or nearest_of(key, self._keys)
                hint = f"did you mean {nearest}?" if nearest else "see shotclock wrap --help"
                self._refuse(key, f"unknown key; {hint}")
            else:
                words += self._words_of(key, item)
        return words

    def _words_of(self, key: str, item: object) -> list[str]:
        match key:
            case "prefix":
                self._prefix = self._text(key, item)
                return []
            case "env":
                return self._variables(item)
            case "headers":
                return self._headers(item)
            case "tools":
                return self._tools(item)
            case "rules":
                return self._rules(item)
        option = self._options[key]
        if not option.metavar:
            if not isinstance(item, bool):
                self._refuse(key, "should be true or false")
            return [option.name] if item is True else []
        if isinstance(item, bool) or not isinstance(item, str | int):
            self._refuse(key, "should be a text")
            return []
        text = self._text(key, str(item))
        word = f"{option.name}={os.path.join(self._folder, text) if key in ('cwd', 'lock') else text}"
        if key == "url":
            self._hide(word, "--url=${SHOTCLOCK_URL}", "SHOTCLOCK_URL", text)
        return [word]

    def _text(self, key: str, item: object) -> str:
        if not isinstance(item, str):
            self._refuse(key, f"{json.dumps(item)[:40]} should be a text: put it in quotes")
            return ""
        try:
            return expand(item)
        except ValueError as error:
            self._refuse(key, str(error))
            return ""

    def _texts(self, key: str, item: object) -> dict[str, str]:
        if not isinstance(item, dict):
            self._refuse(key, "should be an object of texts")
            return {}
        return {str(name): self._text(f"{key}.{name}", text) for name, text in item.items()}

    def _variables(self, item: object) -> list[str]:
        words = []
        for name, text in self._texts("env", item).items():
            words.append(f"--env={name}={text}")
            if not name.startswith(_READ_AT_START):
                self._hide(words[-1], f"--env={name}", name, text)
        return words

    def _headers(self, item: object) -> list[str]:
        words = []
        for number, (name, text) in enumerate(self._texts("headers", item).items()):
            words.append(f"--header={name}: {text}")
            variable = f"SHOTCLOCK_HEADER_{number}"
            self._hide(words[-1], f"--header={name}: ${{{variable}}}", variable, text)
        return words

    def _hide(self, word: str, shown: str, variable: str, text: str) -> None:
        """Pass a text in a variable of the environment: it may be a secret, and others can read a command line."""
        self._shown[word], self._env[variable] = shown, text

    def _tools(self, item: object) -> list[str]:
        words = []
        for pattern, limits in item.items() if isinstance(item, dict) else [("", None)]:
            if not isinstance(limits, dict) or not limits:
                example = 'as in {"build_*": {timeout: 30m}}'
                self._refuse("tools", f"should be an object of patterns, each with its limits, {example}")
                continue
            for name in limits:
                if name not in _LIMITS:
                    self._refuse(f"tools.{pattern}.{name}", f"unknown limit; there are {', '.join(_LIMITS)}")
            text = ",".join(f"{name}:{limit}" for name, limit in limits.items() if name in _LIMITS)
            words.append(f"--tool={pattern}={text}")
        return words

    def _rules(self, item: object) -> list[str]:
        words = []
        for number, rule in enumerate(item if isinstance(item, list) else [None]):
            verdict, text = next(iter(rule.items())) if isinstance(rule, dict) and len(rule) == 1 else ("", None)
            if verdict not in _VERDICTS or not isinstance(text, str):
                self._refuse(
                    "rules" if rule is None else f"rules[{number}]", 'should be as in [{allow: "read_*"}, {deny: "*"}]'
                )
            else:
                words.append(f"--{verdict}={text}")
        return words

    def _command_of(self, entry: Mapping[str, object]) -> list[str]:
        if "url" in entry:
            if "command" in entry:
                self._refuse("url", "url and command exclude each other: leave one out")
            return []
        if "command" not in entry:
            self._refuse("command", "is missing")
            return []
        command, args = self._text("command", entry["command"]), entry.get("args", [])
        if not isinstance(args, list):
            self._refuse("args", "should be a list of texts")
            return []
        words = [self._text(f"args[{number}]", word) for number, word in enumerate(args)]
        if os.path.basename(command) == "shotclock" and "wrap" in words and "--config" in words:
            self._refuse("command", "would start several servers again; choose the others with --server")
        if "/" in command:
            command = os.path.join(self._folder, command)
        return [command, *words]
