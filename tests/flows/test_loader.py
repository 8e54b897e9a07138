"""A wrong file: every problem at once, each with its place, and what may have been meant."""

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock.flows.file import loader
from shotclock.flows.file.loader import FINDINGS_LIMIT, SIZE_LIMIT, Finding, load_file, load_text, suggest
from tests.flows.conftest import Load
from tests.flows.test_step_clocks import LEAST
from tests.rows import row

Problems = Callable[[str | bytes], list[Finding]]


def brief(findings: list[Finding]) -> list[tuple[str, str, int, int]]:
    return [(finding.rule, finding.field, finding.place.line, finding.place.column) for finding in findings]


# --- the right shape --------------------------------------------------------------------------------------


def test_a_file_with_everything_is_read(load: Load) -> None:
    loaded = load(
        """
        version: "1.0"
        name: all
        description: everything there is
        timeout: 10m
        max_parallelism: 4
        fail_fast: true
        env: {A: text, B: 1, C: 1.5, D: true, E: ~}
        inputs:
          who: {type: string, description: whom to greet, required: true}
          many: {default: 3}
        outputs: {greeting: "{{ outputs.greet }}"}
        tools:
          count:
            description: count things
            exec: wc -l
            inputSchema: {type: object}
            stdin: "{{ args.text }}"
            timeout: 5000
        defaults: {timeout: 30s, grace: 1s, env: {F: f}, on_fail: {retry: {max: 1}}}
        checks:
          greet:
            exec: echo hello
            timeout: 5
            soft: 3
            idle: 2s
            needs: []
            if: "{{ true }}"
            fail_if: "{{ output == '' }}"
            continue_on_failure: true
            on_fail: {retry: {max: 2, backoff: {mode: exponential, delay_ms: 100, max_delay_ms: 300, jitter: true}}}
            on_success: {run: counted, goto: greet}
            tags: slow
            idempotent: true
            overtime: {observer: progress, budget: 5m}
            transform: "{{ output | upper }}"
            output_schema: {type: string}
            working_directory: /tmp
          counted: {type: tool, tool: count, args: {text: x}, forEach: [1, 2], depends_on: [greet, "greet|other"]}
          other: {type: mcp, command: npx, command_args: [-y, server], tool: ask, method_args: {a: 1}}
        """
    )
    assert loaded.findings == ()
    workflow = loaded.workflow
    assert workflow is not None
    greet, counted, other = (workflow.steps[name] for name in ("greet", "counted", "other"))
    assert (greet.type, greet.cwd, greet.tags, greet.if_) == ("command", "/tmp", ["slow"], "{{ true }}")
    assert greet.on_success is not None
    assert greet.on_success.run == ["counted"]
    assert counted.for_each == [1, 2]
    assert counted.depends_on == ["greet", "greet|other"]
    assert (other.args, other.method, other.arguments) == (["-y", "server"], "ask", {"a": 1})
    assert workflow.tools["count"].input_schema == {"type": "object"}
    assert workflow.env == {"A": "text", "B": 1, "C": 1.5, "D": True, "E": None}


def test_a_step_that_only_says_exec_is_a_command(load: Load) -> None:
    for text in ("steps: {a: {exec: x}}", "steps: {a: {exec: x, type: ~}}"):
        workflow = load(text).workflow
        assert workflow is not None
        assert workflow.steps["a"].type == "command"


def test_a_key_has_its_other_names(load: Load) -> None:
    for text, key, meant in [
        ("checks: {a: {exec: x}}", "depends_on", []),
        ("steps: {a: {exec: x, needs: b}}", "depends_on", ["b"]),
        ("steps: {a: {exec: x, depends_on: b|c}}", "depends_on", ["b|c"]),
        ("steps: {a: {exec: x, forEach: true}}", "for_each", True),
        ("steps: {a: {exec: x, for_each: '{{ outputs.b }}'}}", "for_each", "{{ outputs.b }}"),
        ("steps: {a: {exec: x, working_directory: /}}", "cwd", "/"),
        ("steps: {a: {type: mcp, url: u, tool: t}}", "method", "t"),
        ("steps: {a: {type: mcp, url: u, method: t, methodArgs: {b: 1}}}", "arguments", {"b": 1}),
        ("steps: {a: {type: tool, tool: t, args: {b: 1}}}", "arguments", {"b": 1}),
        ("steps: {a: {type: function, target: t, command: c, args: {b: 1}}}", "arguments", {"b": 1}),
        ("steps: {a: {type: workflow, config: f.yaml}}", "workflow", "f.yaml"),
        ("steps: {a: {type: workflow, workflow: f.yaml, args: {b: 1}}}", "inputs", {"b": 1}),
        ("steps: {a: {exec: x, if: no}}", "if_", "no"),
        ("steps: {a: {exec: x, if: false}}", "if_", False),
    ]:
        with row(text, key, meant):
            loaded = load(text)
            assert loaded.workflow is not None, loaded.findings
            assert getattr(loaded.workflow.steps["a"], key) == meant


def test_a_key_under_two_names_at_once_is_told_so(problems: Problems) -> None:
    for text, said in [
        ("steps: {a: {exec: x}}\nchecks: {b: {exec: y}}", "checks"),
        ("steps: {a: {exec: x, needs: b, depends_on: c}}", "steps.a.needs"),
        ("steps: {a: {exec: x, forEach: [1], for_each: [1]}}", "steps.a.forEach"),
        ("steps: {a: {type: tool, tool: t, args: {}, arguments: {}}}", "steps.a.args"),
    ]:
        with row(text, said):
            (finding,) = problems(text)
            assert (finding.rule, finding.field, finding.suggestion) == ("schema/twice", said, "keep one of them")


def test_a_byte_order_mark_and_document_marks_are_no_problem(load: Load) -> None:
    for data in [b"\xef\xbb\xbfsteps: {a: {exec: x}}", b"--- # c\nsteps: {a: {exec: x}}\n...\n"]:
        with row(data):
            assert load(data).findings == ()


def test_text_stays_as_it_is_written_whatever_the_script(load: Load) -> None:
    workflow = load("steps: {a: {exec: 'größe 尺寸 🚀', env: {ÄÖ: 2020-01-01}}}").workflow
    assert workflow is not None
    assert workflow.steps["a"].exec == "größe 尺寸 🚀"
    assert workflow.steps["a"].env == {"ÄÖ": "2020-01-01"}


def test_steps_may_share_what_they_have_in_common(load: Load) -> None:
    loaded = load(
        """
        steps:
          a: &common
            exec: make
            timeout: 5
            env: {A: 1}
          b:
            <<: *common
            timeout: 6
        """
    )
    assert loaded.workflow is not None
    assert (loaded.workflow.steps["b"].timeout, loaded.workflow.steps["b"].env) == (6, {"A": 1})


# --- everything at once -----------------------------------------------------------------------------------


def test_what_steps_share_has_a_place_of_its_own(load: Load, problems: Problems) -> None:
    loaded = load("x-quick: &quick {timeout: 5s}\nsteps: {a: {<<: *quick, exec: x}}")
    assert loaded.workflow is not None and loaded.workflow.steps["a"].timeout == "5s"
    assert [each.field for each in problems("steps: {a: {exec: x, x-quick: 1}}")] == ["steps.a.x-quick"]


def test_a_mistake_in_one_of_two_shapes_is_one_problem(problems: Problems) -> None:
    assert [each.field for each in problems("steps: {a: {exec: x, approval: {ttl: []}}}")] == ["steps.a.approval.ttl"]


def test_an_unknown_key_lists_the_keys_of_its_own_type_first(problems: Problems) -> None:
    (problem,) = problems("steps: {a: {type: git-checkout, repository: r, credentials: x}}")
    assert str(problem.suggestion).startswith(
        "known here: type, repository, ref, fetch_depth, path, clone_timeout_ms, "
    )


def test_every_problem_is_told_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    found = problems(
        """\
        nmae: x
        timeout: soon
        max_parallelism: 0
        steps:
          a:
            exec: x
            timeot: 5
            on_fail:
              retry:
                max: many
                backoff: {mod: fixed, delay_ms: -1}
          b: {type: comand}
          c: {type: http_client}
          d:
          a: {exec: y}
        tools:
          t: {exce: x}
        defaults: {timeout: 5}
        """
    )
    assert brief(found) == [
        ("schema/unknown-key", "nmae", 1, 1),
        ("schema/value", "timeout", 2, 1),
        ("schema/value", "max_parallelism", 3, 1),
        ("schema/unknown-key", "steps.a.timeot", 7, 5),
        ("schema/value", "steps.a.on_fail.retry.max", 10, 9),
        ("schema/unknown-key", "steps.a.on_fail.retry.backoff.mod", 11, 19),
        ("schema/value", "steps.a.on_fail.retry.backoff.delay_ms", 11, 31),
        ("schema/type", "steps.b.type", 12, 7),
        ("schema/missing", "steps.c.url", 13, 3),
        ("schema/value", "steps.d", 14, 3),
        ("file/duplicate-key", "file", 15, 3),
        ("schema/unknown-key", "tools.t.exce", 17, 7),
        ("schema/value", "defaults.timeout", 18, 12),
    ]


NEAR_MISSES = {
    "at the top": ("stesp: {}\nsteps: {a: {exec: x}}", "stesp", "steps"),
    "at the top, other case": ("failFast: true\nsteps: {a: {exec: x}}", "failFast", "fail_fast"),
    "in a command": ("steps: {a: {exec: x, dependsOn: b}}", "steps.a.dependsOn", "depends_on"),
    "in a command, as elsewhere": ("steps: {a: {type: command, run: x}}", "steps.a.run", "exec"),
    "as in code": ("steps: {a: {exec: x, if_: x}}", "steps.a.if_", "if"),
    "in a reaction": ("steps: {a: {exec: x, on_fail: {retyr: {max: 1}}}}", "steps.a.on_fail.retyr", "retry"),
    "in the other reaction": ("steps: {a: {exec: x, on_success: {got: a}}}", "steps.a.on_success.got", "goto"),
    "in a retry": (
        "steps: {a: {exec: x, on_fail: {retry: {max: 1, backof: {}}}}}",
        "steps.a.on_fail.retry.backof",
        "backoff",
    ),
    "in a backoff": (
        "steps: {a: {exec: x, on_fail: {retry: {max: 1, backoff: {delay: 1}}}}}",
        "steps.a.on_fail.retry.backoff.delay",
        "delay_ms",
    ),
    "in a tool": (
        "tools: {t: {exec: x, input_shema: {}}}\nsteps: {a: {exec: x}}",
        "tools.t.input_shema",
        "input_schema",
    ),
    "in an input": ("inputs: {i: {typ: any}}\nsteps: {a: {exec: x}}", "inputs.i.typ", "type"),
    "in the defaults": ("defaults: {timeuot: 5s}\nsteps: {a: {exec: x}}", "defaults.timeuot", "timeout"),
    "in a default reaction": (
        "defaults: {on_fail: {rety: {max: 1}}}\nsteps: {a: {exec: x}}",
        "defaults.on_fail.rety",
        "retry",
    ),
    "under an alias": ("checks: {a: {exec: x, tiemout: 5}}", "checks.a.tiemout", "timeout"),
    "in an approval": ("steps: {a: {exec: x, approval: {titel: x}}}", "steps.a.approval.titel", "ttl"),
    "retries where they do not belong": ("steps: {a: {exec: x, retry: {max: 1}}}", "steps.a.retry", "on_fail"),
}


def test_a_near_miss_is_told_what_was_meant(problems: Problems) -> None:
    for text, field, meant in NEAR_MISSES.values():
        with row(text, field, meant):
            finding = next(each for each in problems(text) if each.rule == "schema/unknown-key")
            assert (finding.field, finding.suggestion) == (field, f"did you mean {meant!r}?")


def test_a_near_miss_is_found_in_a_step_of_every_kind() -> None:
    for kind in LEAST:
        with row(kind):
            import json

            for miss, meant in {
                "timeut": "timeout",
                "dependson": "depends_on",
                "continue_on_fail": "continue_on_failure",
            }.items():
                step = {"type": kind, **LEAST[kind], miss: 1}
                (finding,) = load_text(json.dumps({"steps": {"a": step}}).encode()).findings
                assert finding.suggestion == f"did you mean {meant!r}?"
            for key in LEAST[kind]:
                step = {"type": kind, **{name: value for name, value in LEAST[kind].items() if name != key}}
                found = load_text(json.dumps({"steps": {"a": step}}).encode()).findings
                assert any(key in finding.message for finding in found), found


def test_what_is_like_nothing_gets_the_list(problems: Problems) -> None:
    (finding,) = problems("qqqqqq: 1\nsteps: {a: {exec: x}}")
    assert finding.suggestion is not None
    assert finding.suggestion.startswith("known here: version, name")


def test_an_unknown_type_is_told_what_was_meant(problems: Problems) -> None:
    for written, hint in [
        ("comand", "did you mean 'command'?"),
        ("http", "did you mean 'http_client'?"),
        ("bash", "did you mean 'command'? It has `shell: bash`"),
        ("http-client", "did you mean 'http_client'?"),
        ("git_checkout", "did you mean 'git-checkout'?"),
        ("humaninput", "did you mean 'human-input'?"),
        ("Workflow", "did you mean 'workflow'?"),
        ("[a]", "one of command"),
        ("7", "one of command"),
    ]:
        with row(written, hint):
            (finding,) = problems(f"steps:\n  a: {{exec: x, type: {written}}}")
            assert (finding.rule, finding.field, finding.place.line, finding.place.column) == (
                "schema/type",
                "steps.a.type",
                2,
                16,
            )
            assert finding.suggestion is not None
            assert finding.suggestion.startswith(hint)


def test_a_step_without_a_type_is_told_which_keys_were_meant(problems: Problems) -> None:
    (finding,) = problems("steps: {a: {exce: x, timout: 3s, name: y}}")
    assert finding.suggestion == "'exce': did you mean 'exec'? 'timout': did you mean 'timeout'?"


# --- wrong values -----------------------------------------------------------------------------------------

WRONG = {
    "no steps": ("name: x", "steps", "'steps' is missing"),
    "empty steps": ("steps: {}", "steps", "is empty"),
    "steps of nothing": ("steps:", "steps", "should be a mapping, and is nothing"),
    "steps as a number": ("steps: 5", "steps", "should be a mapping, and is the number 5"),
    "steps as text": ("steps: x", "steps", "should be a mapping, and is the text 'x'"),
    "a step of nothing": ("steps: {a: }", "steps.a", "should be a mapping, and is nothing"),
    "a step as a number": ("steps: {a: 5}", "steps.a", "should be a mapping, and is the number 5"),
    "a step without a type": ("steps: {a: {url: x}}", "steps.a", "a step needs a `type`"),
    "a number as a name": ("steps: {1: {exec: x}}", "steps.1", "'1' cannot name a step"),
    "a name with a space": ("steps: {a b: {exec: x}}", "steps.a b", "'a b' cannot name a step"),
    "a name with a sign": ("steps: {a|b: {exec: x}}", "steps.a|b", "'a|b' cannot name a step"),
    "an empty command": ("steps: {a: {exec: ''}}", "steps.a.exec", "is empty"),
    "a command as a number": ("steps: {a: {exec: 5}}", "steps.a.exec", "should be text, and is the number 5"),
    "yes": ("fail_fast: yes\nsteps: {a: {exec: x}}", "fail_fast", "should be true or false, and is the text 'yes'"),
    "one for true": (
        "fail_fast: 1\nsteps: {a: {exec: x}}",
        "fail_fast",
        "should be true or false, and is the number 1",
    ),
    "true for one": (
        "max_parallelism: true\nsteps: {a: {exec: x}}",
        "max_parallelism",
        "should be a whole number, and is true",
    ),
    "a number in quotes": (
        "max_parallelism: '3'\nsteps: {a: {exec: x}}",
        "max_parallelism",
        "should be a whole number, and is the text '3'",
    ),
    "a fraction": (
        "max_parallelism: 2.5\nsteps: {a: {exec: x}}",
        "max_parallelism",
        "should be a whole number, and is the number 2.5",
    ),
    "a name that is a list": ("name: [x]\nsteps: {a: {exec: x}}", "name", "should be text, and is a list"),
    "an empty env": ("env:\nsteps: {a: {exec: x}}", "env", "should be a mapping, and is nothing"),
    "a list in env": (
        "env: {A: [1]}\nsteps: {a: {exec: x}}",
        "env.A",
        "should be text or a number or true or false, and is a list",
    ),
    "a mapping for for_each": (
        "steps: {a: {exec: x, for_each: {b: 1}}}",
        "steps.a.for_each",
        "should be true or false or text or a list, and is a mapping",
    ),
    "a dependency of nothing": (
        "steps: {a: {exec: x, depends_on: [b, ]}, b: {exec: x, depends_on: [~]}}",
        "steps.b.depends_on.0",
        "should be text or a mapping, and is nothing",
    ),
    "an empty dependency": ("steps: {a: {exec: x, depends_on: ''}}", "steps.a.depends_on", "a name is empty"),
    "half an alternative": ("steps: {a: {exec: x, depends_on: 'b|'}}", "steps.a.depends_on", "a name is empty"),
    "two servers": ("steps: {a: {type: mcp, url: u, command: c, method: m}}", "steps.a", "name one server"),
    "no server": ("steps: {a: {type: mcp, method: m}}", "steps.a", "name one server"),
    "a shell that is a number": (
        "steps: {a: {exec: x, shell: 5}}",
        "steps.a.shell",
        "should be text or a list of texts, and is 5",
    ),
    "a mode nobody knows": (
        "steps: {a: {exec: x, on_fail: {retry: {max: 1, backoff: {mode: exponentail}}}}}",
        "steps.a.on_fail.retry.backoff.mode",
        "'exponentail' is not one of fixed, linear, exponential",
    ),
    "too many tries": (
        "steps: {a: {exec: x, on_fail: {retry: {max: 1001}}}}",
        "steps.a.on_fail.retry.max",
        "Input should be less than or equal to 1000",
    ),
    "half a character": (
        'steps: {a: {exec: "\\ud800"}}',
        "steps.a.exec",
        "unable to parse raw data as a unicode string",
    ),
    "a list for a clock": ("steps: {a: {exec: x, timeout: [5]}}", "steps.a.timeout", "a list is not a duration"),
}


def test_a_wrong_value_is_one_problem_in_plain_words(problems: Problems) -> None:
    for text, field, message in WRONG.values():
        with row(text, field, message):
            (finding,) = problems(text)
            assert finding.field == field
            assert message in finding.message


def test_yes_and_no_are_text_and_the_message_says_what_to_write(problems: Problems) -> None:
    hints = [
        finding.suggestion for finding in problems("steps: {a: {exec: x, idempotent: on, continue_on_failure: No}}")
    ]
    assert hints == ["write true: in YAML 1.2 on is text", "write false: in YAML 1.2 No is text"]


def test_names_that_mean_something_to_the_machinery_are_names_like_any_other(problems: Problems) -> None:
    found = problems(
        """\
        inputs: {int: {typ: any}}
        steps:
          command: {exec: x, timeot: 1}
          steps: {exec: x, timeot: 1}
          str: {exec: x, env: {str: [1], 'a[0]': [1], function-after: [1], '[key]': [1]}}
        """
    )
    assert [(finding.field, finding.place.line) for finding in found] == [
        ("inputs.int.typ", 1),
        ("steps.command.timeot", 3),
        ("steps.steps.timeot", 4),
        ("steps.str.env.str", 5),
        ("steps.str.env.a[0]", 5),
        ("steps.str.env.function-after", 5),
        ("steps.str.env.[key]", 5),
    ]


def test_a_mistake_that_is_merged_into_a_step_is_told_where_it_is_written(problems: Problems) -> None:
    found = problems("steps:\n  a: &a\n    exec: x\n    timeot: 5\n  b:\n    <<: *a\n")
    assert brief(found) == [
        ("schema/unknown-key", "steps.a.timeot", 4, 5),
        ("schema/unknown-key", "steps.b.timeot", 4, 5),
    ]


# --- no workflow at all -----------------------------------------------------------------------------------

NO_WORKFLOW = {
    "nothing": (b"", "file/shape", "is empty", 1),
    "a comment": (b"# later\n", "file/shape", "is empty", 1),
    "a list": (b"\n- a\n", "file/shape", "holds a list", 2),
    "a word": (b"hello", "file/shape", "holds the text 'hello'", 1),
    "a number": (b"5", "file/shape", "holds the number 5", 1),
    "null": (b"~", "file/shape", "is empty", 1),
    "two documents": (b"steps: {a: {exec: x}}\n---\nsteps: {}\n", "file/documents", "more than one", 2),
    "UTF-16": ("steps: {}".encode("utf-16"), "file/encoding", "is not UTF-8", 1),
    "Latin-1": ("name: x\nsteps: größe".encode("latin-1"), "file/encoding", "is not UTF-8", 2),
    "a program": (b"\x7fELF\x02\x01\x01\0\0\0", "file/syntax", "#x007f", 1),
    "a picture": (b"\x89PNG\r\n\x1a\n", "file/encoding", "is not UTF-8", 1),
    "too much": (b"#" * (SIZE_LIMIT + 1), "file/size", str(SIZE_LIMIT), 1),
}


def test_what_is_no_workflow_at_all_is_one_problem(problems: Problems) -> None:
    for data, rule, message, line in NO_WORKFLOW.values():
        with row(data, rule, message, line):
            (finding,) = problems(data)
            assert (finding.rule, finding.place.line) == (rule, line)
            assert message in finding.message


def test_the_place_of_a_byte_that_is_no_text_is_counted_in_characters(problems: Problems) -> None:
    (finding,) = problems("name: x\nsteps: ß".encode() + b"\xff")
    assert (finding.place.line, finding.place.column) == (2, 9)


def test_a_file_as_large_as_allowed_is_read(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SIZE_LIMIT", 10_000)
    text = b"steps: {a: {exec: x}}\n"
    assert load(text + b"#" * (10_000 - len(text))).findings == ()
    assert [finding.rule for finding in load(text + b"#" * (10_001 - len(text))).findings] == ["file/size"]


# --- files that are none ----------------------------------------------------------------------------------


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        load_file(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(OSError, match="pipe or a device"):
        load_file(tmp_path / "pipe.yaml")


def test_a_device_is_refused_and_not_read() -> None:
    for device in ["/dev/zero", "/dev/null", "/dev/urandom"]:
        with row(device):
            assert stat.S_ISCHR(os.stat(device).st_mode)
            with pytest.raises(OSError, match="pipe or a device"):
                load_file(Path(device))


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.yaml")
        with pytest.raises(OSError):
            load_file(Path("s.yaml"))


def test_only_as_much_as_is_allowed_is_read_of_a_file_without_end(tmp_path: Path) -> None:
    file = tmp_path / "sparse.yaml"
    file.touch()
    os.truncate(file, 1 << 40)
    (finding,) = load_file(file).findings
    assert finding.rule == "file/size"


def test_a_link_is_followed_and_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("steps: {a: {exec: x}}")
    (tmp_path / "link.yaml").symlink_to("flow.yaml")
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    assert load_file(tmp_path / "link.yaml").workflow is not None
    with pytest.raises(OSError):
        load_file(tmp_path / "circle.yaml")


# --- bounded ----------------------------------------------------------------------------------------------


def test_a_file_that_is_all_wrong_gets_a_list_that_can_be_read(problems: Problems) -> None:
    keys = ", ".join(f"k{number}: 1" for number in range(3_000))
    found = problems(f"steps: {{a: {{exec: x, {keys}}}}}")
    assert len(found) == FINDINGS_LIMIT + 1
    assert found[-1].message == f"and {3_000 - FINDINGS_LIMIT} problems more"


def test_a_key_as_long_as_a_book_is_neither_compared_nor_shown_whole(problems: Problems) -> None:
    (finding,) = problems(f"? {'timeout' * 100_000}\n: 1\nsteps: {{a: {{exec: x}}}}")
    assert finding.rule == "schema/unknown-key"
    assert len(finding.message) + len(finding.field) + len(finding.suggestion or "") < 600


def test_a_long_list_of_names_is_cut() -> None:
    said = suggest("zzz", [f"step{number}" for number in range(400)], otherwise="there are ")
    assert said is not None
    assert said.endswith("and 385 more")
    assert len(said) < 200


def test_a_field_is_shown_without_anything_a_terminal_would_obey(problems: Problems) -> None:
    (finding,) = problems('"\\e]0;owned\\a": 1\nsteps: {a: {exec: x}}')
    assert finding.field.isprintable()
    assert finding.message.isprintable()


# --- anything ---------------------------------------------------------------------------------------------

WORDS = ["steps", "checks", "a", "exec", "type", "command", "mcp", "workflow", "timeout", "on_fail", "retry", "max"]
WORDS += ["backoff", "depends_on", "env", "tools", "inputs", "defaults", "if", "for_each", "str", "5", "0.5", "~"]
WORDS += ["true", "-1", "[]", "{}", "clone_timeout_ms", "git-checkout", "repository", "goto", "run", "human-input"]

TREES = st.recursive(
    st.sampled_from(WORDS) | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=25,
)


@given(TREES | st.builds(lambda inner: {"steps": {"a": inner, "b": {"exec": "x", "on_fail": inner}}}, TREES))
@example({"steps": {"5": None}})
def test_whatever_the_tree_it_is_a_workflow_or_findings_with_places(tree: Any) -> None:

    from shotclock.flows.check.lint import lint
    from shotclock.flows.check.plan import plan_of

    loaded = load_text(json.dumps(tree, allow_nan=True).replace("Infinity", ".inf").encode())
    assert (loaded.workflow is None) == bool(loaded.findings)
    assert all(finding.message and finding.place.line == 1 for finding in loaded.findings)
    found = lint(loaded, timeout_ms=1_000)
    if loaded.workflow is not None and not any(finding.rule == "graph/cycle" for finding in found):
        assert len(plan_of(loaded.workflow).steps) == len(loaded.workflow.steps)


@given(st.binary(max_size=80))
def test_whatever_the_bytes_nothing_is_raised(data: bytes) -> None:
    loaded = load_text(data)
    assert (loaded.workflow is None) == bool(loaded.findings)
