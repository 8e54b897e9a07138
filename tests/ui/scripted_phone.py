"""A phone for the real adb client: it speaks the protocol of adbd on loopback, and does what a test says.

What it is asked to run goes to a real shell, in which `input`, `am`, `dumpsys` and the others are functions over a
folder: what a phone shows is a file, and what was done to it a log. So quoting is proved by a shell, not by us.
"""

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from shotclock.core.errors import Failure
from shotclock.ui import client

from .pages import Session, is_alive

CNXN, AUTH, OPEN, OKAY, CLSE, WRTE = (
    int.from_bytes(word, "little") for word in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"CLSE", b"WRTE")
)
VERSION, MAX_DATA = 0x01000001, 256 * 1024
# A stream that a test left hanging ends then.
HANG_LIMIT_S = 30.0
SHELL_LIMIT_S = 10.0
ADB_LIMIT_S = 15.0

PNG = b"\x89PNG\r\n\x1a\n" + os.urandom(3_000_000) + b"\x00\x00\x00\x00IEND\xaeB`\x82"

_SHELL = r"""
cd "$PHONE"
file() { echo "$PHONE/tmp-${1##*/}"; }
rm() { command rm -f "$(file "$2")"; }
cat() { command cat "$(file "$1")"; }
log() { for word in "$@"; do printf '[%s]' "$word"; done >> log; echo >> log; }
uiautomator() {
  log uiautomator "$1"
  if [ -e said ]; then command cat said; return; fi
  cp window.xml "$(file "$2")"; echo "UI hierchary dumped to: $2"
}
dumpsys() { [ "$1" = activity ] && command cat activity; [ "$1" = window ] && echo "mCurrentFocus=null"; true; }
change() { for each in on-"$1"*; do [ -e "$each" ] && . "./$each"; done; true; }
input() { log input "$@"; [ -e refuses ] && { command cat refuses >&2; return 1; }; change "$1"; }
am() { log am "$@"; case "$*" in *nowhere*) echo "Error: Activity not started, unable to resolve Intent";; esac; change am; }
monkey() { log monkey "$@"; case "$2" in *nothing*) echo "** No activities found to run, monkey aborted."; return 252;; esac; change monkey; }
screencap() { [ -e warning ] && command cat warning; command cat screen.png; }
pkill() { log pkill "$@"; }
"""  # noqa: E501

Misbehaviour = Callable[["_Stream"], None]


def hang(stream: "_Stream") -> None:
    stream.phone.ending.wait(HANG_LIMIT_S)


def drip(stream: "_Stream") -> None:
    give_up_at = time.monotonic() + HANG_LIMIT_S
    while time.monotonic() < give_up_at and stream.is_open and not stream.phone.ending.wait(0.05):
        stream.write(b"<")


def garbage(stream: "_Stream") -> None:
    stream.write(bytes(range(256)) * 20 + b"</hierarchy> shotclock-end:x <hierarchy>")


def drop(stream: "_Stream") -> None:
    stream.write(b"<?xml version='1.0'?><hierarchy><node ")
    stream.phone.drop()


def speak_nonsense(stream: "_Stream") -> None:
    """Say on the link itself what is none of the protocol."""
    stream.link.connection.sendall(b"\xff" * 4096)
    stream.phone.ending.wait(1)


class _Stream:
    """One service that adb opened: what is written reaches it as far as it says that it has room."""

    def __init__(self, link: "_Link", mine: int, theirs: int, service: str) -> None:
        self.link, self.phone, self.mine, self.theirs, self.service = link, link.phone, mine, theirs, service
        self.room = threading.Semaphore(0)
        self.is_open = True
        self.packed = service.startswith("shell,v2")

    def serve(self) -> None:
        try:
            self._serve()
        except OSError:  # the link is gone
            pass

    def _serve(self) -> None:
        kind, _, command = self.service.partition(":")
        if not kind.startswith(("shell", "exec")):
            self.link.send(CLSE, 0, self.theirs)
            return
        self.link.send(OKAY, self.mine, self.theirs)
        self.room.release()
        self.phone.asked.append(command)
        for sign, misbehave in list(self.phone.misbehaves.items()):
            if sign in command:
                misbehave(self)
                break
        else:
            code, output = self.phone.run(command)
            self.write(output)
            if self.packed:
                self._send(bytes([3, 1, 0, 0, 0, code]))
        self.link.send(CLSE, self.mine, self.theirs)

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), 100_000):
            part = data[start : start + 100_000]
            self._send(b"\x01" + struct.pack("<I", len(part)) + part if self.packed else part)

    def _send(self, data: bytes) -> None:
        if self.room.acquire(timeout=HANG_LIMIT_S) and self.is_open:
            self.link.send(WRTE, self.mine, self.theirs, data)


class _Link:
    """A connection of an adb server."""

    def __init__(self, phone: "ScriptedPhone", connection: socket.socket) -> None:
        self.phone, self.connection = phone, connection
        self._sending = threading.Lock()
        self._streams: dict[int, _Stream] = {}

    def send(self, command: int, first: int, second: int, data: bytes = b"") -> None:
        head = struct.pack("<IIIIII", command, first, second, len(data), sum(data) & 0xFFFFFFFF, command ^ 0xFFFFFFFF)
        with self._sending:
            self.connection.sendall(head + data)

    def serve(self) -> None:
        try:
            while True:
                command, first, second, size, _, _ = struct.unpack("<IIIIII", self._receive(24))
                self._take(command, first, second, self._receive(size))
        except (OSError, EOFError):
            pass
        finally:
            for stream in self._streams.values():
                stream.is_open = False
                stream.room.release()
            self.connection.close()

    def _receive(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            chunk = self.connection.recv(size - len(read))
            if not chunk:
                raise EOFError
            read += chunk
        return bytes(read)

    def _take(self, command: int, first: int, second: int, data: bytes) -> None:
        if command in (CNXN, AUTH):
            if self.phone.greeting == "authorize":
                self.send(AUTH, 1, 0, os.urandom(20))
            elif self.phone.greeting == "accept":
                self.send(CNXN, VERSION, MAX_DATA, self.phone.banner)
        elif command == OPEN:
            mine = len(self._streams) + 1
            stream = self._streams[mine] = _Stream(self, mine, first, data.rstrip(b"\0").decode())
            threading.Thread(target=stream.serve, daemon=True).start()
        elif command == OKAY and second in self._streams:
            self._streams[second].room.release()
        elif command == WRTE:
            self.send(OKAY, second, first)
        elif command == CLSE and second in self._streams:
            self._streams[second].is_open = False
            self._streams[second].room.release()


class ScriptedPhone:
    """A phone on 127.0.0.1. `misbehaves` says by a part of a command how a service that has it is answered."""

    def __init__(self, folder: Path, features: str = "shell_v2,cmd") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.banner = f"device::ro.product.name=p;ro.product.model=Scripted One;features={features}".encode()
        self.greeting = "accept"
        self.misbehaves: dict[str, Misbehaviour] = {}
        self.asked: list[str] = []
        self.ending = threading.Event()
        self._links: list[_Link] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.listen()
        self.reset()

    @property
    def serial(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- the link ---------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take connections, after a drop again on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        try:
            while True:
                connection, _ = listener.accept()
                link = _Link(self, connection)
                self._links.append(link)
                threading.Thread(target=link.serve, daemon=True).start()
        except OSError:
            pass

    def drop(self) -> None:
        """Cut every connection; new ones are taken, unless `vanish` was said."""
        links, self._links = self._links, []
        for link in links:
            try:
                link.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def vanish(self) -> None:
        """Cut every connection, and take no new one."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.drop()

    def close(self) -> None:
        self.ending.set()
        self.vanish()

    # --- what it shows and does -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Be well, and show the shop again."""
        self.misbehaves.clear()
        self.greeting = "accept"
        for each in self.folder.iterdir():
            each.unlink()
        self.show(SHOP)
        (self.folder / "screen.png").write_bytes(PNG)
        (self.folder / "log").touch()

    def show(self, window: str, activity: str = "com.shop/.MainActivity", instance: str = "a1b2c3") -> None:
        (self.folder / "window.xml").write_text(window, "utf-8")
        said = f"  topResumedActivity=ActivityRecord{{{instance} u0 {activity} t12}}\n"
        (self.folder / "activity").write_text(said, "utf-8")

    def when(self, order: str, window: str, activity: str = "com.shop/.MainActivity", instance: str = "a1b2c3") -> None:
        """Show something else once an order (`tap`, `swipe`, `am`, `monkey`, …) was given."""
        (self.folder / f"next-{order}.xml").write_text(window, "utf-8")
        said = f"topResumedActivity=ActivityRecord{{{instance} u0 {activity} t12}}"
        script = f"cp next-{order}.xml window.xml; echo '{said}' > activity\n"
        (self.folder / f"on-{order}").write_text(script, "utf-8")

    @property
    def log(self) -> list[str]:
        """What was done to it, word by word in brackets."""
        lines = (self.folder / "log").read_text("utf-8").splitlines()
        return [line for line in lines if not line.startswith("[uiautomator]")]

    def run(self, command: str) -> tuple[int, bytes]:
        ran = subprocess.run(
            ["sh", "-c", _SHELL + command],
            env={"PATH": os.environ["PATH"], "PHONE": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SHELL_LIMIT_S,
            check=False,
        )
        return ran.returncode, ran.stdout


# --- what it shows --------------------------------------------------------------------------------------------


def node(class_name: str, text: str = "", *inside: str, box: str = "[0,0][1080,2000]", **more: str) -> str:
    """An element of a dump."""
    told = {"text": text, "class": class_name if "." in class_name else f"android.widget.{class_name}", "bounds": box}
    told |= {"package": "com.shop", "enabled": "true"}
    told |= {name.replace("_", "-"): value for name, value in more.items()}
    written = " ".join(f"{name}={quoteattr(value)}" for name, value in told.items())
    return f"<node {written}>{''.join(inside)}</node>"


def window(*nodes: str) -> str:
    head = "<?xml version='1.0' encoding='UTF-8' standalone='yes' ?><hierarchy rotation='0'>"
    return f"{head}{''.join(nodes)}</hierarchy>"


SHOP = window(
    node(
        "FrameLayout",
        "",
        node("TextView", "Shop", box="[40,100][300,160]"),
        node("Button", "Buy", box="[40,200][240,300]", resource_id="com.shop:id/buy", clickable="true"),
        node("Button", "Closed", box="[40,320][240,400]", enabled="false", clickable="true"),
        node("EditText", "old", box="[40,420][1040,520]", resource_id="com.shop:id/name", content_desc="Name"),
        node("LinearLayout", "", node("TextView", "Price"), node("TextView", "5 EUR"), box="[40,540][1040,600]"),
        node("CheckBox", "Gift", box="[40,620][240,700]", checkable="true", checked="true", clickable="true"),
        node("ImageView", "", box="[40,720][240,800]", content_desc="Basket", clickable="true"),
    )
)
DETAILS = window(node("FrameLayout", "", node("TextView", "Details", box="[40,100][300,160]")))


# --- sessions ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def adb_processes(port: int) -> list[int]:
    """The adb servers on a port."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(f":{port}".encode()) for word in words) and b"adb" in words[0]:
            found.append(int(name))
    return found


@contextmanager
def private_adb(folder: Path) -> Iterator[int]:
    """The port of an adb server that is only ours, if somebody starts it; it is gone afterwards."""
    if shutil.which("adb") is None:
        pytest.skip("no adb on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ours = {
        "ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{port}",
        "ADB_LOCAL_TRANSPORT_MAX_PORT": "5554",  # looks for no emulators
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        for name in ("ANDROID_SERIAL", "SHOTCLOCK_ADB"):
            patch.delenv(name, raising=False)
        try:
            yield port
        finally:
            end_server(port)


def end_server(port: int) -> None:
    servers = adb_processes(port)
    if servers:
        words = ["adb", "-L", f"tcp:127.0.0.1:{port}", "kill-server"]
        subprocess.run(words, timeout=ADB_LIMIT_S, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for pid in servers:
        assert not is_alive(pid), "the adb server is still there"


@contextmanager
def phone_session(folder: Path, phone: ScriptedPhone, device: str | None = None) -> Iterator[Session]:
    """A session with a phone; its daemon is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOTCLOCK_HOME", str(folder))
        session = Session(folder, "", device or f"android:{phone.serial}")
        try:
            yield session
        finally:
            try:
                status = session.status()
            except Failure:
                status = None
            if status is not None:
                client.stop(session.device)
                assert not is_alive(status["pid"]), "the daemon is still there"
