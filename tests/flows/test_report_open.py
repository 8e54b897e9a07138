"""`report --open`: the page in the person's own browser, where there is a person and a browser."""

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.file.loader import load_text
from shotclock.flows.run.runs import RunRequest, start
from shotclock.store.store import Store
from tests.command_line import Seen, is_alive, wait_for

pytestmark = pytest.mark.usefixtures("no_survivors")

# Starting Python twice, on a busy machine.
LIMIT_S = 30.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with the run `../x y`, whose id is no path."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    for name in ("NO_COLOR", "CI", "BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    workflow = load_text(b"steps: {a: {exec: echo here}}").workflow
    assert workflow is not None
    request = RunRequest(workflow, str(tmp_path / "flow.yaml"), tmp_path, run_id="../x y")  # not from a command line
    with Store.open() as store:
        assert asyncio.run(start(request, store)).ok
    return tmp_path / "home"


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An xdg-open that says what it was given and then stays, as a browser does. Where it says it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "xdg-open"
    said = tmp_path / "opened"
    program.write_text(f'#!/bin/sh\necho "$$ $1" > {said}.part; mv {said}.part {said}; exec sleep 60\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield said
    if said.exists():
        os.kill(int(said.read_text().split()[0]), signal.SIGKILL)


@pytest.mark.slow
def test_on_a_terminal_with_a_display_the_page_is_opened_and_nobody_waits(
    home: Path, browser: Path, on_terminal: Callable[..., Seen]
) -> None:
    env = {"DISPLAY": ":0"}
    seen = on_terminal("report", "../x y", "--open", streams=("stdout", "stderr"), within_s=LIMIT_S, env=env)
    page = home / "reports" / "..%2Fx%20y.html"
    assert seen.code == 0
    assert f"opened {page}" in seen.screen.replace("\n", " ")
    pid, _, opened = wait_for(lambda: browser.exists() and browser.read_text(), "the browser").strip().partition(" ")
    assert opened == str(page)
    assert is_alive(int(pid)), "it is meant to outlive us"
    assert "<!doctype html>" in page.read_text("utf-8")


@pytest.mark.slow
def test_a_browser_that_is_named_needs_no_display(
    home: Path, browser: Path, on_terminal: Callable[..., Seen], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "xdg-open").rename(tmp_path / "bin" / "remote")
    env = {"BROWSER": "no-such-browser:remote"}
    seen = on_terminal("report", "../x y", "--open", streams=("stdout", "stderr"), within_s=LIMIT_S, env=env)
    assert seen.code == 0 and "opened " in seen.screen
    wait_for(browser.exists, "the browser")


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"BROWSER": "/no/such/browser"}])
def test_where_no_browser_can_be_the_page_is_named(
    env: dict[str, str], home: Path, browser: Path, on_terminal: Callable[..., Seen], tmp_path: Path
) -> None:
    page = tmp_path / "here.html"
    words = ("report", "../x y", "--open", "--html", str(page))
    seen = on_terminal(*words, streams=("stdout", "stderr"), within_s=LIMIT_S, env=env)
    assert seen.code == 0
    assert f"the page, for a browser: {page}" in seen.screen.replace("\n", " ")
    assert page.exists() and not browser.exists()


@pytest.mark.slow
def test_off_a_terminal_nothing_is_opened_and_both_streams_say_where_it_is(
    home: Path, browser: Path, shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]
) -> None:
    ran = shotclock("report", "../x y", "--open", env={"DISPLAY": ":0"})
    said = validate_envelope(ran.json())
    page = str(home / "reports" / "..%2Fx%20y.html")
    assert said["data"]["html"] == page and said["data"]["opened"] is False
    assert ran.stderr.decode() == f"the page, for a browser: {page}\n"
    ran = shotclock("report", "../x y", "--open", "--output", "markdown", env={"DISPLAY": ":0"})
    assert ran.stdout.startswith(b"### ") and page in ran.stderr.decode()
    assert not browser.exists()


def test_without_an_id_there_is_nothing_to_open(home: Path, shotclock: Callable[..., Any]) -> None:
    ran = shotclock("report", "--open")
    assert ran.code == 2 and ran.json()["error"]["code"] == "ARG_ERROR"
