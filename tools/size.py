"""Print how large and how plain the code is, beside the limits that this project has set itself.

A limit is decided before code is written. It is not raised to fit what was written.

python tools/size.py          the table; exits 1 if a limit is exceeded
python tools/size.py --words  the sentences that name a thing by a clause, worst first
python tools/size.py --waist  the names of the lower rooms that two products or more use
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "shotclock"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# A clause in place of a noun: "what was approved", "whoever asked", "what became of it". The count is a thermometer:
# a sentence may match and be fine.
CLAUSES = re.compile(
    r"(?:^|[.:;,(] |\band |\bof |\bto |\bwith |\bfor |\bin )[Ww]hat (?:is|are|has|have|was|were|had|would|may|must|can|"
    r"cannot|will|it|they|he|she|others|somebody|nobody|whoever|became|becomes|comes|stays|goes|belongs|does|did|the)\b"
    r"|\b[Ww]hom?ever\b|\b[Ww]hatever\b|\b[Nn]obody\b|\b[Ss]omebody\b"
    r"|\b(?:becomes?|became|comes?|came) of\b|\b(?:is|are|was|were|be) (?:told|said)\b"
    r"|\b[Ss]tands?\b|\b[Gg]o(?:es)? on\b|\bwent on\b|^(?:Who|Whose|Whom)\b"
)
MESSAGE_WORDS = 5  # A string of fewer words is a key, not a message.

# The lines that each room may have. Only the text of an issue may raise one.
ROOMS = {
    "core": 4_500,
    "supervise": 4_600,
    "store": 3_400,
    "worker": 3_000,
    "calls": 5_500,
    "net": 1_000,
    "terminal": 1_800,
    "people": 3_900,
    "dispatch": 2_000,
    "commands": 4_600,
    "agents": 2_000,
    "apps": 9_500,
    "wrap": 6_700,
    "ui": 5_000,
    "flows": 21_400,
    "temporal": 3_600,
    "top": 1_000,
}
BELOW_PRODUCTS = list(ROOMS)[:9]
PRODUCTS = list(ROOMS)[9:-1]

Row = tuple[str, float, float]
Text = tuple[Path, int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_texts(path: Path) -> Iterator[Text]:
    """Yield docstrings, messages and comments of a module."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = {
        id(part.value)
        for node in ast.walk(tree)
        for part in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
    }
    inside_f_strings = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part != node
    }
    for node in ast.walk(tree):
        if id(node) in inside_f_strings:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        is_message = len(text.split()) >= MESSAGE_WORDS and "\n    " not in text
        if id(node) in docstrings or is_message:
            yield path, node.lineno, " ".join(text.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "type: ignore" not in token.string and "noqa" not in token.string:
            yield path, token.start[0], token.string.lstrip("# ")


def markdown_texts(path: Path) -> Iterator[Text]:
    """Yield the paragraphs of a page, without code blocks."""
    is_code, paragraph, start = False, list[str](), 1
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.startswith("```"):
            is_code = not is_code
        if is_code or not line.strip() or line.startswith("```"):
            if paragraph:
                yield path, start, " ".join(paragraph)
            paragraph, start = [], number + 1
        else:
            paragraph.append(line.strip())


def word_count(texts: list[Text]) -> int:
    """Count the words of texts."""
    return sum(len(text.split()) for _, _, text in texts)


def clauses_per_thousand(texts: list[Text]) -> float:
    """Count the clauses that replace nouns, per thousand words."""
    return 1000 * sum(len(CLAUSES.findall(text)) for _, _, text in texts) / max(1, word_count(texts))


def parameter_count(function: Function) -> int:
    """Count the parameters of a function, without self."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def inner_imports(tree: ast.Module) -> int:
    """Count the import statements inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return len(
        {id(node) for each in functions for node in ast.walk(each) if isinstance(node, ast.Import | ast.ImportFrom)}
    )


def call_fields(trees: dict[Path, ast.Module]) -> int:
    """Count the annotated fields of the class `Call`."""
    for node in ast.walk(trees[PACKAGE / "calls" / "call.py"]):
        if isinstance(node, ast.ClassDef) and node.name == "Call":
            return sum(isinstance(part, ast.AnnAssign) for part in node.body)
    raise LookupError("calls/call.py has no class Call")


def room_of(path: Path) -> str:
    """Return the folder below the package; "top" for its own modules, the public kit and the words of FastMCP."""
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in ROOMS else "top"


def names_through_the_waist(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of the rooms below `commands` that two products or more use.

    An attribute of a module that is imported whole, such as `kernel.is_alive`, counts as a name.
    """
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in trees}
    users: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        room = room_of(path)
        if room not in PRODUCTS:
            continue
        package, whole = path.relative_to(PACKAGE).parent.parts, dict[str, str]()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            if base.partition(".")[0] not in BELOW_PRODUCTS and base:
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                if full in modules:
                    whole[alias.asname or alias.name] = full
                elif base:
                    users[full].add(room)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
                users[f"{whole[node.value.id]}.{node.attr}"].add(room)
    return {name for name, rooms in users.items() if len(rooms) > 1 and name.partition(".")[0] in BELOW_PRODUCTS}


def measurements() -> list[Row]:
    """Return (name, measured, limit) of each row."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lines: Counter[str] = Counter()
    for path in trees:
        lines[room_of(path)] += len(path.read_text().splitlines())
    modules_of_class = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules_of_class[node.name].add(path)
    source_texts = [text for path in trees for text in python_texts(path)]
    docs_texts = [text for path in DOCS for text in markdown_texts(path)]
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return [
        *((f"lines of {room}", lines[room], budget) for room, budget in ROOMS.items()),
        ("lines of src", lines.total(), 83_500),
        ("files of src", len(trees), 340),
        ("lines of tests", tests, 80_000),
        ("names of lower rooms used by two products or more", len(names_through_the_waist(trees)), 200),
        ("words of docstrings, comments and messages", word_count(source_texts), 131_000),
        ("words of docs and README", word_count(docs_texts), 87_000),
        ("pages of docs", len(DOCS) - 1, 55),
        ("bytes of README", (ROOT / "README.md").stat().st_size, 8_192),
        ("words of docs/design.md", len((ROOT / "docs/design.md").read_text().split()), 1_800),
        ("clauses for nouns per 1,000 words, src", clauses_per_thousand(source_texts), 1.5),
        ("clauses for nouns per 1,000 words, docs and README", clauses_per_thousand(docs_texts), 1.5),
        ("imports inside functions", sum(map(inner_imports, trees.values())), 150),
        ("class names used in more than one module", sum(len(paths) > 1 for paths in modules_of_class.values()), 4),
        ("fields of Call", call_fields(trees), 18),
        (
            "functions with more than 9 parameters",
            sum(isinstance(node, Function) and parameter_count(node) > 9 for node in nodes),
            3,
        ),
        ("Any", sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes), 1_200),
        ("asserts", sum(isinstance(node, ast.Assert) for node in nodes), 40),
    ]


def print_clauses() -> None:
    """Print the texts with clauses for nouns, densest first."""
    texts = [text for path in sorted(SOURCE.rglob("*.py")) for text in python_texts(path)]
    texts += [text for path in DOCS for text in markdown_texts(path)]
    found = [(len(CLAUSES.findall(text)) / max(10, len(text.split())), path, line, text) for path, line, text in texts]
    for density, path, line, text in sorted(found, reverse=True):
        if density:
            print(f"{path.relative_to(ROOT)}:{line}: {text[:200]}")


def print_waist() -> None:
    """Print the names that pass through the waist."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    print("\n".join(sorted(names_through_the_waist(trees))))


def main() -> int:
    """Print the table, the clauses or the waist, and return the exit code."""
    if "--words" in sys.argv[1:]:
        print_clauses()
        return 0
    if "--waist" in sys.argv[1:]:
        print_waist()
        return 0
    exceeded = 0
    print(f"{'':52}{'now':>9}{'limit':>9}")
    for name, measured, limit in measurements():
        exceeded += measured > limit
        number = f"{measured:,.1f}" if isinstance(measured, float) else f"{measured:,}"
        print(f"{name:52}{number:>9}{limit:>9,}{'  exceeded' if measured > limit else ''}")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
