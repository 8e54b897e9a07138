"""`shotclock exec` inside a sandbox like that of Codex, whose seccomp filter refuses most calls on sockets."""

import ctypes
import json
import platform
import struct
import subprocess
import sys
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK

pytestmark = pytest.mark.usefixtures("no_survivors", "enveloped")

# send (sendto), shutdown, bind, setsockopt, getsockopt
REFUSED = {"x86_64": (44, 48, 49, 54, 55), "aarch64": (206, 210, 200, 208, 209)}.get(platform.machine(), ())
LIMIT_S = 30.0


def _statement(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def refuse_sockets() -> None:
    """Answer EPERM to the refused system calls from now on, in this process and all below it."""
    load, equal, give = 0x20, 0x15, 0x06
    lines = [_statement(load, 0)]  # the number of the system call
    lines += [_statement(equal, number, len(REFUSED) - place, 0) for place, number in enumerate(REFUSED)]
    lines += [_statement(give, 0x7FFF0000), _statement(give, 0x00050000 | 1)]  # allow; EPERM
    program = ctypes.create_string_buffer(b"".join(lines))
    filter_ = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, filter_, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set here")


def sandboxed(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [*SHOTCLOCK, "exec", "--json", *words], stdout=subprocess.PIPE, preexec_fn=refuse_sockets, timeout=LIMIT_S
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(not REFUSED, reason="the numbers of the system calls are known for two machines")
@pytest.mark.parametrize("way", [(), ("--overtime", "progress")])
def test_a_sandbox_that_refuses_send_and_socket_options_changes_nothing(way: tuple[str, ...]):
    probe = "import socket; socket.socketpair()[0].send(b'x')"
    refused = sandboxed(*way, "--", sys.executable, "-c", probe)
    assert "PermissionError" in refused["data"]["stderr"]  # the sandbox is there
    assert sandboxed(*way, "--", "true")["ok"]
    assert sandboxed(*way, "--", "sh", "-c", "exit 3")["data"]["exit_code"] == 3
    stopped = sandboxed(*way, "--timeout", "1s", "--grace", "1s", "--", "sh", "-c", "setsid sleep 600 & sleep 600")
    assert (stopped["error"]["code"], stopped["meta"]["survivors"]) == ("TIMEOUT", [])
