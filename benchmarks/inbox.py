"""Ten thousand calls that wait for a person: what each weighs, and how long a decision takes to reach its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from shotclock import App
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Kind, ProposalRequest, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.proposals import NewProposal
from shotclock.store.store import Store

from .isolated import ROOT, run_isolated
from .rounds import Size
from .table import Bar, Row, Table, absolute

LIMIT_S = 900
TITLE = "Waiting for a person"
NOTE = (
    "10,000 calls wait at the same time, each for a proposal of its own. Then another process decides 500 of "
    "them, one after the other, 10 ms apart. *Memory* is the growth of the resident size of the waiting process, "
    "divided by the number of waits. *Late* is the time from the commit of a decision until its waiter, and no "
    "other, has the answer. *Inbox*: `Inbox.wait` in one process. *stdio*: one `shotclock serve` and one pipe, "
    "with 10,000 calls of the tool `propose`. *HTTP*: the same over 10,000 connections. The client writes raw "
    "bytes instead of using the SDK, so that only the server is measured. The waits add no thread and no process."
)
WAITS = 10_000
DECISIONS = 500
PAUSE_S = 0.01
LATE = Bar(100, "ms")
WHY = {
    "HTTP": "The SDK pings every request that waits, each 15 s: 667 writes a second and in bursts, whose garbage "
    "also has Python collect all of half a gigabyte now and then. With the pings off the same run stays below the bar."
}
# Until all calls wait: the disk is waited for once per hundred, the rest is the SDK's work for each.
WAITING_WITHIN_S = 200.0
DECIDED_WITHIN_S = 100.0
STARTED_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0
PART_WITHIN_S = 280.0
# A server that works less than a quarter of this long has nothing left to do but to wait.
REST_S = 0.5
# Those of the inbox, which are there as soon as anybody waits, however many.
MORE_THREADS = 4

app = App("inbox-bench", proposals=True, operation_timeout="0ms")

# Decides what is named on stdin and says when each was committed, on the clock that all processes share.
DECIDER = """
import sys, time
from pathlib import Path
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.core.limits import WallTime
from shotclock.store.store import Store

with Store.open(Path(sys.argv[1])) as store:
    for line in sys.stdin:
        id = line.strip()
        decision = Decision(ProposalStatus.REJECTED, id)
        store.proposals.decide(id, decision, "ann", WallTime.of_ns(time.time_ns()))
        print(id, time.monotonic_ns(), flush=True)
        time.sleep(float(sys.argv[2]))
"""


@dataclass(frozen=True)
class Measured:
    """Of one way to wait."""

    kib_each: float
    late_ms: list[float]
    waiting_s: float

    def rows(self, where: str) -> list[Row]:
        p99 = statistics.quantiles(self.late_ms, n=100)[98]
        return [
            Row(f"{where}: memory per wait", f"{self.kib_each:.1f} KiB"),
            Row(f"{where}: late, median", f"{statistics.median(self.late_ms):.1f} ms"),
            replace(absolute(f"{where}: late, p99", p99, "{:.1f} ms", LATE), why=WHY.get(where, "")),
        ]


async def decided(home: Path, waiters: Mapping[str, Hashable], told: Mapping[Any, int]) -> list[float]:
    """How late each was told, in ms. `waiters` are those whose proposals are decided; `told` is filled by them."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as wanted:
        wanted.write("\n".join(waiters))
        wanted.seek(0)
        command = [sys.executable, "-c", DECIDER, str(home), str(PAUSE_S)]
        decider = subprocess.Popen(command, stdin=wanted, stdout=said, cwd=ROOT)
        try:
            await until(lambda: len(told) >= len(waiters), DECIDED_WITHIN_S, lambda: f"only {len(told)} were told")
            await until(lambda: decider.poll() is not None, GONE_WITHIN_S, lambda: "the decider goes on")
        finally:
            decider.kill()
            decider.wait(GONE_WITHIN_S)
        said.seek(0)
        committed = {id: int(at) for id, at in map(str.split, said)}
    assert told.keys() == set(waiters.values()), "somebody was told who was not meant"
    return [(told[waiter] - committed[id]) / 1e6 for id, waiter in waiters.items()]


async def until(condition: Callable[[], bool], within_s: float, what: Callable[[], str]) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(what())
        await asyncio.sleep(0.02)


def title(number: int) -> str:
    return f"Question {number}"


def some(ids: Mapping[str, Hashable], count: int) -> dict[str, Hashable]:
    return {id: ids[id] for id in random.Random(1).sample(sorted(ids), count)}


# --- in one process -----------------------------------------------------------------------------------------------


def in_one_process(waits: int, decisions: int) -> Measured:
    return asyncio.run(_in_one_process(waits, decisions))


async def _in_one_process(waits: int, decisions: int) -> Measured:
    us = psutil.Process()
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder, Store.open(Path(folder)) as store:
        ids = {f"p-{number:010}": number for number in range(waits)}
        news = [NewProposal(id, ProposalRequest(Kind.QUESTION, title(number)), "agent") for id, number in ids.items()]
        store.proposals.attach_or_create_all(news, WallTime.of_ns(time.time_ns()))
        inbox = Inbox(store)
        await inbox.wait("p-0000000000", 1)  # everything lazy is in place
        del news
        gc.collect()
        before, threads, began = us.memory_info().rss, us.num_threads(), time.monotonic()
        told: dict[int, int] = {}

        async def wait(id: str, number: int) -> None:
            ended = await inbox.wait(id, 1_000_000)
            if not ended.is_open:  # at the end it is closed under them
                told[number] = time.monotonic_ns()
                assert ended.decision is not None and ended.decision.notes == id

        waiting = [asyncio.ensure_future(wait(id, number)) for id, number in ids.items()]
        await asyncio.sleep(0)
        await inbox.get("p-0000000000")  # behind the first readings of all of them
        waiting_s = time.monotonic() - began
        gc.collect()
        grown = us.memory_info().rss - before
        assert us.num_threads() <= threads and not any(each.done() for each in waiting)
        late = await decided(Path(folder), some(ids, decisions), told)
        await inbox.close()
        await asyncio.wait(waiting, timeout=GONE_WITHIN_S)
        return Measured(grown / 1024 / waits, late, waiting_s)


# --- on a server --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(home: Path, *options: str, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    limits = {"SHOTCLOCK_INBOX_LIMIT_EACH": str(2 * WAITS), "SHOTCLOCK_INBOX_LIMIT": str(2 * WAITS)}
    environment = {**os.environ, **limits, "SHOTCLOCK_HOME": str(home), "SHOTCLOCK_RESPONSE_TIMEOUT": "30m"}
    command = [sys.executable, "-m", "shotclock", "serve", "benchmarks.inbox:app", *options]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GONE_WITHIN_S)
        process.kill()
        process.wait(GONE_WITHIN_S)


def call(number: int) -> bytes:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "0"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    arguments = {"title": title(number), "justification": "because"}
    params = {"name": "propose", "arguments": arguments, "_meta": meta}
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}).encode()


async def on_a_server(
    home: Path,
    process: psutil.Process,
    start: Callable[[int], Awaitable[None]],
    answered: Mapping[int, int],
    waits: int,
    decisions: int,
) -> Measured:
    """`start` makes the call of a number; `answered` says when the answer to which of them came."""
    await start(waits)  # one more, so that everything lazy is in place
    with Store.open(home) as store:
        await _all_waiting(store, process, 1, answered)
        before, threads, began = process.memory_info().rss, process.num_threads(), time.monotonic()
        for number in range(waits):
            await start(number)
        ids = await _all_waiting(store, process, waits + 1, answered)
        waiting_s = time.monotonic() - began
        grown, more = process.memory_info().rss - before, process.num_threads() - threads
        assert more <= MORE_THREADS, f"{more} threads more: a wait must not hold one"
        late = await decided(home, some(ids, decisions), answered)
        return Measured(grown / 1024 / waits, late, waiting_s)


async def _all_waiting(
    store: Store, process: psutil.Process, count: int, answered: Mapping[int, int]
) -> dict[str, int]:
    """The proposals by id, with the numbers of the calls, once each is made and the server has come to rest."""
    ids: dict[str, int] = {}
    give_up_at = time.monotonic() + WAITING_WITHIN_S
    while True:
        worked_s = sum(process.cpu_times()[:2])
        await asyncio.sleep(REST_S)
        rests = sum(process.cpu_times()[:2]) - worked_s < REST_S / 4
        if rests:
            ids, last = {}, None
            while page := store.proposals.list(status=ProposalStatus.PENDING, limit=2_000, before_seq=last):
                ids.update((each.id, int(each.title.rpartition(" ")[2])) for each in page)
                last = page[-1].seq
        if len(ids) >= count and rests:
            return ids
        if answered or time.monotonic() > give_up_at:
            raise TimeoutError(f"{len(ids)} of {count} calls wait, {len(answered)} were answered")


def over_stdio(waits: int, decisions: int) -> Measured:
    return asyncio.run(_over_stdio(waits, decisions))


async def _over_stdio(waits: int, decisions: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        home = Path(folder)
        with serving(home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None and process.stdout is not None
            loop = asyncio.get_running_loop()
            answered: dict[int, int] = {}
            reader = asyncio.StreamReader(limit=1 << 20)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
            flow, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, process.stdin)
            writer = asyncio.StreamWriter(flow, protocol, reader, loop)

            async def read() -> None:
                async for line in reader:
                    now = time.monotonic_ns()
                    answered[json.loads(line)["id"]] = now

            async def start(number: int) -> None:
                writer.write(call(number) + b"\n")
                await asyncio.wait_for(writer.drain(), WAITING_WITHIN_S)

            reading = asyncio.ensure_future(read())
            try:
                return await on_a_server(home, psutil.Process(process.pid), start, answered, waits, decisions)
            finally:
                reading.cancel()
                flow.close()


def over_http(waits: int, decisions: int) -> Measured:
    return asyncio.run(_over_http(waits, decisions))


class Connection(asyncio.Protocol):
    """One request, and when its answer came. Its head is there long before, and so are the SDK's pings."""

    def __init__(self, number: int, answered: dict[int, int]) -> None:
        self._number, self._answered = number, answered

    def data_received(self, data: bytes) -> None:
        if b"rejected" in data:
            self._answered[self._number] = time.monotonic_ns()
        elif not data.startswith(b"HTTP/1.1 200") and b": ping" not in data:
            raise RuntimeError(data[:500].decode("utf-8", "replace"))


async def _over_http(waits: int, decisions: int) -> Measured:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: application/json, text/event-stream\r\n"
        "Content-Type: application/json\r\nMCP-Protocol-Version: 2026-07-28\r\nMCP-Method: tools/call\r\n"
        "MCP-Name: propose\r\nContent-Length: {length}\r\n\r\n"
    )
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        home = Path(folder)
        with serving(home, "--http", f"127.0.0.1:{port}", stderr=subprocess.DEVNULL) as process:
            loop = asyncio.get_running_loop()
            answered: dict[int, int] = {}
            held: list[asyncio.Transport] = []
            await until_listening(port)

            async def start(number: int) -> None:
                transport, _ = await loop.create_connection(lambda: Connection(number, answered), "127.0.0.1", port)
                body = call(number)
                transport.write(head.format(length=len(body)).encode() + body)
                held.append(transport)

            try:
                return await on_a_server(home, psutil.Process(process.pid), start, answered, waits, decisions)
            finally:
                for transport in held:
                    transport.abort()


async def until_listening(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    await until(listens, STARTED_WITHIN_S, lambda: f"nobody listens on port {port}")


def measure(size: Size) -> Table:
    few, many = (1_000, DECISIONS), (WAITS, DECISIONS)
    ways = {"Inbox": (in_one_process, many), "stdio": (over_stdio, many), "HTTP": (over_http, many)}
    ways["HTTP, 1,000 waits"] = (over_http, few)
    rows = []
    for where, (way, whole) in ways.items():
        rows += run_isolated(way, *size.of(whole, few, (20, 4)), within_s=PART_WITHIN_S).rows(where)
    return Table(TITLE, NOTE, rows)
