"""Whatever value comes from anywhere: the run ends with a valid envelope, only the value's own step may fail, and what
was printed is what is handed on."""

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shotclock.core.envelope import Envelope, make_whole
from shotclock.core.errors import Failure
from shotclock.core.json_values import DEPTH_LIMIT, is_deeper_than
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = pytest.mark.slow

Run = Callable[..., Envelope]
Web = Callable[[str, bytes], str]
Validate = Callable[[dict[str, Any]], dict[str, Any]]

NUMBERS = st.sampled_from(
    ["0", "-0", "-0.0", "3.10", "12e4567", "1e999", "-1e999", "1e-999", "5e-324", "1.7976931348623157e308", "1e22",
     "9007199254740993", "9007199254740993.0", "0.1000000000000000055511151231257827", "1E5", "9" * 400, "9" * 5000]
) | st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)  # fmt: skip
STRINGS = st.text(st.characters(), max_size=20).map(json.dumps) | st.sampled_from(
    ['"\\ud800"', '"\\udc80x"', '"\ue0000\ue001"', '"\U0010fffd{{ x }}"', '"\\u0000"', json.dumps("x" * 100_000)]
)
DEEP = st.sampled_from([10, 199, 201, 260, 990, 50_000]).map(lambda levels: "[" * levels + "]" * levels)
JSON_TEXTS = st.recursive(
    NUMBERS | STRINGS | st.sampled_from(["true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda parts: f"[{','.join(parts)}]")
        | st.dictionaries(STRINGS, inner, max_size=3).map(
            lambda parts: "{" + ",".join(f"{key}: {value}" for key, value in parts.items()) + "}"
        )
    ),
    max_leaves=6,
)
STRUCTURES = st.lists(JSON_TEXTS, max_size=3).map(lambda parts: f'{{"v": [{",".join(parts)}]}}')
PRINTED = (
    JSON_TEXTS
    | STRUCTURES
    | DEEP
    | st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30)
    | st.sampled_from(["", "[NaN]", "-Infinity", "{no", "[1] [2]", "007", "{{ x }}", "yes", "\ue0000\ue001", "{}"])
)
BATCH = st.lists(st.tuples(PRINTED, STRUCTURES), min_size=4, max_size=4)
# What a step may fail with because of a value. Our own bugs and running out of time are not among them.
FAIR = {"ARG_ERROR", "STEP_INVALID", "OUTPUT_INVALID", "TOOL_FAILED", "TEMPLATE_FAILED", "COMMAND_FAILED"}
BOUNDS = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}

APP = """
from typing import Any

import shotclock

app = shotclock.App("any-value")


@app.command
def back(v: Any) -> Any:
    return {"v": v}
"""


class Number(str):
    """A number as it was written."""


def same(written: Any, held: Any) -> bool:
    """Whether a value is the one that was written."""
    match written:
        case Number():
            literal = str(written)
            if isinstance(held, str):
                return held == literal
            if isinstance(held, bool) or not isinstance(held, int | float):
                return False
            digits = max(1, len(literal.lower().partition("e")[0].replace(".", "").lstrip("-0")))
            shown = str(held) if isinstance(held, int) else format(held, f".{digits}g")
            return Decimal(shown) == Decimal(literal)
        case dict():
            return isinstance(held, dict) and list(written) == list(held) and all(
                same(written[key], held[key]) for key in written
            )  # fmt: skip
        case list():
            return isinstance(held, list) and len(written) == len(held) and all(map(same, written, held))
    return type(written) is type(held) and bool(written == held)


def refuse(name: str) -> None:
    raise ValueError(name)


def strictly_read(envelope: Envelope, validate: Validate) -> Any:
    """Read it as those do who take nothing but JSON in UTF-8, and a contract by its word."""
    read: dict[str, Any] = json.loads(envelope.to_json(), parse_constant=refuse)
    json.dumps(read, ensure_ascii=False).encode()
    return validate(read)


def is_handed_on(printed: str, output: Any) -> bool:
    if printed.lstrip()[:1] in ("{", "["):
        try:
            written = json.loads(printed, parse_int=Number, parse_float=Number, parse_constant=refuse)
        except (ValueError, RecursionError):
            pass
        else:
            # Too deep is text, and so is handed on as it was printed.
            return bool(same(written, output)) or output == printed.removesuffix("\n")
    return bool(output == printed.removesuffix("\n"))


def flow(batch: list[tuple[str, str]], folder: Path, web: Web, speaking: Path) -> str:
    steps = ["beside: {exec: sleep 0.3; echo kept}"]
    for number, (printed, structure) in enumerate(batch):
        (folder / f"printed{number}").write_bytes(printed.encode("utf-8"))
        told = json.dumps({"content": [{"type": "text", "text": printed}]})
        (folder / f"told{number}").write_text(told)
        (folder / f"structured{number}").write_text(f'{{"content": [], "structuredContent": {structure}}}')
        (folder / "echo").write_text('{"content": [{"type": "text", "text": ARGUMENTS}]}')
        value, server = f'"{{{{ outputs.p{number} }}}}"', f"type: mcp, command: {sys.executable}, method: say"
        url = web("application/json", printed.encode())
        steps += [
            f"p{number}: {{exec: cat printed{number}}}",
            f"behind{number}: {{exec: cat > got{number}, stdin: {value}, depends_on: p{number}}}",
            f"word{number}: {{exec: 'printf %s {value} > word{number}', depends_on: p{number}}}",
            f"fetched{number}: {{type: http_client, url: '{url}'}}",
            f"told{number}: {{{server}, args: ['{speaking}', told{number}]}}",
            f"structured{number}: {{{server}, args: ['{speaking}', structured{number}]}}",
            f"given{number}: {{{server}, args: ['{speaking}', echo], "
            f"arguments: {{v: {value}}}, depends_on: p{number}}}",
            f"called{number}: {{type: function, target: 'any_value.py:app', command: back, "
            f"arguments: {{v: {value}}}, depends_on: p{number}}}",
        ]
    return "max_parallelism: 4\nsteps:\n" + "".join(f"  {line}\n" for line in steps)


def check_batch(
    batch: list[tuple[str, str]], run: Run, store: Store, web: Web, speaking: Path, folder: Path, validate: Validate
) -> None:
    (folder / "any_value.py").write_text(APP)
    envelope = run(flow(batch, folder, web, speaking))
    assert isinstance(envelope.data, dict)
    stored = store.runs.get(envelope.data["run_id"])
    assert stored is not None and stored.ended_at is not None
    assert step(envelope, "beside")["output"] == "kept"
    for name, status in statuses(envelope).items():
        error = step(envelope, name).get("error") or {}
        assert status in ("succeeded", "failed", "skipped"), (name, status, error)
        assert status != "failed" or error["code"] in FAIR, (name, error)
        assert status != "skipped" or statuses(envelope)[f"p{name[-1]}"] == "failed", name
    for number, (printed, structure) in enumerate(batch):
        for name in (f"p{number}", f"fetched{number}", f"told{number}"):
            said = step(envelope, name)
            assert said["status"] == "failed" or is_handed_on(printed, said["output"]), (name, printed, said["output"])
        assert step(envelope, f"p{number}")["status"] == "succeeded"
        output = step(envelope, f"p{number}")["output"]
        if step(envelope, f"behind{number}")["status"] == "succeeded":
            got = (folder / f"got{number}").read_text("utf-8", "surrogateescape")
            assert got == output if isinstance(output, str) else json.dumps(json.loads(got)) == json.dumps(output)
        if step(envelope, f"word{number}")["status"] == "succeeded":
            got = (folder / f"word{number}").read_text("utf-8", "surrogateescape")
            assert got == output if isinstance(output, str) else json.dumps(json.loads(got)) == json.dumps(output)
        for name in (f"given{number}", f"called{number}"):
            said = step(envelope, name)
            # An App's own results have no half characters, and a warning where they had.
            given = [json.dumps(each) for each in ({"v": output}, make_whole({"v": output}))]  # 1, 1.0 and true differ
            shown = json.dumps(said["output"])
            if name == f"given{number}" and isinstance(said["output"], str):
                # The object around a value of the deepest kind is too deep, so it is text.
                assert is_deeper_than(DEPTH_LIMIT, {"v": output}), (name, output, said["output"])
                shown = json.dumps(json.loads(said["output"]))
            assert said["status"] == "failed" or shown in given, (name, output, said["output"])
        said = step(envelope, f"structured{number}")
        assert said["status"] == "failed" or is_handed_on(structure, said["output"]), (structure, said["output"])
    # Last, because it makes text whole.
    assert strictly_read(envelope, validate)["data"]["steps"].keys() == statuses(envelope).keys()


def test_values_about_as_deep_as_the_limit_are_handed_on_or_fail_their_own_step(
    run: Run, store: Store, web: Web, speaking: Path, tmp_path: Path, validate_envelope: Validate
) -> None:
    depths = [DEPTH_LIMIT - 1, DEPTH_LIMIT, DEPTH_LIMIT + 1, DEPTH_LIMIT + 2]
    lists = ["[" * depth + "]" * depth for depth in depths]
    objects = ['{"v": ' * depth + "1" + "}" * depth for depth in depths]
    for printed in (lists, objects):
        batch = [(text, f'{{"v": {text}}}') for text in printed]
        check_batch(batch, run, store, web, speaking, tmp_path, validate_envelope)


@settings(max_examples=3, **BOUNDS)
@given(batch=BATCH)
def test_any_value_from_anywhere_is_handed_on_or_fails_its_own_step(
    batch: list[tuple[str, str]],
    run: Run,
    store: Store,
    web: Web,
    speaking: Path,
    tmp_path: Path,
    validate_envelope: Validate,
) -> None:
    check_batch(batch, run, store, web, speaking, tmp_path, validate_envelope)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(max_examples=100, **BOUNDS)
@given(batch=BATCH)
def test_many_values_from_anywhere_are_handed_on_or_fail_their_own_steps(
    batch: list[tuple[str, str]],
    run: Run,
    store: Store,
    web: Web,
    speaking: Path,
    tmp_path: Path,
    validate_envelope: Validate,
) -> None:
    check_batch(batch, run, store, web, speaking, tmp_path, validate_envelope)


@settings(max_examples=4, **BOUNDS)
@given(given_=st.lists(PRINTED, min_size=6, max_size=6))
def test_any_value_as_an_input_is_handed_on_or_refused_before_anything_runs(
    given_: list[str], run: Run, tmp_path: Path, validate_envelope: Validate
) -> None:
    for kind in ("any", "string"):
        names = [f"v{number}" for number in range(len(given_))]
        inputs = "".join(f"  {name}: {{type: {kind}}}\n" for name in names)
        outputs = "".join(f"  {name}: '{{{{ inputs.{name} }}}}'\n" for name in names)
        text = f"inputs:\n{inputs}outputs:\n{outputs}steps: {{a: {{exec: 'true'}}}}"
        envelope = run(text, inputs=dict(zip(names, given_, strict=True)))
        assert envelope.ok and list(envelope.data["outputs"].values()) == given_
        strictly_read(envelope, validate_envelope)
    for value in given_:
        kind = "object" if value.lstrip().startswith("{") else "array"
        text = f"inputs: {{v: {{type: {kind}}}}}\noutputs: {{v: '{{{{ inputs.v }}}}'}}\nsteps: {{a: {{exec: 'true'}}}}"
        try:
            envelope = run(text, inputs={"v": value})
        except Failure as refused:
            assert refused.code == "ARG_ERROR"
        else:
            assert is_handed_on(value, envelope.data["outputs"]["v"]), value
