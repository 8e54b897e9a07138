"""Completion of command lines, in the real shells. Those that are not installed are left out."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SHELL_LIMIT_S = 30.0
SHELLS = ("bash", "zsh", "fish")

# The shell runs on a terminal. A first key inserts every word that is offered into the line, a second one appends
# the line to a file and empties it.
BASH = r"""
keep() { printf '%s\n' "$READLINE_LINE" >> "$LINES_FILE"; READLINE_LINE=; READLINE_POINT=0; }
bind 'set enable-bracketed-paste off'
bind '"\C-t": insert-completions'
bind -x '"\C-x": keep'
"""
ZSH = r"""
autoload -Uz compinit && compinit -u -D
zle -C everything complete-word _generic
zstyle ':completion:everything:*' completer _all_matches _complete
zstyle ':completion:everything:*' insert yes
keep() { print -r -- "$BUFFER" >> $LINES_FILE; BUFFER= }
zle -N keep
bindkey '^T' everything
bindkey '^X' keep
"""
INSERT, KEEP = b"\x14", b"\x18"

TOOL = """
from typing import Literal
from shotclock import App

app = App("my-tool")


@app.command(interruption={"max_lifetime": "1m"})
def paint_wall(colour: Literal["red", "green", "it's $HOME"], coats: int = 1, loud: bool = False) -> None:
    '''Paint a wall. It's "dry" soon: `wait`.'''


@app.command
def sweep(folder: str) -> None:
    '''Sweep.'''


if __name__ == "__main__":
    app()
"""

Complete = Callable[..., list[list[str]]]


@pytest.fixture(params=[pytest.param(shell, marks=pytest.mark.slow if shell != "bash" else ()) for shell in SHELLS])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return str(request.param)


@pytest.fixture
def complete(shell: str, tmp_path: Path, no_survivors: object) -> Complete:
    """A function that returns the words a shell offers for the last word of each command line."""

    def complete(program: list[str], *lines: str) -> list[list[str]]:
        ran = subprocess.run([*program, "completion", shell], capture_output=True, timeout=SHELL_LIMIT_S, check=True)
        script = tmp_path / "script"
        script.write_bytes(ran.stdout)
        return ask_fish(script, lines) if shell == "fish" else type_lines(shell, script, tmp_path / "typed", lines)

    return complete


def ask_fish(script: Path, lines: tuple[str, ...]) -> list[list[str]]:
    program = 'source $argv[1]; for line in $argv[2..-1]; complete -C "$line"; echo; end'
    words = ["fish", "--no-config", "--command", program, str(script), *lines]
    environment = {**os.environ, "HOME": str(script.parent)}
    ran = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=SHELL_LIMIT_S, stdin=subprocess.DEVNULL
    )
    assert ran.stderr == "", ran.stderr
    answers = ran.stdout.split("\n\n")[:-1] if ran.stdout else []
    return [sorted(line.partition("\t")[0] for line in answer.splitlines() if line) for answer in answers]


def type_lines(shell: str, script: Path, file: Path, lines: tuple[str, ...]) -> list[list[str]]:
    """Type each line in an interactive shell and return the words that come in the place of its last word."""
    file.touch()
    start = script.with_name("start")
    start.write_text((BASH if shell == "bash" else ZSH) + f"source '{script}'\nprintf '\\nREADY%s\\n' TO-TYPE\n")
    flags = ["--norc", "--noprofile", "-i"] if shell == "bash" else ["-f", "-i"]
    home = script.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "LINES_FILE": str(file), "HOME": str(home), "TERM": "dumb", "PS1": "$ "}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [shell, *flags], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=home, start_new_session=True
    )
    os.close(theirs)
    screen = b""

    def wait_for(done: Callable[[], bool]) -> None:
        nonlocal screen
        give_up_at = time.monotonic() + SHELL_LIMIT_S
        while not done():
            assert time.monotonic() < give_up_at, screen.decode(errors="replace")
            if select.select([ours], [], [], 0.02)[0]:
                screen += os.read(ours, 65536)

    try:
        os.write(ours, f"source '{start}'\n".encode())
        wait_for(lambda: b"READYTO-TYPE" in screen)
        for number, line in enumerate(lines, 1):
            os.write(ours, line.encode() + INSERT + KEEP)
            wait_for(lambda number=number: len(file.read_text().splitlines()) == number)  # type: ignore[misc]
    finally:
        process.kill()
        process.wait(SHELL_LIMIT_S)
        os.close(ours)
    typed = file.read_text().splitlines()
    file.unlink()
    return [sorted(after.split()[len(line.split(" ")) - 1 :]) for line, after in zip(lines, typed, strict=True)]


SHOTCLOCK = [sys.executable, "-m", "shotclock"]


@pytest.mark.slow
def test_commands_and_options_of_shotclock_are_offered(complete: Complete) -> None:
    offered = complete(
        SHOTCLOCK,
        "shotclock in",
        "shotclock inbox wit",
        "shotclock exec --bu",
        "shotclock run --format j",
        "shotclock --ver",
    )
    assert offered == [["inbox"], ["withdraw"], ["--budget"], ["json"], ["--version"]]


@pytest.fixture
def tool(tmp_path: Path) -> list[str]:
    """A tool as pip installs it: a script of its own name."""
    file = tmp_path / "bin" / "my-tool"
    file.parent.mkdir()
    file.write_text(f"#!{sys.executable}\n{TOOL}")
    file.chmod(0o755)
    return [str(file)]


@pytest.mark.slow
def test_commands_parameters_and_their_values_of_an_app_are_offered(complete: Complete, tool: list[str]) -> None:
    expected = {
        "my-tool pa": ["paint-wall"],
        "my-tool paint-wall --co": ["--coats", "--colour"],
        "my-tool paint-wall --no-": ["--no-loud"],
        "my-tool paint-wall --colour g": ["green"],
        "my-tool paint-wall r": ["red"],
        "my-tool job can": ["cancel"],
        "my-tool --timeout 5s sweep --time": ["--timeout"],
    }
    assert dict(zip(expected, complete(tool, *expected), strict=True)) == expected


def test_a_shell_that_is_not_known_is_refused_and_the_help_says_how_to_use_it(tool: list[str]) -> None:
    refused = subprocess.run([*tool, "completion", "tcsh"], capture_output=True, text=True, timeout=SHELL_LIMIT_S)
    assert refused.returncode == 2 and "none of bash, zsh, fish" in refused.stdout
    shown = subprocess.run([*tool, "completion", "--help"], capture_output=True, text=True, timeout=SHELL_LIMIT_S)
    assert 'eval "$(my-tool completion bash)"' in shown.stdout
