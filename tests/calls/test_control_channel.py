"""The control socket of a process: who may speak to it, what it refuses, and what it leaves behind."""

import asyncio
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls import control
from shotclock.calls.control import live_calls
from shotclock.calls.control_channel import ask, ask_holder
from shotclock.calls.runtime import Runtime
from shotclock.core.errors import Failure
from shotclock.core.limits import Clocks
from shotclock.core.overtime import ObserverKind, Overtime, OvertimePolicy
from shotclock.supervise.kernel import this_process
from tests.calls.bounds import soon

pytestmark = pytest.mark.usefixtures("no_survivors")

SOON_S = 10.0


def socket_of(home: Path) -> Path:
    [path] = (home / "control").iterdir()
    return path


async def asked(path: Path, **request: Any) -> Any:
    return await asyncio.to_thread(ask, path, request)


async def begun(name: str) -> str:
    """Wait for a call of this name, and return its id."""
    async with asyncio.timeout(SOON_S):
        while not (found := [call.request_id for call in live_calls.values() if call.name == name]):
            await asyncio.sleep(0.01)
    return found[0]


def test_the_socket_is_the_users_alone_and_goes_with_the_runtime(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 30)  # a socket's address has room for 107 bytes

    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(home)
            assert stat.S_IMODE((home / "control").stat().st_mode) == 0o700
            assert stat.S_IMODE(socket_of(home).stat().st_mode) == 0o600
            assert await asked(socket_of(home), do="list") == {"calls": []}
        assert list((home / "control").iterdir()) == []

    asyncio.run(scenario())


def test_sockets_of_dead_processes_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    me = this_process()
    inode = "".join(letter for letter in me.namespace if letter.isdecimal())
    (tmp_path / "control").mkdir(mode=0o700)
    names = {f"{me.pid}-1-{inode}-0": False, "7-7-1-0": True, "notes": True}  # pid-start-namespace-number
    for name in names:
        (tmp_path / "control" / name).touch()

    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)

    asyncio.run(scenario())
    assert {name: (tmp_path / "control" / name).exists() for name in names} == names


@pytest.mark.slow
def test_what_cannot_be_understood_is_refused_and_silence_is_cut_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            folder = os.open(tmp_path / "control", os.O_RDONLY)  # the path itself may be too long for a socket
            path = f"/proc/self/fd/{folder}/{socket_of(tmp_path).name}"
            deep = b"[" * 50_000 + b"\n"
            for sent in (
                deep,
                b"no json\n",
                b"[]\n",
                b"{}\n",
                b'{"do": "dance"}\n',
                b'{"do": "extend", "by_ms": "x"}\n',
            ):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(sent)
                async with asyncio.timeout(SOON_S):
                    answer = json.loads(await reader.readline())
                assert answer["code"] in ("ARG_ERROR", "CALL_NOT_FOUND"), sent
                writer.close()
            reader, writer = await asyncio.open_unix_connection(path)
            async with asyncio.timeout(SOON_S):  # it says nothing, and is hung up on
                assert await reader.read() == b""
            writer.close()
            os.close(folder)

    asyncio.run(scenario())


def test_a_request_about_a_call_whose_loop_is_blocked_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_blocked(call: Any, act: Any) -> None:
        raise TimeoutError

    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            running = asyncio.create_task(runtime.run(["sleep", "60"], Clocks.of("20s"), name="command"))
            request_id = await begun("command")
            monkeypatch.setattr(control, "act_on", is_blocked)
            with pytest.raises(Failure) as refused:
                await asked(socket_of(tmp_path), do="stop", who="alice", request_id=request_id)
            assert (refused.value.code, "blocked" in str(refused.value)) == ("TIMEOUT", True)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())


def test_running_calls_are_listed_extended_and_wound_down_by_their_ids(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            path = socket_of(tmp_path)
            until_go = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"  # it is asked twice before it has ended
            script = f"trap '{until_go}; echo kept; exit 0' TERM; echo up; touch {tmp_path}/up; sleep 60 & wait"
            running = asyncio.ensure_future(runtime.run(["sh", "-c", script], Clocks.of(timeout="30s"), name="long"))
            request_id = await begun("long")
            await soon((tmp_path / "up").exists, within=SOON_S)  # before its trap it would only be ended
            [shown] = (await asked(path, do="list"))["calls"]
            assert (shown["request_id"], shown["kind"], shown["timeout_ms"]) == (request_id, "command", 30_000)
            assert 0 < shown["remaining_ms"] <= 30_000
            [extended] = (await asked(path, do="extend", request_id=request_id, by_ms=5000, who="me"))["extended"]
            assert (extended["granted_ms"], extended["timeout_ms"]) == (5000, 35_000)
            with pytest.raises(Failure, match="no call 'nobody'") as refused:
                await asked(path, do="stop", request_id="nobody", who="me")
            assert refused.value.code == "CALL_NOT_FOUND"
            [stopping] = (await asked(path, do="stop", request_id=request_id, who="me", reason="enough"))["stopping"]
            assert stopping["winding_down"]["reason"] == "enough"
            with pytest.raises(Failure, match="winding down already"):
                await asked(path, do="stop", request_id=request_id, who="me")
            (tmp_path / "go").touch()
            envelope = await running
            assert envelope.data["stdout"] == "up\nkept\n"
            assert envelope.meta["overtime"]["requests"][0]["asked_by"] == "me"
            with pytest.raises(Failure) as gone:
                await asked(path, do="extend", request_id=request_id, by_ms=5000, who="me")
            assert gone.value.code == "CALL_NOT_FOUND"

    asyncio.run(scenario())


def test_a_call_has_no_more_than_its_caller_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", "8000")

    async def scenario() -> None:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            running = asyncio.ensure_future(runtime.run(["sleep", "60"], Clocks.of(timeout="4s"), name="long"))
            request_id = await begun("long")
            [extended] = (await asked(socket_of(tmp_path), do="extend", request_id=request_id, by_ms=60_000, who="me"))[
                "extended"
            ]
            assert 0 < extended["granted_ms"] < 4000
            with pytest.raises(Failure, match="has all the time that its caller has"):
                await asked(socket_of(tmp_path), do="extend", request_id=request_id, by_ms=60_000, who="me")
            await asked(socket_of(tmp_path), do="stop", request_id=request_id, who="me")
            assert (await running).code == "CANCELLED"

    asyncio.run(scenario())


def test_a_token_speaks_for_its_own_call_and_work_cannot_extend_itself(tmp_path: Path) -> None:
    """What a command does with the socket that it is told of, beside asking for its own call."""
    thief = (
        "import json, os, socket\n"
        "request_id, token, path = os.environ['SHOTCLOCK_OVERTIME'].split(':', 2)\n"
        "def ask(**request):\n"
        "    with socket.socket(socket.AF_UNIX) as connection:\n"
        "        connection.settimeout(10)\n"
        "        os.chdir(os.path.dirname(path))\n"
        "        connection.connect(os.path.basename(path))\n"
        "        connection.sendall(json.dumps(request).encode() + b'\\n')\n"
        "        return json.loads(connection.makefile().readline())\n"
        "other = request_id.rpartition('-')[0] + '-1'\n"
        "print(json.dumps([ask(do='overtime', request_id=other, token=token, by_ms=1, reason='r'),\n"
        "    ask(do='overtime', request_id=request_id, token='x', by_ms=1, reason='r'),\n"
        "    ask(do='extend', request_id=request_id, by_ms=1000, who='me'),\n"
        "    ask(do='overtime', request_id=request_id, token=token, by_ms=1000, reason='r')]))\n"
    )

    async def scenario() -> Any:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            call = runtime.begin("thief", {}, Clocks.of(timeout="30s", soft="20s"), is_command=True)
            call.overtime = Overtime(OvertimePolicy(ObserverKind.NONE, 5000))
            return await runtime.run([sys.executable, "-c", thief], call=call)

    envelope = asyncio.run(scenario())
    assert envelope.ok, envelope.to_dict()
    other, forged, extended, granted = json.loads(envelope.data["stdout"])
    assert [other["code"], forged["code"], extended["code"]] == ["NOT_ALLOWED"] * 3
    assert granted["data"]["granted_ms"] == 1000
    assert [request["asked_by"] for request in envelope.meta["overtime"]["requests"]] == ["call"]


def test_a_command_that_may_have_no_overtime_is_told_of_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOTCLOCK_OVERTIME", "of:somebody:else")

    async def scenario() -> Any:
        async with Runtime() as runtime:
            runtime.open_channel(tmp_path)
            return await runtime.run(["sh", "-c", "echo ${SHOTCLOCK_OVERTIME-none}"])

    assert asyncio.run(scenario()).data["stdout"] == "none\n"


def test_who_cannot_be_reached_is_said_in_plain_words(tmp_path: Path) -> None:
    from shotclock.core.value_types import replace

    me = this_process()
    cases = {
        "another machine": replace(me, host="elsewhere", boot_id="other"),
        "another container": replace(me, namespace="pid:[1]"),
        "is gone": replace(me, started=me.started + 1),
        "no control socket": me,
    }
    for said, holder in cases.items():
        with pytest.raises(Failure, match=said) as refused:
            ask_holder(tmp_path, holder, {"do": "list"})
        assert refused.value.code == "CALL_NOT_FOUND"


def test_a_process_that_does_not_answer_costs_no_more_than_the_limit(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(os.fspath(tmp_path / "deaf"))
        deaf.listen(1)
        with pytest.raises(Failure) as refused:
            ask(tmp_path / "deaf", {"do": "list"}, within_s=0.2)
    assert refused.value.code == "TIMEOUT"
