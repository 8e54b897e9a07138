"""The rules of the tree (docs/design.md), read from the syntax of every file under src/shotclock.

import-linter knows who imports whom; this knows what is *used*. Names are resolved through the file's imports
(`from time import monotonic as now` still reads time), and a mention counts as much as a call, because a
function that is passed on is called later.
"""

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "shotclock"
LINT_IMPORTS_TIMEOUT_S = 60  # takes about a second; only a broken install would run this out


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The absolute modules a file imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The imported things (and `print`) a file reads, by their full dotted names, with their lines."""
    known = {"print": "builtins.print"}
    inner = set()  # `sys.stdout` inside `sys.stdout.flush`: only the longest chain is reported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Attribute):
            inner.add(node.value)

    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or node in inner:
            continue
        if not isinstance(node.ctx, ast.Load):  # `sys.stdout = …` in a worker redirects, it does not write
            continue
        chain, leaf = [], node
        while isinstance(leaf, ast.Attribute):
            chain.append(leaf.attr)
            leaf = leaf.value
        if isinstance(leaf, ast.Name) and leaf.id in known:
            yield node.lineno, ".".join([known[leaf.id], *reversed(chain)])


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the words of a program: the strings that are no docstring, and the modules it imports."""
    bodies = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    spoken = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, bodies)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken:
            yield node.lineno, node.value
    yield from imports(tree)


# rule → (what is looked at, what may not occur in it, files it concerns; all paths relative to src/shotclock)
RULES = {
    "core reads no time, touches no OS, does not log": (
        imports,
        r"(asyncio|logging|os|select|signal|socket|subprocess|threading|time)(\..*)?",
        r"core/.*",
    ),
    "only supervise, worker and calls start, signal or kill": (
        uses,
        r"os\.(fork|forkpty|kill|killpg|system|popen|posix_spawnp?|spawn[lv]p?e?|exec[lv]p?e?)"
        r"|signal\.(pidfd_send_signal|pthread_kill|raise_signal)"
        r"|subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)|multiprocessing\..*"
        r"|asyncio\.create_subprocess_(exec|shell)"
        r"|anyio\.(open_process|run_process)",
        r"(?!supervise/|worker/|calls/).*",
    ),
    # What reads and writes state goes through Store: another database is a change of store/ alone.
    "only store speaks SQL": (
        imports,
        r"sqlite3(\..*)?",
        r"(?!store/).*",
    ),
    # All others speak SQL that any database understands: another one is a change of _database.py, _schema.py
    # (its tables) and store.py (which one is opened).
    "only _database.py and _schema.py speak SQLite": (
        texts,
        r"(?s)sqlite3(\..*)?|.*(?:\b(?:INSERT OR|REPLACE INTO|INDEXED BY|WITHOUT ROWID|PRAGMA|AUTOINCREMENT|VACUUM|GLOB"
        r"|BEGIN IMMEDIATE|rowid|_rowid_|oid|sqlite_\w+|strftime|julianday|typeof|ifnull|iif|total_changes"
        r"|last_insert_rowid|group_concat|json_\w+|datetime\(|LIMIT -1)\b"
        r"|\b(?:max|min)\([^()]*(?:\([^()]*\)[^()]*)*,"  # of two values, which elsewhere is `greatest`
        r"|\bLIMIT -|\bIS \?|\bWHERE 1$|[\s(=<>,]:[a-z]\w*\b(?!:)).*",
        r"store/(?!_database\.py$|_schema\.py$).*",
    ),
    # Asking stdout something or flushing it writes nothing of ours.
    "only terminal and the command lines of products print": (
        uses,
        r"builtins\.print|sys\.(__)?stdout(__)?(?!\.(encoding|fileno|flush|isatty)$)(\..*)?",
        r"(?!terminal/|commands/|agents/|main\.py$|(.*/)?cli(_\w+)?\.py$|(.*/)?cli/).*",
    ),
    "private parts of asyncio are not used": (uses, r"asyncio\.(.*\.)?_.*", r".*"),
    "only supervise/clock.py reads time": (
        uses,
        r"time\.(monotonic|time|perf_counter|clock_gettime)(_ns)?"
        r"|datetime\.datetime\.(now|utcnow|today)"
        r"|datetime\.date\.today",
        r"(?!supervise/clock\.py$).*",
    ),
}


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache  # three rules look at the same
def looked_at(look_at: Callable[[ast.AST], Iterator[tuple[int, str]]], source: str) -> list[tuple[int, str]]:
    return list(look_at(parsed(source)))


def offences(rule: str, path: str, source: str) -> list[str]:
    look_at, forbidden, concerned = RULES[rule]
    if not re.fullmatch(concerned, path):
        return []
    found = looked_at(look_at, source)
    return [f"{path}:{line}: {name}" for line, name in found if re.fullmatch(forbidden, name)]


@functools.cache
def sources() -> dict[str, str]:
    """The text of every file by its path."""
    return {file.relative_to(SRC).as_posix(): file.read_text("utf-8") for file in sorted(SRC.rglob("*.py"))}


def test_the_tree_keeps_every_rule() -> None:
    layers = {path.split("/")[0] for path in sources()}
    assert {"core", "supervise", "apps"} <= layers, "the walk looks in the wrong place"
    broken = {rule: [o for path, source in sources().items() for o in offences(rule, path, source)] for rule in RULES}
    assert not any(broken.values()), {rule: found for rule, found in broken.items() if found}


PURE, STOPPING, SQL, SQLITE, PRINTING, PRIVATE, TIME = RULES


BROKEN = [
    (PURE, "core/a.py", "import os.path"),
    (PURE, "core/a.py", "def f():\n    from time import sleep"),
    (STOPPING, "people/a.py", "import os\nos.kill(1, 9)"),
    (STOPPING, "people/a.py", "from subprocess import run as r\nr(['true'])"),
    (STOPPING, "people/a.py", "import os\nstop = os.killpg"),
    (STOPPING, "main.py", "import asyncio\nasync def f(): await asyncio.create_subprocess_exec('true')"),
    (SQL, "dispatch/a.py", "import sqlite3"),
    (SQL, "dispatch/a.py", "def f():\n    from sqlite3 import connect"),
    (SQLITE, "store/a.py", "import sqlite3"),
    (SQLITE, "store/a.py", "from sqlite3 import Connection"),
    (SQLITE, "store/a.py", "t.execute('INSERT OR IGNORE INTO a VALUES (?)', (1,))"),
    (SQLITE, "store/a.py", "t.execute(f'SELECT {x} FROM a ORDER BY a.rowid DESC')"),
    (SQLITE, "store/a.py", "t.execute('UPDATE a SET seq = max(coalesce(seq, 0), ?)', (1,))"),
    (SQLITE, "store/a.py", "t.execute('SELECT x FROM a WHERE n = ifnull(?, n)', (1,))"),
    (SQLITE, "store/a.py", "t.execute('SELECT x FROM a WHERE n = :n', {'n': 1})"),
    (PRINTING, "supervise/a.py", "print('x', file=None)"),
    (PRINTING, "apps/server/a.py", "import sys\nsys.stdout.write('x')"),
    (PRINTING, "flows/client.py", "import sys\nout = sys.stdout"),
    (PRINTING, "supervise/a.py", "from sys import stdout\nstdout.buffer.write(b'x')"),
    (PRIVATE, "calls/a.py", "import asyncio\nasyncio.tasks._enter_task(None, None)"),
    (PRIVATE, "apps/a.py", "from asyncio import _get_running_loop as now\nnow()"),
    (TIME, "calls/runtime.py", "import time as t\nt.monotonic_ns()"),
    (TIME, "calls/runtime.py", "from time import perf_counter\ndef f(now=perf_counter): ..."),
    (TIME, "apps/a.py", "from datetime import datetime, UTC\ndatetime.now(UTC).isoformat()"),
]
ALLOWED = [
    (PURE, "supervise/a.py", "import os"),
    (PURE, "core/a.py", "from .time import Instant"),
    (STOPPING, "supervise/a.py", "import os\nos.kill(1, 9)"),
    (STOPPING, "people/a.py", "import os\nos.getpid()"),
    (SQL, "store/a.py", "import sqlite3\nfrom ._database import Database"),
    (SQLITE, "store/_schema.py", "FIRST = 'CREATE TABLE a (seq INTEGER PRIMARY KEY AUTOINCREMENT)'"),
    (SQLITE, "store/a.py", "'Nothing here needs a rowid.'\nt.execute('SELECT max(seq) FROM a WHERE n = ?', (1,))"),
    (SQLITE, "store/a.py", "t.execute('INSERT INTO a VALUES (?) ON CONFLICT (id) DO NOTHING', (1,))"),
    (PRINTING, "apps/cli_serve.py", "print('x')"),
    (PRINTING, "flows/cli/run.py", "print('x')"),
    (PRINTING, "supervise/a.py", "import sys\nsys.stdout.flush(); sys.stdout = None"),
    (PRINTING, "supervise/a.py", "import sys\nsys.stderr.write('x')"),
    (TIME, "supervise/clock.py", "import time\ntime.monotonic()"),
    (TIME, "supervise/a.py", "import time\ntime.sleep(0)"),
    (TIME, "core/a.py", "def f(time): return time.monotonic()"),
]


def test_a_breach_is_found_and_what_is_allowed_is_left_alone() -> None:
    missed = [case for case in BROKEN if not offences(*case)]
    assert not missed
    assert not [case for case in ALLOWED if offences(*case)]


# --- a module without a leading underscore is the surface of its package ----------------------------------------


def private_imports(path: str, source: str) -> Iterator[str]:
    """Yield imports of a private module by a file outside the package that has it."""
    package = ["shotclock", *path.split("/")[:-1]]
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        module = [*base, *(node.module or "").split(".")] if node.module else base
        for name in (alias.name for alias in node.names):
            parts = [*module, name]
            private = next((at for at, part in enumerate(parts[1:], 1) if part.startswith("_")), None)
            if module[:1] != ["shotclock"] or private is None or parts[private].startswith("__"):
                continue
            owner = parts[:private]
            if private < len(module) or is_module(parts[: private + 1]):
                if package[: len(owner)] != owner:
                    yield f"{path}:{node.lineno}: {'.'.join(parts)}"


def is_module(parts: list[str]) -> bool:
    return f"{'/'.join(parts[1:])}.py" in sources()


def test_a_private_module_is_imported_only_inside_its_package() -> None:
    assert list(private_imports("apps/cli_x.py", "from .server import _tools"))
    assert list(private_imports("wrap/a.py", "def f():\n    from ..store._database import Database"))
    assert not list(private_imports("apps/server/x.py", "from ._tools import Tools\nfrom .._version import _x"))
    broken = [each for path, source in sources().items() for each in private_imports(path, source)]
    assert not broken, "move it to where both may use it, or make it a part of the surface"


def test_import_contracts_hold() -> None:
    beside_python = Path(sys.executable).parent
    lint_imports = shutil.which("lint-imports", path=beside_python) or shutil.which("lint-imports")
    assert lint_imports, "import-linter is not installed: make setup"
    ran = subprocess.run(
        [lint_imports, "--no-cache"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LINT_IMPORTS_TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout


def test_every_public_name_of_the_package_can_be_imported() -> None:
    """They are imported when first used, by the name of their module, which no type checker reads."""
    program = "import shotclock\nfor name in shotclock.__all__: getattr(shotclock, name)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LINT_IMPORTS_TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stderr


# --- one admission and one answer per call (design R1) ---------------------------------------------------------

# Who starts the clocks of a call, and why it is not `Runtime.begin` for them. The shorter, the better.
ADMITTING = {
    "calls/runtime.py": "begins every call of an operation, a command or a program",
    "calls/outcomes.py": "a call of a call whose arguments cannot be opened here",
    "commands/doctor.py": "the self-test, which is there before any runtime",
    "dispatch/job_client.py": "what is said of a job whose runner is gone",
    "commands/background_runner.py": "a command in the background, whose runner has no runtime",
    "people/auth.py": "requests to the inbox over HTTP, which run no operation",
    "flows/run/runs.py": "a run",
    "flows/run/_step_approval.py": "the approval of a step, which has no other clock",
    "temporal/_step_activity.py": "the run that a step of another process is in",
    "temporal/_engine.py": "what is said of a run on an engine that waits for people",
    "wrap/_failures.py": "a request of a client that its server did not answer: no event loop, no runtime",
    "commands/exec.py": "the blocking command line: no event loop, no runtime",
    "commands/timeout.py": "the same in the words of GNU timeout, which has no envelope",
    "terminal/subcommand.py": "every other command line: our subcommands, and what no call answers",
}
# Who makes an envelope of an outcome: those above, and who waits for such a call in a place of its own.
NOT_ANSWERING = ("calls/runtime.py", "commands/doctor.py", "temporal/_step_activity.py", "commands/timeout.py")
ANSWERING = {
    **{path: why for path, why in ADMITTING.items() if path not in NOT_ANSWERING},
    "flows/run/step_attempt.py": "a try of a step, which its provider carries out",
    "apps/server/_tool_calls.py": "the backstop, when the work of a call does not answer",
}
MAKING = {"calls/runtime.py": "`Answering`, which may have to store the answer before its span is recorded"}


def test_calls_are_admitted_and_answered_only_where_it_is_said_why() -> None:
    for name, allowed in (("admit", ADMITTING), ("answer", ANSWERING), ("make_envelope", MAKING)):
        found = {path for path, source in sources().items() if takes_from_call(source, name)}
        assert found == set(allowed), f"{name}: let the runtime or the dispatcher do it; what is gone leaves the list"


def takes_from_call(source: str, name: str) -> bool:
    """Whether a file has one of the two ends of a call from calls/call.py, however it is imported."""
    if not re.search(r"\bcall\b", source):  # parsing every file takes a second
        return False
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom):
            is_call = (node.module or "").split(".")[-1] == "call"
            if is_call and any(alias.name == name for alias in node.names):
                return True
            if any(alias.name == "call" for alias in node.names) and (node.module or "").split(".")[-1] in (
                "",
                "calls",
            ):
                return True
    return False


# --- one list of clocks ------------------------------------------------------------------------------------------


def lists_of_clocks(source: str) -> list[int]:
    """Return the lines with a collection of literals that names two clocks or more beside the timeout."""
    if sum(name in source for name in ("soft", "idle", "grace")) < 2:  # parsing every file takes a second
        return []
    kinds = ast.Tuple | ast.List | ast.Set
    found = [node for node in ast.walk(parsed(source)) if isinstance(node, kinds)]
    return [
        node.lineno
        for node in found
        if len({"soft", "idle", "grace"} & {getattr(each, "value", None) for each in node.elts}) > 1
    ]


def test_no_file_but_the_clocks_own_repeats_which_clocks_there_are() -> None:
    assert lists_of_clocks('_CLOCKS = ("timeout", "soft", "idle")') and not lists_of_clocks('("timeout", "grace")')
    files = {path: source for path, source in sources().items() if path != "core/limits.py"}
    broken = [f"{path}:{line}" for path, source in files.items() for line in lists_of_clocks(source)]
    assert not broken, "take the names from core/limits.py (CLOCK_NAMES, WORK_CLOCKS)"


# --- one list of versions of Python, and one place that gives wrappers their signatures ------------------------------


def test_the_versions_of_python_are_the_same_wherever_they_are_listed() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    (listed,) = re.findall(r"^PYTHONS := (.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    (tested,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    page = (ROOT / "docs/reference/stability.md").read_text("utf-8")
    assert classifiers == listed.split() == re.findall(r"[\d.]+", tested)
    assert f"Python {classifiers[0]} to {classifiers[-1]}" in page
    assert f"Python {classifiers[0]} to {classifiers[-1]}" in (ROOT / "Makefile").read_text("utf-8")


def test_only_one_module_wraps_functions_and_declares_their_annotations() -> None:
    """From Python 3.14 on the two ways to keep annotations undo each other."""
    ways = (r"functools import .*\bwraps\b", r"functools\.wraps", "__(annotations|signature)__ ?=", r"get_type_hints\(")
    written = re.compile("|".join(ways))
    found = {path for path, source in sources().items() if path != "core/signatures.py" and written.search(source)}
    assert found == {"core/json_values.py"}  # reads the hints of a class
