"""The artifacts of a run: files that its steps leave, copied into a private folder of the run when a step has ended.

Only regular files below the step's working directory are read: links that lead out of it are not followed, and nothing
is opened that could block. A file is copied beside its place and then renamed, and counts once it is in the record of
its step. The work is done in a thread, which looks at its time limit between two pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...core.envelope import Warning_, warning
from ...core.errors import Failure
from ...core.limits import NS_PER_MS
from ...core.value_types import JsonObject, field, record
from ...store.home import make_private_directory
from ...store.store import ARTIFACTS_FOLDER, log_name, parse_size
from ...supervise.clock import monotonic_ns
from ..file.schema import WorkflowFile
from ..steps.provider import ArtifactPath
from .state import StepState

VARIABLE = "SHOTCLOCK_RUN_ARTIFACTS_SIZE"
DEFAULT_BYTES = 256_000_000
COLLECT_LIMIT_MS = 30_000  # for the files of one step; a full disk cache or a slow network folder exhausts it
LEAST_LIMIT_MS = 2_000  # also if the run has no time left
THREAD_MARGIN_S = 1.0  # beyond its limit, the thread is given up: a dead mount blocks it
MOST_FILES = 2_000  # of one step
MOST_ENTRIES = 200_000  # that the patterns of one step look at
NAMED = 20  # files left out that the warning names
PIECE = 1 << 20
_MAGIC = frozenset("*?[")
_PART_PREFIX = ".part-"  # a step's folder begins with a letter or `_`


class _LeftOut(Exception):
    """A file that is not kept, and why."""


class _OutOfTime(Exception):
    pass


@record
class Kept:
    """The files that were kept for a step, and what was not."""

    artifacts: list[JsonObject] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    missing: list[ArtifactPath] = field(default_factory=list)

    def warnings(self) -> Iterator[Warning_]:
        if self.left_out:
            named = [{"path": path, "why": why} for path, why in self.left_out[:NAMED]]
            shown = ", ".join(f"{path} ({why})" for path, why in self.left_out[:3])
            more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
            message = f"not kept as artifacts: {shown}{more}"
            yield warning("ARTIFACTS_LEFT_OUT", message, files=named, count=len(self.left_out))
        for wanted in self.missing:
            if wanted.if_missing == "warn":
                yield warning("ARTIFACT_MISSING", f"no file matches {wanted.path!r}", path=wanted.path)


def run_folder(home: Path, run_id: str) -> Path:
    return home / ARTIFACTS_FOLDER / log_name(run_id)


def restore_artifacts(files: Iterable[Mapping[str, str]]) -> None:
    """Copy artifacts of an earlier run to their places. Raises Failure."""
    for each in files:
        part = f"{each['to']}{_PART_PREFIX}{os.urandom(4).hex()}"
        try:
            os.makedirs(os.path.dirname(part), exist_ok=True)
            shutil.copy(each["from"], part)
            os.rename(part, each["to"])
        except OSError as error:
            raise Failure("FILE_UNWRITABLE", f"{each['to']!r} cannot be restored: {error.strerror}") from None


def read_limit(environment: Mapping[str, str]) -> int:
    """Return the bytes that the artifacts of a run may have; 0 is no limit. Raises ValueError."""
    text = environment.get(VARIABLE, "").strip()
    return parse_size(text) if text else DEFAULT_BYTES


def find_wrong_limit(workflow: WorkflowFile, environment: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the variable with the limit and a message, if a step has artifacts and the limit cannot be read."""
    if any(step.artifacts for step in workflow.steps.values()):
        try:
            read_limit(environment)
        except ValueError as error:
            yield (VARIABLE,), str(error)


def describe_artifacts(home: Path, run_id: str, of_steps: Iterable[Sequence[JsonObject]]) -> JsonObject | None:
    """Return the folder of a run with the number and the size of its files; None if it has none."""
    found = [artifact for artifacts in of_steps for artifact in artifacts]
    if not found:
        return None
    size = sum(artifact["bytes"] for artifact in found)
    return {"folder": str(run_folder(home, run_id)), "files": len(found), "bytes": size}


def find_artifacts(home: Path, run_id: str, of_steps: Iterable[Sequence[JsonObject]]) -> JsonObject | None:
    """Return the same for a report, and whether the folder was deleted: that of an old run is before the run."""
    described = describe_artifacts(home, run_id, of_steps)
    return described and {**described, "is_deleted": not os.path.isdir(described["folder"])}


class RunArtifacts:
    """The folder of the artifacts of one run, for the process that has it."""

    def __init__(self, home: Path, run_id: str, limit_bytes: int, recorded: Mapping[str, StepState]) -> None:
        self._folder = run_folder(home, run_id)
        self.home: str = os.path.realpath(home)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._used = {name: sum(each["bytes"] for each in state.artifacts) for name, state in recorded.items()}
        self._is_ready = False

    async def keep(self, step: str, folders: Mapping[str, Path], wanted: Sequence[ArtifactPath], limit_ms: int) -> Kept:
        """Keep the files of a step that has ended. `folders` has its working directories by name."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        search = _Collector(self, step, monotonic_ns() + limit_ms * NS_PER_MS)

        def work() -> None:
            search.run(folders, wanted)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        # A daemon, unlike the threads of the loop: the process does not wait for one that a dead mount blocks.
        try:
            threading.Thread(target=work, name="shotclock-artifacts", daemon=True).start()
        except RuntimeError:  # too many threads
            work()
        await asyncio.wait([ended], timeout=limit_ms / 1000 + THREAD_MARGIN_S)
        return search.finish(wanted)

    def prepare(self, step: str) -> None:
        """Make the folder of the run, and remove what an earlier visit to the step left in it."""
        with self._lock:
            make_private_directory(self._folder.parent)
            make_private_directory(self._folder)
            if not self._is_ready:  # what a killed process was copying
                for name in os.listdir(self._folder):
                    if name.startswith(_PART_PREFIX):
                        os.unlink(self._folder / name)
                self._is_ready = True
            self._used[step] = 0
        for name in os.listdir(self._folder):
            if name == log_name(step) or name.startswith(f"{log_name(step)}["):
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def reserve(self, step: str, size: int) -> None:
        """Count bytes towards the limit of the run. Raises _LeftOut if they do not fit."""
        with self._lock:
            if self._limit and sum(self._used.values()) + size > self._limit:
                raise _LeftOut(f"the artifacts of a run have {self._limit} bytes at most, see {VARIABLE}")
            self._used[step] = self._used.get(step, 0) + size

    def give_back(self, step: str, size: int) -> None:
        with self._lock:
            self._used[step] -= size

    def path_of(self, name: str, path: str) -> Path:
        return self._folder / log_name(name) / path

    def new_part(self) -> Path:
        return self._folder / f"{_PART_PREFIX}{os.urandom(8).hex()}"


class _Collector:
    def __init__(self, run: RunArtifacts, step: str, until_ns: int) -> None:
        self._run, self._step, self._until_ns = run, step, until_ns
        self._kept = Kept()
        self._found: set[str] = set()
        self._entries = 0
        self._unsearched: str | None = "there was no time for more"
        """Why not everything was looked at."""
        self._lock = threading.Lock()
        self._is_given_up = False

    def run(self, folders: Mapping[str, Path], wanted: Sequence[ArtifactPath]) -> None:
        """Copy the files. Done in a thread."""
        try:
            self._run.prepare(self._step)
            for name, folder in folders.items():
                self._keep_below(name, folder, wanted)
            self._unsearched = None
        except _OutOfTime:
            pass
        except Exception as error:  # of the store's folder; the step itself is not at fault
            self._unsearched = getattr(error, "strerror", None) or str(error)

    def finish(self, wanted: Sequence[ArtifactPath]) -> Kept:
        """Return what was kept until now. Nothing is added afterwards."""
        with self._lock:
            self._is_given_up = True
            if self._unsearched is not None:
                self._kept.left_out.append(("the rest", self._unsearched))
            else:
                self._kept.missing = [each for each in wanted if each.path not in self._found]
            self._kept.artifacts.sort(key=lambda each: str(each["file"]))
            return self._kept

    def _keep_below(self, name: str, folder: Path, wanted: Sequence[ArtifactPath]) -> None:
        try:
            root = os.path.realpath(folder)
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return  # then everything is missing
        try:
            sizes: dict[str, int] = {}
            for each in wanted:
                for path in self._find(root, each.path):
                    self._found.add(each.path)
                    sizes[path] = 0
                    with contextlib.suppress(OSError, ValueError):
                        sizes[path] = os.lstat(os.path.join(root, path)).st_size
            # The small ones first: a log must not wait for an image that uses up the time or the room.
            for path in sorted(sizes, key=lambda path: sizes[path]):
                self._keep(name, root, root_fd, path)
        finally:
            os.close(root_fd)

    def _keep(self, name: str, root: str, root_fd: int, path: str) -> None:
        self._look()
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        try:
            if len(self._kept.artifacts) >= MOST_FILES:
                raise _LeftOut(f"a step has {MOST_FILES} artifacts at most")
            real = os.path.realpath(os.path.join(root, path))
            inside = _inside(real, root)
            if inside is None:
                raise _LeftOut("it leads out of the working directory")
            if _inside(real, self._run.home) is not None:
                raise _LeftOut("it belongs to the store of shotclock")
            size, digest = self._copy(root_fd, inside, self._run.path_of(name, path))
        except _LeftOut as why:
            self._leave_out(shown, str(why))
        except (OSError, ValueError) as error:
            self._leave_out(shown, getattr(error, "strerror", None) or str(error))
        else:
            file = f"{log_name(name)}/{shown}"
            with self._lock:
                if not self._is_given_up:
                    self._kept.artifacts.append({"path": shown, "bytes": size, "sha256": digest, "file": file})

    def _copy(self, root_fd: int, inside: str, target: Path) -> tuple[int, str]:
        """Copy a file, and return its size and digest. The copy has its name only when it is whole."""
        source, size, digest = _open_below(root_fd, inside.split("/")), 0, hashlib.sha256()
        part = self._run.new_part()
        try:
            found = os.fstat(source)
            if not stat.S_ISREG(found.st_mode):
                raise _LeftOut("it is not a regular file")
            self._run.reserve(self._step, found.st_size)
            self._run.give_back(self._step, found.st_size)  # counted as it is read: it may still grow
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            copy = os.open(part, flags, 0o700 if found.st_mode & 0o100 else 0o600)
            try:
                while piece := os.read(source, PIECE):
                    self._look()
                    self._run.reserve(self._step, len(piece))
                    size += len(piece)
                    digest.update(piece)
                    while piece:
                        piece = piece[os.write(copy, piece) :]
            finally:
                os.close(copy)
            target.parent.mkdir(0o700, parents=True, exist_ok=True)
            os.rename(part, target)
        except BaseException:
            self._run.give_back(self._step, size)
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(source)
        return size, digest.hexdigest()

    def _find(self, root: str, pattern: str) -> Iterator[str]:
        """Yield the files that a pattern names, relative to the working directory; of a directory all files in it."""
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        is_plain = not any(_MAGIC.intersection(part) for part in parts)
        for path in self._match(root, "", parts):
            whole = os.path.join(root, path)
            if not os.path.isdir(whole):
                yield path
            elif not os.path.islink(whole) or (is_plain and _inside(os.path.realpath(whole), root) is not None):
                yield from self._walk(root, path)
            else:
                yield path  # left out, with the reason

    def _match(self, root: str, base: str, parts: Sequence[str]) -> Iterator[str]:
        if not parts:
            yield base
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            while rest and rest[0] == "**":
                rest = rest[1:]
            for folder in self._folders(root, base):
                yield from self._match(root, folder, rest or ["*"])
        elif not _MAGIC.intersection(first):
            path = os.path.join(base, first)
            whole = os.path.join(root, path)
            if os.path.islink(whole) and _inside(os.path.realpath(whole), root) is None:
                yield os.path.join(path, *rest)  # left out, with the reason
            elif os.path.lexists(whole):
                yield from self._match(root, path, rest)
        else:
            for entry in self._scan(root, base):
                is_hidden = entry.name.startswith(".") and not first.startswith(".")
                if not is_hidden and fnmatchcase(entry.name, first):
                    path = os.path.join(base, entry.name)
                    if not rest:
                        yield path
                    elif entry.is_dir(follow_symlinks=False):
                        yield from self._match(root, path, rest)

    def _folders(self, root: str, base: str) -> Iterator[str]:
        """Yield a directory and all directories in it, without hidden ones and links."""
        left = [base]
        while left:
            folder = left.pop()
            yield folder
            below = [entry for entry in self._scan(root, folder) if entry.is_dir(follow_symlinks=False)]
            left += [os.path.join(folder, entry.name) for entry in reversed(below) if not entry.name.startswith(".")]

    def _walk(self, root: str, base: str) -> Iterator[str]:
        left = [base]
        while left:
            folder = left.pop()
            for entry in self._scan(root, folder):
                path = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    left.append(path)
                else:
                    yield path

    def _scan(self, root: str, folder: str) -> list[os.DirEntry[str]]:
        self._look()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
                found = [entry for entry in found if entry.path != self._run.home]  # a copy would contain itself
        except OSError:
            return []
        self._entries += len(found)
        if self._entries > MOST_ENTRIES:
            raise OSError(f"the patterns look at more than {MOST_ENTRIES} files")
        return found

    def _leave_out(self, path: str, why: str) -> None:
        with self._lock:
            if not self._is_given_up:
                self._kept.left_out.append((path, why))

    def _look(self) -> None:
        if monotonic_ns() > self._until_ns:
            raise _OutOfTime


def _inside(path: str, root: str) -> str | None:
    """Return a real path relative to the root; None if it is not below it."""
    prefix = root if root.endswith("/") else f"{root}/"
    if path == root:
        return "."
    return path[len(prefix) :] if path.startswith(prefix) else None


def _open_below(root_fd: int, parts: Sequence[str]) -> int:
    """Open a regular file below a directory, without following any link. Raises OSError, _LeftOut."""
    folder = root_fd
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(part, flags, dir_fd=folder)
            if folder != root_fd:
                os.close(folder)
            folder = below
        kind = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(kind):
            raise _LeftOut("it is a link to a directory")
        if not stat.S_ISREG(kind):  # opening a device may have an effect
            raise _LeftOut("it is not a regular file")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        if folder != root_fd:
            os.close(folder)
