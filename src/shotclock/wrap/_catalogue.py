"""The last known greeting and tools of a server, in a file: a client need not wait while `npx` downloads."""

from __future__ import annotations

import contextlib
import json
import os
import zlib

from ..supervise.command_task import make_private_directory, state_directory
from ._messages import JsonObject, RpcMessage, envelope_of_protocol, read_line
from ._server_process import ServerCommand

METHODS = ("initialize", "server/discover", "tools/list")
MOST_ENTRIES = 16  # one client with one set of capabilities has three
LARGEST_FILE = 2 * 1024 * 1024


class LastCatalogue:
    """Answers of a command, by method and by the greeting of the client: a server may list more tools to some."""

    def __init__(self, command: ServerCommand) -> None:
        self._command = command.identity
        name = f"{zlib.crc32(json.dumps(self._command).encode()):08x}.json"
        self._path = os.path.join(state_directory(), "catalogues", name)
        self._client = ""
        self._answers = self._load()

    def _load(self) -> dict[str, JsonObject]:
        try:
            if os.path.getsize(self._path) > LARGEST_FILE:
                return {}
            with open(self._path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError):
            return {}
        # Two commands may have the same checksum.
        if not isinstance(content, dict) or content.get("command") != self._command:
            return {}
        answers = content.get("answers")
        return answers if isinstance(answers, dict) else {}

    def get(self, message: RpcMessage) -> JsonObject | None:
        """Return the `result` or `error` of the last answer to such a request."""
        key = self._key(message)
        answer = None if key is None else self._answers.get(key)
        return answer if isinstance(answer, dict) else None

    def _key(self, message: RpcMessage) -> str | None:
        """Return the key of an answer; None if it is not kept. Notes the client, which greets before it lists."""
        if message.method not in METHODS or "cursor" in message.params:
            return None
        envelope = envelope_of_protocol(message.meta)
        if message.method == "initialize":
            greeting = {name: item for name, item in message.params.items() if name != "_meta"}
            self._client = json.dumps(greeting, sort_keys=True)
        elif envelope:
            self._client = json.dumps(envelope, sort_keys=True)
        return f"{message.method} {self._client}"

    def keep(self, request_line: bytes, answer: RpcMessage) -> None:
        """Keep an answer, if it is of use for the next start."""
        request = read_line(request_line)
        key = None if request is None else self._key(request)
        if key is None or request is None:
            return
        if answer.is_error and request.method != "server/discover":  # an old server refuses discovery: that is known
            return
        content = json.loads(answer.line)
        kept = {name: content[name] for name in ("result", "error") if name in content}
        is_part = isinstance(answer.result, dict) and "nextCursor" in answer.result
        if is_part or self._answers.get(key) == kept:
            return
        self._answers.pop(key, None)
        self._answers[key] = kept
        while len(self._answers) > MOST_ENTRIES:
            del self._answers[next(iter(self._answers))]
        self._save()

    def _save(self) -> None:
        """Replace the file at once, so that another start reads the old or the new one."""
        content = json.dumps({"command": self._command, "answers": self._answers})
        draft = f"{self._path}.{os.getpid()}"
        with contextlib.suppress(OSError):  # no place to write: the next start is slow
            make_private_directory(os.path.dirname(self._path))
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(draft, self._path)
