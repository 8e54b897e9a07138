"""The control channel of a process: a socket where processes of the same user control its running calls.

A request is one line of JSON, and so is the answer. The socket's name contains the identity of its process, so the
process that holds a run can be found. The address given to a command is valid for its own call.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from ..core.errors import Failure
from ..core.limits import NS_PER_MS, ProcessIdentity, WallTime
from ..core.value_types import JsonObject, value
from ..store.home import state_home
from ..supervise import kernel, private_socket
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import this_process
from . import control
from .call import Call

FOLDER = "control"
# A request is a name and some numbers; more is not from us.
MOST_BYTES = 64 * 1024
MOST_AT_ONCE = 64
MOST_ANSWERED = 8 * 1024 * 1024
MOST_LISTED = 1000
# Exhausted by a client that sends nothing, or that does not read its answer.
READ_LIMIT_S = 2.0
WRITE_LIMIT_S = 2.0
ANSWER_LIMIT_S = 5.0  # how long a client waits for an answer; a stopped process or a blocked loop exhausts it

_numbers = itertools.count()

runs: dict[str, Call] = {}  # the running calls that are runs or jobs, by their id in the store
run_cancels: dict[str, Callable[[str], None]] = {}  # cancel a run of a workflow, and take the reason


class ControlChannel:
    """The listening end. It lives on the loop that opens it."""

    def __init__(self, home: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._key = os.urandom(32)
        self._serving: set[asyncio.Task[None]] = set()
        self._listener, self._path = _listen(home)
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for task in self._serving:
            task.cancel()

    def overtime_address(self, call: Call) -> str:
        return f"{call.request_id}:{self._sign(call.request_id)}:{self._path}"

    def _sign(self, request_id: str) -> str:
        return hashlib.blake2b(request_id.encode(), key=self._key, digest_size=16).hexdigest()

    def _accept(self) -> None:
        connection = private_socket.accept(self._listener)
        if connection is None:
            return
        if len(self._serving) >= MOST_AT_ONCE:
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection, private_socket.peer_of(connection)[0]))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket, pid: int) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):  # the client has left, or sent nothing
            async with asyncio.timeout(READ_LIMIT_S):
                request = await self._read(connection)
            answer = await self._answer(request, pid)
            async with asyncio.timeout(WRITE_LIMIT_S):
                await self._loop.sock_sendall(connection, json.dumps(answer).encode() + b"\n")

    async def _read(self, connection: socket.socket) -> object:
        read = b""
        while b"\n" not in read:
            chunk = await self._loop.sock_recv(connection, 4096)
            if not chunk or len(read) > MOST_BYTES:
                break
            read += chunk
        try:
            return json.loads(read)
        except (ValueError, RecursionError):
            return None

    async def _answer(self, request: object, pid: int) -> dict[str, object]:
        try:
            if not isinstance(request, dict):
                raise Failure("ARG_ERROR", "the request is not an object on one line of JSON")
            return {"data": await self._perform(request, pid)}
        except Failure as failure:
            return {"code": failure.code, "message": str(failure)}
        except TimeoutError:
            return {"code": "TIMEOUT", "message": "the event loop of the call is blocked"}
        except (KeyError, TypeError, ValueError) as error:
            return {"code": "ARG_ERROR", "message": f"the request cannot be understood: {error!r}"[:500]}

    async def _perform(self, request: JsonObject, pid: int) -> dict[str, object]:
        match request["do"]:
            case "list":
                return {"calls": list_calls()}
            case "overtime":
                return await self._request_overtime(request)
            case "extend":
                if os.getpid() in kernel.ancestors(pid):
                    raise Failure("NOT_ALLOWED", "work cannot extend itself: request it with `shotclock overtime`")
                order = RunOrder("", None, str(request["who"])[:100], int(request["by_ms"]))
                return await order.act_on(find_calls(request))
            case "stop":
                within_ms = None if request.get("within_ms") is None else int(request["within_ms"])
                reason = str(request.get("reason") or "")[:500]
                order = RunOrder("", None, str(request["who"])[:100], None, within_ms, reason)
                return await order.act_on(find_calls(request))
            case "cancel":
                run_id = str(request["run"])
                if (cancel := run_cancels.get(run_id)) is None:
                    raise Failure("CALL_NOT_FOUND", f"{run_id[:80]!r} is not running here any more")
                cancel(str(request["reason"])[:500])
                return {"cancelled": run_id}
        raise Failure("ARG_ERROR", f"{request['do']!r:.40} is not a request of this channel")

    async def _request_overtime(self, request: JsonObject) -> dict[str, object]:
        request_id, by_ms = str(request["request_id"]), int(request["by_ms"])
        if not hmac.compare_digest(self._sign(request_id), str(request["token"])):
            raise Failure("NOT_ALLOWED", "this is not the token of that call")
        call = control.live_calls.get(request_id)
        if call is None:
            raise Failure("CALL_NOT_FOUND", "the call that this command was started for has ended")
        before = 0 if call.overtime is None else len(call.overtime.requests)
        granted_ms = await control.request_overtime(call, max(0, by_ms), str(request["reason"])[:2000])
        made = [] if call.overtime is None else call.overtime.requests[before:]
        settled = next((each for each in reversed(made) if each.asked_by == "call"), None)
        bell = call.bound.bell
        return {
            "granted_ms": granted_ms,
            "reason": "it is winding down" if settled is None else settled.reason,
            "verdict": "declined" if settled is None else settled.verdict.value,
            "remaining_ms": None if bell is None else bell.remaining_ms(monotonic_ns()),
        }


def open_channel(home: Path | None) -> ControlChannel | None:
    """Open the control channel of the running loop; None without a home or with a full disk, since it is optional."""
    try:
        return ControlChannel(home or state_home(os.environ), asyncio.get_running_loop())
    except (OSError, Failure):
        return None


def list_calls() -> list[dict[str, object]]:
    ids = {call.request_id: name for name, call in runs.items()}
    return [describe_call(call, ids.get(call.request_id)) for call in list(control.live_calls.values())[:MOST_LISTED]]


def describe_call(call: Call, run_id: str | None = None) -> dict[str, object]:
    now_ns, bell, controlled = monotonic_ns(), call.bound.bell, control.control_of(call)
    elapsed_ms = (now_ns - call.started_ns) // NS_PER_MS
    kind = "run" if call.name.startswith("run ") and call.operation is None else "command"
    if call.operation is not None:
        kind = "function"
    elif call.name.startswith("step "):
        kind = "step"
    described: dict[str, object] = {
        "request_id": call.request_id,
        "name": call.name,
        "kind": kind,
        "parent": None if call.inside_of is None else call.inside_of.request_id,
        "started_at": WallTime(wall_time().ms - elapsed_ms).iso(),
        "elapsed_ms": elapsed_ms,
        "timeout_ms": call.bound.limit_ms,
        "remaining_ms": None if bell is None else bell.remaining_ms(now_ns),
        "soft_ms": controlled.soft_remaining_ms(now_ns),
        "overtime": None if call.overtime is None else call.overtime.as_meta(),
        "winding_down": None,
        "progress": controlled.progress[-1] if controlled.progress else None,
    }
    if run_id is not None:
        described["run_id"] = run_id
    if (stop := call.winding_down) is not None:
        left_ms = max(0, stop.until_ns - now_ns) // NS_PER_MS
        described["winding_down"] = {"by": stop.by, "reason": stop.reason, "remaining_ms": left_ms}
    return described


def find_calls(request: JsonObject) -> list[Call]:
    """Return the calls that a request names: a call, a run or job, or the current attempts of one of its steps."""
    if (request_id := request.get("request_id")) is not None:
        call = control.live_calls.get(str(request_id))
        if call is None:
            raise Failure("CALL_NOT_FOUND", f"no call {str(request_id)[:80]!r} is running here")
        return [call]
    run_id, step = str(request["run"]), request.get("step")
    if step is not None and "." in str(step):  # of a run inside this one
        inner, _, last = str(step).rpartition(".")
        if f"{run_id}.{inner}" in runs:
            run_id, step = f"{run_id}.{inner}", last
    run = runs.get(run_id)
    if run is None:
        raise Failure("CALL_NOT_FOUND", f"{run_id[:80]!r} is not running here any more")
    if step is None:
        return [run]
    attempts = [call for call in control.live_calls.made_by(run) if call.name == f"step {step}"]
    if not attempts:
        raise Failure("CALL_NOT_FOUND", f"step {str(step)[:80]!r} of {run_id[:80]!r} is not running now")
    return attempts


@value
class RunOrder:
    """An order to running work: more time for a run, a job or a step, or to wind down."""

    run_id: str
    step: str | None
    who: str
    by_ms: int | None  # None winds down
    within_ms: int | None = None
    reason: str = ""

    def as_request(self) -> dict[str, object]:
        request: dict[str, object] = {"run": self.run_id, "step": self.step, "who": self.who}
        if self.by_ms is None:
            return {**request, "do": "stop", "within_ms": self.within_ms, "reason": self.reason}
        return {**request, "do": "extend", "by_ms": self.by_ms}

    def send(self, home: Path, holder: ProcessIdentity, name: str) -> JsonObject:
        """Send it to the process that has the run or job, which messages call `name`."""
        try:
            return ask_holder(home, holder, self.as_request())
        except Failure as failure:
            if failure.code != "CALL_NOT_FOUND":
                raise
            raise Failure("CALL_NOT_FOUND", f"{name} cannot be reached: {failure}") from None

    async def act_on(self, calls: list[Call]) -> dict[str, object]:
        """Act on calls of this process. Raises Failure if none can be extended, or all are winding down already."""
        return await (self._wind_down(calls) if self.by_ms is None else self._extend(calls, self.by_ms))

    async def _extend(self, calls: list[Call], by_ms: int) -> dict[str, object]:
        extended, refused = [], None
        for call in calls:
            try:
                request = await control.act_on(call, lambda controlled: controlled.extend(by_ms, self.who))
                extended.append(describe_call(call) | {"granted_ms": request.granted_ms})
            except Failure as failure:
                refused = failure
        if not extended and refused is not None:
            raise refused
        return {"extended": extended}

    async def _wind_down(self, calls: list[Call]) -> dict[str, object]:
        stopping = [call for call in calls if call.winding_down is None]
        if calls and not stopping:
            raise Failure("NOT_EXTENDABLE", f"{calls[0].name} is winding down already")
        why = self.reason or f"asked to stop by {self.who}"
        for call in stopping:
            await control.act_on(call, lambda controlled: controlled.wind_down(self.who, why, self.within_ms))
        return {"stopping": [describe_call(call) for call in stopping]}


def ask(path: str | os.PathLike[str], request: dict[str, object], within_s: float = ANSWER_LIMIT_S) -> JsonObject:
    """Return the answer of a process. Raises its refusal, CALL_NOT_FOUND if none listens, TIMEOUT if it is silent."""
    until_ns = monotonic_ns() + int(within_s * 1e9)
    try:
        with private_socket.connect(path, within_s) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            read = b""
            while b"\n" not in read and len(read) <= MOST_ANSWERED:
                connection.settimeout(max(0.001, (until_ns - monotonic_ns()) / 1e9))
                chunk = connection.recv(65536)
                if not chunk:
                    break
                read += chunk
        answer = json.loads(read)
    except PermissionError:
        raise Failure("NOT_ALLOWED", "the control socket belongs to another user") from None
    except TimeoutError:
        raise Failure("TIMEOUT", f"the process did not answer within {within_s:g} s") from None
    except OSError as error:
        raise Failure("CALL_NOT_FOUND", f"nothing is running there any more ({error.strerror})") from None
    except ValueError:
        raise Failure("CALL_NOT_FOUND", "the process ended before it answered") from None
    if "code" in answer:
        raise Failure(str(answer["code"]), str(answer["message"]))
    data: JsonObject = answer["data"]
    return data


def ask_holder(
    home: Path, holder: ProcessIdentity, request: dict[str, object], within_s: float = ANSWER_LIMIT_S
) -> JsonObject:
    """Send a request to the process that holds a run or a job. Raises Failure if it cannot be reached."""
    me = this_process()
    if holder.boot_id != me.boot_id or holder.host != me.host:
        raise Failure("CALL_NOT_FOUND", f"it runs on another machine ({holder.host}), or did before a restart of it")
    if holder.namespace != me.namespace:
        raise Failure("CALL_NOT_FOUND", "it runs in another container; do this there")
    if not kernel.is_alive(holder):
        raise Failure("CALL_NOT_FOUND", f"its process {holder.pid} is gone")
    refused: Failure | None = None
    for path in sorted((home / FOLDER).glob(f"{_stem_of(holder)}-*")):
        try:
            return ask(path, request, within_s)
        except Failure as failure:
            if failure.code != "CALL_NOT_FOUND":
                raise
            refused = failure
    raise refused or Failure("CALL_NOT_FOUND", f"its process {holder.pid} cannot be reached: it has no control socket")


def _listen(home: Path) -> tuple[socket.socket, Path]:
    folder = home / FOLDER
    os.makedirs(home.parent, exist_ok=True)
    for each in (home, folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
    _remove_stale(folder)
    path = folder / f"{_stem_of(this_process())}-{next(_numbers):x}"
    return private_socket.listen(path, MOST_AT_ONCE), path


def _stem_of(process: ProcessIdentity) -> str:
    namespace = "".join(letter for letter in process.namespace if letter.isdecimal())
    return f"{process.pid}-{process.started}-{namespace or 0}"


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of killed processes; other pid namespaces cannot be judged from here."""
    namespace = _stem_of(this_process()).rpartition("-")[2]
    for name in os.listdir(folder):
        pid, _, rest = name.partition("-")
        started, _, rest = rest.partition("-")
        if rest.partition("-")[0] != namespace or not (pid.isdecimal() and started.isdecimal()):
            continue
        with contextlib.suppress(OSError):
            if kernel.start_of(int(pid)) != int(started):
                os.unlink(folder / name)
