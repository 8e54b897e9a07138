"""`shotclock serve TARGET --install CLIENT`: the entry of a server in the configuration of a client."""

import json
from pathlib import Path
from typing import Any

import pytest

TOOL = "from shotclock import App\napp = App('my-tool')\n@app.command\ndef greet() -> None: ...\n"


@pytest.fixture
def install(shotclock: Any, tmp_path: Path, no_survivors: Any) -> Any:
    """A function that runs the command in a folder with a tool, and a home of its own."""
    (tmp_path / "tool.py").write_text(TOOL)
    env = {"HOME": str(tmp_path), "CLAUDE_CONFIG_DIR": None, "XDG_CONFIG_HOME": None, "CODEX_HOME": None}
    return lambda *words: shotclock("serve", *words, cwd=tmp_path, env=env)


@pytest.mark.slow
def test_the_file_of_each_client_gets_the_entry_and_a_second_time_nothing_changes(install: Any, tmp_path: Path) -> None:
    files = {
        "claude": (".claude.json", "mcpServers"),
        "cursor": (".cursor/mcp.json", "mcpServers"),
        "gemini": (".gemini/settings.json", "mcpServers"),
        "vscode": (".config/Code/User/mcp.json", "servers"),
    }
    for client, (file, table) in files.items():
        answer = install("tool.py", "--install", client, "--yes").json()
        assert answer["ok"] and answer["data"]["changed"], answer
        [(name, entry)] = json.loads((tmp_path / file).read_text())[table].items()
        assert name == "my-tool" and entry["args"] == ["serve", f"{tmp_path / 'tool.py'}:app"]
        assert Path(entry["command"]).name == "shotclock" and Path(entry["command"]).is_absolute()
        assert entry.get("type") == ("stdio" if client == "vscode" else None)
    assert install("tool.py", "--install", "claude", "--yes").json()["data"]["changed"] is False


def test_without_a_person_nothing_is_written_and_the_difference_is_in_the_answer(install: Any, tmp_path: Path) -> None:
    ran = install("tool.py", "--install", "cursor", "--project", "--name", "other")
    answer = ran.json()
    assert ran.code == 2 and '+    "other": {' in answer["error"]["context"]["diff"], answer
    text = install("tool.py", "--install", "cursor", "--project", "--format", "text").stderr.decode()
    assert '+    "my-tool": {' in text and text.rstrip().endswith("then add --yes")
    assert not (tmp_path / ".cursor").exists()


def test_options_of_the_server_go_into_the_entry(install: Any, tmp_path: Path) -> None:
    words = ["--operation-timeout", "5m", "--elicitation", "--project", "--yes"]
    answer = install("tool.py", "--install", "claude", *words).json()
    assert answer["data"]["entry"]["args"][2:] == ["--elicitation", "--operation-timeout", "5m"]
    assert (tmp_path / ".mcp.json").exists()


def test_the_folder_of_uploads_goes_into_the_entry_and_belongs_to_the_target_ui(install: Any, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    answer = install("ui", "--files", "files", "--install", "cursor", "--yes").json()
    assert answer["data"]["entry"]["args"] == ["serve", "ui", "--files", str(tmp_path / "files")]
    for words, said in (
        (["tool.py", "--files", "files"], "belongs to the target ui"),
        (["ui", "--files", "x"], "no folder"),
    ):
        refused = install(*words, "--json")
        assert refused.code == 2 and said in refused.json()["error"]["message"]


def test_a_tool_that_cannot_be_served_and_contradicting_options_are_refused(install: Any, tmp_path: Path) -> None:
    assert install("none.py", "--install", "cursor", "--yes").json()["error"]["code"] == "TARGET_NOT_FOUND"
    assert install("tool.py", "--install", "emacs").code == 2
    refused = install("tool.py", "--install", "cursor", "--http", "127.0.0.1:0", "--json")
    assert refused.code == 2 and "exclude each other" in refused.json()["error"]["message"]
    refused = install("tool.py", "--yes", "--json")
    assert refused.code == 2 and "--yes needs --install or --remove" in refused.json()["error"]["message"]
    assert not (tmp_path / ".cursor").exists()


def test_the_entry_is_removed_without_importing_the_tool(install: Any, tmp_path: Path) -> None:
    file = tmp_path / ".codex/config.toml"
    file.parent.mkdir()
    file.write_text("# mine\n")
    assert install("tool.py", "--install", "codex", "--yes").json()["ok"]
    assert '[mcp_servers.my-tool]\ncommand = "' in file.read_text()
    (tmp_path / "tool.py").write_text("it does not even parse")
    answer = install("tool.py", "--remove", "codex", "--yes").json()
    assert (answer["data"]["changed"], answer["data"]["server"], file.read_text()) == (True, "my-tool", "# mine\n")
    (tmp_path / "tool.py").unlink()
    assert install("tool.py", "--remove", "codex", "--yes").json()["error"]["code"] == "TARGET_NOT_FOUND"
    assert install("tool.py", "--remove", "codex", "--name", "my-tool", "--yes").json()["data"]["changed"] is False
    (tmp_path / "tool.py").write_text(TOOL)
    text = install("tool.py", "--remove", "codex", "--yes", "--format", "text").stdout.decode()
    assert text.startswith("nothing to change in")
