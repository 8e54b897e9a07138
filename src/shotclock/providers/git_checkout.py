"""The repository and the folder of a checkout, which is made beside its folder and moved there when complete."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..core.errors import SideEffects
from ..core.redaction import hide_credentials, hide_values
from ..core.value_types import value
from ..runtime.command_runner import run_shielded

# A large tree on a slow disk may take longer: it is still removed, and the answer reports partial side effects.
REMOVAL_LIMIT_S = 10.0


class InTheWay(Exception):
    """A file or folder that existed before the checkout and must not be touched."""


class CheckoutFolder:
    """The folder of a checkout. Only files that a checkout has made are ever removed."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made: list[Path] = []  # folders above the target, outermost first
        self._moved: list[Path] = []
        self._staging: Path | None = None
        self._held = -1
        """Locked as long as this process lives: a staging folder without a lock was left by a killed process."""
        self._is_free = False
        self._is_taken = False

    def is_free(self) -> bool:
        """Return whether the target is missing or empty. Raises InTheWay."""
        target = self.target
        if not os.path.lexists(target):
            self._is_free = True
        elif not target.is_dir():
            raise InTheWay(f"{target} exists and is not a folder")
        elif os.listdir(target) in ([], [self._staging_name]):
            self._is_free = True
        elif not os.path.lexists(target / ".git"):
            raise InTheWay(f"{target} is not empty, and not a checkout")
        return self._is_free

    async def prepare(self) -> Path:
        """Make an empty folder beside the target. Raises InTheWay while another checkout uses it."""
        staging = self._make_staging()
        if os.listdir(staging):  # left by a checkout whose process was killed
            clearing = asyncio.ensure_future(asyncio.to_thread(_clear, staging))
            if not (await asyncio.wait([clearing], timeout=REMOVAL_LIMIT_S))[0]:
                raise InTheWay(f"{staging} was left by a killed checkout and takes long to remove: try again later")
            clearing.result()
        return staging

    def _make_staging(self) -> Path:
        for folder in reversed(self.target.parents):
            if not os.path.lexists(folder):
                folder.mkdir()
                self._made.append(folder)
        staging = (self.target if self.target.is_dir() else self.target.parent) / self._staging_name
        staging.mkdir(exist_ok=True)
        self._held = _lock(staging)
        self._staging = staging
        return staging

    def move_into_place(self) -> None:
        assert self._staging is not None
        if self._staging.parent == self.target:  # it may be the working directory of a process, so it stays
            for entry in list(self._staging.iterdir()):
                moved = self.target / entry.name
                entry.rename(moved)
                self._moved.append(moved)
        else:
            self._staging.rename(self.target)
        self._is_taken = True

    async def clean_up(self) -> SideEffects | None:
        """Remove a failed checkout, bounded and shielded from cancellation. Return the side effects; None: unknown."""
        if not self._is_free:
            return None
        removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
        await run_shielded(asyncio.wait([removing], timeout=REMOVAL_LIMIT_S))
        is_gone = removing.done() and removing.exception() is None
        return SideEffects.NONE if is_gone else SideEffects.PARTIAL

    @property
    def _staging_name(self) -> str:
        return f".{self.target.name[:100]}.part"

    def _remove(self) -> None:
        try:
            self._remove_made()
        finally:
            if self._held >= 0:
                os.close(self._held)
            self._held = -1

    def _remove_made(self) -> None:
        if not self._is_taken:
            for path in self._moved:
                _remove_tree(path)
        if self._staging is not None and os.path.lexists(self._staging):
            shutil.rmtree(self._staging)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # it is used by the checkout or by others
                folder.rmdir()


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _lock(folder: Path) -> int:
    """Lock a folder until this process ends; return its descriptor. Raises InTheWay if it is locked."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise InTheWay(f"{folder} is in use by another checkout: wait for it, or use another `path`") from None
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
    """The address of a repository."""

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
        """Return whether a checkout with this remote is one of this repository."""
        return _normalize(url) == _normalize(self.stored)

    def without_secrets(self, text: str) -> str:
        """Return the text without the secrets of the address."""
        return hide_credentials(hide_values(text, self._hidden, SHORTEST_SECRET), names_too=False)


NO_REPOSITORY = "repository: it is missing, GITHUB_REPOSITORY is not set, and the file is not in a git repository"


def find_repository(environment: Mapping[str, str], folder: Path) -> str | None:
    """Return GITHUB_REPOSITORY, else the repository that contains the workflow file."""
    if name := environment.get("GITHUB_REPOSITORY"):
        return f"{environment.get('GITHUB_SERVER_URL') or 'https://github.com'}/{name}"
    folder = Path(os.path.abspath(folder))
    return next((str(above) for above in (folder, *folder.parents) if os.path.lexists(above / ".git")), None)


def find_unusable(settings: Mapping[str, Any], is_template: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield the invalid keys of a step without templates, and why."""
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
