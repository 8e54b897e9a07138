"""Health of this machine: how work is stopped here, proved on a live tree, and which processes were left behind.

Each probe runs in a child that is killed on time (`forked`), because a dead mount or `/proc` entry may hang it. A
leftover is past its deadline with no supervisor above it, found by the inherited SHOTCLOCK_DEADLINE_NS (which children
left by `exec --leave-children` do not get). Only `sweep_away` kills, and only processes of this user that are overdue,
unguarded and not at a terminal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import psutil

from .._version import __version__
from ..calls.call import admit
from ..calls.commands import assign
from ..core.limits import NS_PER_MS, Clocks, format_duration
from ..core.trace import TRACEPARENT_VARIABLE, TraceContext
from ..core.value_types import as_dict, field, record, value
from ..supervise import foreground, forked, input_wait, kernel, kill
from ..supervise.clock import monotonic_ns, wall_seconds
from ..supervise.command_task import state_directory
from ..supervise.environment import DEADLINE_VARIABLE
from ..supervise.supervisor import SUPERVISOR_NAME
from ..supervise.zygote import ZYGOTE_NAME

_GUARDS = (SUPERVISOR_NAME, ZYGOTE_NAME)

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]

PROBE_LIMIT_MS = 5_000  # a healthy machine needs milliseconds; a dead mount exhausts it
# The tree of the self-test must be up before its timeout; the second attempt is for a machine short of CPU.
SELF_TEST_TIMEOUTS_MS = (600, 2_500)
SELF_TEST_GRACE_MS = 50
# Below these limits a tree of ordinary size may not start.
FEW_PROCESSES = 64
FEW_FILES = 256
OVERDUE_AFTER_MS = 1_000  # a tree that is being stopped is past its deadline as well; its supervisor needs milliseconds
# The time of a leftover between TERM and KILL, and from KILL to its end.
SWEEP_GRACE_MS = 1_000
SWEEP_VERIFY_MS = 2_000
CGROUP_SETTLED_S = 60  # the supervisor of a cgroup younger than this may be about to put its command into it

# A leader and a daemon (forked twice, in its own session, holding our pipe). Both ignore TERM.
_TREE = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready, ready_in = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(ready_in, b"%d" % os.getpid())
        time.sleep(60)
    os._exit(0)
os.wait()
os.write(1, os.read(ready, 32))
time.sleep(60)
"""


@value
class Check:
    name: str
    status: Status
    detail: str


@value
class SelfTest:
    started: bool
    killed_ms: int = 0  # from SIGKILL to the kernel's word that nothing is left
    survivors: list[dict[str, object]] = field(default_factory=list)


@value
class Leftover:
    pid: int
    command: str
    overdue_ms: int
    trace_id: str
    kept: str  # why a sweep does not touch it; empty if it does
    started: int  # with the pid, an identity that is never reused


@record
class Findings:
    checks: list[Check] = field(default_factory=list)
    mechanism: dict[str, object] = field(default_factory=dict)
    cannot_catch: list[str] = field(default_factory=list)
    self_test: SelfTest | None = None
    leftovers: list[Leftover] = field(default_factory=list)
    swept: list[dict[str, object]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    def as_data(self) -> dict[str, object]:
        return {
            **as_dict(self),
            "checks": [as_dict(check) for check in self.checks],
            "self_test": self.self_test and as_dict(self.self_test),
            "leftovers": [as_dict(leftover) for leftover in self.leftovers],
            "versions": {"shotclock": __version__, "python": sys.version.split()[0], "platform": sys.platform},
        }


def examine(*, sweep: bool = False, trace_id: str | None = None) -> Findings:
    """Run every probe. With `sweep` leftovers are stopped."""
    findings = Findings()
    checks = findings.checks
    findings.mechanism = _probe(checks, "mechanism", mechanism) or {}
    is_cgroup = findings.mechanism.get("commands") == "cgroup"
    findings.cannot_catch = cannot_catch(is_cgroup)
    _check(checks, "stopping", lambda: _check_stopping(is_cgroup))
    findings.self_test = _probe(checks, "self_test", self_test)
    if findings.self_test is not None:
        checks.append(_judge_self_test(findings.self_test))
    _check(checks, "input", _check_input)
    _check(checks, "processes", _check_processes)
    _check(checks, "open_files", _check_open_files)
    _check(checks, "state_directory", _check_state)
    found = _probe(checks, "leftovers", lambda: find_leftovers(trace_id))
    if found is not None:
        findings.leftovers = found
        findings.swept = sweep_away(found) if sweep else []
        checks.append(_judge_leftovers(findings))
    if sweep and trace_id is None:
        _probe(checks, "cgroups", _remove_abandoned_cgroups)
    return findings


def _probe(checks: list[Check], name: str, probe: Callable[[], T]) -> T | None:
    """Return the probe's result; a probe without one is itself a failed check."""
    try:
        return forked.run(probe, until_ns=monotonic_ns() + PROBE_LIMIT_MS * NS_PER_MS)
    except forked.StoppedBySignal:
        raise
    except forked.Overdue:
        checks.append(Check(name, "fail", f"no answer within {format_duration(PROBE_LIMIT_MS)}"))
    except forked.Unfinished as unfinished:
        checks.append(Check(name, "fail", f"could not be looked at: {unfinished}"))
    return None


def _check(checks: list[Check], name: str, probe: Callable[[], tuple[Status, str]]) -> None:
    if (result := _probe(checks, name, probe)) is not None:
        checks.append(Check(name, *result))


def mechanism() -> dict[str, object]:
    functions, proof = ("subreaper", "ECHILD") if kernel.LINUX else ("process group", "none")
    return {"commands": kill.mechanism(), "functions": functions, "proof": proof}


def cannot_catch(is_cgroup: bool) -> list[str]:
    escapes = [
        "work handed to a daemon that was already running (docker, systemd-run, at, cron): it never was below us",
        "a process stuck inside the kernel (state D, as on a dead network mount): it goes when the kernel lets go, "
        "and is reported as a survivor until then",
        "processes of a command whose guards (supervisor and caller, in a run the zygote as well) are all killed "
        "in the same instant; they are listed here once they are overdue",
    ]
    if os.geteuid() != 0 and not is_cgroup:
        escapes.append("processes of another user (sudo, setuid programs): only root may signal them")
    if not kernel.LINUX:
        escapes.append("anything that leaves the process group (setsid, daemons): only Linux can adopt orphans")
    return escapes


def _check_stopping(is_cgroup: bool) -> tuple[Status, str]:
    if not kernel.LINUX:
        return "warn", "process group only: a process that changes session is not caught"
    if (unfit := kernel.find_unfitness()) is not None:
        return "fail", unfit
    if not kernel.become_subreaper():
        return "fail", "the kernel does not let us adopt orphans (PR_SET_CHILD_SUBREAPER)"
    if kernel.hides_processes():
        return "warn", "/proc is mounted with hidepid: a process of another user is a survivor without a name"
    walk = "a /proc walk below a subreaper, proved by ECHILD"
    return "ok", f"cgroup.kill, then {walk}" if is_cgroup else walk


def self_test() -> SelfTest:
    for timeout_ms in SELF_TEST_TIMEOUTS_MS:
        call = admit("self-test", Clocks(timeout_ms=timeout_ms, grace_ms=SELF_TEST_GRACE_MS))
        task = assign(call, [sys.executable, "-I", "-S", "-c", _TREE])
        report = foreground.run(task, foreground.TerminalSignals())
        if report.stdout.head:
            daemon = int(report.stdout.head)
            survivors = report.survivors
            if not survivors and psutil.pid_exists(daemon):
                survivors = [kernel.describe(daemon)]
            return SelfTest(True, max(0, report.ended_ns - (task.kill_ns or 0)) // NS_PER_MS, survivors)
    return SelfTest(False)


def _judge_self_test(tested: SelfTest) -> Check:
    if not tested.started:
        return Check("self_test", "fail", kernel.find_unfitness() or "the tree did not start")
    tree = "a tree with a setsid daemon that ignores SIGTERM"
    if tested.survivors:
        left = ", ".join(str(survivor["pid"]) for survivor in tested.survivors)
        return Check("self_test", "fail", f"{tree}: still there after SIGKILL: {left}")
    return Check("self_test", "ok", f"{tree}: gone {tested.killed_ms} ms after SIGKILL, no survivors")


def _check_input() -> tuple[Status, str]:
    if (why := input_wait.find_blindness()) is not None:
        return "warn", f"INPUT_WANTED is never claimed: {why}"
    return "ok", "/proc shows a process that waits for input"


def _check_processes() -> tuple[Status, str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0:
        return "ok", "no limit for root"
    if limit == resource.RLIM_INFINITY:
        return "ok", "no limit"
    # The limit counts threads. Those of other users may not be readable.
    processes = [each.info for each in psutil.process_iter(["uids", "num_threads"])]
    used = sum(each["num_threads"] or 0 for each in processes if each["uids"] and each["uids"].real == os.getuid())
    return "ok" if limit - used >= FEW_PROCESSES else "warn", f"{used} of {limit} in use by this user"


def _check_open_files() -> tuple[Status, str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return "ok", "no limit"
    return "ok" if limit >= FEW_FILES else "warn", f"at most {limit} per process"


def _check_state() -> tuple[Status, str]:
    """Check the state directory, or the place where it would be made."""
    folder = state_directory()
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        parent = folder
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        if (why := _refuses_directories(parent)) is None:
            return "ok", f"{folder} (not there yet, can be made)"
        return "fail", f"{folder} cannot be made: {parent}: {why}"
    except OSError as error:
        return "fail", f"{folder}: {os.strerror(error.errno or 0).lower()}"
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return "fail", f"{folder} is not a directory"
    if (why := _refuses_directories(folder)) is not None:
        return "fail", f"{folder} cannot be written to: {why}"
    if status.st_uid != os.geteuid():
        return "warn", f"{folder} belongs to another user"
    if mode & 0o077:
        return "warn", f"{folder} has mode {mode:04o}; others may look in: chmod 700"
    return "ok", f"{folder} (mode {mode:04o})"


def _refuses_directories(folder: str) -> str | None:
    """Return why no directory can be made in a folder. Permissions alone do not show it."""
    trial = os.path.join(folder, f".shotclock-doctor-{os.getpid()}")
    try:
        os.mkdir(trial, 0o700)
        os.rmdir(trial)
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return None


def find_leftovers(trace_id: str | None = None) -> list[Leftover]:
    """Return the overdue and unguarded processes of this machine, or of one trace. Only root sees those of others."""
    if not os.path.isdir("/proc/self"):
        return []
    now_ns = monotonic_ns()
    ourselves = {os.getpid(), *kernel.ancestors(os.getpid())}
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if pid in ourselves or (inherited := _read_deadline(pid)) is None:
            continue
        deadline_ns, trace = inherited
        overdue_ms = (now_ns - deadline_ns) // NS_PER_MS
        if overdue_ms < OVERDUE_AFTER_MS or (trace_id is not None and trace != trace_id):
            continue
        with contextlib.suppress(OSError):
            started = kernel.start_of(pid)
            # A zygote that runs cleans up after its supervisors.
            guards = [each for each in (pid, *kernel.ancestors(pid)) if kernel.name_of(each) in _GUARDS]
            if not started or kernel.is_zombie(pid) or not all(map(kernel.is_stopped, guards)):
                continue
            kept = "has a terminal, so a person may be using it" if kernel.has_terminal(pid) else ""
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                kept = "belongs to another user"
            found.append(Leftover(pid, str(kernel.describe(pid)["command"]), overdue_ms, trace, kept, started))
    return found


def _read_deadline(pid: int) -> tuple[int, str] | None:
    variables = dict(entry.partition(b"=")[::2] for entry in kernel.environment_of(pid))
    deadline = variables.get(DEADLINE_VARIABLE.encode(), b"")
    if not deadline.isdigit() or len(deadline) >= 20:
        return None
    trace = TraceContext.parse(variables.get(TRACEPARENT_VARIABLE.encode(), b"").decode(errors="replace"))
    return int(deadline), "" if trace is None else trace.trace_id


def sweep_away(leftovers: Iterable[Leftover]) -> list[dict[str, object]]:
    """Send TERM and then KILL. Return for each leftover that is not kept whether it is gone."""
    swept = [leftover for leftover in leftovers if not leftover.kept]
    held: dict[int, Leftover] = {}
    unseen: list[Leftover] = []
    with contextlib.ExitStack() as stack:
        for leftover in swept:
            try:
                fd = _pin(leftover)
            except OSError:  # out of descriptors, for example: no proof that it is gone
                unseen.append(leftover)
                continue
            if fd is not None:
                held[fd] = leftover
                stack.callback(os.close, fd)
        for number, wait_ms in ((signal.SIGTERM, SWEEP_GRACE_MS), (signal.SIGKILL, SWEEP_VERIFY_MS)):
            for fd in held:
                for each in (number, signal.SIGCONT):
                    kill.signal_pinned(fd, each)
            held = {fd: held[fd] for fd in _await_ends(held, wait_ms)}
    left = {leftover.pid for leftover in (*held.values(), *unseen)}
    return [{"pid": each.pid, "command": each.command, "gone": each.pid not in left} for each in swept]


def _pin(leftover: Leftover) -> int | None:
    """Open a descriptor, so that the pid cannot be reused; None if the process is gone. Raises OSError if unknown."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fd = os.pidfd_open(leftover.pid)
        try:
            if kernel.read_start(leftover.pid) == leftover.started:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _await_ends(pidfds: Iterable[int], wait_ms: int) -> list[int]:
    """Wait until the processes have ended. Return the descriptors of those that have not."""
    give_up_ns = monotonic_ns() + wait_ms * NS_PER_MS
    left = []
    for fd in pidfds:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(max(0, -(-(give_up_ns - monotonic_ns()) // NS_PER_MS))):
            left.append(fd)
    return left


def _judge_leftovers(findings: Findings) -> Check:
    found, swept = findings.leftovers, findings.swept
    stayed = [each for each in swept if not each["gone"]]
    if stayed:
        return Check("leftovers", "fail", f"{len(stayed)} of {len(swept)} could not be stopped")
    if swept:
        kept = len(found) - len(swept)
        detail = f"{len(swept)} stopped" + (f", {kept} kept" if kept else "")
        return Check("leftovers", "warn" if kept else "ok", detail)
    if found:
        return Check("leftovers", "warn", f"{len(found)} overdue without a supervisor: stop them with --sweep")
    return Check("leftovers", "ok", "none")


def _remove_abandoned_cgroups() -> None:
    """Remove the empty cgroups of killed supervisors. They are small, but add up."""
    home = kill.home_directory()
    for name in os.listdir(home) if home is not None else ():
        prefix, _, pid = name.partition("-")
        if prefix != "shotclock" or not pid.isdecimal() or os.path.exists(f"/proc/{pid}"):
            continue
        path = os.path.join(str(home), name)
        with contextlib.suppress(OSError):
            with open(os.path.join(path, "cgroup.events")) as file:
                is_empty = "populated 0" in file.read()
            if is_empty and wall_seconds() - os.stat(path).st_mtime > CGROUP_SETTLED_S:
                kill.Cgroup(path).remove()
