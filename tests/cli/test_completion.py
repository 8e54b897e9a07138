"""Completion of command lines, in the real shells. Those that are not installed are left out."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SHELL_LIMIT_S = 30.0
SHELLS = ("bash", "zsh", "fish")

BASH = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" "$1" "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """compdef() { complete_with=$1 }
compadd() { shift; print -l -- "$@" }
_describe() { print -l -- "${(@P)argv[-1]}" }
_files() { print FILES }
source "$1"; shift
words=("$@"); CURRENT=$#; PREFIX=${words[-1]}
$complete_with
"""
FISH = """source $argv[1]
complete -C (string join ' ' -- $argv[2..-1])
"""

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

Complete = Callable[..., list[str]]


@pytest.fixture(params=[pytest.param(shell, marks=pytest.mark.slow if shell != "bash" else ()) for shell in SHELLS])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return str(request.param)


@pytest.fixture
def complete(shell: str, tmp_path: Path) -> Complete:
    """A function that returns the words a shell offers for a command line, whose last word is being typed."""

    def complete(program: list[str], *words: str) -> list[str]:
        script = tmp_path / "script"
        ran = subprocess.run([*program, "completion", shell], capture_output=True, timeout=SHELL_LIMIT_S, check=True)
        script.write_bytes(ran.stdout)
        body, flags = {"bash": (BASH, ["--norc"]), "zsh": (ZSH, ["-f"]), "fish": (FISH, ["-N"])}[shell]
        (tmp_path / "body").write_text(body)
        offered = subprocess.run(
            [shell, *flags, str(tmp_path / "body"), str(script), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SHELL_LIMIT_S,
        )
        assert offered.stderr == "", offered.stderr
        lines = offered.stdout.splitlines()
        return sorted({line.split("\t")[0].partition(":")[0] for line in lines if line.startswith(words[-1])})

    return complete


SHOTCLOCK = [sys.executable, "-m", "shotclock"]


@pytest.mark.slow
def test_commands_and_options_of_shotclock_are_offered(complete: Complete) -> None:
    assert complete(SHOTCLOCK, "shotclock", "in") == ["inbox"]
    assert complete(SHOTCLOCK, "shotclock", "inbox", "wit") == ["withdraw"]
    assert {"--budget", "--timeout"} <= {*complete(SHOTCLOCK, "shotclock", "exec", "--")}
    assert complete(SHOTCLOCK, "shotclock", "run", "--format", "j") == ["json"]
    assert complete(SHOTCLOCK, "shotclock", "--ver") == ["--version"]


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
    assert complete(tool, "my-tool", "pa") == ["paint-wall"]
    assert complete(tool, "my-tool", "paint-wall", "--co") == ["--coats", "--colour"]
    assert complete(tool, "my-tool", "paint-wall", "--no-") == ["--no-loud"]
    assert complete(tool, "my-tool", "paint-wall", "--colour", "g") == ["green"]
    assert complete(tool, "my-tool", "paint-wall", "r") == ["red"]
    assert complete(tool, "my-tool", "job", "can") == ["cancel"]
    assert complete(tool, "my-tool", "--timeout", "5s", "sweep", "--time") == ["--timeout"]


def test_a_shell_that_is_not_known_is_refused_and_the_help_says_how_to_use_it(tool: list[str]) -> None:
    refused = subprocess.run([*tool, "completion", "tcsh"], capture_output=True, text=True, timeout=SHELL_LIMIT_S)
    assert refused.returncode == 2 and "none of bash, zsh, fish" in refused.stdout
    shown = subprocess.run([*tool, "completion", "--help"], capture_output=True, text=True, timeout=SHELL_LIMIT_S)
    assert 'eval "$(my-tool completion bash)"' in shown.stdout
