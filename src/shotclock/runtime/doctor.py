"""Health of this machine: what stops work here, proved on a live tree, and what it cannot catch.

Each probe runs in a child that is killed on time (`forked`), because what it looks at may be what is broken: a
state directory on a dead network mount, a process whose `/proc` entry cannot be read.

Leftovers outlived their deadline with nobody left to stop them. Everything a command starts inherits
SHOTCLOCK_DEADLINE_NS. A process that carries one which has passed, and has no supervisor above it, is a leftover: its
supervisor and its caller were killed in the same instant. (What is left on purpose by `exec --leave-children` is told
of no deadline.) Nothing here kills but `sweep_away`, and only what is ours, overdue, unguarded and not at a terminal.

docs/design.md: R18.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from .._version import __version__
from ..core.clocks import NS_PER_MS, Clocks, format_duration
from ..core.trace import TRACEPARENT_VARIABLE, parse_trace
from ..core.value_types import as_dict, field, record, value
from ..process import foreground, forked, kernel, kill
from ..process.clock import monotonic_ns, wall_seconds
from ..process.command_task import state_directory
from ..process.environment import DEADLINE_VARIABLE
from ..process.supervisor import SUPERVISOR_NAME
from ..process.zygote import ZYGOTE_NAME
from .call import admit
from .commands import assign

T = TypeVar("T")
Status = Literal["ok", "warn", "fail"]

# What one probe may take. A healthy machine needs milliseconds; a dead mount would take for ever.
PROBE_LIMIT_MS = 5_000
# The self-test's tree must be up before its bell rings; the second try is for a machine short of CPU.
SELF_TEST_TIMEOUTS_MS = (600, 2_500)
SELF_TEST_GRACE_MS = 50
# Below these a tree of ordinary size may not start. Worth knowing before, even where it is meant.
FEW_PROCESSES = 64
FEW_FILES = 256

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000

# A leader and a daemon (forked twice, in a session of its own, holding our pipe), both deaf to TERM.
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
    """Result of a tree with a daemon in it, deaf to TERM: started, and killed."""

    started: bool
    killed_ms: int = 0
    """From SIGKILL to the kernel's word that nothing is left."""
    survivors: list[dict[str, object]] = field(default_factory=list)


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
        versions = {"shotclock": __version__, "python": sys.version.split()[0], "platform": sys.platform}
        return {
            **as_dict(self),
            "checks": [as_dict(check) for check in self.checks],
            "self_test": self.self_test and as_dict(self.self_test),
            "leftovers": [as_dict(leftover) for leftover in self.leftovers],
            "versions": versions,
        }


def examine(*, sweep: bool = False, trace_id: str | None = None) -> Findings:
    """Look at everything. Changes nothing, unless `sweep` is asked for: then leftovers are stopped."""
    findings = Findings()
    checks = findings.checks
    findings.mechanism = _ask(checks, "mechanism", mechanism) or {}
    commands_by = findings.mechanism.get("commands")
    findings.cannot_catch = cannot_catch(commands_by)
    _note(checks, "python", _check_python)
    _note(checks, "stopping", lambda: _check_stopping(commands_by))
    tested = _ask(checks, "self_test", self_test)
    if tested is not None:
        findings.self_test = tested
        checks.append(_judge_self_test(tested))
    _note(checks, "proc_walk", _check_proc_walk)
    _note(checks, "cgroup_kill", lambda: _check_cgroup_kill(commands_by, sweep and trace_id is None))
    _note(checks, "pid_namespace", _check_pid_namespace)
    for name, probe in (
        ("processes", _check_processes),
        ("open_files", _check_open_files),
        ("state_directory", _check_state),
    ):
        _note(checks, name, probe)
    found = _ask(checks, "leftovers", lambda: find_leftovers(trace_id))
    if found is not None:
        findings.leftovers = found
        findings.swept = sweep_away(found) if sweep else []
        checks.append(_judge_leftovers(findings))
    return findings


def _ask(checks: list[Check], name: str, probe: Callable[[], T]) -> T | None:
    """Return the probe's answer; a probe that does not answer is itself a finding."""
    try:
        return forked.run(probe, until_ns=monotonic_ns() + PROBE_LIMIT_MS * NS_PER_MS)
    except forked.Interrupted:
        raise
    except forked.Overdue:
        checks.append(Check(name, "fail", f"no answer within {format_duration(PROBE_LIMIT_MS)}"))
    except forked.Unfinished as unfinished:
        checks.append(Check(name, "fail", f"could not be looked at: {unfinished}"))
    return None


def _note(checks: list[Check], name: str, probe: Callable[[], Check]) -> None:
    check = _ask(checks, name, probe)
    if check is not None:
        checks.append(check)


# --- what stops work here ---------------------------------------------------------------------------------


def mechanism() -> dict[str, object]:
    """Return how work is stopped on this machine: commands, functions in workers, and how we know that it worked."""
    functions = "subreaper" if kernel.LINUX else "process group"
    proof = "ECHILD" if kernel.LINUX else "none"
    return {"commands": kill.mechanism(), "functions": functions, "proof": proof}


def cannot_catch(commands_by: object) -> list[str]:
    """Return what no mechanism in use here can stop. Said before it matters, not after."""
    escapes = [
        "work handed to a daemon that was already there (docker, systemd-run, at, cron): it never was below us",
        "a process stuck inside the kernel (state D, as on a dead network mount): it goes when the kernel lets go, "
        "and is reported as a survivor until then",
        "what a command started, if all who guard it (supervisor and caller, in a run the zygote as well) are killed "
        "in the same instant; it is listed here once it is overdue",
    ]
    if os.geteuid() != 0 and commands_by != "cgroup":
        escapes.append("processes of another user (sudo, setuid programs): only root may signal them")
    if not kernel.LINUX:
        escapes.append("anything that leaves the process group (setsid, daemons): only Linux can adopt orphans")
    return escapes


def _check_python() -> Check:
    return Check("python", "ok", f"Python {sys.version.split()[0]}, shotclock {__version__}")


def _check_stopping(commands_by: object) -> Check:
    if not kernel.LINUX:
        return Check("stopping", "warn", "process group only: a process that changes session is not caught")
    if (unfit := kernel.find_unfitness()) is not None:
        return Check("stopping", "fail", unfit)
    if not kernel.become_subreaper():
        return Check("stopping", "fail", "the kernel does not let us adopt orphans (PR_SET_CHILD_SUBREAPER)")
    how = (
        "cgroup.kill, then a /proc walk below a subreaper"
        if commands_by == "cgroup"
        else "/proc walk below a subreaper"
    )
    return Check("stopping", "ok", f"{how}, proved by ECHILD")


def _check_proc_walk() -> Check:
    if (unfit := kernel.find_unfitness()) is not None:
        return Check("proc_walk", "fail", unfit)
    began = monotonic_ns()
    kernel.descendants(os.getpid())
    took_ms = (monotonic_ns() - began) / NS_PER_MS
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return Check("proc_walk", "ok", f"by the children files ({took_ms:.1f} ms)")
    return Check("proc_walk", "ok", f"over all of /proc ({took_ms:.1f} ms): this kernel has no children files")


def _check_cgroup_kill(commands_by: object, sweep: bool) -> Check:
    if commands_by != "cgroup":
        return Check("cgroup_kill", "ok", "not available (not needed): no cgroup v2 that this user may write to")
    abandoned = find_abandoned_cgroups()
    if not abandoned:
        return Check("cgroup_kill", "ok", "in use")
    what = f"{len(abandoned)} empty cgroups of killed supervisors"
    if not sweep:
        return Check("cgroup_kill", "warn", f"in use; {what} can go: see --sweep")
    remove_cgroups(abandoned)
    return Check("cgroup_kill", "ok", f"in use; {what} removed")


def self_test() -> SelfTest:
    for timeout_ms in SELF_TEST_TIMEOUTS_MS:
        call = admit("self-test", Clocks(timeout_ms=timeout_ms, grace_ms=SELF_TEST_GRACE_MS))
        task = assign(call, [sys.executable, "-I", "-S", "-c", _TREE])
        report = foreground.run(task, foreground.TerminalSignals())
        if report.stdout.head:
            daemon = int(report.stdout.head)
            survivors = report.survivors
            if not survivors and _is_alive(daemon):
                survivors = [kernel.describe(daemon)]
            assert task.kill_ns is not None
            return SelfTest(True, max(0, report.ended_ns - task.kill_ns) // NS_PER_MS, survivors)
    return SelfTest(False)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _judge_self_test(tested: SelfTest) -> Check:
    if not tested.started:
        return Check("self_test", "fail", kernel.find_unfitness() or "the tree did not start")
    what = "a tree with a setsid daemon, deaf to SIGTERM"
    if tested.survivors:
        left = ", ".join(str(survivor["pid"]) for survivor in tested.survivors)
        return Check("self_test", "fail", f"{what}: still there after SIGKILL: {left}")
    return Check("self_test", "ok", f"{what}: gone {tested.killed_ms} ms after SIGKILL, no survivors")


def _check_pid_namespace() -> Check:
    """Check whether this user could make one. Asked for real, in this child, which is about to end."""
    if not kernel.LINUX:
        return Check("pid_namespace", "ok", "not available (not needed): only Linux has them")
    flags = _CLONE_NEWPID if os.geteuid() == 0 else _CLONE_NEWPID | _CLONE_NEWUSER
    if ctypes.CDLL(None, use_errno=True).unshare(flags) == 0:
        return Check("pid_namespace", "ok", "available, not used")
    why = os.strerror(ctypes.get_errno()).lower()
    return Check("pid_namespace", "ok", f"not available (not needed): {why}")


# --- limits and state -------------------------------------------------------------------------------------


def _check_processes() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0:
        return Check("processes", "ok", "no limit for root")
    if limit == resource.RLIM_INFINITY:
        return Check("processes", "ok", "no limit")
    used = _threads_of(os.getuid())
    status: Status = "ok" if limit - used >= FEW_PROCESSES else "warn"
    return Check("processes", status, f"{used} of {limit} in use by this user")


def _threads_of(uid: int) -> int:
    """Count threads, which the limit on processes counts."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _check_open_files() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("open_files", "ok", "no limit")
    return Check("open_files", "ok" if limit >= FEW_FILES else "warn", f"at most {limit} per process")


def _check_state() -> Check:
    """Check the state directory. Nothing stays that is made here: one that is not there yet is judged by where it would
    be made."""
    folder = state_directory()
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        parent = folder
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        if (why := _refuses_directories(parent)) is None:
            return Check("state_directory", "ok", f"{folder} (not there yet, can be made)")
        return Check("state_directory", "fail", f"{folder} cannot be made: {parent}: {why}")
    except OSError as error:
        return Check("state_directory", "fail", f"{folder}: {os.strerror(error.errno or 0).lower()}")
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return Check("state_directory", "fail", f"{folder} is not a directory")
    if (why := _refuses_directories(folder)) is not None:
        return Check("state_directory", "fail", f"{folder} cannot be written to: {why}")
    if status.st_uid != os.geteuid():
        return Check("state_directory", "warn", f"{folder} belongs to another user")
    if mode & 0o077:
        return Check("state_directory", "warn", f"{folder} has mode {mode:04o}; others may look in: chmod 700")
    return Check("state_directory", "ok", f"{folder} (mode {mode:04o})")


def _refuses_directories(folder: str) -> str | None:
    """Return why no directory can be made in it. Found out by making one: permissions do not say what a kernel's own
    file system takes, nor what root may not do."""
    trial = os.path.join(folder, f".shotclock-doctor-{os.getpid()}")
    try:
        os.mkdir(trial, 0o700)
        os.rmdir(trial)
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return None


def _judge_leftovers(findings: Findings) -> Check:
    found, swept = findings.leftovers, findings.swept
    stayed = [each for each in swept if not each["gone"]]
    if stayed:
        return Check("leftovers", "fail", f"{len(stayed)} of {len(swept)} could not be stopped")
    rest = len(found) - len(swept)
    if swept:
        return Check(
            "leftovers", "warn" if rest else "ok", f"{len(swept)} stopped" + (f", {rest} kept" if rest else "")
        )
    if found:
        return Check("leftovers", "warn", f"{len(found)} overdue with nobody to stop them; see --sweep")
    return Check("leftovers", "ok", "none")


# --- leftovers --------------------------------------------------------------------------------------------

# A tree that is being stopped right now is past its deadline, too; its supervisor takes milliseconds.
OVERDUE_AFTER_MS = 1_000
# What a leftover gets between TERM and KILL, and how long a killed one may take to be gone.
GRACE_MS = 1_000
VERIFY_MS = 2_000

# A cgroup this young may be of a supervisor that is about to put its command into it.
CGROUP_SETTLED_S = 60

# A supervisor stops what is below it; a zygote, what its supervisors lost.
_GUARDS = (SUPERVISOR_NAME, ZYGOTE_NAME)


@value
class Leftover:
    pid: int
    command: str
    overdue_ms: int
    trace_id: str
    kept: str
    """Why a sweep would not touch it; empty if it would."""
    started: int
    """Clock ticks since boot: with the pid, an identity that is never reused."""


@value
class _Process:
    name: str
    parent: int
    terminal: int
    started: int


def find_leftovers(trace_id: str | None = None) -> list[Leftover]:
    """Return everything on this machine that is overdue and unguarded; of one trace only, if one is given.

    Environments of other users' processes cannot be read unless we are root, so those are not seen.
    """
    if not os.path.isdir("/proc/self"):
        return []
    now, me = monotonic_ns(), os.geteuid()
    ourselves = {os.getpid(), *_ancestors(os.getpid())}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in ourselves:
            continue
        pid = int(name)
        carried = _read_deadline(pid)
        if carried is None:
            continue
        deadline_ns, trace = carried
        overdue_ms = (now - deadline_ns) // NS_PER_MS
        if overdue_ms < OVERDUE_AFTER_MS or (trace_id is not None and trace != trace_id):
            continue
        process = _read(pid)
        if process is None or kernel.is_zombie(pid) or _is_guarded(pid):
            continue
        kept = ""
        try:
            if os.stat(f"/proc/{pid}").st_uid != me:
                kept = "belongs to another user"
            elif process.terminal:
                kept = "has a terminal, so somebody may be sitting at it"
        except OSError:
            continue
        command = str(kernel.describe(pid)["command"])
        found.append(Leftover(pid, command, overdue_ms, trace, kept, process.started))
    return sorted(found, key=lambda leftover: leftover.pid)


def sweep_away(leftovers: Iterable[Leftover]) -> list[dict[str, object]]:
    """Send TERM, wait a short grace, send KILL. Return of each whether it is gone. What would be kept is not
    touched."""
    held: dict[int, Leftover] = {}
    swept: list[dict[str, object]] = []
    try:
        for leftover in leftovers:
            if leftover.kept:
                continue
            try:
                fd = os.pidfd_open(leftover.pid)
            except OSError:  # it left meanwhile
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
                continue
            held[fd] = leftover
        # The descriptor pins the process; only now is it certain that it is still the one that was looked at.
        for fd, leftover in list(held.items()):
            process = _read(leftover.pid)
            if process is None or process.started != leftover.started:
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
                del held[fd]
                os.close(fd)
        for number, wait_ms in ((signal.SIGTERM, GRACE_MS), (signal.SIGKILL, VERIFY_MS)):
            for fd in held:
                for each in (number, signal.SIGCONT):
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(fd, each)
            for fd in _await_ends(set(held), wait_ms):
                leftover = held.pop(fd)
                os.close(fd)
                swept.append({"pid": leftover.pid, "command": leftover.command, "gone": True})
        swept += [{"pid": left.pid, "command": left.command, "gone": False} for left in held.values()]
    finally:
        for fd in held:
            os.close(fd)
    return swept


def find_abandoned_cgroups() -> list[str]:
    """Return empty cgroups of supervisors that were killed before they could remove them. They cost little, but add
    up."""
    home = kill.home_directory()
    found = []
    for name in os.listdir(home) if home is not None else ():
        word, _, pid = name.partition("-")
        if word != "shotclock" or not pid.isdecimal() or os.path.exists(f"/proc/{pid}"):
            continue
        path = os.path.join(str(home), name)
        try:
            with open(os.path.join(path, "cgroup.events")) as file:
                empty = "populated 0" in file.read()
            if empty and wall_seconds() - os.stat(path).st_mtime > CGROUP_SETTLED_S:
                found.append(path)
        except OSError:
            continue
    return found


def remove_cgroups(paths: Iterable[str]) -> None:
    for path in paths:
        kill.Cgroup(path).remove()


def _await_ends(pidfds: set[int], wait_ms: int) -> set[int]:
    poller = select.poll()
    for fd in pidfds:
        poller.register(fd, select.POLLIN)
    ended: set[int] = set()
    give_up_ns = monotonic_ns() + wait_ms * NS_PER_MS
    while len(ended) < len(pidfds) and (left_ns := give_up_ns - monotonic_ns()) > 0:
        for fd, _ in poller.poll(-(-left_ns // NS_PER_MS)):
            ended.add(fd)
            poller.unregister(fd)
    return ended


def _read_deadline(pid: int) -> tuple[int, str] | None:
    """Return the deadline and the trace that a process was started with, if any."""
    variables = dict(entry.partition(b"=")[::2] for entry in kernel.environment_of(pid))
    deadline = variables.get(DEADLINE_VARIABLE.encode(), b"")
    if not deadline.isdigit() or len(deadline) >= 20:
        return None
    trace = parse_trace(variables.get(TRACEPARENT_VARIABLE.encode(), b"").decode(errors="replace"))
    return int(deadline), "" if trace is None else trace.trace_id


def _read(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name is in parentheses and may itself contain anything. fields[n] is field n + 3 of proc(5).
            before, _, after = file.read().rpartition(b")")
    except OSError:
        return None
    fields = after.split()
    name = before.partition(b"(")[2].decode(errors="replace")
    return _Process(name, int(fields[1]), int(fields[4]), int(fields[19]))


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    process = _read(pid)
    while process is not None and process.parent > 0 and process.parent not in found:
        found.append(process.parent)
        process = _read(process.parent)
    return found


def _is_guarded(pid: int) -> bool:
    return any((process := _read(each)) is not None and process.name in _GUARDS for each in (pid, *_ancestors(pid)))
