"""Print how large and how plain the code is, beside the limits that this project sets itself.

python tools/size.py          the table; exits 1 if a limit is exceeded
python tools/size.py --words  the sentences that name a thing by a clause, worst first
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
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
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == "Call":
                return sum(isinstance(part, ast.AnnAssign) for part in node.body)
    return 0


def measurements() -> list[tuple[str, float, float]]:
    """Return (name, measured, limit) of each row."""
    files = sorted(SOURCE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    modules_of_class = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules_of_class[node.name].add(path)
    source_texts = [text for path in files for text in python_texts(path)]
    docs_texts = [text for path in DOCS for text in markdown_texts(path)]
    # The limits of 0.2 were 52,000 lines, 170 files, 75,000 words and 1,000 times `Any`. Capabilities since then raised
    # them by their lines: waiting for input, `run` and `timeout` 1,800; background commands 2,100; `shotclock-sh` 550;
    # `agent` 1,400; `serve shell` 1,150; `wrap` with its policy and log 5,200, over HTTP 3,700, several servers 2,200,
    # its installation, the page and traces 1,700; content, resources and prompts 1,450; the kit for authors 1,900;
    # questions, tasks and authorisation 2,300, reloading 400; state and sync functions that share it 1,200; a tool for
    # each UI action, tabs, dialogs and frames 1,000; FastMCP's words 250; of workflows the advice
    # from past runs 850, the output of steps 900 and of all kinds of steps 650, lists of steps, matrix, env_file and
    # named outputs 400, `finally` 500, reruns and chosen steps 900, groups and artifacts 1,100, messages 950, the
    # import of files of four other tools 6,100; the demo 760; written types of attributes 70. The
    # new rules of design.md are R29c and R74 to R82.
    return [
        ("lines of Python in src", sum(len(path.read_text().splitlines()) for path in files), 94_500),
        ("files in src", len(files), 377),
        ("words of docstrings, comments and messages", word_count(source_texts), 138_000),
        ("clauses for nouns per 1,000 words, src", clauses_per_thousand(source_texts), 1.5),
        ("clauses for nouns per 1,000 words, docs and README", clauses_per_thousand(docs_texts), 1.5),
        ("imports inside functions", sum(map(inner_imports, trees.values())), 190),
        ("class names used in more than one module", sum(len(paths) > 1 for paths in modules_of_class.values()), 4),
        ("fields of Call", call_fields(trees), 18),
        (
            "functions with more than 9 parameters",
            sum(isinstance(node, Function) and parameter_count(node) > 9 for node in nodes),
            4,
        ),
        ("Any", sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes), 1_800),
        ("asserts", sum(isinstance(node, ast.Assert) for node in nodes), 40),
        ("words of docs/design.md", len((ROOT / "docs/design.md").read_text().split()), 5_800),
    ]


def print_clauses() -> None:
    """Print the texts with clauses for nouns, densest first."""
    texts = [text for path in sorted(SOURCE.rglob("*.py")) for text in python_texts(path)]
    texts += [text for path in DOCS for text in markdown_texts(path)]
    found = [(len(CLAUSES.findall(text)) / max(10, len(text.split())), path, line, text) for path, line, text in texts]
    for density, path, line, text in sorted(found, reverse=True):
        if density:
            print(f"{path.relative_to(ROOT)}:{line}: {text[:200]}")


def main() -> int:
    """Print the table, or the clauses, and return the exit code."""
    if "--words" in sys.argv[1:]:
        print_clauses()
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
