"""State over MCP: concurrent calls agree, a killed process is reported, and the lifespan is closed at the end."""

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import ENVELOPE_KEY
from tests.apps.app.test_lifespan import events, folder, misbehave
from tests.apps.server.client import ENDED_WITHIN_S, connected, envelope_of, run, served
from tests.apps.server.test_lifecycle import hear, say
from tests.calls.bounds import eventually, soon
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
__all__ = ["folder"]

TARGET = "tests.apps.app.stateful:app"
CALLS = 200
ROUNDS = 3


def test_200_concurrent_calls_agree_in_every_round(folder: Path) -> None:
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            for number in range(ROUNDS):
                results = await asyncio.gather(*(client.call_tool("count", {}) for _ in range(CALLS)))
                expected = range(number * CALLS + 1, (number + 1) * CALLS + 1)
                assert sorted(result.structured_content["result"] for result in results) == list(expected)
                resource = await client.read_resource("state://counted")
                assert resource.contents[0].text == str((number + 1) * CALLS)
            assert events(folder) == ["opening", "opened"]
        await soon(lambda: events(folder)[2:] == ["closing", "closed"])

    run(scenario())


def test_why_an_opening_failed_is_told_to_clients_as_far_as_it_is_meant_for_them(folder: Path) -> None:
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            for misdeed, said, unsaid in (
                ("raise", "RuntimeError", "10.0.0.7"),
                ("fail", "the database is closed today", "Failure"),
            ):
                misbehave(folder, misdeed)
                result = await client.call_tool("count", {})
                text = result.content[0].text
                assert "LIFESPAN_FAILED" in text and said in text and unsaid not in text, text
                assert unsaid not in str(result.meta[ENVELOPE_KEY]["error"]["message"])
            assert (await envelope_of(client, "count"))["data"] == {"result": 1}

    run(scenario())


def test_a_model_reads_that_the_state_is_lost_and_that_it_was_rebuilt(folder: Path) -> None:
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            assert [each.text for each in (await client.call_tool("count", {})).content] == ["1"]
            died = await client.call_tool("die", {})
            assert "the next call opens the lifespan anew" in died.content[0].text, died.content
            value, note = (await client.call_tool("count", {})).content
            assert value.text == "1"
            assert note.text.startswith("Note: the lifespan was opened anew for this call") and "it died" in note.text

    run(scenario())


def test_when_the_shared_process_is_killed_among_many_calls_each_is_told_and_the_next_works(folder: Path) -> None:
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            for number in range(3):
                pid = (await envelope_of(client, "beside"))["data"]["result"]
                calls = [envelope_of(client, "waits") for _ in range(30)]
                calls += [envelope_of(client, "sleeps", {"seconds": 60}) for _ in range(30)]
                calls += [envelope_of(client, "reports") for _ in range(10)]
                calls += [envelope_of(client, "count") for _ in range(100)]
                pending = [asyncio.ensure_future(call) for call in calls]
                await soon(lambda number=number: events(folder).count("begun") >= 70 * (number + 1))
                os.kill(pid, signal.SIGKILL)
                answers = await asyncio.wait_for(asyncio.gather(*pending), 20)
                told: Counter[Any] = Counter()
                for each in answers:
                    told[each["error"] and each["error"]["code"]] += 1
                    if each["error"]:
                        assert each["error"]["code"] == "WORKER_CRASHED", each
                        assert each["meta"]["side_effects"] == "unknown"
                        assert [note["code"] for note in each["warnings"]] == ["HOST_REPLACED"], each
                        assert "opens the lifespan anew" in each["warnings"][0]["message"]
                assert told["WORKER_CRASHED"] >= 70, told
                # Calls that had not begun moved to the new process. The first there say that its state is new.
                after = await envelope_of(client, "count")
                moved = after["data"]["result"] - 1
                values = Counter(each["data"]["result"] for each in answers if each["ok"])
                in_former = values - Counter(range(1, moved + 1))
                assert values >= Counter(range(1, moved + 1)) and all(times == 1 for times in in_former.values())
                rebuilt = [each for each in (*answers, after) if "STATE_REBUILT" in str(each["warnings"])]
                assert rebuilt and all(each["ok"] for each in rebuilt)
                assert (after in rebuilt) is (not moved)
                assert "the shared process was replaced, it died" in str(rebuilt[0]["warnings"])

    run(scenario())


ENDS = ["EOF", "EOF, asleep", "EOF, slowly", "SIGTERM", "SIGINT", "SIGKILL", "SIGTERM, hanging"]


@pytest.mark.parametrize("end", corners(ENDS, "EOF, slowly", "SIGINT", "SIGKILL", "SIGTERM, hanging"))
def test_the_lifespan_is_closed_however_the_server_ends_unless_it_is_killed(end: str, folder: Path) -> None:
    if "hanging" in end:
        misbehave(folder, "hang closing")
    if "slowly" in end:
        misbehave(folder, "close slowly")
    with served("serve", TARGET) as process:
        say(process, 1, "count", {})
        assert hear(process)["result"]["structuredContent"] == {"result": 1}
        say(process, 2, *(("sleeps", {"seconds": 60}) if "asleep" in end else ("waits", {})))
        eventually(lambda: "begun" in events(folder))
        if "slowly" in end:  # beside a function that is still there when its grace is over
            say(process, 3, "sleeps", {"seconds": 60})
            say(process, 4, "says_where", {})  # begins after it
            assert hear(process)["id"] == 4
        began = time.monotonic()
        assert process.stdin is not None
        if end.startswith("EOF"):
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, end.partition(",")[0]))
        process.wait(ENDED_WITHIN_S)
        took_s = time.monotonic() - began
        seen = [each for each in events(folder)[3:] if each != "begun"]
        assert seen == {"SIGKILL": [], "SIGTERM, hanging": ["closing"]}.get(end, ["closing", "closed"])
        assert took_s < (6 if "hanging" in end else 3)
        assert process.stderr is not None
        said = subprocess.list2cmdline([process.stderr.read().decode()])
        assert ("the lifespan did not close within 3 s" in said) is ("hanging" in end), said
