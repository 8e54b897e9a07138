"""Published MCP servers and SDKs by exact version, and the steps that a client takes with each of them.

`python -m tests.conformance.published_servers npm` prints the packages of npm. The others are installed by
`python -m tests.conformance.published_servers FOLDER`, in environments of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SHOTCLOCK_CONFORMANCE") or "/nonexistent").absolute()
PYTHON_1, PYTHON_2 = "mcp==1.30.0", "mcp==2.3.0"
FASTMCP = "fastmcp==4.1.2"
PYDANTIC_AI = ("pydantic-ai-slim[mcp]==2.66.0", "fastmcp-slim==4.2.0")
INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
TYPESCRIPT_SDKS = ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0")
PYRIGHT = "pyright@1.1.414"
AXE = "axe-core@4.14.0"
NODE = "node@22.23.3"  # for the conformance suite and the inspector, which do not run on Node.js 20
SUITES = {"0.1.16": "@modelcontextprotocol/conformance", "0.2.0-alpha.12": "conformance-next"}
"""The conformance suites by version: the stable one, and the next one under another name."""
SUITE_PACKAGES = tuple(f"{name}@npm:@modelcontextprotocol/conformance@{version}" for version, name in SUITES.items())
INSTALL_S = 600.0
GIT_S = 30.0
CHROMIUM = next(
    (path for name in ("chromium-headless-shell", "chromium", "google-chrome") if (path := shutil.which(name))), ""
)


@dataclass(frozen=True)
class PublishedServer:
    """A server: its package, its command, the steps of a client, and the text that differs from run to run.

    In command and steps, FOLDER has the packages, PLACE is a folder for one run, and SITE a page on loopback.
    """

    name: str
    package: str
    command: tuple[str, ...]
    steps: tuple[list[Any], ...]
    full_steps: tuple[list[Any], ...] = ()
    """Steps that need a client which answers questions."""
    tools: int = 0
    full_tools: int = 0
    varies: tuple[str, ...] = ()
    probe: str = ""
    """The tool of the kill matrix, called as in the steps."""
    timeout_s: float = 5.0
    """The limit of that call, in which a new server has to start on a busy machine."""

    def argv(self, place: Path) -> list[str]:
        return [_fill(word, place, "") for word in self.command]

    def plan(self, argv: list[str], place: Path, site: str, *, full: bool) -> dict[str, Any]:
        steps = [["tools"], *(self.full_steps if full else ()), *self.steps]
        return {"command": argv, "full": full, "steps": json.loads(_fill(json.dumps(steps), place, site))}


def _fill(text: str, place: Path, site: str) -> str:
    return text.replace("FOLDER", str(FOLDER)).replace("PLACE", str(place)).replace("SITE", site)


def npm(name: str) -> str:
    return f"FOLDER/node_modules/.bin/{name}"


SERVERS = (
    PublishedServer(
        "everything",
        "@modelcontextprotocol/server-everything@2026.8.31",
        (npm("mcp-server-everything"), "stdio"),
        (
            ["prompts"],
            ["resources"],
            ["templates"],
            ["level", "debug"],
            ["call", "echo", {"message": "héllo \U0001f600 \u2028 \\u0000"}],
            ["call", "get-sum", {"a": 2, "b": 40}],
            ["call", "get-sum", {"a": "two"}],
            ["call", "get-structured-content", {"location": "Chicago"}],
            ["call", "get-tiny-image", {}],
            ["call", "get-annotated-message", {"messageType": "error", "includeImage": True}],
            ["call", "get-resource-links", {"count": 3}],
            ["call", "get-resource-reference", {"resourceType": "Text", "resourceId": 1}],
            ["call", "trigger-long-running-operation", {"duration": 0.3, "steps": 3}],
            ["call", "no-such-tool", {}],
            ["prompt", "simple-prompt", {}],
            ["prompt", "args-prompt", {"city": "Paris"}],
            ["prompt", "no-such-prompt", {}],
            ["read", "demo://resource/dynamic/text/1"],
            ["read", "demo://resource/dynamic/blob/2"],
            ["subscribe", "demo://resource/dynamic/text/1"],
            ["call", "toggle-subscriber-updates", {}],
            ["call", "toggle-subscriber-updates", {}],
            ["call", "get-env", {}],
        ),
        (
            ["call", "get-roots-list", {}],  # first, because the server asks by itself after 350 ms
            ["call", "trigger-sampling-request", {"prompt": "Say something", "maxTokens": 10}],
            ["call", "trigger-elicitation-request", {}],
        ),
        tools=13,
        full_tools=17,
        varies=(r"\d{1,2}:\d\d:\d\d [AP]M", r"UmVzb3VyY2U[\w+/=]*"),  # a time, also in base64
        probe="echo",
    ),
    PublishedServer(
        "filesystem",
        "@modelcontextprotocol/server-filesystem@2026.8.31",
        (npm("mcp-server-filesystem"), "PLACE"),
        (
            ["call", "write_file", {"path": "PLACE/new.txt", "content": "line 1\nline 2\n"}],
            ["call", "read_text_file", {"path": "PLACE/new.txt"}],
            ["call", "edit_file", {"path": "PLACE/new.txt", "edits": [{"oldText": "line 2", "newText": "line two"}]}],
            ["call", "list_directory", {"path": "PLACE"}],
            ["call", "search_files", {"path": "PLACE", "pattern": "*.txt"}],
            ["call", "read_text_file", {"path": "/etc/passwd"}],
            ["call", "list_allowed_directories", {}],
        ),
        probe="list_directory",
    ),
    PublishedServer(
        "memory",
        "@modelcontextprotocol/server-memory@2026.8.31",
        ("env", "MEMORY_FILE_PATH=PLACE/memory.jsonl", npm("mcp-server-memory")),
        (
            ["resources"],
            ["call", "create_entities", {"entities": [{"name": "Ada", "entityType": "person", "observations": ["x"]}]}],
            ["call", "add_observations", {"observations": [{"entityName": "Ada", "contents": ["y"]}]}],
            ["call", "read_graph", {}],
            ["call", "search_nodes", {"query": "ada"}],
            ["call", "delete_entities", {"entityNames": ["Ada"]}],
            ["call", "read_graph", {}],
        ),
        probe="read_graph",
    ),
    PublishedServer(
        "sequential-thinking",
        "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
        (npm("mcp-server-sequential-thinking"),),
        tuple(
            [
                "call",
                "sequentialthinking",
                {"thought": f"t{number}", "nextThoughtNeeded": number < 3, "thoughtNumber": number, "totalThoughts": 3},
            ]
            for number in (1, 2, 3)
        ),
        probe="sequentialthinking",
    ),
    PublishedServer(
        "playwright",
        "@playwright/mcp@0.0.83",
        (
            npm("playwright-mcp"),
            *(
                "--headless",
                "--isolated",
                "--no-sandbox",
                "--output-dir",
                "PLACE/output",
                "--executable-path",
                CHROMIUM,
            ),
        ),
        (
            ["call", "browser_navigate", {"url": "SITE"}],
            ["call", "browser_snapshot", {}],
            ["call", "browser_evaluate", {"function": "() => document.title"}],
            ["call", "browser_click", {"target": "e999", "element": "nothing"}],
            ["call", "browser_close", {}],
        ),
        varies=(r"page-\d{4}-[-\dTZ]*",),
        probe="browser_evaluate",
        timeout_s=10.0,
    ),
    PublishedServer(
        "git",
        "mcp-server-git==2026.10.19",
        ("FOLDER/python/bin/mcp-server-git", "--repository", "PLACE"),
        (
            ["prompts"],
            ["resources"],
            ["call", "git_status", {"repo_path": "PLACE"}],
            ["call", "git_log", {"repo_path": "PLACE"}],
            ["call", "git_diff_unstaged", {"repo_path": "PLACE"}],
            ["call", "git_show", {"repo_path": "PLACE", "revision": "HEAD"}],
            ["call", "git_show", {"repo_path": "PLACE", "revision": "nowhere"}],
        ),
        probe="git_status",
    ),
    PublishedServer(
        "time",
        "mcp-server-time==2026.10.19",
        ("FOLDER/python/bin/mcp-server-time",),
        (
            ["call", "get_current_time", {"timezone": "Europe/Berlin"}],
            ["call", "get_current_time", {"timezone": "Nowhere/Atall"}],
            ["call", "convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}],
        ),
        varies=(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",),
        probe="convert_time",
    ),
    PublishedServer(
        "fetch",
        "mcp-server-fetch==2026.10.24",
        ("FOLDER/python/bin/mcp-server-fetch", "--allow-private-ips"),
        (
            ["prompts"],
            ["call", "fetch", {"url": "SITE/plain"}],
            ["call", "fetch", {"url": "SITE", "raw": True, "max_length": 20}],
            ["call", "fetch", {"url": "SITE/missing"}],
            ["prompt", "fetch", {"url": "SITE/plain"}],
        ),
        probe="fetch",
        timeout_s=10.0,
    ),
)

TRIED = tuple(server for server in SERVERS if server.name != "playwright" or CHROMIUM)


def prepare(place: Path) -> None:
    """Make the folder of a run anew: a repository with one commit of a fixed date, and one change."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "readme.txt").write_text("one\n")
    who = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in _AUTHOR.items()}
    environ = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for words in (["init", "-q", "-b", "main"], ["add", "readme.txt"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=place, env=environ, check=True, timeout=GIT_S)
    (place / "readme.txt").write_text("two\n")


_AUTHOR = {"NAME": "Ada", "EMAIL": "ada@example.invalid", "DATE": "2026-01-02T03:04:05Z"}


def install(folder: Path) -> None:
    """Install the packages of PyPI, where they are not there yet."""
    servers = tuple(server.package for server in SERVERS if "==" in server.package)
    environments = {
        "python": (PYTHON_2, *servers),
        "python-1": (PYTHON_1,),
        "fastmcp": (FASTMCP,),
        "pydantic-ai": PYDANTIC_AI,
    }
    for name, packages in environments.items():
        environment, stamp = folder / name, folder / name / "packages"
        if stamp.exists() and stamp.read_text() == " ".join(packages):
            continue
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True, timeout=INSTALL_S)
        pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        subprocess.run([*pip, "install", *packages], check=True, timeout=INSTALL_S)
        stamp.write_text(" ".join(packages))


if __name__ == "__main__":
    if sys.argv[1] == "npm":
        print(
            *(server.package for server in SERVERS if "==" not in server.package),
            *TYPESCRIPT_SDKS,
            INSPECTOR,
            NODE,
            PYRIGHT,
            AXE,
            *SUITE_PACKAGES,
        )
    else:
        install(Path(sys.argv[1]))
