"""The coding agents of the conformance suite: their packages, and how each is started against a scripted model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROMPT = "do it"
DENIED = "touch"
"""The program that the user's own rule denies in the scenario of a denied command."""


@dataclass(frozen=True)
class Place:
    """A private home, a project in it, and the port of the model."""

    home: Path
    project: Path
    port: int

    def write(self, name: str, content: object) -> None:
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True)
class CodingAgent:
    """An agent: its npm package, its command line and variables, its files, and a rule that denies DENIED."""

    name: str
    package: str
    words: tuple[str, ...]
    freedom: tuple[str, ...]
    """The options that let it run every command without asking."""
    variables: dict[str, str]
    prepare: Callable[[Place], None]
    deny: Callable[[Place], tuple[str, ...]]
    """Writes the rule, or returns the options that hold it."""
    install_options: tuple[str, ...] = ()
    background: dict[str, object] | None = None
    """The arguments with which its model puts a command in the background. None: it cannot."""
    says_so: bool = True
    """Whether the shell can know that a command is put in the background."""

    def command(self, folder: Path, more: tuple[str, ...] = (), *, asks: bool = False) -> list[str]:
        freedom = () if asks else self.freedom
        return [str(folder / "node_modules" / ".bin" / self.name), *self.words, *freedom, *more]

    def environ(self, place: Place) -> dict[str, str]:
        values = {name: text.replace("PORT", str(place.port)) for name, text in self.variables.items()}
        base = {"HOME": str(place.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb", "CI": "1"}
        return {**base, **values}


def _prepare_nothing(place: Place) -> None:
    pass


def _deny_claude(place: Place) -> tuple[str, ...]:
    file = place.home / ".claude" / "settings.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    place.write(".claude/settings.json", {**settings, "permissions": {"deny": [f"Bash({DENIED} *)"]}})
    return ()


def _prepare_codex(place: Place) -> None:
    place.write(
        ".codex/config.toml",
        'model = "scripted"\nmodel_provider = "scripted"\n'
        'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.scripted]\nname = "scripted"\nbase_url = "http://127.0.0.1:{place.port}/v1"\n'
        'wire_api = "responses"\nenv_key = "SCRIPTED_KEY"\n',
    )


def _deny_codex(place: Place) -> tuple[str, ...]:
    place.write(".codex/rules/default.rules", f'prefix_rule(pattern=["{DENIED}"], decision="forbidden")\n')
    return ()


def _prepare_gemini(place: Place) -> None:
    place.write(".gemini/settings.json", {"security": {"auth": {"selectedType": "gemini-api-key"}}})


def _deny_gemini(place: Place) -> tuple[str, ...]:
    rule = f'toolName = "run_shell_command"\ncommandPrefix = "{DENIED}"\ndecision = "deny"\npriority = 100\n'
    place.write(".gemini/policies/mine.toml", f"[[rule]]\n{rule}")
    return ()


def _opencode(place: Place, rules: dict[str, str]) -> None:
    options = {"baseURL": f"http://127.0.0.1:{place.port}/v1", "apiKey": "none"}
    models = {"m": {"name": "scripted"}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "scripted", "options": options, "models": models}
    settings = {"model": "scripted/m", "provider": {"scripted": provider}, "permission": {"bash": rules}}
    place.write(".config/opencode/opencode.json", settings)


def _prepare_opencode(place: Place) -> None:
    _opencode(place, {"*": "allow"})


def _deny_opencode(place: Place) -> tuple[str, ...]:
    _opencode(place, {"*": "allow", f"{DENIED} *": "deny"})
    return ()


AGENTS = (
    CodingAgent(
        "claude",
        "@anthropic-ai/claude-code@2.1.326",
        ("-p", PROMPT),
        ("--dangerously-skip-permissions",),
        {
            "ANTHROPIC_BASE_URL": "http://127.0.0.1:PORT",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        },
        _prepare_nothing,
        _deny_claude,
        background={"run_in_background": True},
    ),
    CodingAgent(
        "codex",
        "@openai/codex@0.169.0",
        ("exec", "--skip-git-repo-check", "--json", PROMPT),
        ("--dangerously-bypass-hook-trust",),
        {"SCRIPTED_KEY": "none"},
        _prepare_codex,
        _deny_codex,
        ("--accept-allow",),
        background={"yield_time_ms": 1000},
        says_so=False,
    ),
    CodingAgent(
        "gemini",
        "@google/gemini-cli@0.61.0",
        ("--output-format", "json", "-p", PROMPT),
        ("--yolo",),
        {
            "GEMINI_API_KEY": "none",
            "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:PORT",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        _prepare_gemini,
        _deny_gemini,
        background={"is_background": True},
    ),
    CodingAgent(
        "opencode",
        "opencode-ai@1.18.33",
        ("run", "--format", "json", PROMPT),
        (),
        {},
        _prepare_opencode,
        _deny_opencode,
    ),
    CodingAgent(
        "copilot",
        "@github/copilot@1.0.102",
        ("--no-auto-update", "-p", PROMPT),
        ("--allow-all",),
        {
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_BASE_URL": "http://127.0.0.1:PORT/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": "none",
            "COPILOT_MODEL": "scripted",
        },
        _prepare_nothing,
        lambda place: ("--deny-tool", f"shell({DENIED})"),
        ("--accept-allow",),
        background={"mode": "async"},
    ),
)

if __name__ == "__main__":
    print(*(agent.package for agent in AGENTS))
