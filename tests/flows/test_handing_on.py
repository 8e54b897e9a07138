"""What was printed is what is handed on, and no value ends more than its step."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.flows.run import step_executor
from shotclock.store import _database as database
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]


@pytest.fixture
def speaks(tmp_path: Path, speaking: Path) -> Callable[..., str]:
    """A function that makes the keys of an `mcp` step whose server answers with that JSON text."""

    def speaks(result: str, *more: str) -> str:
        file = tmp_path / f"answer-{len(list(tmp_path.iterdir()))}.json"
        file.write_text(result)
        args = json.dumps([str(speaking), str(file), *more])
        return f"type: mcp, command: {sys.executable}, args: {args}, method: say"

    return speaks


# --- no value ends more than its step ---------------------------------------------------------------------


def test_a_word_that_looks_like_a_number_is_handed_on_as_it_was_printed(run: Run) -> None:
    envelope = run(
        """
        outputs: {tag: "{{ outputs.tag }}"}
        steps:
          beside: {exec: sleep 0.3; echo kept}
          tag: {exec: echo 12e4567}
          behind: {exec: 'echo "image:{{ outputs.tag }}"', depends_on: tag}
        """
    )
    assert envelope.ok and envelope.data["outputs"] == {"tag": "12e4567"}
    assert [step(envelope, name)["output"] for name in ("beside", "behind")] == ["kept", "image:12e4567"]


def test_a_number_out_of_range_in_anybodys_answer_is_kept_as_text_and_said(
    run: Run, web: Callable[[str, bytes], str], speaks: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "sums.py").write_text(
        "import shotclock\napp = shotclock.App('sums')\n\n@app.command\ndef infinite() -> dict:\n"
        "    return {'v': float('inf')}\n\n@app.command\ndef long() -> dict:\n    return {'v': 10**5000}\n"
    )
    text = json.dumps({"content": [{"type": "text", "text": '{"v": 1e999, "w": 1}'}]})
    structured = '{"content": [], "structuredContent": {"v": 1e999, "w": 1}}'
    envelope = run(
        f"""
        steps:
          beside: {{exec: sleep 1; echo kept}}
          printed: {{exec: 'echo ''{{"v": 1e999, "w": 1}}'''}}
          fetched: {{type: http_client, url: "{web("application/json", b'{"v": 1e999, "w": 1}')}"}}
          told: {{{speaks(text)}}}
          structured: {{{speaks(structured)}}}
          made: {{type: function, target: "sums.py:app", command: infinite}}
          long: {{type: function, target: "sums.py:app", command: long, continue_on_failure: true}}
          behind: {{exec: 'echo {{{{ outputs.fetched.v }}}} {{{{ outputs.told.w }}}}', depends_on: [fetched, told]}}
        """
    )
    assert envelope.ok, envelope.error
    assert step(envelope, "beside")["output"] == "kept" and step(envelope, "behind")["output"] == "1e999 1"
    for name in ("printed", "fetched", "told", "structured"):
        assert step(envelope, name)["output"] == {"v": "1e999", "w": 1}
        (notice,) = step(envelope, name)["warnings"]
        assert notice["code"] == "NUMBER_KEPT_AS_TEXT" and "1e999" in notice["message"]
    assert step(envelope, "made")["output"] == {"v": "inf"}


@pytest.mark.parametrize(
    "given", ['{"a": 1e999}', f"[{'9' * 5_000}]", '{"a": 9007199254740993.0}', "[NaN]", "[" * 300 + "]" * 300]
)
def test_an_input_that_cannot_be_held_is_refused_before_anything_runs(run: Run, given: str, tmp_path: Path) -> None:
    kind = "object" if given.startswith("{") else "array"
    with pytest.raises(Failure) as refused:
        run(f"inputs: {{o: {{type: {kind}}}}}\nsteps: {{a: {{exec: touch ran}}}}", inputs={"o": given})
    assert refused.value.code == "ARG_ERROR" and len(str(refused.value)) < 500
    assert not (tmp_path / "ran").exists()


def test_an_input_given_as_text_is_text(run: Run) -> None:
    envelope = run(
        "inputs: {v: {}, s: {type: string}, n: {type: number}}\noutputs: {v: '{{ inputs.v }}', s: '{{ inputs.s }}', "
        "n: '{{ inputs.n }}'}\nsteps: {a: {exec: 'true'}}",
        inputs={"v": "3.10", "s": "12e4567", "n": "3.10"},
    )
    assert envelope.data["outputs"] == {"v": "3.10", "s": "12e4567", "n": 3.1}


def test_an_output_that_the_store_cannot_take_fails_its_step_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_executor, "OUTPUT_LIMIT", 10_000)
    envelope = run(
        """
        steps:
          much: {exec: "head -c 20000 /dev/zero | tr '\\\\0' x"}
          user: {exec: wc -c, stdin: "{{ outputs.much }}", depends_on: much}
          many: {exec: "head -c 4000 /dev/zero | tr '\\\\0' x", for_each: [1, 2, 3, 4]}
          fine: {exec: echo fine}
        """
    )
    assert statuses(envelope) == {"much": "failed", "user": "skipped", "many": "failed", "fine": "succeeded"}
    assert {step(envelope, name)["error"]["code"] for name in ("much", "many")} == {"OUTPUT_INVALID"}
    assert step(envelope, "much")["output"] is None, "a part of an output is shown, and never handed on"
    assert set(step(envelope, "much")["error"]["context"]["stdout"]) == {"x"}


def test_a_step_that_prints_too_much_fails_only_where_something_may_use_its_output(run: Run) -> None:
    flood = "head -c 61000000 /dev/zero | tr '\\\\0' x; echo the end"
    envelope = run(f"""
        steps: {{long: {{exec: "{flood}", timeout: 50s}}, after: {{exec: 'true', depends_on: long}}}}
        """)
    assert statuses(envelope) == {"long": "succeeded", "after": "succeeded"}
    long = step(envelope, "long")
    assert long["output"].endswith("xthe end\n") and len(long["output"]) < 5_000 and long["partial"]
    notes = [each["message"] for each in long["warnings"] if each["code"] == "OUTPUT_TRUNCATED"]
    assert any("nothing uses its output" in each for each in notes)
    used = run(f"""
        steps: {{long: {{exec: "{flood}", timeout: 50s}}}}
        outputs: {{size: "{{{{ outputs.long | length }}}}"}}
        """)
    assert step(used, "long")["error"]["code"] == "OUTPUT_INVALID" and step(used, "long")["output"] is None


def test_a_reference_alone_hands_on_the_value_and_text_around_it_is_limited(run: Run) -> None:
    envelope = run(
        """
        tools: {count: {exec: wc -c, stdin: "{{ args.text }}"}}
        steps:
          much: {exec: "head -c 10500000 /dev/zero | tr '\\\\0' x"}
          alone: {exec: wc -c, stdin: "{{ outputs.much }}", depends_on: much}
          tool: {type: tool, tool: count, arguments: {text: "{{ outputs.much }}"}, depends_on: much}
          each: {exec: wc -c, for_each: ["{{ outputs.much }}"], stdin: "{{ item }}", depends_on: much}
          built: {exec: wc -c, stdin: ">{{ outputs.much }}", depends_on: much}
        """
    )
    said = [step(envelope, name)["output"] for name in ("alone", "tool", "each", "built")]
    assert said == ["10500000", "10500000", ["10500000"], None]
    assert step(envelope, "built")["error"]["code"] == "TEMPLATE_FAILED"


def test_what_a_run_ends_with_may_be_more_than_the_store_takes(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is small enough, and all that is made of them together is not."""
    monkeypatch.setattr(database, "LONGEST_JSON", 30_000)
    lines = "".join(f"  s{number}: {{exec: head -c 9000 /dev/zero | tr '\\0' x}}\n" for number in range(4))
    outputs = ", ".join(f"s{number}: '{{{{ outputs.s{number} }}}}!'" for number in range(4))
    envelope = run(f"outputs: {{{outputs}}}\nsteps:\n{lines}")
    assert envelope.ok and len(step(envelope, "s3")["output"]) == 9000
    assert [note["code"] for note in envelope.warnings] == ["NOT_WRITTEN_DOWN"]
    stored = store.runs.get(envelope.data["run_id"])
    assert stored is not None and stored.ended_at is not None and stored.envelope["ok"] is True


# --- types ------------------------------------------------------------------------------------------------


def test_what_a_command_prints_is_text_unless_it_is_an_object_or_a_list(run: Run) -> None:
    printed = ["3.10", "1234e56", "10.00", "9007199254740993.0", "5", "true", "null", "-0"]
    lines = "".join(f"  s{number}: {{exec: 'echo {text}'}}\n" for number, text in enumerate(printed))
    outputs = ", ".join(f'o{number}: "{{{{ outputs.s{number} }}}}"' for number in range(len(printed)))
    envelope = run(f"outputs: {{{outputs}}}\nsteps:\n{lines}")
    assert list(envelope.data["outputs"].values()) == printed
    assert [step(envelope, f"s{number}")["output"] for number in range(len(printed))] == printed


def test_text_stays_text_in_the_outputs_of_the_run(run: Run) -> None:
    envelope = run(
        """
        outputs: {v: "{{ outputs.v }}", list: "{{ outputs.list }}", mixed: "[{{ outputs.v }}]"}
        steps:
          v: {exec: echo 3.10, output_format: text}
          list: {exec: "echo '[1]'", output_format: text}
        """
    )
    assert envelope.data["outputs"] == {"v": "3.10", "list": "[1]", "mixed": "[3.10]"}


def test_output_format_json_reads_single_values_as_well(run: Run) -> None:
    envelope = run(
        """
        steps:
          n: {exec: echo 3.5, output_format: json, fail_if: "output > 4"}
          t: {exec: echo true, output_format: json}
          s: {exec: "echo '\\"x\\"'", output_format: json}
          huge: {exec: echo 12e4567, output_format: json}
          yes: {exec: echo y, if: "outputs.n + 1 == 4.5 and outputs.t == true", depends_on: [n, t]}
        """
    )
    assert [step(envelope, name)["output"] for name in ("n", "t", "s", "huge")] == [3.5, True, "x", "12e4567"]
    assert statuses(envelope)["yes"] == "succeeded"
    assert step(envelope, "huge")["warnings"][0]["code"] == "NUMBER_KEPT_AS_TEXT"


def test_a_template_that_is_one_expression_keeps_its_type_everywhere(run: Run, speaks: Callable[..., str]) -> None:
    said = '{"content": [{"type": "text", "text": ARGUMENTS}]}'
    arguments = json.dumps(
        {
            "next": "{{ inputs.n + 1 }}",
            "size": "{{ outputs.list | length }}",
            "neg": "{{ -5 }}",
            "is": "{{ inputs.n > 3 }}",
            "text": "n {{ inputs.n + 1 }}",
            "spaced": " {{- inputs.n + 1 -}} ",
        }
    )
    envelope = run(
        f"""
        inputs: {{n: {{type: integer, default: 4}}}}
        outputs:
          next: "{{{{ inputs.n + 1 }}}}"
          odd: "{{{{ outputs.list | select('odd') }}}}"
          object: "{{{{ {{'a': [-inputs.n]}} }}}}"
          text: "{{{{ inputs.n }}}}{{{{ inputs.n }}}}"
        steps:
          list: {{exec: "echo '[1, 2, 3]'"}}
          call: {{{speaks(said)}, depends_on: list, arguments: {arguments}}}
          shaped: {{exec: "echo '{{\\"a\\": 1}}'", transform: "{{{{ {{'b': output.a + 1}} }}}}"}}
          built: {{exec: "echo x", transform: '{{% if true %}}[1,{{{{ 2 }}}}]{{% endif %}}'}}
          three: {{exec: "echo {{{{ item }}}}", for_each: "{{{{ range(3) }}}}"}}
        """
    )
    assert envelope.ok, envelope.error
    assert step(envelope, "call")["output"] == {
        "next": 5, "size": 3, "neg": -5, "is": True, "text": "n 5", "spaced": 5,
    }  # fmt: skip
    assert envelope.data["outputs"] == {"next": 5, "odd": [1, 3], "object": {"a": [-4]}, "text": "44"}
    assert step(envelope, "shaped")["output"] == {"b": 2} and step(envelope, "built")["output"] == [1, 2]
    assert step(envelope, "three")["output"] == ["0", "1", "2"]


def test_a_key_that_holds_text_gets_the_text_of_a_value(run: Run) -> None:
    envelope = run(
        """
        steps:
          fetch: {exec: "echo '{\\"a\\": [1, \\"é\\"]}'"}
          read: {exec: cat, stdin: "{{ outputs.fetch }}", depends_on: fetch}
          sum: {exec: cat, stdin: "{{ outputs.fetch.a[0] + 1 }}", depends_on: fetch}
        """
    )
    assert (
        envelope.ok and step(envelope, "read")["output"] == {"a": [1, "é"]} and step(envelope, "sum")["output"] == "2"
    )


def test_text_that_is_compared_with_a_number_says_what_to_write(run: Run) -> None:
    envelope = run('steps: {a: {exec: echo 5}, b: {exec: echo b, if: "outputs.a > 4", depends_on: a}}')
    assert "`| int`" in step(envelope, "b")["error"]["message"]


def test_what_is_no_number_is_an_error_and_not_0(run: Run) -> None:
    for written in ("('1' + '0' * 400) | float", "'inf' | float", "'abc' | int", "'1e999' | int", "none | int"):
        envelope = run(f'steps: {{a: {{exec: cat, stdin: "{{{{ {written} }}}}"}}}}')
        error = step(envelope, "a")["error"]
        assert error["code"] == "TEMPLATE_FAILED" and "is not a number" in error["message"], written
    envelope = run("""steps: {a: {exec: cat, stdin: "{{ ' 7 ' | int }} {{ '2.5' | int }} {{ 'x' | int(3) }}"}}""")
    assert step(envelope, "a")["output"] == "7 2 3"


def test_phase_is_validation_only_where_nothing_ran(run: Run) -> None:
    envelope = run(
        """
        steps:
          ran: {exec: echo hi, fail_if: "output.nope()"}
          shaped: {exec: echo hi, transform: "{{ output.nope.x }}"}
          item: {exec: "echo {{ item }}", for_each: [1], fail_if: "output.nope()"}
          not: {exec: "echo {{ env.NOPE_AT_ALL }}"}
        """
    )
    phases = {name: step(envelope, name)["error"]["phase"] for name in statuses(envelope)}
    assert phases == {"ran": "execution", "shaped": "execution", "item": "execution", "not": "validation"}


def test_a_step_sees_its_own_variables_in_its_conditions(run: Run) -> None:
    envelope = run(
        """
        env: {MODE: fast}
        steps:
          yes: {exec: echo y, if: "env.GO == 'now' and env.MODE == 'fast'", env: {GO: now}}
          no: {exec: echo n, if: "env.GO == 'now'", env: {GO: later}}
          bad: {exec: echo b, fail_if: "output ~ env.X == 'b1'", env: {X: "{{ item }}"}, for_each: [1]}
          shaped: {exec: echo s, transform: "{{ output ~ env.Z }}", env: {Z: z}}
        """
    )
    assert statuses(envelope) == {"yes": "succeeded", "no": "skipped", "bad": "failed", "shaped": "succeeded"}
    assert step(envelope, "bad")["error"]["code"] == "FAIL_IF" and step(envelope, "shaped")["output"] == "sz"


# --- answers that are no answers --------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"a": [1, 2', b'{"a": "half', b"[1,"])
def test_json_that_was_cut_off_is_no_success(run: Run, web: Callable[[str, bytes], str], body: bytes) -> None:
    url = web("application/json; charset=utf-8", body)
    envelope = run(f'steps: {{a: {{type: http_client, url: "{url}"}}}}')
    assert statuses(envelope) == {"a": "failed"} and step(envelope, "a")["error"]["code"] == "FETCH_FAILED"
    assert "cut off" in step(envelope, "a")["error"]["message"] and step(envelope, "a")["output"] == body.decode()


@pytest.mark.parametrize(
    "result",
    [
        '{"content": [], "structuredContent": {"v": ' + "[" * 300 + "]" * 300 + "}}",
        '{"content": "no list"}',
    ],
    ids=["deep", "wrong"],
)
def test_an_mcp_answer_that_cannot_be_read_fails_its_step_and_is_not_waited_out(
    run: Run, speaks: Callable[..., str], result: str
) -> None:
    envelope = run(f"steps: {{a: {{{speaks(result)}, timeout: 30s}}, b: {{exec: echo b}}}}")
    assert statuses(envelope) == {"a": "failed", "b": "succeeded"}
    error: dict[str, Any] = step(envelope, "a")["error"]
    assert error["code"] == "TOOL_FAILED" and step(envelope, "a")["duration_ms"] < 15_000


def test_half_a_character_in_an_answer_is_handed_on(run: Run, speaks: Callable[..., str]) -> None:
    result = '{"content": [], "structuredContent": {"v": "\\ud800"}}'
    envelope = run(
        f"""
        steps:
          a: {{{speaks(result)}, timeout: 30s}}
          b: {{exec: 'echo {{{{ outputs.a.v }}}}', depends_on: a}}
          c: {{exec: 'cat', stdin: "{{{{ outputs.a }}}}", depends_on: a}}
          d: {{exec: 'cat', stdin: "{{{{ outputs.a.v }}}}", depends_on: a}}
        """
    )
    assert statuses(envelope) == {"a": "succeeded", "b": "failed", "c": "succeeded", "d": "failed"}
    assert step(envelope, "a")["output"] == {"v": "\ud800"} == step(envelope, "c")["output"]
    assert {step(envelope, name)["error"]["code"] for name in "bd"} == {"STEP_INVALID"}
