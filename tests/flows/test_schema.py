"""The JSON Schema for editors, and the reference, say what the models say: no key more, none less."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from shotclock.core.limits import format_duration
from shotclock.core.validation import Part
from shotclock.flows.check import _finally_check as finally_check
from shotclock.flows.check import _template_check as template_check
from shotclock.flows.check import lint
from shotclock.flows.file import _env_files as env_files
from shotclock.flows.file import loader, shell_quoting, yaml_reader
from shotclock.flows.file.loader import load_file, load_text
from shotclock.flows.file.schema import ConcurrencyPart, DefaultsPart, InputPart, ToolPart, WorkflowFile, json_schema
from shotclock.flows.report import history
from shotclock.flows.steps import ai
from shotclock.flows.steps.ai_models import AiLimits, AiPart, AiServer
from shotclock.flows.steps.provider import STEP_TYPES, ArtifactPath, Backoff, Reaction, StepPart, StepRetry
from shotclock.people.notify.entries import NotifyPart, SmtpPart
from tests.flows.test_lint import CASES
from tests.flows.test_loader import NEAR_MISSES, TREES, WRONG
from tests.flows.test_step_clocks import LEAST
from tests.rows import row

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples" / "flows").glob("*.yaml"))
PAGE = (ROOT / "docs" / "reference" / "workflow.md").read_text("utf-8")

SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def read(text: str) -> Any:
    """By somebody else's reader, as JSON."""
    return json.loads(json.dumps(YAML(typ="safe", pure=True).load(text)))


# --- JSON Schema ------------------------------------------------------------------------------------------


def test_it_is_a_json_schema_and_json() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


def test_the_least_of_every_kind_is_accepted() -> None:
    for kind in LEAST:
        with row(kind):
            assert VALIDATOR.is_valid({"steps": {"a": {"type": kind, **LEAST[kind]}}})
            for key in LEAST[kind]:
                less = {name: value for name, value in LEAST[kind].items() if name != key}
                if (kind, key) not in (
                    ("mcp", "url"),
                    ("ai", "prompt"),
                    ("ui", "execution"),
                ):  # that one of two is there is checked by `check` alone
                    assert not VALIDATOR.is_valid({"steps": {"a": {"type": kind, **less}}})


def test_every_near_miss_is_refused() -> None:
    for text, field, meant in NEAR_MISSES.values():
        with row(text, field, meant):
            assert not VALIDATOR.is_valid(read(text))


# What only `check` knows: what is a duration, a character or an alternative.
BEYOND = {"two servers", "no server", "an empty dependency", "half an alternative", "half a character"}


def test_every_wrong_value_is_refused() -> None:
    for text, field, message in WRONG.values():
        with row(text, field, message):
            if not any(WRONG[name] == (text, field, message) for name in BEYOND):
                assert not VALIDATOR.is_valid(read(text))


def test_whatever_has_the_right_shape_is_accepted() -> None:
    for text in [text for fires, quiet in CASES.values() for text in [*quiet, *(t for t, _ in fires)]]:
        with row(text):
            assert list(VALIDATOR.iter_errors(read(text))) == []


def test_every_key_is_there_under_all_its_names_and_not_under_two_at_once() -> None:
    for model in [WorkflowFile, ToolPart, *(each.schema for each in STEP_TYPES.values())]:
        with row(model):
            part = SCHEMA if model is WorkflowFile else SCHEMA["$defs"][model.__name__]
            assert set(part["properties"]) == {key for name in model.model_fields for key in model.keys_of(name)}
            assert part["additionalProperties"] is False


def test_one_key_under_two_names_is_refused() -> None:
    step = {"exec": "x"}
    assert VALIDATOR.is_valid({"steps": {"a": step}})
    assert VALIDATOR.is_valid({"checks": {"a": step}})
    assert not VALIDATOR.is_valid({"steps": {"a": step}, "checks": {"a": step}})
    assert not VALIDATOR.is_valid({"steps": {"a": {**step, "needs": "b", "depends_on": "b"}}})


@given(TREES.map(lambda inner: {"steps": {"a": {"exec": "x", "on_fail": inner}, "b": inner}}))
def test_what_check_accepts_the_schema_accepts(tree: Any) -> None:
    text = json.dumps(tree)
    loaded = load_text(text.encode())
    if loaded.workflow is not None:
        assert list(VALIDATOR.iter_errors(tree)) == []


# --- examples ---------------------------------------------------------------------------------------------


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_an_example_is_accepted_by_the_schema_and_nothing_is_said_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in EXAMPLES:
        with row(file):
            monkeypatch.setenv("OPENAI_API_KEY", "of nobody")
            assert list(VALIDATOR.iter_errors(read(file.read_text("utf-8")))) == []
            assert lint.lint(load_file(file)) == []


def test_an_example_says_in_its_first_line_what_it_shows() -> None:
    for file in EXAMPLES:
        with row(file):
            assert file.read_text("utf-8").startswith("# ")


# --- the reference ----------------------------------------------------------------------------------------


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a table below a heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    tables = re.findall(r"(?:^\|.*\n)+", found[1], re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in tables[number].splitlines()[2:]]


def documented(rows: list[list[str]]) -> dict[tuple[str, ...], str]:
    return {tuple(re.findall(r"`([^`]+)`", row[0])): row[1] for row in rows}


def declared(model: type[Part], but: type[Part] | None = None) -> dict[tuple[str, ...], str]:
    left_out = () if but is None else but.model_fields
    return {
        tuple(model.keys_of(name)): "required" if info.is_required() else default(info.default)
        for name, info in model.model_fields.items()
        if name not in left_out
    }


def default(value: Any) -> str:
    return f"`{json.dumps(value)}`" if isinstance(value, str | int | float | bool) else "–"


def test_every_key_is_in_the_reference_with_its_default_and_no_other() -> None:
    for heading, number, model in [
        ("The file", 0, WorkflowFile),
        ("Every step", 0, StepPart),
        ("Reactions", 0, Reaction),
        ("Reactions", 1, StepRetry),
        ("Reactions", 2, Backoff),
        ("Concurrency", 0, ConcurrencyPart),
        ("Artifacts", 0, ArtifactPath),
        ("Tools", 0, ToolPart),
        ("Notify", 0, NotifyPart),
        ("Notify", 1, SmtpPart),
        ("Inputs", 0, InputPart),
        ("Defaults", 0, DefaultsPart),
        ("The ai block", 0, AiPart),
        ("Servers of an agent", 0, AiServer),
        ("Limits of an agent", 0, AiLimits),
    ]:
        with row(heading, number, model):
            assert documented(table(heading, number)) == declared(model)


def test_every_key_of_a_kind_is_in_the_reference_with_its_default_and_no_other() -> None:
    for kind in STEP_TYPES:
        with row(kind):
            assert documented(table(kind)) == declared(STEP_TYPES[kind].schema, but=StepPart)


def test_the_kinds_are_in_the_reference_as_they_are() -> None:
    lasts = {None: "the run's", 0: "none"}
    units = {"s": "seconds", "ms": "milliseconds"}
    assert table("Kinds of steps") == [
        [
            f"`{kind.name}`",
            kind.summary,
            f"`{kind.timeout_key}`",
            units[kind.unit],
            lasts.get(kind.default_ms) or format_duration(kind.default_ms or 0),
        ]
        for kind in STEP_TYPES.values()
    ]


MODULES = (env_files, finally_check, lint, loader, template_check, yaml_reader, ai, shell_quoting, history)


def test_every_rule_is_in_the_reference_and_no_other() -> None:
    source = "".join(Path(module.__file__ or "").read_text("utf-8") for module in MODULES)
    rules = set(
        re.findall(
            r"\"((?:schema|graph|clock|budget|template|shell|env|tool|human|nested|file|ai|input|http|git|function|history|finally)/[a-z-]+)\"",
            source,
        )
    )
    told = {name for names in documented(table("What check finds")) for name in names}
    assert {rule for rule in rules if not rule.startswith("file/")} == told - {"file/…"}
    assert "file/…" in told


def test_every_limit_in_the_reference_is_the_real_one() -> None:
    for said in (
        f"{loader.SIZE_LIMIT // 1_000_000} MB",
        f"{yaml_reader.DEPTH_LIMIT} levels deep",
        f"{yaml_reader.NODE_LIMIT:,} values",
        f"Past {loader.FINDINGS_LIMIT} of",
        f"more than {lint.NESTING_LIMIT} files deep",
        f"more than {lint.NESTED_FILES_LIMIT} files",
    ):
        assert said in PAGE, said
