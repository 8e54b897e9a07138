"""Many calls: each hung one is answered, and the memory of the process in front stays flat."""

from pathlib import Path

import pytest

from tests.wrap.client import RawClient, failure, wrapped

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.soak]

CALLS = 15_000
WARMED_UP = 5_000  # by then the first calls are logged, for which the store is loaded
GROWTH_KB = 1_024
PEAK_KB = 30 * 1024


def memory_kb(client: RawClient, field: str) -> int:
    status = Path(f"/proc/{client.process.pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def test_memory_is_flat_over_10_000_calls() -> None:
    with wrapped(cold=True) as client:
        for number in range(CALLS):
            client.ask("echo", text=str(number))
            client.lines.clear()
            if number == WARMED_UP:
                warm_kb = memory_kb(client, "VmRSS")
        assert memory_kb(client, "VmRSS") <= warm_kb + GROWTH_KB
        assert memory_kb(client, "VmHWM") <= PEAK_KB


def test_1000_hung_calls_are_answered_200_at_a_time() -> None:
    with wrapped("--timeout", "500ms") as client:
        for _ in range(5):
            for id in [client.call("hang") for _ in range(200)]:
                failure(client.receive(id)["result"])
        assert client.text("echo", text="next") == "next"
        assert memory_kb(client, "VmHWM") <= PEAK_KB
