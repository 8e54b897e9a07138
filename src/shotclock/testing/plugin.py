"""Pytest plugin: it names the processes that a test left behind. See docs/howto/test-a-tool.md.

Processes of fixtures that outlive the test (scopes above `function`) are not the test's. Linux only.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from typing import Any

import pytest

from ..supervise.leftovers import MARK, LeftProcess, Watch, pids
from ..worker.context import KEPT_BY_PYTHON

MARKER = "shotclock_leaks"
MODES = ("fail", "warn", "off")
# For processes that are being stopped when a test returns. A warning is not worth a longer wait in each of many tests.
LEFT_WITHIN_S = {"fail": 3.0, "warn": 1.0}
KILLED_WITHIN_S = 5.0  # only a process stuck in the kernel exhausts this


class ProcessesLeft(pytest.PytestWarning):
    """Processes that a test left behind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "processes that a test left behind: fail the test and kill them, warn (default), or off"
    parser.getgroup("shotclock").addoption("--shotclock-leaks", choices=MODES, default=None, help=text)
    parser.addini("shotclock_leaks", text, default="warn")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(mode): as --shotclock-leaks, for one test: fail, warn or off")
    if config.getini("shotclock_leaks") not in MODES:
        raise pytest.UsageError(f"shotclock_leaks is one of {', '.join(MODES)}")
    if os.path.exists("/proc/self/environ"):
        config.pluginmanager.register(LeakCheck(), "shotclock-leaks")


def _mode_of(item: pytest.Item) -> str:
    if (option := item.config.getoption("--shotclock-leaks")) is not None:
        return str(option)
    marker = item.get_closest_marker(MARKER)
    mode = str(marker.args[0]) if marker is not None and marker.args else item.config.getini("shotclock_leaks")
    if mode not in MODES:
        raise pytest.UsageError(f"{item.nodeid}: {MARKER} is one of {', '.join(MODES)}")
    return str(mode)


class LeakCheck:
    """The check of one pytest process."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._mark_before: str | None = None  # of a pytest that runs this one

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if _mode_of(item) != "off":
            self._watch = Watch(uuid.uuid4().hex, spares_earlier=True, counts_zombies=False)
            self._watch.begin()
            self._mark_before = os.environ.get(MARK)
            _set_mark(self._watch.token)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Leave out the processes of a fixture that outlives the test."""
        watch = None if fixturedef.scope == "function" else self._watch
        before = set() if watch is None else pids()
        made = yield
        if watch is not None:
            watch.before |= pids() - before
        return made

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            ended = yield
        finally:
            watch, self._watch = self._watch, None
            if watch is not None:
                _set_mark(self._mark_before)
        if watch is not None:
            _report(item, watch)
        return ended


def _set_mark(token: str | None) -> None:
    if token is None:
        os.environ.pop(MARK, None)
    else:
        os.environ[MARK] = token


def _report(item: pytest.Item, watch: Watch) -> None:
    mode = _mode_of(item)
    watch.before |= {process.pid for process in watch.alive() if _is_kept(process)}
    # Again: one may have had no command line of its own yet.
    left = [process for process in watch.wait_until_alone(LEFT_WITHIN_S[mode]) if not _is_kept(process)]
    if not left:
        return
    count = "1 process" if len(left) == 1 else f"{len(left)} processes"
    lines = [f"{item.nodeid} left {count} behind:", *(f"  {process}" for process in left)]
    if mode == "warn":
        item.warn(ProcessesLeft("\n".join(lines)))
        return
    if immortal := watch.wait_until_alone(KILLED_WITHIN_S, kill=True):
        lines += ["SIGKILL did not end:", *(f"  {process}" for process in immortal)]
    pytest.fail("\n".join(lines), pytrace=False)


def _is_kept(process: LeftProcess) -> bool:
    return any(name in process.cmdline for name in KEPT_BY_PYTHON)
