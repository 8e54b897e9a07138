"""Every block in README and docs is run, and what it shows is compared with what comes out.

- `console`: each line after `$ ` is run by one bash per block, in a scratch folder per page, with shotclock on PATH;
  the lines below it are its output, stdout and stderr together. `console tty` runs it on a terminal instead.
- `python`: run as a program. If its first line is `# name.py` it is saved under that name for the blocks below it.
- `json`: must parse; an envelope must keep the contract.
- `yaml`: a workflow. Like a `text`, it is saved if its first line is `# name.yaml` or `// name.json`.
- `text`: a drawing, or a generated page. `diff`: two files that tests compare (tests/examples).

In shown output `…` stands for anything: alone on a line for any lines, else for the rest of the word or line.
Durations, ids, times and pids are taken out on both sides. The ports of a page, and the lengths of the sleeps that it
looks for with `pgrep`, are others in each run, so two runs on one machine do not meet.
"""

import json
import os
import pty
import random
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import load_text
from shotclock.ui._browser import find_chromium
from tests.warm import WarmStart

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What one block may take. The slowest shows clocks of a few seconds; a hang is what this project is against.
BLOCK_LIMIT_S = 60.0
ENDS_WITHIN_S = 5.0

# Commands that are shown but not run, each with its reason. Anything else that cannot run fails.
NOT_RUN = {
    "make demo": "sets up .venv; the demo has tests of its own",
    "make test": "this suite",
}

# Pages that act on a real page, and are not run where there is no browser to do it in.
NEEDS_BROWSER = {"browsers.md"}

SEPARATOR = "\x1e"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    terminal: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The commands of a console block, with the output shown below each."""
        if self.language != "console":
            return []
        steps: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                steps.append((line.removeprefix("$ "), []))
            elif line.startswith("> ") and steps and not steps[-1][1]:
                steps[-1] = (f"{steps[-1][0]}\n{line.removeprefix('> ')}", [])
            else:
                assert steps, f"{self}: a console block begins with a command"
                steps[-1][1].append(line)
        return [(command, "\n".join(shown)) for command, shown in steps]


def blocks_of(page: Path) -> list[Block]:
    found = []
    pattern = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    content = page.read_text("utf-8")
    for match in pattern.finditer(content):
        language, _, mode = match[2].strip().partition(" ")
        assert mode in ("", "tty"), f"{page.name}: {match[2]!r}"
        line = content.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, mode == "tty", textwrap.dedent(match[3])))
    fences = len(re.findall(r"^ *```", content, re.MULTILINE))
    assert fences == 2 * len(found), f"{page.name}: a block is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# --- running --------------------------------------------------------------------------------------

PORT = re.compile(r"(?:port |http\.server |127\.0\.0\.1:)(\d{4,5})\b")
SLEEP = re.compile(r"pgrep -fx '(sleep [^']*)'")
BELOW_EPHEMERAL_PORTS = range(12_000, 32_000)  # no client gets one of them meanwhile
LONG_SLEEPS = range(100_000, 1_000_000)


def is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def own_numbers(page: Path) -> dict[str, str]:
    """The ports and the sleeps of a page that another run on this machine would meet, with numbers in their place."""
    commands = "\n".join(command for block in blocks_of(page) for command, _ in block.steps)
    ports = sorted(set(PORT.findall(commands)))
    sleeps = sorted({number for found in SLEEP.findall(commands) for number in re.findall(r"\d+", found)})
    free = (str(port) for port in random.sample(BELOW_EPHEMERAL_PORTS, 100) if is_free(port))
    lengths = (str(length) for length in random.sample(LONG_SLEEPS, len(sleeps)))
    return {**dict(zip(ports, free, strict=False)), **dict(zip(sleeps, lengths, strict=True))}


def put_numbers(text: str, numbers: dict[str, str]) -> str:
    return re.sub(r"\b\d{4,6}\b", lambda found: numbers.get(found[0], found[0]), text)


def environment(scratch: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k == "SHOTCLOCK_TEST_MARK" or not k.startswith("SHOTCLOCK_")}
    for name in ("CI", "NO_COLOR"):
        kept.pop(name, None)
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "SHOTCLOCK_HOME": str(scratch / ".state"),
        "COLUMNS": "100",
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
    }


def run(argv: list[str], scratch: Path, *, terminal: bool = False) -> tuple[int, str]:
    """Exit code and everything it wrote. A file or a terminal, never a pipe: a leaked child would hold it."""
    output = scratch / ".output"
    ours = theirs = -1
    if terminal:
        ours, theirs = pty.openpty()
    # GNU timeout ends a page whose test was killed: in a session of its own, nothing else would.
    bounded = ["timeout", "--foreground", "-k", "5", str(BLOCK_LIMIT_S + 10), *argv]
    variables, start, words = environment(scratch), subprocess.Popen, bounded
    if argv[0] == sys.executable:  # what shells start is cold; such a program has the locale of the tests
        variables.pop("LC_ALL")
        start, words = WarmStart, argv
    with open(output, "wb") as file:
        process = start(
            words,
            cwd=scratch,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=theirs if terminal else file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    screen = b""
    give_up_at = time.monotonic() + BLOCK_LIMIT_S
    try:
        while process.poll() is None:
            assert time.monotonic() < give_up_at, f"still running after {BLOCK_LIMIT_S} s: {argv}"
            if not terminal:
                time.sleep(0.01)
            elif select.select([ours], [], [], 0.02)[0]:
                screen += os.read(ours, 65536)
        while terminal and select.select([ours], [], [], 0)[0]:
            screen += os.read(ours, 65536)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(ENDS_WITHIN_S)
        for fd in (ours, theirs):
            if fd >= 0:
                os.close(fd)
    text = (screen if terminal else output.read_bytes()).decode(errors="replace").replace("\r\n", "\n")
    return process.returncode, text


def run_console(block: Block, scratch: Path, numbers: dict[str, str]) -> list[str]:
    """What is wrong with the block; each step separated by a character that no command prints."""
    steps = [(command, shown) for command, shown in block.steps if command not in NOT_RUN]
    if not steps:
        return []
    lines = ["s=0"]
    for command, _ in steps:
        lines += ["printf '\\036'; (exit $s)", command, "s=$?"]
    script = scratch / ".block.sh"
    script.write_text(put_numbers("\n".join(lines) + "\n", numbers))
    _, output = run(["bash", str(script)], scratch, terminal=block.terminal)
    output = put_numbers(output, {own: shown for shown, own in numbers.items()})
    output = re.sub(r"\x1b\[2K[^\r\n]*\r", "", output)  # a progress bar, which the next one erases
    outputs = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output).split(SEPARATOR)[1:]
    if len(outputs) != len(steps):
        return [f"{block}: {len(outputs)} of {len(steps)} commands ran:\n{output}"]
    return [
        f"{block}: $ {command}\nshown:\n{shown}\ncame:\n{came}"
        for (command, shown), came in zip(steps, outputs, strict=True)
        if not matches(shown, came)
    ]


def run_python(block: Block, scratch: Path) -> list[str]:
    named = re.match(r"# (\w+\.py)\n", block.text)
    file = scratch / (named[1] if named else ".block.py")
    file.write_text(block.text)
    run_below = re.compile(rf"\bpython {re.escape(file.name)}(?!\S)")
    if any(run_below.search(command) for later in blocks_of(block.page) for command, _ in later.steps):
        return []  # run there, and its output looked at
    code, output = run([sys.executable, str(file)], scratch)
    return [] if code == 0 else [f"{block}: exit code {code}\n{output}"]


def save_named(block: Block, scratch: Path) -> None:
    """Save a file that the page shows under its name. One in the home of the reader is not touched."""
    named = re.match(r"(?:#|//) ([\w.][\w./-]*\.\w+)\n", block.text)
    if named and ".." not in named[1]:
        file = scratch / named[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)


# --- comparing ------------------------------------------------------------------------------------

VOLATILE = [
    (r'"(duration_ms|elapsed_ms|remaining_ms|running_ms|pid|killed_ms)": ?\d+', r'"\1": N'),
    (r'"(request_id|trace_id|timestamp)": ?"[^"]*"', r'"\1": "…"'),
    (r"\(\d{2,}\)", "(PID)"),
    (r"\b\d+(\.\d+)? ms\b", "N ms"),
    (r"\bfinished in [\d.]+m?s\b", "finished in N"),
    (r"\((\w+), [\d.]+(ms|s)\)", r"(\1, N)"),
    (r"\b\d{4}-\d\d-\d\dT[\d:.]+Z\b", "TIME"),
]


def steady(text: str) -> str:
    for pattern, replacement in VOLATILE:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def matches(shown: str, came: str) -> bool:
    pattern = ""
    for line in steady(shown).splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("…")) + r"\n"
    return re.fullmatch(pattern, steady(came) + "\n" if came.strip("\n") else "") is not None


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("a\n…\nd", "a\nb\nc\nd"),
        ("a\n…", "a\n"),
        ("took 3 ms", "took 12 ms\n"),
        ('{"duration_ms": 7}', '{"duration_ms": 8}'),
        ("sleep 600 (1234)", "sleep 600 (99)"),
        ("done…", "done and more"),
        ("", ""),
    ],
)
def test_output_that_differs_only_in_volatile_parts_matches(shown: str, came: str) -> None:
    assert matches(shown, came)


@pytest.mark.parametrize(
    ("shown", "came"),
    [("a", "b"), ("a\n…\nd", "a\nb\nc"), ("", "something"), ("a", ""), ("exit 10", "exit 2"), ("a\nb", "a")],
)
def test_output_that_differs_otherwise_does_not(shown: str, came: str) -> None:
    assert not matches(shown, came)


def test_a_page_gets_ports_and_sleeps_of_its_own() -> None:
    numbers = own_numbers(ROOT / "docs/howto/background.md")
    assert {"8391", "8642"} == set(numbers) and len({*numbers, *numbers.values()}) == 4
    assert put_numbers("x:8391 sleep 8642", numbers) == f"x:{numbers['8391']} sleep {numbers['8642']}"


def test_the_processes_that_a_page_looks_for_are_its_own() -> None:
    for block in BLOCKS:
        for command, _ in block.steps:
            sought = re.findall(r"\b(?:pgrep|pkill|killall)\b(?! -fx 'sleep \d+(?:\|sleep \d+)*'| -f \$job)", command)
            assert not sought, f"{block}: {command}"


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.slow
@by_page
def test_every_command_and_program_on_the_page_does_what_is_shown(
    page: Path, tmp_path: Path, no_survivors: object
) -> None:
    if page.name in NEEDS_BROWSER and find_chromium() is None:
        pytest.skip("no Chromium on this machine")
    wrong: list[str] = []
    numbers = own_numbers(page)
    for block in blocks_of(page):
        if block.language == "console":
            wrong += run_console(block, tmp_path, numbers)
        elif block.language == "python":
            wrong += run_python(block, tmp_path)
        elif block.language in ("yaml", "text"):
            save_named(block, tmp_path)
    assert not wrong, "\n\n".join(wrong)


def test_every_block_has_a_language_that_is_tested() -> None:
    tested = ("console", "python", "json", "text", "yaml", "diff")
    untested = [block for block in BLOCKS if block.language not in tested]
    assert not untested


def test_each_program_in_the_background_writes_to_a_file_of_its_own() -> None:
    """It truncates its file some time after the next command has started, which may read another's output."""
    for page in PAGES:
        commands = [command for block in blocks_of(page) for command, _ in block.steps]
        background = [command for command in commands if re.search(r"&( \w+=\$!)?$", command)]
        files = [file for command in background for file in re.findall(r"> (\S+)", command)]
        assert len(files) == len(set(files)), f"{page.name}: {files}"


def test_every_json_block_parses_and_envelopes_keep_the_contract(
    validate_envelope: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    for block in BLOCKS:
        if block.language == "json":
            content = json.loads(block.text)
            if isinstance(content, dict) and "ok" in content:
                validate_envelope(content)


def test_every_yaml_block_is_a_workflow_that_could_be_run() -> None:
    for block in BLOCKS:
        if block.language == "yaml":
            findings = lint(load_text(block.text.encode(), block.page.name))
            assert not [finding for finding in findings if finding.is_error], f"{block}: {findings}"


def test_nothing_is_exempt_that_is_not_there() -> None:
    shown = {command for block in BLOCKS for command, _ in block.steps}
    stale = {command for command in NOT_RUN if command not in shown}
    assert not stale


def test_every_link_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_page_names_a_path_of_an_authors_machine() -> None:
    for page in PAGES:
        found = re.findall(r"/(?:work|root|home|Users)/\S*", page.read_text("utf-8"))
        assert not found, f"{page.name}: {found}"
