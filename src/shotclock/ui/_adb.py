"""The adb client of this machine, each use of it a program with a limit.

A phone on USB belongs to the adb server that has claimed it, so a machine has one server, which other programs share.
Shotclock neither ends nor replaces it. If there is none, a session that has found its phone starts it as a program that
outlives the session. The client never starts it: that server would be killed with the bounded command.

AGENTS.md: the adb server belongs to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import NoReturn

from ..core.errors import Failure
from ..core.value_types import value
from .device import Countdown, DeviceServices, ProgramOutput

ADB_VARIABLE = "SHOTCLOCK_ADB"
DEFAULT_PORT = 5037
MARGIN_MS = 100  # the part of a command's time in which it is killed and its answer passed on
PROBE_MS = 3_000  # a server that just starts listens before it answers
VERSION_MS = 5_000
LIST_MS = 4_000
# The limits for the start of a server, and for connecting with a phone on the network.
SERVER_START_MS = 8_000
SERVER_PAUSE_S = 0.05
CONNECT_MS = 5_000
STATE_MS = 500

INSTALL = (
    "adb is not on PATH: install it (Debian and Ubuntu: apt install adb; macOS: brew install android-platform-tools; "
    f"others: Android's platform-tools), or name it in {ADB_VARIABLE}"
)
NO_PHONE = (
    "no phone is attached: connect one by USB with USB debugging on (Settings, Developer options), or name one on the "
    "network, as in android:192.168.1.5:5555"
)
_ADVICE = {
    "unauthorized": "unlock it and allow USB debugging of this computer in the dialog that it shows",
    "authorizing": "unlock it and allow USB debugging of this computer in the dialog that it shows",
    "offline": "it does not answer: unplug it and plug it in again, or run `adb reconnect`",
    "connecting": "its connection is being made: try again in a moment",
    "no permissions": "this user may not use the USB device: see udev rules for Android (Debian: android-sdk-platform-"
    "tools-common), and that you are in the group plugdev",
    "bootloader": "it is in its bootloader: start Android on it",
    "recovery": "it is in recovery mode: start Android on it",
    "sideload": "it waits for an update to be sent: start Android on it",
}
_LINE = re.compile(rf"(\S+)\s+(device|unknown|host|rescue|{'|'.join(_ADVICE)})\b(.*)")
_MARK = "shotclock-end:"


@value
class Phone:
    serial: str
    state: str
    model: str

    @property
    def is_usable(self) -> bool:
        return self.state == "device"

    def describe(self) -> str:
        if self.is_usable:
            return self.model or "ready"
        return f"{self.state}: {_ADVICE[self.state]}" if self.state in _ADVICE else self.state


def parse_phones(text: str) -> list[Phone]:
    found = []
    for line in text.splitlines():
        if (parts := _LINE.match(line)) is not None and not line.startswith(("*", "List of devices")):
            model = re.search(r"\bmodel:(\S+)", parts[3])
            found.append(Phone(parts[1], parts[2], model[1].replace("_", " ") if model else ""))
    return found


def choose_phone(phones: list[Phone], serial: str = "") -> str:
    found = [phone for phone in phones if serial in ("", phone.serial)]
    usable = [phone.serial for phone in found if phone.is_usable]
    if len(usable) == 1:
        return usable[0]
    if usable:
        names = ", ".join(f"android:{each}" for each in usable)
        message = f"there are {len(usable)} phones: choose one with --device, of {names}"
    elif found:
        states = "; ".join(f"{phone.serial} is {phone.describe()}" for phone in found)
        message = f"no phone can be used: {states}"
    else:
        message = f"there is no phone {serial!r:.80}: see `shotclock ui devices`" if serial else NO_PHONE
    raise Failure("DEVICE_UNAVAILABLE", message)


def server_address() -> tuple[str, int]:
    spec = os.environ.get("ADB_SERVER_SOCKET")
    if not spec:
        host = os.environ.get("ANDROID_ADB_SERVER_ADDRESS") or "127.0.0.1"
        spec = f"tcp:{host}:{os.environ.get('ANDROID_ADB_SERVER_PORT') or DEFAULT_PORT}"
    parts = re.fullmatch(r"tcp:(?:(.*):)?(\d{1,5})", spec)
    if parts is None:
        message = f"the address of the adb server is {spec!r:.100}: only tcp:HOST:PORT is supported"
        raise Failure("DEVICE_UNAVAILABLE", message)
    return parts[1] or "127.0.0.1", int(parts[2])


def _is_local(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", "[::1]")


async def find_server_version() -> int | None:
    host, port = server_address()
    try:
        async with asyncio.timeout(PROBE_MS / 1000):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(b"000chost:version")
                status = await reader.readexactly(8)
                version = int(await reader.readexactly(4), 16)
            finally:
                writer.close()
        if status != b"OKAY0004":
            raise ValueError(status)
    except ConnectionRefusedError:
        return None
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        why = f"no answer within {PROBE_MS} ms" if isinstance(error, TimeoutError) else f"{error}"
        message = f"the program on {host}:{port} is not a working adb server ({why}): end it with `adb kill-server`"
        raise Failure("DEVICE_UNAVAILABLE", message) from None
    return version


class Adb:
    def __init__(self, program: str, services: DeviceServices, serial: str = "") -> None:
        self.program = program
        self.serial = serial
        self._services = services

    @classmethod
    def find(cls, services: DeviceServices, serial: str = "") -> Adb:
        if (program := shutil.which(os.environ.get(ADB_VARIABLE) or "adb")) is None:
            raise Failure("DEVICE_UNAVAILABLE", INSTALL)
        return cls(program, services, serial)

    @property
    def is_on_network(self) -> bool:
        return re.fullmatch(r".+:\d{1,5}", self.serial) is not None

    async def run(self, *words: str, within_ms: int, socket: str | None = None) -> ProgramOutput:
        if socket is None:
            host, port = server_address()
            # With this name of the host the client assumes another machine, on which it starts no server.
            socket = f"tcp:{'127.0.0.1' if _is_local(host) else host}:{port}"
        chosen = ("-s", self.serial) if self.serial else ()
        try:
            return await self._services.run_command(
                [self.program, "-L", socket, *chosen, *words], within_ms=max(1, within_ms - MARGIN_MS)
            )
        except Failure as failure:
            if failure.code == "TIMEOUT":
                raise
            raise Failure("DEVICE_LOST", f"adb could not be run: {failure}") from None

    async def find_version(self) -> tuple[str, int | None]:
        output = (await self._ask_adb("version", within_ms=VERSION_MS)).stdout.decode("utf-8", "replace")
        protocol = re.search(r"version 1\.0\.(\d+)", output)
        version = re.search(r"^Version (\S+)", output, re.MULTILINE)
        name = version[1] if version else output.strip().split("\n")[0][:80]
        return name, int(protocol[1]) if protocol else None

    async def check_server(self) -> bool:
        """Return whether there is a server. Raises Failure for one that this client would end."""
        theirs = await find_server_version()
        if theirs is None:
            return False
        ours = (await self.find_version())[1]
        if ours != theirs:
            host, port = server_address()
            message = (
                f"the adb server on {host}:{port} has version {theirs}, and {self.program} has {ours}: one would end "
                f"the other. Name the server's own adb in {ADB_VARIABLE}, or run `adb kill-server`"
            )
            raise Failure("DEVICE_UNAVAILABLE", message)
        return True

    async def start_server(self) -> None:
        if await self.check_server():
            return
        await self._look_for_phone()
        host, port = server_address()
        if not _is_local(host):
            raise Failure("DEVICE_UNAVAILABLE", f"there is no adb server on {host}:{port}")
        await self._services.start_program([self.program, "-L", f"tcp:localhost:{port}", "start-server"])
        time = Countdown(SERVER_START_MS)
        while not time.is_over:
            with contextlib.suppress(Failure):  # it has only begun to listen
                if await find_server_version() is not None:
                    return
            await asyncio.sleep(SERVER_PAUSE_S)
        message = f"`adb start-server` started no server on {host}:{port} within {SERVER_START_MS} ms"
        raise Failure("DEVICE_UNAVAILABLE", message)

    async def list_phones(self, socket: str | None = None) -> list[Phone]:
        output = await self._ask_adb("devices", "-l", within_ms=LIST_MS, socket=socket)
        return parse_phones(output.stdout.decode("utf-8", "replace"))

    async def find_phones(self) -> list[Phone]:
        if await self.check_server():
            return await self.list_phones()
        with _own_server() as own:
            return await self.list_phones(own)

    def _unconnected(self, output: str) -> Failure:
        advice = f"{output}: {_ADVICE['unauthorized']}" if "authenticate" in output else output
        return Failure("DEVICE_UNAVAILABLE", f"{self.serial} cannot be connected: {advice}")

    async def _look_for_phone(self) -> None:
        """Raise Failure if no phone is usable. The server of this search ends with it."""
        if not self.is_on_network:
            choose_phone(await self.find_phones(), self.serial)
            return
        with _own_server() as own:
            output = await self._try("connect", self.serial, within_ms=CONNECT_MS, socket=own)
        if "connected to" not in output:
            raise self._unconnected(output)

    async def _ask_adb(self, *words: str, within_ms: int, socket: str | None = None) -> ProgramOutput:
        try:
            output = await self.run(*words, within_ms=within_ms, socket=socket)
        except Failure as failure:
            why = f"no answer within {within_ms} ms" if failure.code == "TIMEOUT" else str(failure)
            raise Failure("DEVICE_UNAVAILABLE", f"adb {words[0]}: {why}") from None
        if output.exit_code:
            raise Failure("DEVICE_UNAVAILABLE", f"adb {words[0]}: {_last_line(output.stderr)}")
        return output

    async def connect(self, within_ms: int) -> None:
        time = Countdown(within_ms)
        phones = await self.list_phones()
        state = next((each for each in phones if each.serial == self.serial), None)
        if self.is_on_network and (state is None or not state.is_usable):
            if state is not None:  # or the server would report a connection, and keep the dead link
                await self._try("disconnect", self.serial, within_ms=STATE_MS)
            output = await self._try("connect", self.serial, within_ms=min(CONNECT_MS, time.left_ms))
            phones = await self.list_phones()
            if all(each.serial != self.serial for each in phones):
                raise self._unconnected(output)
        choose_phone(phones, self.serial)

    async def _try(self, *words: str, within_ms: int, socket: str | None = None) -> str:
        """Run the client without a phone, and return its last line or its error."""
        try:
            output = await Adb(self.program, self._services).run(*words, within_ms=within_ms, socket=socket)
        except Failure as failure:
            return str(failure)
        return _last_line(output.stdout.decode("utf-8", "replace")) or _last_line(output.stderr)

    async def shell(self, script: str, within_ms: int) -> tuple[int, bytes]:
        """Return the exit code and the output of a script. An answer is whole only with its requested last line."""
        time = Countdown(within_ms)
        marked = f"({script}) 2>&1; shotclock_code=$?; echo; echo {_MARK}$shotclock_code"
        output = await self.run("shell", marked, within_ms=within_ms)
        text, mark, code = output.stdout.replace(b"\r\n", b"\n").rpartition(b"\n" + _MARK.encode())
        if not mark or not code.strip().isdigit():
            await self.explain_failure(output, time)
        return int(code), text

    async def explain_failure(self, output: ProgramOutput, time: Countdown) -> NoReturn:
        line = _last_line(output.stderr) or _last_line(output.stdout.decode("utf-8", "replace")) or "nothing"
        left_ms = max(2 * MARGIN_MS, min(STATE_MS, time.left_ms))
        try:
            state = (await self.run("get-state", within_ms=left_ms)).stdout.decode("utf-8", "replace").strip()
        except Failure as failure:
            state = "device" if failure.code == "TIMEOUT" else ""  # a timeout proves nothing
        if state != "device":
            raise Failure("DEVICE_LOST", f"the phone {self.serial} went away ({state or 'not connected'}): {line}")
        raise Failure("ACTION_FAILED", f"the phone gave no whole answer: {line}")


@contextlib.contextmanager
def _own_server() -> Iterator[str]:
    """Yield the address of a server that lasts for one command."""
    # Not in TMPDIR: the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="shotclock-adb-", dir="/tmp") as folder:
        yield f"localfilesystem:{folder}/server"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
