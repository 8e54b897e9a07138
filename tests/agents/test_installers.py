"""`agent install`, `wrap install` and `serve --install`: one file is handled the same by all three."""

import os
import stat
from pathlib import Path

import pytest

from shotclock.agents.known_agents import AGENTS, CLIENTS
from shotclock.core.errors import Failure
from tests.agents.installers import Installer, kept_texts

INSTALLERS = [("agent", name) for name in AGENTS if name != "opencode"]
INSTALLERS += [(verb, name) for verb in ("wrap", "serve") for name in CLIENTS]

COMMENTS = '{\n  // mine\n  "TABLE": {\n    "a": {"command": "npx", "args": ["-y"]} // about a\n  } /* end */\n}\n'
JSON_FORMS = {
    "plain": '{"zeta": 1.0e3, "TABLE": {"a": {"args": [ "-y"], "command": "\\u006epx"}}}\n',
    "comments": COMMENTS,
    "last comma": '{\n  "TABLE": {\n    "a": {"command": "npx", "args": ["-y"]},\n  },\n}\n',
    "byte order mark": '\ufeff{\n  "TABLE": {\n    "a": {"command": "npx", "args": ["-y"]}\n  }\n}\n',
}
TOML_COMMENTS = '# mine\n[TABLE.a] # about a\ncommand = "npx"\nargs = ["-y"]\n'
TOML_FORMS = {"comments": TOML_COMMENTS, "byte order mark": f"\ufeff{TOML_COMMENTS}"}
# What each program reads beside plain JSON. Seen with the agents; VS Code and Cursor have one reader.
READS = {"claude": {"byte order mark"}, "gemini": {"comments"}, "cursor": set(JSON_FORMS), "vscode": set(JSON_FORMS)}


@pytest.fixture(autouse=True)
def home(user_home: Path) -> Path:
    return user_home


@pytest.mark.parametrize(("verb", "name"), INSTALLERS)
@pytest.mark.parametrize("project", [False, True])
def test_a_file_is_changed_in_place_and_restored_or_refused_by_every_installer(
    verb: str, name: str, project: bool, home: Path
) -> None:
    installer = Installer(verb, name, project=project)
    is_toml = installer.file.suffix == ".toml"
    for form, text in (TOML_FORMS if is_toml else JSON_FORMS).items():
        text = text.replace("TABLE", installer.table or "mcpServers")
        installer.write(text)
        if form != "plain" and not is_toml and form not in READS.get(name, ()):
            with pytest.raises(Failure, match=r"was left as it is, because .* does not read it") as refused:
                installer.install()
            assert (refused.value.code, installer.text) == ("CONFLICT", text)
            continue
        before = installer.data
        assert installer.install()["changed"] is True
        written = installer.text
        assert written is not None and "shotclock" in written
        for kept in ("// mine\n", "// about a\n", "/* end */", "# mine\n", "# about a\n", "1.0e3", "\ufeff"):
            assert (kept in written) == (kept in text), (form, written)
        after = installer.data
        if verb != "wrap":
            assert after.get(installer.table, {}).pop("mine", None) is not None or verb == "agent"
            assert {key: after.get(key) for key in before} == before, "nothing else has changed"
        assert (installer.install()["changed"], installer.text) == (False, written), "twice changes nothing"
        assert installer.remove()["changed"] is True
        assert installer.text == text, "byte for byte"
        assert installer.remove()["changed"] is False
        installer.install()
        installer.file.write_bytes(f"{installer.text}\n".encode())
        assert "changed since" in str(installer.remove()["notes"])
        wanted = text.replace("},\n  },", "}\n  },") if verb == "serve" else text  # the comma was needed before ours
        assert installer.text == f"{wanted}\n", "only our entries are taken out"
    assert kept_texts(home) == [] or not project


@pytest.mark.parametrize(("verb", "name"), [each for each in INSTALLERS if each[0] != "wrap"])
def test_an_empty_or_missing_file_gets_the_entry_and_is_restored(verb: str, name: str, home: Path) -> None:
    for project in (False, True):
        installer = Installer(verb, name, project=project)
        blank = ["", "\n", "# mine\n"] if installer.file.suffix == ".toml" else ["", "{}", "{}\n\n"]
        for text in [None, *blank]:
            installer.write(text)
            assert installer.install()["changed"] is True
            assert "shotclock" in (installer.text or "")
            installer.remove()
            assert installer.text == text, (verb, name, text)


def test_folders_that_an_installation_made_are_deleted_if_they_are_empty(home: Path) -> None:
    before = set(home.rglob("*"))
    made = [("agent", name) for name in AGENTS] + [("serve", name) for name in CLIENTS]
    for verb, name in made:
        for project in (False, True):
            installer = Installer(verb, name, project=project)
            for _ in range(2):  # the folders are known also after a second installation
                installer.install()
            installer.remove()
    assert {path for path in set(home.rglob("*")) - before if home / ".local" not in (path, *path.parents)} == set()
    installer = Installer("agent", "copilot", project=True)
    installer.install()
    (home / "project/.github/mine").touch()
    installer.remove()
    assert [path.name for path in (home / "project/.github").iterdir()] == ["mine"]


@pytest.mark.parametrize("verb", ["agent", "wrap", "serve"])
def test_what_cannot_be_changed_safely_is_refused_with_its_mistake_and_left_as_it_is(verb: str) -> None:
    for name, text, mistake in (
        ("claude", '{"a": 1,}', "Claude Code does not read it"),
        ("claude", "{", "line 1"),
        ("claude", "[]", "it is not an object"),
        ("claude", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("claude", '{"a": {"x": 1, "x": 2}}', "it has 'x' twice"),
        ("codex", "[mcp_servers.a]\ncommand = 'x'\ncommand = 'y'\n", "line 3"),
    ):
        installer = Installer(verb, name)
        if name == "codex" and verb == "agent":
            continue
        installer.write(text)
        with pytest.raises(Failure) as refused:
            installer.install()
        assert (refused.value.code, installer.text) == ("CONFLICT", text)
        assert mistake in str(refused.value), (text[:80], str(refused.value))
    installer.write("")
    installer.file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(Failure, match="is not UTF-8"):
        installer.install()


@pytest.mark.parametrize("verb", ["agent", "wrap", "serve"])
def test_a_link_stays_a_link_and_the_mode_the_owner_and_the_kept_text_stay_private(verb: str, home: Path) -> None:
    installer, real = Installer(verb, "claude"), home / "dotfiles.json"
    text = '{"mcpServers": {"a": {"command": "secret"}}}'
    real.write_text(text)
    real.chmod(0o640)
    owner = (12345, 12346) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(real, *owner)
    installer.file.parent.mkdir(parents=True, exist_ok=True)
    installer.file.symlink_to(real)
    installer.install()
    assert installer.file.is_symlink() and "shotclock" in real.read_text()
    found = real.stat()
    assert (stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid)) == (0o640, owner)
    [kept] = kept_texts(home)
    assert "secret" in kept.read_text() and stat.S_IMODE(kept.stat().st_mode) == 0o600
    installer.remove()
    assert (installer.file.is_symlink(), real.read_text(), kept.exists()) == (True, text, False)


@pytest.mark.parametrize("verb", ["agent", "wrap", "serve"])
def test_a_damaged_record_or_one_of_a_file_that_was_not_written_is_not_restored(verb: str, home: Path) -> None:
    installer, text = Installer(verb, "gemini"), COMMENTS.replace("TABLE", "mcpServers")
    for damage in (b"", b"[]", b"{", b"\xff", b'{"before": 3, "after": "x"}'):
        installer.write(text)
        installer.install()
        [kept] = kept_texts(home)
        kept.write_bytes(damage)
        installer.remove()
        assert installer.text == text, damage
        kept.unlink(missing_ok=True)
    installer.install()  # the record is written first; a kill before the file is replaced leaves it behind
    changed = text.replace("npx", "other")
    installer.write(changed)
    assert (installer.remove()["changed"], installer.text) == (False, changed)


def test_homes_of_the_agents_are_where_their_variables_say(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb, name, variable, file in (
        ("agent", "claude", "CLAUDE_CONFIG_DIR", "settings.json"),
        ("agent", "codex", "CODEX_HOME", "hooks.json"),
        ("agent", "gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
        ("agent", "opencode", "XDG_CONFIG_HOME", "opencode/plugins/shotclock.js"),
        ("agent", "copilot", "COPILOT_HOME", "hooks/shotclock.json"),
        ("wrap", "claude", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("wrap", "codex", "CODEX_HOME", "config.toml"),
        ("wrap", "vscode", "XDG_CONFIG_HOME", "Code/User/mcp.json"),
        ("wrap", "gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
    ):
        monkeypatch.setenv(variable, str(home / name))
        assert Installer(verb, name).file == home / name / file
        monkeypatch.delenv(variable)


def test_a_server_of_another_program_is_not_replaced_and_two_of_ours_come_and_go_alone(home: Path) -> None:
    for before in ('{"mcpServers": {"mine": {"command": "npx"}}}', '{"mcpServers": 3}'):
        installer = Installer("serve", "claude")
        installer.write(before)
        with pytest.raises(Failure, match="left as it is"):
            installer.install()
        assert installer.text == before
    from shotclock.agents.config_files import write_change
    from shotclock.agents.known_agents import ConfigScope
    from shotclock.apps.cli_install import plan_entry, plan_removal

    for name, text in (("cursor", "{\n  // mine\n}\n"), ("codex", "# mine\n[other]\nx = 1\n")):
        installer, client = Installer("serve", name), CLIENTS[name]
        installer.write(text)
        for each in ("one", "two"):
            write_change(plan_entry(client, ConfigScope.USER, each, [f"{each}.py:app"]))
        assert set(installer.servers) == {"one", "two"}
        write_change(plan_removal(client, ConfigScope.USER, None, "one.py:app"))
        assert set(installer.servers) == {"two"}
        write_change(plan_removal(client, ConfigScope.USER, "two", "gone.py:app"))
        assert installer.servers == {} and "mine" in (installer.text or "")
        write_change(plan_entry(client, ConfigScope.USER, "again", ["two.py:app"]))
        write_change(plan_entry(client, ConfigScope.USER, "again", ["two.py:app", "--reload"]))
        assert installer.servers["again"]["args"] == ["serve", "two.py:app", "--reload"]
        plan = plan_removal(client, ConfigScope.USER, None, "three.py:app")
        assert plan.before == plan.after, "there is none"
