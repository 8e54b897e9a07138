"""`git-checkout`: a repository at a branch, tag or commit in a folder, every git process inside one deadline.

It does not use `git clone`: the remote resolves the ref first, so that a shallow fetch fetches the right commit. A new
checkout is moved to its place when it is complete: a step that is stopped leaves nothing, and one whose process is
killed leaves a `.NAME.part` folder, which the next one removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from ...calls.call import Call, Effects, Outcome, wound_down_problem
from ...calls.outcomes import stalled_problem
from ...calls.runtime import Runtime
from ...calls.supervised_commands import run_shielded
from ...core.envelope import Envelope, Problem, Warning_
from ...core.errors import Ending, SideEffects
from ...core.limits import ClockKind, Clocks
from ...core.validation import field
from ...core.value_types import replace, value
from ...core.visible_text import hide_credentials, hide_values
from ...supervise.clock import monotonic_ns
from ...worker.context import Scope, current_scope
from .provider import Provider, StepCall, StepPart, StepResult, StepType, WholeMs, cancelled_outcome, remaining_limit_ms


class GitStep(StepPart):
    type: Literal["git-checkout"]
    repository: str | None = None
    ref: str | None = None
    fetch_depth: int | None = field(default=None, ge=0)
    path: str | None = None
    clone_timeout_ms: WholeMs | None = None


CHECKOUT = StepType(
    "git-checkout",
    "clone and check out",
    GitStep,
    lambda services: GitProvider(),
    default_ms=300_000,
    unit="ms",
    timeout_key="clone_timeout_ms",
)
STEP_TYPES = (CHECKOUT,)


# git must not ask questions, and must not run anything of the repository or of the user's configuration.
SETTINGS = (
    "protocol.ext.allow=never",
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.askPass=",
    "credential.interactive=false",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    # Maintenance in the background would outlive the step and be killed.
    "gc.auto=0",
    "maintenance.auto=false",
    "advice.detachedHead=false",
)
ENVIRONMENT = {
    "GIT_ASKPASS": "",
    # Answers no to every question of ssh, which then does not use a terminal.
    "SSH_ASKPASS": "false",
    "SSH_ASKPASS_REQUIRE": "force",
    "GCM_INTERACTIVE": "never",
}
# Set inside a git hook, they would select the repository of that hook.
ELSEWHERE = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_QUARANTINE_PATH",
    "GIT_TEMPLATE_DIR",
    "GIT_PROTOCOL_FROM_USER",
)
PROTOCOLS = ("file", "git", "http", "https", "ssh")

_FULL_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class GitProvider(Provider):
    step_type = CHECKOUT

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        call.effects = Effects(idempotent=True)
        try:
            request = CheckoutRequest.of(step)
        except InvalidRepository as error:
            return StepResult(Outcome(Ending.NOT_STARTED, Problem("STEP_INVALID", str(error), "validation")))
        git = Git(runtime, call, step.env)
        # Git counts the clocks itself; the scope is for the trace of the processes.
        outer = current_scope.get() or Scope(runtime.inherited, -1, "caller", call)
        token = current_scope.set(replace(outer, span=call, call=call))
        try:
            outcome = await _check_out(git, request, call)
        except asyncio.CancelledError:
            step.cancelled.result = StepResult(cancelled_outcome(Ending.KILLED))
            raise
        finally:
            current_scope.reset(token)
        outcome.warnings += tuple(git.warnings)
        return StepResult(outcome, outcome.data if outcome.problem is None else None)


@value
class CheckoutRequest:
    repository: Repository
    ref: str | None
    depth: int  # 0 is the whole history
    target: Path

    @classmethod
    def of(cls, step: StepCall) -> CheckoutRequest:
        settings = step.settings
        if settings.get("repository") is None:
            raise InvalidRepository(NO_REPOSITORY)
        repository = Repository.of(settings["repository"], step.folder)
        ref = None if settings.get("ref") in (None, "HEAD") else str(settings["ref"])
        if ref is not None and (why := ref_problem(ref)) is not None:
            raise InvalidRepository(f"ref: {why}")
        path = str(settings.get("path") or repository.name)
        if "\0" in path:
            raise InvalidRepository("path: it has a NUL character in it")
        target = Path(os.path.abspath(step.folder / path))
        return cls(repository, ref, int(settings.get("fetch_depth") or 0), target)


class CheckoutRefused(Exception):
    """A ref that the remote does not have, or a checkout that would touch files that are not its own."""


class GitFailed(Exception):
    def __init__(self, verb: str, envelope: Envelope) -> None:
        super().__init__(f"git {verb}: {envelope.code}")
        self.verb = verb
        self.envelope = envelope


class Git:
    def __init__(self, runtime: Runtime, admission: Call, env: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._admission = admission
        allowed = [name for name in env.get("GIT_ALLOW_PROTOCOL", ":".join(PROTOCOLS)).split(":") if name in PROTOCOLS]
        self._base_env = {name: value for name, value in env.items() if name not in ELSEWHERE}
        self._env = {**ENVIRONMENT, "GIT_ALLOW_PROTOCOL": ":".join(allowed)}
        self.warnings: list[Warning_] = []

    async def __call__(self, folder: Path, verb: str, *words: str, may_fail: bool = False) -> str | None:
        """Run git and return its stdout; None if it failed and may. Raises GitFailed."""
        settings = [word for setting in SETTINGS for word in ("-c", setting)]
        # A folder without its own .git is not part of the repository around it.
        envelope = await self._runtime.run(
            ["git", *settings, verb, *words],
            self._clocks(),
            env={**self._env, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
            base_env=self._base_env,
            cwd=folder,
            name=self._admission.name,
        )
        self.warnings += [note for note in envelope.warnings if note["code"] in ("SURVIVORS", "DESCENDANTS_STOPPED")]
        if envelope.ok:
            data: Any = envelope.data
            return str(data["stdout"])
        if may_fail and envelope.code == "COMMAND_FAILED":
            return None
        raise GitFailed(verb, envelope)

    def _clocks(self) -> Clocks:
        return replace(
            self._admission.clocks,
            timeout_ms=remaining_limit_ms(self._admission),
            soft_ms=None,  # the step's soft limit winds its processes down
            queue_ms=None,
            reserve_ms=None,
        )

    @property
    def progress(self) -> list[str]:
        """Return the option that shows a working fetch to the idle limit."""
        return ["--progress"] if self._admission.clocks.idle_ms else ["--quiet"]


@value
class ResolvedRef:
    shown: str
    full_name: str | None = None  # None for the beginning of a commit id, or all of it

    @property
    def branch(self) -> str | None:
        name = self.full_name or ""
        return name.removeprefix("refs/heads/") if name.startswith("refs/heads/") else None


class Checkout:
    def __init__(self, git: Git, request: CheckoutRequest) -> None:
        self._git = git
        self._repository = request.repository
        self._ref = request.ref
        self._depth = request.depth

    async def create(self, folder: Path) -> dict[str, object]:
        """Make the checkout in an empty folder; return its commit and ref."""
        await self._git(folder, "init", "--quiet", "--template=")
        await self._git(folder, "remote", "add", "origin", self._repository.stored)
        return await self._switch(folder)

    async def update(self, folder: Path) -> dict[str, object]:
        """Update a checkout. Raises CheckoutRefused where local work would be lost."""
        url = await self._git(folder, "config", "--get", "remote.origin.url", may_fail=True)
        if url is None or not self._repository.is_at(url.strip()):
            raise CheckoutRefused(f"{folder} is not empty, and not a checkout of {self._repository.shown}")
        return await self._switch(folder)

    async def _switch(self, folder: Path) -> dict[str, object]:
        resolved = await self._resolve_ref(folder)
        if (branch := resolved.branch) is None:
            commit = await self._fetch_ref(folder, resolved)
            await self._git(folder, "checkout", "--quiet", "--detach", commit, "--")
            return {"commit": commit, "ref": resolved.shown}
        before = await self._find_commit(folder, f"refs/heads/{branch}")
        known = None if before is None else await self._find_commit(folder, f"refs/remotes/origin/{branch}")
        commit = await self._fetch_ref(folder, resolved)
        if before not in (None, known, commit):
            words = ("--is-ancestor", str(before), commit)
            if await self._git(folder, "merge-base", *words, may_fail=True) is None:
                raise CheckoutRefused(f"the branch {branch} in {folder} has commits that the remote does not have")
        await self._git(folder, "checkout", "--quiet", "-B", branch, commit, "--")
        await self._git(folder, "config", f"branch.{branch}.remote", "origin")
        await self._git(folder, "config", f"branch.{branch}.merge", f"refs/heads/{branch}")
        return {"commit": commit, "ref": resolved.shown}

    async def _resolve_ref(self, folder: Path) -> ResolvedRef:
        """Return the ref as the remote resolves it: branch, tag, other name, commit, in this order."""
        ref = self._ref
        patterns = ["HEAD"] if ref is None else [f"refs/heads/{ref}", f"refs/tags/{ref}", ref]
        listed = await self._git(folder, "ls-remote", "--symref", "--", self._repository.url, *patterns)
        lines = [line.split("\t") for line in (listed or "").splitlines() if line.count("\t") == 1]
        if ref is None:
            for value, name in lines:
                if name == "HEAD" and value.startswith("ref: refs/heads/"):
                    branch = value.removeprefix("ref: refs/heads/")
                    if ref_problem(branch) is not None:  # the remote chooses it, so it is not trusted
                        raise CheckoutRefused(f"the default branch of {self._repository.shown} has an invalid name")
                    return ResolvedRef(branch, f"refs/heads/{branch}")
            for value, name in lines:
                if name == "HEAD":
                    return ResolvedRef(value)
            raise CheckoutRefused(f"{self._repository.shown} has no default branch; it may be empty")
        names = {name for _, name in lines}
        for name in patterns:
            if name in names and name.startswith("refs/"):
                return ResolvedRef(ref, name)
        if re.fullmatch("[0-9a-f]{4,64}", ref.lower()):
            return ResolvedRef(ref)
        raise CheckoutRefused(f"{self._repository.shown} has no branch, tag or commit {ref!r}")

    async def _fetch_ref(self, folder: Path, resolved: ResolvedRef) -> str:
        if resolved.full_name is None:
            return await self._fetch_commit(folder, resolved.shown.lower())
        name = resolved.full_name
        kept = f"refs/remotes/origin/{resolved.branch}" if resolved.branch is not None else name
        if self._depth:
            await self._fetch(folder, f"+{name}:{kept}")
        else:
            await self._fetch_all(folder, f"+{name}:{kept}")
        commit = await self._find_commit(folder, kept)
        if commit is None:
            raise CheckoutRefused(f"{resolved.shown!r} of {self._repository.shown} is not a commit")
        return commit

    async def _fetch_commit(self, folder: Path, commit: str) -> str:
        # A server may refuse a commit by its id; then all branches are fetched to find it.
        if self._depth and _FULL_COMMIT.fullmatch(commit):
            await self._fetch(folder, commit, may_fail=True)
        if (found := await self._find_commit(folder, commit)) is None:
            await self._fetch_all(folder)
            found = await self._find_commit(folder, commit)
        if found is None and _FULL_COMMIT.fullmatch(commit):
            await self._fetch(folder, commit, may_fail=True)
            found = await self._find_commit(folder, commit)
        if found is None:
            raise CheckoutRefused(f"{self._repository.shown} has no branch, tag or commit {commit!r}")
        return found

    async def _fetch(self, folder: Path, what: str, *, may_fail: bool = False) -> None:
        depth = [f"--depth={self._depth}"] if self._depth else []
        words = [*self._git.progress, "--no-tags", *depth, "--", self._repository.url, what]
        await self._git(folder, "fetch", *words, may_fail=may_fail)

    async def _fetch_all(self, folder: Path, *also: str) -> None:
        shallow = await self._git(folder, "rev-parse", "--is-shallow-repository")
        whole = ["--unshallow"] if shallow is not None and shallow.strip() == "true" else []
        words = [*self._git.progress, "--tags", "--force", *whole, "--", self._repository.url]
        await self._git(folder, "fetch", *words, "+refs/heads/*:refs/remotes/origin/*", *also)

    async def _find_commit(self, folder: Path, name: str) -> str | None:
        words = ("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        found = await self._git(folder, "rev-parse", *words, may_fail=True)
        return None if found is None else found.strip()


async def _check_out(git: Git, request: CheckoutRequest, admission: Call) -> Outcome:
    checkout, repository, target = Checkout(git, request), request.repository, request.target
    effects: SideEffects | None = None
    try:
        if _is_free(target):
            place = NewFolder(target)
            try:
                found = await checkout.create(await place.prepare())
                place.move_into_place()
            finally:
                effects = await place.clean_up()
        else:
            found = await checkout.update(target)
        return Outcome(Ending.FINISHED, data={"path": str(target), **found})
    except GitFailed as failed:
        problem, ending = _problem(failed, admission, repository)
        data: dict[str, object] = {"stderr": repository.without_secrets(_stderr(failed.envelope))}
    except CheckoutRefused as refused:
        problem, ending, data = Problem("GIT_FAILED", str(refused)), Ending.FINISHED, {}
    except OSError as error:
        message = f"{target} cannot be made: {error.strerror or error}"
        problem, ending, data = Problem("FILE_UNWRITABLE", message), Ending.FINISHED, {}
    if effects is not None:
        problem = replace(problem, side_effects=effects)
    return Outcome(ending, problem, data or None)


def _problem(failed: GitFailed, admission: Call, repository: Repository) -> tuple[Problem, Ending]:
    """Return the problem of a failed process, or of the step's clock that stopped it."""
    envelope = failed.envelope
    error: Any = envelope.error
    ending = Ending(envelope.ending)
    match envelope.code:
        case "TIMEOUT" | "NO_TIME_LEFT":
            if admission.winding_down is not None:
                return wound_down_problem(admission), Ending.KILLED
            fired = admission.fired(ClockKind.TIMEOUT, monotonic_ns() - admission.started_ns)
            return Problem("TIMEOUT", f"Git checkout timed out after {fired.limit_ms}ms", fired=fired), Ending.KILLED
        case "STALLED":
            return stalled_problem(admission), ending
        case "COMMAND_FAILED":
            reason = _extract_reason(_stderr(envelope)) or str(error["message"])
            return Problem("GIT_FAILED", f"git {failed.verb}: {repository.without_secrets(reason)}"), ending
        case _:
            message = repository.without_secrets(str(error["message"]))
            return Problem(str(envelope.code), message, str(error["phase"])), ending


def _stderr(envelope: Envelope) -> str:
    return str(envelope.data.get("stderr", "")) if isinstance(envelope.data, dict) else ""


def _extract_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.replace("\r", "\n").splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines[-2:]
    return "; ".join(wrong)[:500]


# A large tree on a slow disk may take longer: it is still removed, and the answer reports partial side effects.
REMOVAL_LIMIT_S = 10.0


def _is_free(target: Path) -> bool:
    """Return whether the target is missing or empty. Raises CheckoutRefused."""
    if not os.path.lexists(target):
        return True
    if not target.is_dir():
        raise CheckoutRefused(f"{target} exists and is not a folder")
    if os.listdir(target) in ([], [_staging_name(target)]):
        return True
    if not os.path.lexists(target / ".git"):
        raise CheckoutRefused(f"{target} is not empty, and not a checkout")
    return False


def _staging_name(target: Path) -> str:
    return f".{target.name[:100]}.part"


class NewFolder:
    """The folder of a new checkout. Only files that a checkout has made are ever removed."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._staging = (target if target.is_dir() else target.parent) / _staging_name(target)
        self._undo = contextlib.ExitStack()

    async def prepare(self) -> Path:
        """Make an empty folder beside the target. Raises CheckoutRefused while another checkout uses it."""
        self._make_folders()
        if os.listdir(self._staging):  # left by a checkout whose process was killed
            clearing = asyncio.ensure_future(asyncio.to_thread(_clear, self._staging))
            if not (await asyncio.wait([clearing], timeout=REMOVAL_LIMIT_S))[0]:
                message = f"{self._staging} was left by a killed checkout and takes long to remove: try again later"
                raise CheckoutRefused(message)
            clearing.result()
        return self._staging

    def _make_folders(self) -> None:
        for folder in reversed(self._target.parents):
            if not os.path.lexists(folder):
                folder.mkdir()
                self._undo.callback(_remove_if_empty, folder)
        self._staging.mkdir(exist_ok=True)
        self._undo.callback(os.close, _lock(self._staging))
        self._undo.callback(_remove_tree, self._staging)

    def move_into_place(self) -> None:
        if self._staging.parent != self._target:
            self._staging.rename(self._target)
            return
        # The target may be the working directory of a process, so it stays.
        undo = self._undo.enter_context(contextlib.ExitStack())
        for entry in list(self._staging.iterdir()):
            moved = self._target / entry.name
            entry.rename(moved)
            undo.callback(_remove_tree, moved)
        undo.pop_all()

    async def clean_up(self) -> SideEffects:
        """Remove a failed checkout, bounded and shielded from cancellation. Return the side effects."""
        removing = asyncio.ensure_future(asyncio.to_thread(self._undo.close))
        await run_shielded(asyncio.wait([removing], timeout=REMOVAL_LIMIT_S))
        is_gone = removing.done() and removing.exception() is None
        return SideEffects.NONE if is_gone else SideEffects.PARTIAL


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is used by the checkout or by others
        folder.rmdir()


def _lock(folder: Path) -> int:
    """Lock a folder until this process ends: one without a lock was left by a killed process.

    Return its descriptor. Raises CheckoutRefused if it is locked.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise CheckoutRefused(f"{folder} is in use by another checkout: wait for it, or use another `path`") from None
    except OSError:  # the file system has no locks
        pass
    return held


SCHEMES = ("file", "git", "http", "https", "ssh", "git+ssh", "ssh+git")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>[^/]*)@)?(?P<rest>.*)", re.DOTALL)
# Shorter parts of an address would be found in every other word.
SHORTEST_SECRET = 3
# git-check-ref-format(1), and no way to write an expression such as HEAD~1.
_NOT_IN_REFS = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|[/.]$|^[/.]|^@$")


class InvalidRepository(Exception):
    """An address or a ref that git must not get. Nothing ran."""


@value
class Repository:
    url: str
    stored: str  # for .git/config, without a password
    shown: str
    _hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, written: Any, folder: Path) -> Repository:
        text = str(written).strip()
        if not text or re.search(r"[\x00-\x1f\x7f]", text):
            raise InvalidRepository("repository: it is empty, or has a control character in it")
        if text.startswith("-"):
            raise InvalidRepository("repository: it begins with a dash, which git would take for an option")
        if found := re.match(r"[A-Za-z0-9][A-Za-z0-9+.-]*::", text):
            raise InvalidRepository(f"repository: {found.group()} names a program to run, which is not allowed")
        url = _URL.fullmatch(text)
        if url is None:
            host, colon, _ = text.partition(":")
            if colon and "/" not in host:  # user@host:path, which is ssh
                if host.rpartition("@")[2].startswith("-"):
                    raise InvalidRepository("repository: its host begins with a dash")
                return cls(text, text, text)
            path = os.path.abspath(folder / text)
            return cls(path, path, path)
        scheme, user, rest = url["scheme"].lower(), url["user"], url["rest"]
        if scheme not in SCHEMES:
            raise InvalidRepository(f"repository: {scheme}:// is not fetched from; {', '.join(SCHEMES)} are")
        if rest.startswith("-"):
            raise InvalidRepository("repository: its host begins with a dash")
        if user is None:
            return cls(text, text, text)
        # In http a name alone can be a secret token; in ssh it is the user.
        name, _, password = user.partition(":")
        is_http = scheme in ("http", "https")
        without = f"{scheme}://{rest}" if is_http else f"{scheme}://{name}@{rest}"
        hidden = [user, password, *([name] if is_http else [])]
        hidden += [unquote(part) for part in hidden]
        return cls(text, without, without, tuple(hidden) if is_http or password else ())

    @property
    def name(self) -> str:
        """Return the default folder name, as for git clone. Raises InvalidRepository."""
        path = re.sub(r"/+(\.git)?/*$", "", self.stored).removesuffix(".git")
        name = re.sub(r"[^\w.-]+", "-", re.split(r"[/:]", path)[-1]).lstrip("-")
        if name in ("", ".", ".."):
            raise InvalidRepository("path: it is needed, because the repository's address has no name in it")
        return name

    def is_at(self, url: str) -> bool:
        return _normalize(url) == _normalize(self.stored)

    def without_secrets(self, text: str) -> str:
        return hide_credentials(hide_values(text, self._hidden, SHORTEST_SECRET), names_too=False)


NO_REPOSITORY = "repository: it is missing, GITHUB_REPOSITORY is not set, and the file is not in a git repository"


def find_repository(environment: Mapping[str, str], folder: Path) -> str | None:
    """Return GITHUB_REPOSITORY, else the repository that contains the workflow file."""
    if name := environment.get("GITHUB_REPOSITORY"):
        return f"{environment.get('GITHUB_SERVER_URL') or 'https://github.com'}/{name}"
    folder = Path(os.path.abspath(folder))
    return next((str(above) for above in (folder, *folder.parents) if os.path.lexists(above / ".git")), None)


def find_unusable(settings: Mapping[str, Any], is_template: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    repository, ref = settings.get("repository"), settings.get("ref")
    if repository is not None and not is_template(repository):
        try:
            Repository.of(repository, Path())
        except InvalidRepository as error:
            yield "repository", str(error).removeprefix("repository: ")
    if ref not in (None, "HEAD") and not is_template(ref) and (why := ref_problem(ref)) is not None:
        yield "ref", why


def _normalize(url: str) -> str:
    found = _URL.fullmatch(url)
    if found is not None and found["scheme"].lower() == "file":
        url = found["rest"]
    elif found is not None:
        host, slash, path = found["rest"].partition("/")
        user = "" if found["scheme"].lower() in ("http", "https") else (found["user"] or "").partition(":")[0]
        url = f"{found['scheme'].lower()}://{user}@{host.lower()}{slash}{path}"
    return re.sub(r"/+$", "", url).removesuffix(".git").rstrip("/")


def ref_problem(ref: str) -> str | None:
    """Return why a text cannot be a branch, a tag or a commit, or None."""
    if not ref:
        return "it is empty"
    if ref.startswith("-"):
        return "it begins with a dash, which git would take for an option"
    if _NOT_IN_REFS.search(ref):
        return f"{ref[:80]!r} cannot be the name of a branch, a tag or a commit"
    return None
