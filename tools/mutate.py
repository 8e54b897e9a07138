"""Change a room's source at random places, one at a time, and print which changes its own tests notice.

python tools/mutate.py --room core [--module limits] [--count 20] [--seed 1] [--within 60] [--near]

A change is a comparison turned round, a condition negated, `and` for `or`, `+` for `-`, a number one higher, or a
return value dropped, in a copy of the tree. Only the tests in tests/<room> are run: first those that name the changed
module, with --near only those. A change is noticed if a test fails twice, or if they hang and do not without it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OPPOSITES: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
LOGS = ("logging", "logger", "log", "warnings")
Span = tuple[int, int]


class Change(NamedTuple):
    """Replacement of a piece of a file, as byte offsets."""

    path: Path
    line: int
    start: int
    end: int
    text: str


def changes_of(path: Path) -> list[Change]:
    """Return all possible changes of a module."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> Span:
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end

    def between(left: ast.expr, right: ast.expr, word: str) -> Span | None:
        """Return the place of an operator between two operands."""
        start, end = span(left)[1], span(right)[0]
        found = re.search(rb"(?<![\w])" + word.encode() + rb"(?![\w])", source[start:end])
        return None if found is None else (start + found.start(), start + found.end())

    found = []
    for node in walk(ast.parse(source)):
        where: Span | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            text = OPPOSITES[type(node.ops[0])]
            where = (span(node.left)[1], span(node.comparators[0])[0])
            old = source[slice(*where)].decode()
            text = f" {text} {'(' * old.count('(')}"
            where = None if ")" in old or "#" in old else where
        elif isinstance(node, ast.BoolOp):
            old, text = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            where = between(node.values[0], node.values[1], old)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            old, text = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            where = between(node.left, node.right, re.escape(old))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            where, text = span(node), str(node.value + 1)
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and not node.value.value):  # None stands for False
                where, text = span(node.value), "None"
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            where = span(node.test)
            text = f"(not ({source[slice(*where)].decode()}))"
        if where is not None:
            found.append(Change(path, getattr(node, "lineno", 0), *where, text))
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that decide something: no annotations, messages, logs, named bounds, fields or imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr | ast.arguments | ast.Assert | ast.Import | ast.ImportFrom):
            continue  # an argument's default is data, and an assertion is for the type checker
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).partition(".")[0] in LOGS:
            continue
        if isinstance(node, ast.Module | ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign):
            continue  # a bound, a table or the default of a field
        if getattr(node, "annotation", None) is child or getattr(node, "returns", None) is child:
            continue
        if isinstance(child, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in child.bases):
            continue
        yield child
        yield from walk(child)


def copy_tree(to: Path) -> Path:
    """Copy the tree with an environment of its own, whose programs import the copy. Return its Python."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    old, new = Path(sys.prefix), to / ".venv"
    packages = next(old.glob("lib/python*/site-packages"))
    for folder in (new / "bin", new / packages.relative_to(old)):
        folder.mkdir(parents=True)
    shutil.copy2(old / "pyvenv.cfg", new)
    for each in [*(old / "bin").iterdir(), *packages.iterdir()]:
        place = new / each.relative_to(old)
        if each.name.startswith("shotclock") and each.parent.name == "bin":
            place.write_text(each.read_text().replace(str(old), str(new)))
            place.chmod(0o755)
        elif each.suffix == ".pth" and "shotclock" in each.name:
            place.write_text(str(to / "src"))
        else:
            place.symlink_to(each)
    return new / "bin" / Path(sys.executable).name


def run_tests(python: Path, tree: Path, module: str, wanted: argparse.Namespace) -> tuple[bool | None, float]:
    """Run a room's tests. Return whether they passed, None if they took too long, and the seconds."""
    named = re.compile(rf"\b{module}\b")
    tests = sorted((tree / "tests" / wanted.room).rglob("test_*.py"))
    files = sorted(tests, key=lambda path: named.search(path.read_text()) is None)
    if wanted.near:
        files = [path for path in files if named.search(path.read_text())] or files
    began = time.monotonic()
    passed = run_pytest(python, tree, files, wanted.within)
    if passed is False:  # a test that fails only now and then, on a busy machine, has noticed nothing
        passed = run_pytest(python, tree, ["--last-failed", *files], wanted.within)
    return passed, time.monotonic() - began


def run_pytest(python: Path, tree: Path, arguments: Sequence[str | Path], within_s: float) -> bool | None:
    """Return whether these tests passed; None if they took too long."""
    process = subprocess.Popen(
        [python, "-m", "pytest", "-x", "-q", "-m", "not soak and not alone", *arguments], cwd=tree,
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return process.wait(within_s) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main() -> int:
    """Print a line for each change, and the share of those that were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", required=True, help="a folder of src/shotclock, such as core")
    parser.add_argument("--module", help="only this module of the room")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within", type=float, default=60, help="seconds for the tests of one change")
    parser.add_argument("--near", action="store_true", help="run only the test files that name the changed module")
    wanted = parser.parse_args()
    noticed = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        tree = Path(scratch)
        python = copy_tree(tree)
        paths = sorted((tree / "src/shotclock" / wanted.room).rglob(f"{wanted.module or '*'}.py"))
        possible = [change for path in paths for change in changes_of(path)]
        chosen = random.Random(wanted.seed).sample(possible, min(wanted.count, len(possible)))
        passed, took_s = run_tests(python, tree, "", wanted)  # all of them: "" is named everywhere
        print(f"without a change: {'passed' if passed else 'too slow' if passed is None else 'FAILED'}, {took_s:.0f} s")
        if passed is False:
            return 1
        for change in chosen:
            source = change.path.read_bytes()
            change.path.write_bytes(source[: change.start] + change.text.encode() + source[change.end :])
            module = change.path.stem if change.path.stem != "__init__" else change.path.parent.name
            result, took_s = run_tests(python, tree, module, wanted)
            change.path.write_bytes(source)
            is_noticed = result is False or (result is None and passed is True)
            noticed += is_noticed
            place = f"{change.path.relative_to(tree / 'src/shotclock')}:{change.line}"
            before = " ".join(source[change.start : change.end].decode().split())
            verdict = "noticed" if is_noticed else "NOT    "
            print(f"{verdict} {took_s:4.0f} s  {place}: {before[:60]!r} -> {change.text[:60]!r}", flush=True)
    print(f"{wanted.room}: {noticed} of {len(chosen)} changes noticed ({len(possible)} possible, seed {wanted.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
