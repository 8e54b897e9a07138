"""Where a repository is, as a step writes it: what git may be given of it, and what may be shown and stored."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..core.records import dataclass
from ..core.redaction import hide_credentials, hide_values

SCHEMES = ("file", "git", "http", "https", "ssh", "git+ssh", "ssh+git")
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>[^/]*)@)?(?P<rest>.*)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Part of an address: shorter ones would be found in every other word.
SHORTEST_SECRET = 3
# git-check-ref-format(1), and no way to write an expression such as HEAD~1.
_NOT_IN_REFS = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|[/.]$|^[/.]|^@$")


class InvalidRepository(Exception):
    """What is written cannot be given to git. Nothing ran."""


@dataclass(frozen=True)
class Repository:
    url: str
    """For git."""
    stored: str
    """For .git/config: a password that is there is found by everybody who finds the folder."""
    shown: str
    _hidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, written: Any, folder: Path) -> Repository:
        """Raises InvalidRepository."""
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
        """Of the folder, if the step does not say: the last part, as for git clone. Raises InvalidRepository."""
        path = re.sub(r"/+(\.git)?/*$", "", self.stored).removesuffix(".git")
        name = re.sub(r"[^\w.-]+", "-", re.split(r"[/:]", path)[-1]).lstrip("-")
        if name in ("", ".", ".."):
            raise InvalidRepository("path: it is needed, because the repository's address has no name in it")
        return name

    def is_at(self, url: str) -> bool:
        """Whether a checkout with this remote is one of ours."""
        return _plain(url) == _plain(self.stored)

    def without_secrets(self, text: str) -> str:
        """Return the text without what of the address is secret."""
        return hide_credentials(hide_values(text, self._hidden, SHORTEST_SECRET), names_too=False)


def _plain(url: str) -> str:
    """The same for all ways to write it."""
    found = _URL.fullmatch(url)
    if found is not None and found["scheme"].lower() == "file":
        url = found["rest"]
    elif found is not None:
        host, slash, path = found["rest"].partition("/")
        user = "" if found["scheme"].lower() in ("http", "https") else (found["user"] or "").partition(":")[0]
        url = f"{found['scheme'].lower()}://{user}@{host.lower()}{slash}{path}"
    return re.sub(r"/+$", "", url).removesuffix(".git").rstrip("/")


def ref_problem(ref: str) -> str | None:
    """Why it cannot be a branch, a tag or a commit."""
    if not ref:
        return "it is empty"
    if ref.startswith("-"):
        return "it begins with a dash, which git would take for an option"
    if _NOT_IN_REFS.search(ref):
        return f"{ref[:80]!r} cannot be the name of a branch, a tag or a commit"
    return None
