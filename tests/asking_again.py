"""With --ask-again, what failed beside other tests is asked again by itself: code that is late is late then too."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

MOST_ASKED_AGAIN = 40  # more than these do not fail because the machine is busy
ASKED_WITHIN_S = 600.0
failed_at_first: dict[str, None] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ask-again", type=int, default=0, metavar="TIMES", help="ask what failed again by itself, up to so many times"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed_at_first[report.nodeid] = None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    yield
    times, config = session.config.option.ask_again, session.config
    in_worker, is_over = hasattr(config, "workerinput"), exitstatus != pytest.ExitCode.TESTS_FAILED
    if in_worker or is_over or not times or not failed_at_first or len(failed_at_first) > MOST_ASKED_AGAIN:
        return
    passed = {test: number for test in failed_at_first if (number := passes_by_itself(test, times, config))}
    print("\nfailed beside the others, and were asked again by themselves:")
    for test in failed_at_first:
        print(f"  {f'passed when asked {passed[test]}×' if test in passed else 'FAILED each time'}: {test}", flush=True)
    if len(passed) == len(failed_at_first):
        session.exitstatus = pytest.ExitCode.OK


def passes_by_itself(test: str, times: int, config: pytest.Config) -> int:
    """Return how often it had to be asked until it passed, 0 if it never did."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", config.option.markexpr, test]
    for number in range(1, times + 1):
        print(f"\nasked again: {test}", flush=True)
        try:
            if subprocess.run(command, cwd=config.invocation_params.dir, timeout=ASKED_WITHIN_S).returncode == 0:
                return number
        except subprocess.TimeoutExpired:
            print(f"no answer within {ASKED_WITHIN_S:g} s", flush=True)
    return 0
