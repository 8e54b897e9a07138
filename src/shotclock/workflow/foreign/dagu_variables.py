"""Parameters, variables and outputs of a DAG of Dagu: as inputs, `env` and templates of ours."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ..yaml_reader import quote
from .common import (
    Draft,
    FileRefused,
    Unconvertible,
    is_scalar,
    list_at,
    literal,
    literal_variable,
    scalar_text,
    secrets_in,
)

TEXT_LIMIT = 200_000  # of a variable: it can double with each line of a file
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w-]*)((?:\.[\w-]+|\[\d+\])*)\}|\$([A-Za-z_]\w*)")
_POSITION = re.compile(r"\$(?:([1-9])|\{([1-9])\})")
_SUBSTITUTION = re.compile(r"`[^`]*`|\$\(")


class Variables:
    def __init__(self, draft: Draft, document: dict[str, Any]) -> None:
        self.draft = draft
        self.document = document
        self.inputs: dict[str, Any] = {}
        self.positions: dict[str, str] = {}
        self.env: dict[str, str] = {}  # of the file, as templates of ours
        self.outputs: dict[str, str] = {}  # variables, and our steps that print them

    def convert(self) -> None:
        """Write the inputs and variables of the file."""
        self._read_params()
        self._read_env()

    def _read_params(self) -> None:
        written = self.document.get("params")
        entries: list[Any] = [written] if isinstance(written, dict) else written if isinstance(written, list) else []
        if isinstance(written, dict) and ("schema" in written or written.get("type") == "object"):
            raise FileRefused("its params are a JSON Schema: write them as a list")
        if isinstance(written, str):
            try:
                entries = shlex.split(written)
            except ValueError:
                raise FileRefused("its params cannot be read: a quotation mark is missing") from None
        for number, entry in enumerate(entries):
            name, default, part = "", entry, {}
            if isinstance(entry, str) and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", entry, re.DOTALL)):
                name, default = found[1], found[2]
            elif isinstance(entry, dict) and isinstance(entry.get("name"), str):
                name, default, part = entry["name"], entry.get("default"), entry
            elif isinstance(entry, dict):
                for key, value in entry.items():
                    self._add_param(key, value, {}, number)
                continue
            self._add_param(name, default, part, number)

    def _add_param(self, name: str, default: Any, part: dict[str, Any], number: int) -> None:
        position = str(len(self.inputs) + 1)
        name = name if name.isidentifier() else f"param_{position}"
        if not is_scalar(default):
            raise FileRefused(f"the param {name} is no text")
        text = scalar_text(default)
        if _SUBSTITUTION.search(text):
            raise FileRefused(f"the param {name} is computed by a command")
        self.inputs[name] = {"type": "string", "default": text}
        if part.get("required") is True and "default" not in part:
            self.inputs[name] = {"type": "string", "required": True}
        if isinstance(part.get("description"), str):
            self.inputs[name]["description"] = part["description"]
        if lost := part.keys() - {"name", "default", "required", "description"}:
            self.draft.lose(("params", number), f"the value is not checked: {', '.join(sorted(map(str, lost)))}")
        self.positions[position] = name
        self.draft.top.setdefault("inputs", {})[name] = self.inputs[name]

    def _read_env(self) -> None:
        for name in self.inputs:
            self.env[name] = f"{{{{ inputs.{name} }}}}"
        for secret in list_at(self.document, "secrets"):
            if not isinstance(secret, dict) or not str(secret.get("name", "")).isidentifier():
                raise FileRefused(f"a secret cannot be read: {quote(secret)}")
            key = secret.get("key") if secret.get("provider") == "env" else secret["name"]
            self.env[secret["name"]] = f"${{{key}}}" if str(key).isidentifier() else f"${{{secret['name']}}}"
            self.draft.differ(("secrets",), "a secret is taken from a variable of the environment, which has to be set")
        self.env |= self.read(self.document, dict(self.env))
        self.draft.top["env"] = self.env
        files = [each for each in list_at(self.document, "dotenv") if isinstance(each, str)]
        self.draft.top["env_file"] = [{"path": each, "optional": True} for each in files if each]

    def read(self, holder: dict[str, Any], known: dict[str, str]) -> dict[str, str]:
        """Return the variables of a file or a step, in which earlier ones may stand."""
        written = holder.get("env")
        entries = [written] if isinstance(written, dict) else list_at(holder, "env")
        made: dict[str, str] = {}
        for entry in entries:
            if isinstance(entry, str) and "=" in entry:
                entry = dict([entry.split("=", 1)])
            if not isinstance(entry, dict) or not all(map(is_scalar, entry.values())):
                raise Unconvertible(f"has a variable that cannot be read: {quote(entry)}")
            for name, value in entry.items():
                made[name] = self._value(scalar_text(value), {**known, **made})
        return made

    def _value(self, text: str, known: dict[str, str]) -> str:
        """Return the value of a variable. References to others are replaced, as there."""
        if _SUBSTITUTION.search(text):
            raise Unconvertible(f"has a variable that is computed by a command: {quote(text)}")
        made, end = "", 0
        for found in _REFERENCE.finditer(text):
            name = found[1] or found[3]
            if found[2] or name in self.outputs:
                raise Unconvertible(f"has a variable that is made of the output {found[0]}")
            made += literal_variable(text[end : found.start()])
            made += known.get(name, f"${{{name}-}}" if name.isidentifier() else "")
            end = found.end()
            if len(made) > TEXT_LIMIT:
                raise Unconvertible("has variables that are too long")
        return made + literal_variable(text[end:])

    def folder(self, text: str) -> str:
        text = re.sub(r"^~(?=/|$)", "$HOME", text)
        made, end = "", 0
        for found in _REFERENCE.finditer(text):
            name = found[1] or found[3]
            known = self.env.get(name, "")
            if found[2] or (name not in self.inputs and ("{{" in known or "${" in known)):
                raise Unconvertible(f"has a folder that is computed: {quote(text)}")
            value = f"{{{{ inputs.{name} }}}}" if name in self.inputs else known or f"{{{{ env.{name} }}}}"
            made += literal(text[end : found.start()]) + value
            end = found.end()
        return made + literal(text[end:])

    def script(self, text: str) -> str:
        """Return a command: what Dagu fills in is a variable of the shell here, or a template."""
        if self.positions:
            text = _POSITION.sub(lambda found: self._position(found[1] or found[2], found[0]), text)
        made, end = "", 0
        for found in _REFERENCE.finditer(text):
            if not found[2]:
                continue
            name = found[1]
            if name not in self.outputs:
                raise Unconvertible(f"uses {found[0]}")
            value = f"outputs['{self.outputs[name]}']{found[2]}"
            made += f"{literal(text[end : found.start()])}{{{{ {value} }}}}"
            end = found.end()
        return made + literal(text[end:])

    def _position(self, number: str, written: str) -> str:
        self.draft.differ(
            ("params",), "$1 is the variable of an input here, also where the shell has it in single quotes"
        )
        return f"${{{self.positions[number]}}}" if number in self.positions else written

    def own_env(self, script: str, env: dict[str, str]) -> dict[str, Any]:
        """Return the `env` of a step: with the outputs and secrets that its command names."""
        named = {found[1] or found[3] for found in _REFERENCE.finditer(script) if not found[2]}
        made = {
            name: f"{{{{ steps['{step}'].output | default('', true) }}}}"
            for name, step in self.outputs.items()
            if name in named
        }
        made = {**secrets_in(script, {*self.env, *made, *env}), **made, **env}
        return {"env": made} if made else {}
