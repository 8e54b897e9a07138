"""`shotclock-sh`: side by side with bash, and with limits, an owner, and hooks and servers beside its commands."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.commands import shell
from shotclock.commands.shell_limits import BadSetting, read_limits
from tests.command_line import SOON_S, is_alive, wait_for

from .test_exec_sandboxed import REFUSED, refuse_sockets

pytestmark = pytest.mark.usefixtures("no_survivors")

ROOT = Path(__file__).resolve().parents[2]
BASH = "/bin/bash"
LIMIT_S = 30.0
GONE_WITHIN_S = 2.0  # after the end of the owner; the machine may add to it
ENTRY = f"#!{sys.executable}\nimport sys\nfrom shotclock.main import run_shell\nsys.exit(run_shell())\n"
# As Claude Code 2.1.326 gives a command to CLAUDE_CODE_SHELL_PREFIX.
CLAUDE_LINE = (
    "source {folder}/shell-snapshots/snapshot-bash-1-x.sh 2>/dev/null || true && "
    "{{ \\builtin shopt -u extglob || \\builtin setopt NO_EXTENDED_GLOB; }} >/dev/null 2>&1 || true && "
    "eval {command} < /dev/null && pwd -P >| {folder}/cwd"
)


class Shell:
    """A `shotclock-sh` in a folder of its own, with nothing of this machine's settings."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.home, self.work = (folder / name for name in ("bin", "home", "work"))
        for each in (self.bin, self.home, self.work, self.work / ".git"):
            each.mkdir()
        self.path = self.bin / "shotclock-sh"
        self.path.write_text(ENTRY)
        self.path.chmod(0o755)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("SHOTCLOCK_", "XDG_CONFIG"))}
        kept |= {name: text for name, text in os.environ.items() if name == "SHOTCLOCK_TEST_MARK"}
        self.env = {**kept, "HOME": str(self.home), "SHELL": BASH, "PYTHONPATH": str(ROOT / "src")}

    def link(self, name: str) -> Path:
        (self.bin / name).symlink_to(self.path)
        return self.bin / name

    def popen(self, *words: str | bytes, program: object = None, **more: Any) -> subprocess.Popen[bytes]:
        options = {"cwd": self.work, "stdin": subprocess.DEVNULL, **more}
        options["env"] = {**self.env, **options.get("env", {})}
        options |= {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in options}
        return subprocess.Popen([str(program or self.path), *words], **options)

    def run(self, *words: str | bytes, given: bytes | None = None, **more: Any) -> tuple[int, bytes, bytes]:
        """Return the exit code as a shell sees it, stdout and stderr."""
        process = self.popen(*words, **more, **({} if given is None else {"stdin": subprocess.PIPE}))
        try:
            out, err = process.communicate(given, timeout=LIMIT_S)
        finally:
            process.kill()
        code = process.returncode
        return (code if code >= 0 else 128 - code), out, err


@pytest.fixture
def sh(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


# --- as bash ------------------------------------------------------------------------------------------------------

Table = list[tuple[list[str | bytes], bytes | None]]
SAME: Table = [
    (["-c", "echo out; echo err >&2; exit 3"], None),
    (["-c", 'echo "$0|$1|$2|$#"', "name", "a b", "c"], None),
    (["-c", 'echo "$0"'], None),
    (["-c", b"printf %s \xff\xc3"], None),
    (["-lc", "shopt -q login_shell && echo login"], None),
    (["-l", "-c", "shopt -q login_shell && echo login"], None),
    (["-c", "-l", 'shopt -q login_shell && echo "$0"', "zero"], None),
    (["-euc", "false; echo not reached"], None),
    (["-euo", "pipefail", "-c", "false | true; echo not reached"], None),
    (["-O", "extglob", "-c", "shopt -q extglob && echo on"], None),
    (["-xc", "echo traced"], None),
    (["--norc", "--noprofile", "-c", "echo plain"], None),
    (["--", "script.sh", "a b", "c"], None),
    (["script.sh", "a b", "c"], None),
    (["-x", "script.sh"], None),
    (["no-such-script.sh", "a"], None),
    (["-c", "cat; echo end"], b"bytes \x00\xff\n"),
    (["-c", "read line; echo got $line; cat"], b"one\ntwo\n"),
    (["-c", "kill -TERM $$"], None),
    (["-c", "kill -KILL $$"], None),
    (["-c", "trap 'echo handled; exit 9' USR1; kill -USR1 $$; sleep 5"], None),
    (["-c", "no-such-command-here"], None),
    (["-c", "exit 255"], None),
    (["-c", "if"], None),
    (["-c", ""], None),
    (["-c"], None),
    (["-c", "cd / && pwd -P >| /dev/stdout"], None),
    (["-c", "ulimit -S -c; umask"], None),
    ([], b"echo from stdin\nexit 4\n"),
    (["-s", "a b"], b'echo "$1"\n'),
    (["-"], b"echo dash\n"),
    (["--login"], b"shopt -q login_shell && echo login\n"),
    (["-o", "errexit"], b"false\necho not reached\n"),
]


@pytest.mark.slow
def test_output_input_arguments_and_exit_codes_are_those_of_bash(sh: Shell):
    (sh.work / "script.sh").write_text('echo "$0|$1|$2|$#"; exit 6\n')
    for words, given in SAME:
        assert sh.run(*words, given=given) == sh.run(*words, given=given, program=BASH), words


@pytest.mark.slow
def test_the_locale_of_a_command_is_that_of_the_caller(sh: Shell):
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        sh.env.pop(name, None)
    for locale in ({}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}, {"LANG": "C"}, {"LC_ALL": "C"}):
        words = ["-c", "env | grep ^L[AC]; x=é; echo ${#x}"]
        assert sh.run(*words, env=locale) == sh.run(*words, env=locale, program=BASH), locale


def test_output_that_cannot_be_written_is_reported_also_if_the_command_dies_of_it(sh: Shell):
    with open("/dev/full", "wb") as full:
        for words in ("echo one line", "yes | head -c 1000000"):
            ran = sh.run("-o", "pipefail", "-c", words, stdout=full, env={"SHOTCLOCK_IDLE": "20s"})
            assert ran[0] == 125 and b"could not be written: No space left" in ran[2], ran


def test_signals_that_the_caller_blocks_stay_blocked_and_the_end_is_still_noticed(sh: Shell):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
    try:
        words = ["-c", "grep SigBlk /proc/self/status; exit 3"]
        assert sh.run(*words) == sh.run(*words, program=BASH)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_one_argument_is_a_command_line(sh: Shell):
    assert sh.run("echo one; exit 3") == (3, b"one\n", b"")
    (sh.work / "tool").write_text("#!/bin/sh\necho ran $0\n")
    (sh.work / "tool").chmod(0o755)
    assert sh.run("./tool") == (0, b"ran ./tool\n", b"")


@pytest.mark.slow
def test_one_argument_that_names_a_readable_file_is_a_script(sh: Shell):
    text = 'echo "$0 $#"; exit 6\n'
    (sh.work / "plain.sh").write_text(text)
    for name in ("in_bash.sh", "named.sh", "by_env"):
        first = {"in_bash.sh": "#!/bin/bash", "named.sh": f"#!{sh.path}", "by_env": "#!/usr/bin/env shotclock-sh"}[name]
        (sh.work / name).write_text(f"{first}\n{text}")
        (sh.work / name).chmod(0o755)
    for word in ("plain.sh", "./plain.sh", "in_bash.sh", "named.sh"):
        assert sh.run(word) == sh.run(word, program=BASH) == (6, f"{word} 0\n".encode(), b""), word
    path = f"{sh.bin}{os.pathsep}{os.environ['PATH']}"
    for name in ("named.sh", "by_env"):  # the kernel gives the path of the script as the one argument
        program = sh.work / name
        assert sh.run(program=program, env={"PATH": path}) == (6, f"{program} 0\n".encode(), b"")
        assert sh.run("a b", program=program, env={"PATH": path}) == (6, f"{program} 1\n".encode(), b"")
        line = f"{program}; echo $?"  # as a hook of Claude Code, and below a command
        assert sh.run(line, env={"PATH": path, "CLAUDECODE": "1"}) == (0, f"{program} 0\n6\n".encode(), b"")
        assert sh.run(str(program), env={"PATH": path, "CLAUDECODE": "1"}) == (6, f"{program} 0\n".encode(), b"")


def test_a_hook_of_claude_code_is_a_command_also_where_a_file_of_the_project_has_its_name(sh: Shell):
    (sh.work / "true").write_text("echo the file of the project\n")
    assert sh.run("true", env={"CLAUDECODE": "1"}) == (0, b"", b"")


@pytest.mark.slow
def test_a_shell_that_starts_itself_without_end_is_stopped_with_a_reason(sh: Shell):
    again = sh.work / "again"
    again.write_text(f"#!/bin/sh\nexec {sh.path} -c {again}\n")
    again.chmod(0o755)
    code, _, err = sh.run(str(again))
    assert code == 125
    assert b"20 of these shells are inside each other" in err


def test_the_line_of_claude_code_runs_in_bash_and_leaves_its_folder(sh: Shell, tmp_path: Path):
    (tmp_path / "shell-snapshots").mkdir()
    (tmp_path / "shell-snapshots" / "snapshot-bash-1-x.sh").write_text("greet() { echo hello; }\n")
    line = CLAUDE_LINE.format(folder=tmp_path, command="'greet; cd /'")
    for words in ([line], ["-c", line]):
        (tmp_path / "cwd").unlink(missing_ok=True)
        assert sh.run(*words) == (0, b"hello\n", b"")
        assert (tmp_path / "cwd").read_text() == "/\n"


def test_help_and_version_are_its_own_only_under_its_own_name(sh: Shell):
    code, out, _ = sh.run("--version")
    assert (code, out.split()[0]) == (0, b"shotclock-sh")
    assert b"SHOTCLOCK_TIMEOUT" in sh.run("--help")[1]
    assert sh.run("--version", program=sh.link("bash")) == sh.run("--version", program=BASH)


def test_as_a_link_named_bash_it_is_bash_with_limits(sh: Shell):
    (sh.work / "script.sh").write_text('echo "$0"\n')
    link = sh.link("bash")
    for words in (["script.sh"], ["-c", 'echo "$0" $BASH'], ["-c", "-l", "echo x"], ["-c", "env | grep ^SHELL="]):
        assert sh.run(*words, program=link) == sh.run(*words, program=BASH), words
    code, _, err = sh.run("-c", "sleep 60", program=link, env={"SHOTCLOCK_TIMEOUT": "1s"})
    assert (code, err.count(b"\n")) == (124, 1)


@pytest.mark.slow
def test_it_never_takes_itself_for_the_shell(sh: Shell, monkeypatch: pytest.MonkeyPatch):
    links = [sh.link(name) for name in ("bash", "zsh", "sh")]
    path = f"{sh.bin}{os.pathsep}{os.environ['PATH']}"
    for program in (sh.path, links[0], links[2]):
        for own in (sh.path, *links):
            ran = sh.run("-c", "echo real", program=program, env={"PATH": path, "SHELL": str(own)})
            assert ran == (0, b"real\n", b"")
    code, out, err = sh.run("-c", "echo real", env={"SHOTCLOCK_SHELL": str(links[0])})
    assert (code, out) == (125, b"") and err.startswith(b"shotclock-sh: SHOTCLOCK_SHELL=")
    # Where there is no shell in the usual folders, PATH is searched, and a relative entry is passed over.
    monkeypatch.setattr(shell, "_FOLDERS", ())
    monkeypatch.chdir("/bin")
    monkeypatch.setenv("SHELL", str(links[0]))
    monkeypatch.setenv("PATH", f"{sh.bin}{os.pathsep}.{os.pathsep}")
    with pytest.raises(shell.Unusable, match="SHOTCLOCK_SHELL"):
        shell.find_shell("bash")
    monkeypatch.setenv("PATH", f"{sh.bin}{os.pathsep}{os.pathsep}/bin")
    assert shell.find_shell("bash") == "/bin/bash"
    monkeypatch.setenv("PATH", str(sh.home))
    (sh.home / "bash").symlink_to(BASH)
    with pytest.raises(shell.Unusable, match="no zsh in the path"):  # bash would read its scripts in another way
        shell.find_shell("zsh")


def test_the_shell_is_the_chosen_one_then_that_of_the_name_then_that_of_the_user(sh: Shell, tmp_path: Path):
    own = tmp_path / "other" / "bash"
    own.parent.mkdir()
    own.symlink_to(BASH)
    show = ["-c", 'readlink /proc/$$/exe; echo "$BASH"']
    assert str(own).encode() in sh.run(*show, env={"SHELL": str(own)})[1]
    assert str(own).encode() not in sh.run(*show, env={"SHELL": str(own)}, program=sh.link("bash"))[1]
    assert b"dash" in sh.run("-c", "readlink /proc/$$/exe", env={"SHOTCLOCK_SHELL": "/bin/dash"})[1]


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_command_that_hangs_is_stopped_with_its_tree_and_one_line_tells_what_to_do(sh: Shell):
    code, out, err = sh.run(
        "-c", "setsid sleep 600 & echo begun; sleep 600", env={"SHOTCLOCK_TIMEOUT": "1s", "PATH": "/usr/bin:/bin"}
    )
    assert (code, out) == (124, b"begun\n")
    assert err == (
        b"shotclock: TIMEOUT: stopped after 1s, the limit of commands here (SHOTCLOCK_TIMEOUT). "
        b"Do less in one command, or run it in the background: shotclock exec --detach --name NAME -- COMMAND\n"
    )


@pytest.mark.slow
def test_every_limit_has_a_line_without_options_that_cannot_be_given(sh: Shell):
    reads = {"stdin": os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)}
    cases: list[tuple[str, dict[str, str], dict[str, int], bytes]] = [
        ("sleep 600", {"SHOTCLOCK_IDLE": "1s"}, {}, b"no output for 1s, the limit of silence here (SHOTCLOCK_IDLE)"),
        ("read answer", {"SHOTCLOCK_INPUT_WAIT": "1s"}, reads, b"Use a non-interactive option"),
        ("sleep 600 & echo left", {}, {}, b"To keep such a process, run it in the background"),
    ]
    try:
        for command, env, more, said in cases:
            code, _, err = sh.run("-c", command, env={"SHOTCLOCK_TIMEOUT": "20s", **env}, **more)
            assert code == (0 if "left" in command else 124), err
            assert said in err and err.count(b"\n") == 1
            assert b"--idle" not in err and b"--input-wait" not in err and b"--leave" not in err
    finally:
        os.close(reads["stdin"])


def test_the_advice_names_a_program_that_can_be_started(sh: Shell):
    beside = sh.bin / "shotclock"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    env = {"SHOTCLOCK_TIMEOUT": "500ms", "PATH": "/usr/bin:/bin"}
    assert f"{beside} exec --detach".encode() in sh.run("-c", "sleep 60", env=env)[2]
    assert f"{beside} exec --detach".encode() in sh.run("-c", "sleep 60", env=env, program=sh.link("bash"))[2]


def test_limits_come_from_variables_then_the_project_then_the_user_and_a_project_only_shortens(tmp_path: Path):
    home, project = tmp_path / "home", tmp_path / "home" / "project"
    deep, user = project / "a" / "b", home / ".config" / "shotclock" / "config.toml"
    for folder in (deep, user.parent, project / ".git"):
        folder.mkdir(parents=True)
    outside = home / "shotclock.toml"  # the home directory is no project
    outside.write_text('timeout = "1s"')

    def limit(key: str, **variables: str) -> tuple[int, str]:
        limits, mistakes = read_limits({"HOME": str(home), **variables}, str(deep), {"timeout": 600_000}, {})
        assert not mistakes
        return limits[key].ms, limits[key].source

    assert limit("timeout") == (600_000, "SHOTCLOCK_TIMEOUT")
    assert limit("idle") == (0, "SHOTCLOCK_IDLE")
    user.write_text('timeout = "30m"\nlifetime = "8h"\n')
    assert limit("timeout") == (1_800_000, f"timeout in {user}")
    toml = project / "pyproject.toml"
    toml.write_text('[tool.other]\nx = 1\n[tool.shotclock]\ntimeout = "5m"\nidle = "1m"\nlifetime = 0\n')
    assert limit("timeout") == (300_000, f"timeout in {toml}")
    assert limit("idle") == (60_000, f"idle in {toml}")  # shorter than none
    assert limit("lifetime") == (28_800_000, f"lifetime in {user}")  # 0 would be longer
    toml.write_text('[tool.shotclock]\ntimeout = "2h"\n')
    assert limit("timeout") == (1_800_000, f"timeout in {user}")
    nearer = project / "a" / "shotclock.toml"
    nearer.write_text('timeout = "20s"')
    assert limit("timeout") == (20_000, f"timeout in {nearer}")
    assert limit("timeout", SHOTCLOCK_TIMEOUT="1h") == (3_600_000, "SHOTCLOCK_TIMEOUT")
    assert limit("timeout", SHOTCLOCK_TIMEOUT="0") == (0, "SHOTCLOCK_TIMEOUT")
    (tmp_path / "xdg" / "shotclock").mkdir(parents=True)
    (tmp_path / "xdg" / "shotclock" / "config.toml").write_text('input_wait = "3s"')
    assert limit("input_wait", XDG_CONFIG_HOME=str(tmp_path / "xdg"))[0] == 3_000


def test_nothing_above_the_repository_counts(tmp_path: Path):
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    (tmp_path / "shotclock.toml").write_text('timeout = "1s"')
    limits, _ = read_limits({}, str(tmp_path / "repository"), {"timeout": 5}, {})
    assert limits["timeout"].ms == 5


def test_without_a_repository_only_the_working_directory_counts_also_without_a_home(tmp_path: Path):
    (tmp_path / "below").mkdir()
    (tmp_path / "shotclock.toml").write_text('timeout = "1s"')
    for folder, expected in ((tmp_path, 1_000), (tmp_path / "below", 5_000)):
        for home in ({}, {"HOME": ""}, {"HOME": "/nowhere"}):
            limits, _ = read_limits(home, str(folder), {"timeout": 5_000}, {})
            assert limits["timeout"].ms == expected, (folder, home)


def test_a_table_of_another_form_in_pyproject_is_a_mistake(tmp_path: Path):
    for text in ('[[tool.shotclock]]\ntimeout = "1s"', "tool.shotclock = 5"):
        (tmp_path / "pyproject.toml").write_text(text)
        limits, mistakes = read_limits({}, str(tmp_path), {"timeout": 5_000}, {})
        assert limits["timeout"].ms == 5_000 and "tool.shotclock is not a table" in mistakes[0]


@pytest.mark.slow
def test_a_file_that_cannot_be_parsed_in_time_or_at_all_holds_no_command_up(sh: Shell):
    # From Python 3.14 on its parser refuses both at once.
    for text, whys in (
        ("a = " + "[" * 20_000, (b"nested too deeply",)),
        ("a." * 200_000 + "a = 1", (b"too long to read", b"nested too deeply")),
    ):
        (sh.work / "shotclock.toml").write_text(text)
        code, out, err = sh.run("-c", "echo ran")
        assert (code, out, err.count(b"\n")) == (0, b"ran\n", 1)
        assert any(why in err for why in whys)


@pytest.mark.slow
def test_a_mistake_in_a_project_is_told_and_ignored_one_of_the_user_is_refused(sh: Shell):
    (sh.work / "shotclock.toml").write_text('timout = "5s"\nidle = 30\ntimeout = "9m"\n')
    code, out, err = sh.run("-c", "echo ran")
    assert (code, out, err.count(b"\n")) == (0, b"ran\n", 1)
    assert err.startswith(b"shotclock-sh: ignored: ") and b"'timout'" in err and b"(and 1 more)" in err
    (sh.work / "shotclock.toml").write_text("idle = 30")
    assert b"shotclock.toml: idle: 30 has no unit: write 30s or 30ms" in sh.run("-c", "echo ran")[2]
    (sh.work / "shotclock.toml").write_text("timeout = [")
    assert sh.run("-c", "echo ran")[:2] == (0, b"ran\n")
    (sh.work / "shotclock.toml").unlink()
    os.mkfifo(sh.work / "shotclock.toml")
    assert sh.run("-c", "echo ran") == (0, b"ran\n", b"")
    code, out, err = sh.run("-c", "echo ran", env={"SHOTCLOCK_TIMEOUT": "ten"})
    assert (code, out) == (125, b"") and err.startswith(b"shotclock-sh: SHOTCLOCK_TIMEOUT: 'ten' is not")
    own = sh.home / ".config" / "shotclock" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("timeout = true")
    code, out, err = sh.run("-c", "echo ran")
    assert (code, out) == (125, b"") and f"{own}: timeout: True is not".encode() in err


def test_unknown_keys_and_values_name_their_file(tmp_path: Path):
    config = tmp_path / "shotclock" / "config.toml"
    config.parent.mkdir()
    for text in ("x = 1", "timeout = 5", "idle = {}", "a b", "\udcff"):
        config.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(BadSetting, match=str(config)):
            read_limits({"XDG_CONFIG_HOME": str(tmp_path)}, "/", {}, {})


def test_files_are_parsed_only_where_they_have_limits(sh: Shell):
    (sh.work / "pyproject.toml").write_text("[project]\nname = ")  # broken, and of no concern
    program = (
        "import sys; from shotclock.commands import shell; shell._limited({}, []); print('tomllib' in sys.modules)"
    )
    show = ["-c", f'{sys.executable} -c "{program}"']
    assert sh.run(*show) == (0, b"False\n", b"")


def test_the_lifetime_of_a_file_is_passed_to_commands(sh: Shell):
    (sh.work / "shotclock.toml").write_text('lifetime = "90m"\n')
    show = ["-c", "echo $SHOTCLOCK_LIFETIME"]
    assert sh.run(*show)[1] == b"1h30m\n"
    assert sh.run(*show, env={"SHOTCLOCK_LIFETIME": "3h"})[1] == b"3h\n"


def test_options_precede_variables_and_the_shell_sees_none_of_them(sh: Shell):
    show = ["-c", 'echo "$# $SHOTCLOCK_LIFETIME"; sleep 60', "x", "y"]
    env = {"SHOTCLOCK_TIMEOUT": "1h", "SHOTCLOCK_LIFETIME": "1h"}
    code, out, err = sh.run("--timeout", "1s", "--lifetime=2h", *show, env=env)
    assert (code, out) == (124, b"1 2h\n") and b"the limit of commands here (--timeout)" in err
    assert sh.run("--input-wait", "3s", "echo line") == (0, b"line\n", b"")
    for words in (["--timeout"], ["--timeout", "soon", "true"], ["--idle=5", "true"]):
        code, out, err = sh.run(*words)
        assert (code, out) == (125, b"") and err.startswith(b"shotclock-sh: --")


def test_limits_without_a_command_are_refused(sh: Shell):
    code, out, err = sh.run("--timeout", "5s", given=b"echo not run\n")
    assert (code, out) == (125, b"") and b"limits need a command" in err


@pytest.mark.slow
def test_limits_nest(sh: Shell):
    inner = f"{sh.path} -c 'echo deep; sleep 600'"
    code, out, err = sh.run("-c", f"SHOTCLOCK_TIMEOUT=1h {inner}; echo after $?", env={"SHOTCLOCK_TIMEOUT": "2s"})
    assert out.startswith(b"deep\n") and b"the deadline of the caller" in err
    code, out, err = sh.run("-c", f"SHOTCLOCK_TIMEOUT=500ms {inner}; echo after $?")
    assert (code, out) == (0, b"deep\nafter 124\n")


# --- commands of an agent, its hooks and its servers --------------------------------------------------------------


@pytest.mark.slow
def test_with_the_mark_of_claude_code_only_commands_have_limits(sh: Shell, tmp_path: Path):
    env = {"CLAUDECODE": "1", "SHOTCLOCK_TIMEOUT": "1s"}
    slow = "sleep 2; echo done; echo $PAGER"
    assert sh.run(slow, env={**env, "PAGER": "more"}) == (0, b"done\nmore\n", b"")
    assert sh.run(slow, env=env)[1].startswith(b"done\n")
    line = CLAUDE_LINE.format(folder=tmp_path, command=f"'{slow}'")
    assert sh.run(line, env=env)[0] == 124
    assert sh.run("-c", slow, env=env)[0] == 124
    with open(tmp_path / "out", "wb") as file:  # a command in a form that is not known: its output is a file
        assert sh.run(slow, env=env, stdout=file)[0] == 124


@pytest.mark.slow
def test_a_command_in_the_background_has_a_limit_of_its_own_and_says_so_once(sh: Shell, tmp_path: Path):
    slow = "sleep 1; echo it\\'s done"
    said = b"shotclock-sh: in the background, without the limits of other commands: it ends "
    line = CLAUDE_LINE.format(folder=tmp_path, command="'" + slow.replace("'", "'\"'\"'") + "'")
    # As each agent tells its hook, and as its shell gets the command.
    request = {"tool_name": "Bash", "tool_input": {"command": slow, "run_in_background": True}}
    claude = {"CLAUDECODE": "1", "CLAUDE_CODE_SESSION_ID": "s"}
    ways: list[tuple[str, dict[str, Any], list[str], dict[str, str]]] = [
        ("claude", request, [line], claude),
        ("claude", request, [line.replace(" < /dev/null", "")], claude),
        (
            "copilot",
            {"sessionId": "s", "toolName": "bash", "toolArgs": {"command": slow, "mode": "async"}},
            ["-c", slow],
            {"COPILOT_CLI": "1", "COPILOT_AGENT_SESSION_ID": "s"},
        ),
        (
            "gemini",
            {"tool_name": "run_shell_command", "tool_input": {"command": slow, "is_background": True}},
            ["-c", slow],
            {"GEMINI_CLI": "1"},
        ),
    ]
    short = {"SHOTCLOCK_TIMEOUT": "500ms", "SHOTCLOCK_IDLE": "500ms", "SHOTCLOCK_HOME": str(sh.home)}
    for agent, request, words, marks in ways:

        def tell_hook(agent: str = agent, request: dict[str, Any] = request, env: dict[str, str] = marks) -> None:
            command = [sys.executable, "-m", "shotclock", "agent", "hook", agent, str(sh.path)]
            given = json.dumps(request).encode()
            subprocess.run(command, input=given, env={**sh.env, **short, **env}, check=True, timeout=LIMIT_S)

        env = {**short, **marks}
        tell_hook()
        assert sh.run(*words, env=short)[0] == 124, "it is not the command of an agent"
        assert sh.run(*words, env=env) == (0, b"it's done\n", said + b"with its agent\n"), agent
        assert sh.run(*words, env=env)[0] == 124, "a note is for one command"
        tell_hook()
        code, _, err = sh.run(*words, env={**env, "SHOTCLOCK_BACKGROUND": "600ms"})
        assert code == 124
        assert err.startswith(said + b"after 600ms (SHOTCLOCK_BACKGROUND) at the latest, and with its agent\n")
        assert b"limit of commands in the background here (SHOTCLOCK_BACKGROUND)" in err


def test_a_hook_keeps_the_processes_that_it_leaves_and_its_stderr(sh: Shell, tmp_path: Path):
    pid_file = tmp_path / "pid"
    hook = f"sleep 60 > /dev/null 2>&1 & echo $! > {pid_file}; echo seen >&2; exit 2"
    assert sh.run(hook, env={"CLAUDECODE": "1"}) == (2, b"", b"seen\n")
    pid = int(pid_file.read_text())
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_real_mcp_server_answers_past_the_limit_of_commands_and_ends_with_sigint(sh: Shell, tmp_path: Path):
    server = tmp_path / "my server.py"
    server.write_text(
        "import asyncio\n"
        "from mcp.server import MCPServer\n"
        "app = MCPServer('slow')\n"
        "@app.tool()\n"
        "async def wait() -> str:\n"
        "    await asyncio.sleep(2)\n"
        "    return 'waited'\n"
        "app.run()\n"
    )
    process = sh.popen(
        f"{sys.executable} '{server}'",
        stdin=subprocess.PIPE,
        env={"CLAUDECODE": "1", "SHOTCLOCK_TIMEOUT": "1s", "SHOTCLOCK_IDLE": "1s", "SHOTCLOCK_INPUT_WAIT": "1s"},
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(number: int, method: str, **params: object) -> Any:
        assert process.stdin is not None and process.stdout is not None
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], LIMIT_S)[0], f"no answer to {method}"
        return json.loads(process.stdout.readline())["result"]

    try:
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        assert ask(1, "initialize", **client)["serverInfo"]["name"] == "slow"
        process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        assert ask(2, "tools/call", name="wait", arguments={})["content"][0]["text"] == "waited"
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    finally:
        process.kill()
        process.communicate(timeout=SOON_S)


# --- its owner ----------------------------------------------------------------------------------------------------

STUBBORN = "trap '' TERM HUP; setsid sh -c 'trap \"\" TERM HUP; echo $$; while :; do sleep 9; done' & echo $$; wait"
AGENT = """
import os, subprocess, sys
marks = dict(word.replace("=PID", f"={os.getpid()}").split("=") for word in sys.argv[1].split())
words = sys.argv[2:]
sys.exit(subprocess.Popen(words, env={**os.environ, **marks}, start_new_session=True).wait())
"""


@pytest.mark.parametrize("has_shell_between", [False, True], ids=["its child", "a shell between"])
@pytest.mark.parametrize("marks", ["CLAUDECODE=1 CLAUDE_PID=PID", "OPENCODE_PID=PID", "GEMINI_CLI=1"])
def test_commands_are_gone_soon_after_their_agent_was_killed(sh: Shell, marks: str, has_shell_between: bool):
    words = [BASH, "-c", f'{sh.path} -c "$1"; true', "bash"] if has_shell_between else [str(sh.path), "-c"]
    kill_and_await_the_end(sh, marks, words)


def test_without_an_agent_the_parent_is_the_owner(sh: Shell):
    kill_and_await_the_end(sh, "", [str(sh.path), "-c"])


@pytest.mark.slow
def test_where_there_are_no_descriptors_of_processes_the_owner_is_looked_at(sh: Shell):
    sh.path.write_text(ENTRY.replace("import sys\n", "import os, sys\ndel os.pidfd_open\n"))
    kill_and_await_the_end(sh, "CLAUDECODE=1 CLAUDE_PID=PID", [str(sh.path), "-c"])


def kill_and_await_the_end(sh: Shell, marks: str, words: list[str]) -> None:
    agent = sh.popen("-c", AGENT, marks, *words, STUBBORN, program=sys.executable)
    assert agent.stdout is not None
    try:
        assert select.select([agent.stdout], [], [], LIMIT_S)[0]
        pids = [int(agent.stdout.readline()) for _ in range(2)]
        assert all(map(is_alive, pids))
    finally:
        agent.kill()
        agent.wait(SOON_S)
    killed_at = time.monotonic()
    wait_for(lambda: not any(map(is_alive, pids)), "the end of the commands", GONE_WITHIN_S + SOON_S)
    took_s = time.monotonic() - killed_at
    agent.stdout.close()
    assert agent.stderr is not None
    agent.stderr.close()
    assert took_s < GONE_WITHIN_S * 2, "grace of 1 s; the rest is the load of the machine"


@pytest.mark.slow
def test_a_server_of_an_agent_ends_with_it_as_well(sh: Shell):
    agent = sh.popen("-c", AGENT, "CLAUDECODE=1", str(sh.path), "echo $$; exec sleep 600", program=sys.executable)
    assert agent.stdout is not None and agent.stderr is not None
    pid = int(agent.stdout.readline())
    agent.kill()
    agent.wait(SOON_S)
    wait_for(lambda: not is_alive(pid), "the end of the server")
    agent.stdout.close()
    agent.stderr.close()


def test_a_command_of_an_agent_that_is_already_gone_is_not_started(sh: Shell):
    gone = subprocess.Popen(["true"])
    gone.wait(SOON_S)
    # This process is in another session and has no such variable, as one that has adopted an orphan.
    for pid, expected in ((gone.pid, (125, b"")), (1, (0, b"ran\n"))):  # in a container the agent may be process 1
        env = {"CLAUDECODE": "1", "CLAUDE_PID": str(pid)}
        assert sh.run("-c", "echo ran", env=env, start_new_session=True)[:2] == expected
    # A shell below the agent outlived it, as in a terminal multiplexer.
    words = ["-c", f"{sh.path} -c 'echo ran'; exit"]
    env = {"CLAUDECODE": "1", "CLAUDE_PID": str(gone.pid)}
    assert sh.run(*words, program=BASH, env=env) == (0, b"ran\n", b"")
    assert sh.run("-c", f"setsid -w {sh.path} -c 'echo ran'; exit", program=BASH, env=env) == (0, b"ran\n", b"")


def test_it_runs_in_a_sandbox_that_hides_the_agent(sh: Shell):
    sandbox = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*sandbox, "true"], capture_output=True, timeout=SOON_S).returncode:
        pytest.skip("this machine permits no namespaces")
    env = {"CLAUDECODE": "1", "CLAUDE_PID": str(os.getpid())}
    for words in ([str(sh.path), "-c", "echo ran"], [BASH, "-c", f"setsid -w {sh.path} -c 'echo ran'; exit"]):
        assert sh.run(*sandbox[1:], *words, program=sandbox[0], env=env) == (0, b"ran\n", b""), words


# --- where it runs ------------------------------------------------------------------------------------------------


def on_pty(sh: Shell, words: list[str], typed: bytes, until: Callable[[bytes], bool], env: dict[str, str]) -> bytes:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(sh.work)
        os.execve(str(sh.path), ["shotclock-sh", *words], {**sh.env, "PS1": "$ ", "TERM": "dumb", **env})
    screen, give_up_at = b"", time.monotonic() + LIMIT_S
    try:
        os.write(fd, typed)
        while not until(screen) and time.monotonic() < give_up_at and select.select([fd], [], [], LIMIT_S)[0]:
            try:
                screen += os.read(fd, 65536)
            except OSError:  # the other side is closed
                break
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5 if b"exit 5" in typed else True
    finally:
        os.close(fd)
    return screen.replace(str(pid).encode(), b"SAME")


@pytest.mark.slow
def test_without_arguments_it_becomes_the_interactive_shell_without_a_limit(sh: Shell):
    typed = b"sleep 1.5; echo me-$$-$((6*7)); [ -z $SHOTCLOCK_STOP_FILE ] && echo untouched; exit 5\n"
    screen = on_pty(sh, [], typed, lambda screen: False, {"SHOTCLOCK_TIMEOUT": "1s"})
    assert b"me-SAME-42" in screen and b"\nuntouched" in screen


def test_a_command_at_a_terminal_has_it(sh: Shell):
    command = "[ -t 0 ] && [ -t 1 ] && read x < /dev/tty; echo got-$x-${PAGER-none}; exit 5"
    sh.env.pop("PAGER", None)
    screen = on_pty(sh, ["-c", command], b"exit 5\n", lambda screen: False, {})
    assert b"got-exit 5-none" in screen


@pytest.mark.skipif(not REFUSED, reason="the numbers of the system calls are known for two machines")
def test_it_works_in_a_sandbox_that_refuses_most_calls_on_sockets(sh: Shell):
    probe = "import socket; socket.socketpair()[0].send(b'x')"
    assert b"PermissionError" in sh.run("-c", f'{sys.executable} -c "{probe}"', preexec_fn=refuse_sockets)[2]
    assert sh.run("-c", "echo in; exit 3", preexec_fn=refuse_sockets) == (3, b"in\n", b"")
    env = {"SHOTCLOCK_TIMEOUT": "1s", "CLAUDECODE": "1"}
    assert sh.run("-c", "setsid sleep 600 & sleep 600", preexec_fn=refuse_sockets, env=env)[0] == 124


def test_it_is_installed_as_a_program():
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["shotclock-sh"] == "shotclock.main:run_shell"
