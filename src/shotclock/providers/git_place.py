"""Where a checkout goes: made beside its place, moved there when it is whole, and gone without a trace otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from pathlib import Path

from ..core.effects import SideEffects
from ..enforce.processes import shielded

# How long removing what a failed checkout left may hold up the answer: a large tree on a slow disk runs it out. It is
# removed all the same; the answer only does not wait for it, and says that something is left.
REMOVAL_LIMIT_S = 10.0


class InTheWay(Exception):
    """What is there already is not ours to touch."""


class Place:
    """Only what it has made itself is ever removed."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._made: list[Path] = []
        """Folders above the target, outermost first."""
        self._moved: list[Path] = []
        self._staging: Path | None = None
        self._is_free = False
        self._is_taken = False

    def is_free(self) -> bool:
        """Nothing there, or an empty folder. Raises InTheWay."""
        target = self.target
        if not os.path.lexists(target):
            self._is_free = True
        elif not target.is_dir():
            raise InTheWay(f"{target} is there and no folder")
        elif not any(os.scandir(target)):
            self._is_free = True
        elif not os.path.lexists(target / ".git"):
            raise InTheWay(f"{target} is not empty, and no checkout")
        return self._is_free

    def prepare(self) -> Path:
        """An empty folder on the same file system."""
        above = self.target.parent
        missing = []
        while not os.path.lexists(above):
            missing.append(above)
            above = above.parent
        for folder in reversed(missing):
            folder.mkdir()
            self._made.append(folder)
        beside = self.target if self.target.is_dir() else self.target.parent
        staging = beside / f".{self.target.name[:100]}.{secrets.token_hex(6)}.part"
        staging.mkdir()
        self._staging = staging
        return staging

    def take(self) -> None:
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
        """Bounded, and done even if cancelled meanwhile. What is left of a checkout that came to nothing; None where
        that cannot be told."""
        if not self._is_free:
            return None
        removing = asyncio.ensure_future(asyncio.to_thread(self._remove))
        await shielded(asyncio.wait([removing], timeout=REMOVAL_LIMIT_S))
        is_gone = removing.done() and removing.exception() is None
        return SideEffects.NONE if is_gone else SideEffects.PARTIAL

    def _remove(self) -> None:
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
