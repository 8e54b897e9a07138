"""The files of `env_file`: variables in the form of dotenv, as data. Nothing in them is executed or replaced."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.references import REFERENCE
from ...core.value_types import record
from ..steps.provider import EnvFile, Scalar, StepPart
from .schema import WorkflowFile, is_template

FILE_LIMIT = 1 << 20  # bytes
FILES_LIMIT = 100

_NAME = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")
_QUOTED = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_REST = re.compile(r"(?:[ \t]+#[^\n]*|[ \t]*)(?:\n|\Z)")
_ESCAPED = re.compile(r"\\([nrt\"\\$])")
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}


def read_variables(text: str) -> dict[str, str]:
    """Return the variables of a dotenv text. Raises ValueError, which does not quote a value."""
    text = text.replace("\r\n", "\n")
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        line, end = text.count("\n", 0, at) + 1, text.find("\n", at)
        end = len(text) if end < 0 else end
        written = text[at:end].strip()
        if not written or written.startswith("#"):
            at = end + 1
            continue
        name = _NAME.match(text, at)
        if name is None:
            raise ValueError(f"line {line} is not NAME=value")
        at = name.end()
        if text[at : at + 1] in ("'", '"'):
            quoted = _QUOTED.match(text, at)
            if quoted is None:
                raise ValueError(f"line {line}: the quotation mark is never closed")
            rest = _REST.match(text, quoted.end())
            if rest is None:
                raise ValueError(f"line {line}: there is more behind the closing quotation mark")
            plain, escaped = quoted.groups()
            value = _ESCAPED.sub(lambda each: _MEANT.get(each[1], each[1]), escaped) if plain is None else plain
            at = rest.end()
        else:
            is_comment = text[at : at + 1] == "#" and text[at - 1] in " \t"
            value = "" if is_comment else re.split(r"[ \t]+#", text[at:end], maxsplit=1)[0].rstrip()
            at = end + 1
        if "\0" in value:
            raise ValueError(f"line {line} holds a NUL character")
        if is_template(value) or REFERENCE.search(value):
            raise ValueError(
                f"line {line}: `{{{{`, `{{%` and `${{NAME}}` in a value are not replaced; write it under `env`"
            )
        found[name[1]] = value
    return found


class EnvFlaw(NamedTuple):
    path: tuple[str, ...]
    message: str
    suggestion: str | None = None
    rule: str = "env/file"


@record
class EnvFiles:
    """The files of one workflow, each read once."""

    folder: Path
    contents: dict[str, bytes | OSError]

    def merge_into(self, workflow: WorkflowFile) -> tuple[WorkflowFile, list[EnvFlaw]]:
        """Return the workflow with the variables of its files under `env`, where they are not set."""
        flaws: list[EnvFlaw] = []
        written = workflow.model_dump(exclude_unset=True)
        self._merge(written, workflow, (), flaws)
        for name, step in workflow.steps.items():
            self._merge(written["steps"][name], step, ("steps", name), flaws)
        return WorkflowFile.model_validate(written), flaws

    def _merge(
        self, written: dict[str, object], part: WorkflowFile | StepPart, path: tuple[str, ...], flaws: list[EnvFlaw]
    ) -> None:
        variables: dict[str, Scalar] = {}
        for file in part.env_file:
            if is_template(file.path) or "\0" in file.path:
                message = "the file is read before anything runs: its name cannot be a template"
                flaws.append(EnvFlaw((*path, "env_file"), message, rule="env/file-name"))
                continue
            try:
                variables |= self._read(file)
            except ValueError as wrong:
                flaws.append(EnvFlaw((*path, "env_file"), str(wrong)))
            except FileNotFoundError:
                hint = f"write {{path: {file.path}, optional: true}} if it may be missing"
                flaws.append(EnvFlaw((*path, "env_file"), f"there is no file {file.path!r}", hint))
            except OSError as error:
                flaws.append(EnvFlaw((*path, "env_file"), f"{file.path!r} cannot be read: {error.strerror}"))
        written.pop("env_file", None)
        if variables:
            written["env"] = {**variables, **part.env}

    def _read(self, file: EnvFile) -> dict[str, str]:
        name = str(self.folder / file.path)
        if name not in self.contents:
            if len(self.contents) >= FILES_LIMIT:
                raise ValueError(f"there are more than {FILES_LIMIT} files of variables")
            self.contents[name] = _read_bytes(name)
        data = self.contents[name]
        if isinstance(data, OSError):
            if file.optional and isinstance(data, FileNotFoundError):
                return {}
            raise data
        if len(data) > FILE_LIMIT:
            raise ValueError(f"{file.path!r} is larger than {FILE_LIMIT} bytes")
        try:
            return read_variables(data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError(f"{file.path!r} is not UTF-8") from None
        except ValueError as wrong:
            raise ValueError(f"{file.path!r}, {wrong}") from None


def files_of(workflow: WorkflowFile) -> Sequence[EnvFile]:
    return [*workflow.env_file, *(file for step in workflow.steps.values() for file in step.env_file)]


def _read_bytes(name: str) -> bytes | OSError:
    try:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return OSError(errno.EINVAL, "it is not a file")
            return file.read(FILE_LIMIT + 1)
    except OSError as error:
        return error
