"""The repository and the folder of a checkout. A checkout is made beside its folder, moved there when it is whole, and
removed otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..core.errors import SideEffects
from ..core.redaction import hide_credentials, hide_values
from ..core.value_types import value
from ..runtime.command_runner import run_shielded

# How long removing what a failed checkout left may hold up the answer: a large tree on a slow disk runs it out. It is
# removed all the same; the answer only does not wait for it, and says that something is left.
REMOVAL_LIMIT_S = 10.0


# Another process may take a folder that was made a moment ago for one that was left behind; once is chance.
MOST_STAGINGS = 5
LONGEST_PREFIX = 100


class InTheWay(Exception):
    """A file or folder that was there before the checkout, and is not to be touched."""


class CheckoutFolder:
    """The folder of a checkout. Only what this object has made itself is ever removed."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made: list[Path] = []
        """Folders above the target, outermost first."""
        self._moved: list[Path] = []
        self._staging: Path | None = None
        self._held = -1
        """The staging folder, locked for as long as this process lives: so it is known for one that is in use."""
        self._is_free = False
        self._is_taken = False

    async def sweep(self) -> None:
        """Remove what processes that were killed have left here. Bounded, like every removal."""
        sweeping = asyncio.ensure_future(asyncio.to_thread(self._sweep))
        await run_shielded(asyncio.wait([sweeping], timeout=REMOVAL_LIMIT_S))

    def is_free(self) -> bool:
        """Return whether there is nothing, or an empty folder. Raises InTheWay."""
        target = self.target
        if not os.path.lexists(target):
            self._is_free = True
        elif not target.is_dir():
            raise InTheWay(f"{target} exists and is not a folder")
        elif not any(os.scandir(target)):
            self._is_free = True
        elif not os.path.lexists(target / ".git"):
            raise InTheWay(f"{target} is not empty, and not a checkout")
        return self._is_free

    def prepare(self) -> Path:
        """Make an empty folder on the same file system, and return it."""
        above = self.target.parent
        missing = []
        while not os.path.lexists(above):
            missing.append(above)
            above = above.parent
        for folder in reversed(missing):
            folder.mkdir()
            self._made.append(folder)
        beside = self.target if self.target.is_dir() else self.target.parent
        for _ in range(MOST_STAGINGS):
            staging = beside / f"{self._prefix}{secrets.token_hex(6)}.part"
            staging.mkdir()
            if (held := _lock(staging)) is not None:
                break
        else:
            raise InTheWay(f"{beside}: another process removes the folders that are made there; use another `path`")
        self._staging, self._held = staging, held
        return staging

    def move_into_place(self) -> None:
        assert self._staging is not None
        if self._staging.parent == self.target:  # it was there, and whoever stands in it must not lose the ground
            for entry in list(self._staging.iterdir()):
                moved = self.target / entry.name
                entry.rename(moved)
                self._moved.append(moved)
        else:
            self._staging.rename(self.target)
        self._is_taken = True

    async def clean_up(self) -> SideEffects | None:
        """Remove what a checkout that came to nothing has left. Bounded, and done even if cancelled meanwhile. Returns
        what is left of it; None where that cannot be known."""
        if not self._is_free:
            return None
        removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
        await run_shielded(asyncio.wait([removing], timeout=REMOVAL_LIMIT_S))
        is_gone = removing.done() and removing.exception() is None
        return SideEffects.NONE if is_gone else SideEffects.PARTIAL

    @property
    def _prefix(self) -> str:
        return f".{self.target.name[:LONGEST_PREFIX]}."

    def _sweep(self) -> None:
        for folder in self._left_behind():
            if (held := _lock(folder)) is not None:
                try:
                    if held >= 0:
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    _unlock(held)

    def _left_behind(self) -> Iterator[Path]:
        """Yield the folders that are named as only we name them. Whether one is in use is another question."""
        name = re.compile(re.escape(self._prefix) + "[0-9a-f]{12}[.]part")
        for folder in (self.target, self.target.parent):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                found = [entry.path for entry in entries if name.fullmatch(entry.name)]
                yield from map(Path, found)

    def _remove(self) -> None:
        try:
            self._remove_made()
        finally:
            _unlock(self._held)
            self._held = -1

    def _remove_made(self) -> None:
        if not self._is_taken:
            for path in self._moved:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        if self._staging is not None and os.path.lexists(self._staging):
            shutil.rmtree(self._staging)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # it is in use by now: by the checkout, or by somebody else
                folder.rmdir()


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process ends, however it does. Returns the descriptor; None where another process has
    it, or it is gone; -1 where there are no locks, and nobody can know."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(held), os.stat(folder, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except OSError:
        os.close(held)
        return -1
    if not is_there:
        os.close(held)
        return None
    return held


def _unlock(held: int) -> None:
    if held >= 0:
        os.close(held)


# --- where a repository is --------------------------------------------------------------------------------

SCHEMES = ("file", "git", "http", "https", "ssh", "git+ssh", "ssh+git")
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>[^/]*)@)?(?P<rest>.*)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Part of an address: shorter ones would be found in every other word.
SHORTEST_SECRET = 3
# git-check-ref-format(1), and no way to write an expression such as HEAD~1.
_NOT_IN_REFS = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|[/.]$|^[/.]|^@$")


class InvalidRepository(Exception):
    """An address or a ref that cannot be given to git. Nothing ran."""


@value
class Repository:
    """The address of a repository: for git, for storing and for showing."""

    url: str
    """For git."""
    stored: str
    """For .git/config: a password that is there is found by everybody who finds the folder."""
    shown: str
    _hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, written: Any, folder: Path) -> Repository:
        """Read the address of a repository. Raises InvalidRepository."""
        text = str(written).strip()
        if not text or _CONTROL.search(text):
            raise InvalidRepository("repository: it is empty, or has a control character in it")
        if text.startswith("-"):
            raise InvalidRepository("repository: it begins with a dash, which git would take for an option")
        if found := _HELPER.match(text):
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
        # In http a name alone can be the secret; in ssh it is who to be, and is needed.
        name, _, password = user.partition(":")
        is_http = scheme in ("http", "https")
        without = f"{scheme}://{rest}" if is_http else f"{scheme}://{name}@{rest}"
        hidden = [user, password, *([name] if is_http else [])]
        hidden += [unquote(part) for part in hidden]
        return cls(text, without, without, tuple(hidden) if is_http or password else ())

    @property
    def name(self) -> str:
        """Return the name of the folder, if the step does not say: the last part, as for git clone. Raises
        InvalidRepository."""
        path = re.sub(r"/+(\.git)?/*$", "", self.stored).removesuffix(".git")
        name = re.sub(r"[^\w.-]+", "-", re.split(r"[/:]", path)[-1]).lstrip("-")
        if name in ("", ".", ".."):
            raise InvalidRepository("path: it is needed, because the repository's address has no name in it")
        return name

    def is_at(self, url: str) -> bool:
        """Return whether a checkout with this remote is one of this repository."""
        return _normalize(url) == _normalize(self.stored)

    def without_secrets(self, text: str) -> str:
        """Return the text without what of the address is secret."""
        return hide_credentials(hide_values(text, self._hidden, SHORTEST_SECRET), names_too=False)


NO_REPOSITORY = "repository: it is missing, GITHUB_REPOSITORY is not set, and the file is not in a git repository"


def find_repository(environment: Mapping[str, str], folder: Path) -> str | None:
    """Return the repository of a step that names none: GITHUB_REPOSITORY, else the one that the workflow file is in."""
    if name := environment.get("GITHUB_REPOSITORY"):
        return f"{environment.get('GITHUB_SERVER_URL') or 'https://github.com'}/{name}"
    folder = Path(os.path.abspath(folder))
    return next((str(above) for above in (folder, *folder.parents) if os.path.lexists(above / ".git")), None)


def find_unusable(settings: Mapping[str, Any], is_template: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a step that are written out, without a template, and cannot be given to git; and why."""
    repository, ref = settings.get("repository"), settings.get("ref")
    if repository is not None and not is_template(repository):
        try:
            Repository.of(repository, Path())
        except InvalidRepository as error:
            yield "repository", str(error).removeprefix("repository: ")
    if ref not in (None, "HEAD") and not is_template(ref) and (why := ref_problem(ref)) is not None:
        yield "ref", why


def _normalize(url: str) -> str:
    """Return an address as it is the same for all ways to write it."""
    found = _URL.fullmatch(url)
    if found is not None and found["scheme"].lower() == "file":
        url = found["rest"]
    elif found is not None:
        host, slash, path = found["rest"].partition("/")
        user = "" if found["scheme"].lower() in ("http", "https") else (found["user"] or "").partition(":")[0]
        url = f"{found['scheme'].lower()}://{user}@{host.lower()}{slash}{path}"
    return re.sub(r"/+$", "", url).removesuffix(".git").rstrip("/")


def ref_problem(ref: str) -> str | None:
    """Return why a text cannot be a branch, a tag or a commit; None if it can."""
    if not ref:
        return "it is empty"
    if ref.startswith("-"):
        return "it begins with a dash, which git would take for an option"
    if _NOT_IN_REFS.search(ref):
        return f"{ref[:80]!r} cannot be the name of a branch, a tag or a commit"
    return None
