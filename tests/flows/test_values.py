"""Values on their way into shell commands and templates: always data, whatever is in them and around them."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.core.json_values import read_printed
from shotclock.flows.check._template_check import VisibleNames, check_template
from shotclock.flows.file import templates
from shotclock.flows.file.shell_quoting import Unsafe, mark, with_references
from shotclock.flows.file.templates import find_misfit
from tests.rows import row

SHELLS = [shell for shell in ("/bin/sh", "/bin/bash") if Path(shell).exists()]
EVIL = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "\\",
    "\\'",
    "*",
    "",
    "x\ny",
    "--",
    "-n",
    "$HOME",
    "${HOME}",
    '{"a": "b\'c", "n": [1]}',
    "EOF",
    "!!",
    "%s",
    "]]",
    "é\u202e日本",
]
PLACES = [
    "printf %s {m}",
    'printf %s "{m}"',
    "printf %s '{m}'",
    'printf %s "$(printf %s {m})"',
    'printf %s "$(printf %s "{m}")"',
    "printf %s x'{m}'y",
    "cat <<EOF\n{m}\nEOF",
    "cat <<-EOF\n\t{m}\n\tEOF\n",
    "printf %s \"a'{m}'b\"",
    "printf %s 'a\"{m}\"b'",
    "# it's {m}\nprintf %s '{m}'",
    "echo x | { cat >/dev/null; printf %s {m}; }",
    "case {m} in *) printf %s '{m}';; esac",
    "printf %s ${X:-a}{m}",
    "for i in 1; do printf %s '{m}'; done",
    "(printf %s {m})",
    "printf %s \\'{m}",
]


def shell_says(shell: str, template: str, value: str, folder: Path) -> str:
    command, variables = with_references(template.replace("{m}", mark(0)), [value])
    ran = subprocess.run(
        [shell, "-c", command], env={**os.environ, **variables}, capture_output=True, cwd=folder, timeout=20
    )
    assert ran.returncode == 0, (command, ran.stderr)
    return ran.stdout.decode()


@pytest.mark.slow
def test_a_value_reaches_the_shell_as_data_wherever_its_placeholder_stands(tmp_path: Path) -> None:
    for shell in SHELLS:
        for number, place in enumerate(PLACES):
            with row(shell, place):
                for value in EVIL[number % 4 :: 4]:
                    assert value in shell_says(shell, place, value, tmp_path), (place, value)
                assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40),
    place=st.sampled_from(PLACES[:8]),
)
def test_any_text_comes_through_whole(value: str, place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if "$(" in place:
        value = value.rstrip("\n")  # the shell itself takes those away
    assert value in shell_says("/bin/sh", place, value, tmp_path_factory.getbasetemp())


def test_where_a_value_could_mean_something_else_it_is_refused() -> None:
    for place in [
        "cat <<'EOF'\n{m}\nEOF",
        "echo $'{m}'",
        "echo `echo {m}`",
        "echo ${X:-{m}}",
        "echo $(( {m} ))",
        "(( {m} ))",
    ]:
        with row(place):
            with pytest.raises(Unsafe):
                with_references(place.replace("{m}", mark(0)), ["a[$(touch pwned)]"])


def test_a_value_behind_a_backslash_is_refused() -> None:
    for place in ["echo \\{m}", 'echo "\\{m}"', "echo $(echo \\{m})"]:
        with row(place):
            with pytest.raises(Unsafe, match="backslash"):
                with_references(place.replace("{m}", mark(0)), ["x"])


def test_a_block_that_makes_text_of_text_is_refused_in_a_command() -> None:
    for template in [
        '{% set m %}<{{ v }}>{% endset %}echo "{{ m }}"',
        "{% macro m(x) %}<{{ x }}>{% endmacro %}echo '{{ m(v) }}'",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ v }}{% endcall %}",
        "echo {% filter upper %}{{ v }}{% endfilter %}",
        "echo {% block b %}{{ v }}{% endblock %}{{ self.b() }}",
        "echo {% for x in [v] recursive %}{{ loop([x]) }}{% endfor %}",
    ]:
        with row(template):
            with pytest.raises(templates.TemplateError, match="a command cannot use"):
                templates.render_text(template, {"v": "x"}, marked=True)
            templates.environment_for(False).from_string(template)  # elsewhere it is a template like any other
            checked = check_template(template, VisibleNames({"v"}, (), (), is_command=True))
            assert "template/syntax" in [found.rule for found in checked.findings]


def test_data_that_looks_like_a_mark_of_ours_stays_data() -> None:
    for forged in ["\ue0000\ue001", mark(0), mark(1), f"{mark(0)}{mark(7)}\ue000", "\ue002\ue003"]:
        for template in [
            "printf '%s,' {{ env.key | trim }} {{ outputs.url | trim }}",
            "{% set m = outputs.url %}{% for x in [env.key, m] %}printf '%s,' {{ x }};{% endfor %}",
        ]:
            with row(forged, template):
                scope = {"env": {"key": "sekret"}, "outputs": {"url": forged}}
                text, values = templates.render_text(template, scope, marked=True)
                command, variables = with_references(text, values)
                ran = subprocess.run(["/bin/sh", "-c", command], env=variables, capture_output=True, timeout=20)
                assert ran.stdout.decode() == f"sekret,{forged},"


def test_json_that_is_deeper_than_anybody_goes_stays_text() -> None:
    assert read_printed("[" * 200 + "]" * 200).value != "[" * 200 + "]" * 200
    for levels in (202, 900, 100_000):
        assert read_printed("[" * levels + "]" * levels).value == "[" * levels + "]" * levels


def test_a_template_that_wants_all_the_memory_there_is_is_refused() -> None:
    for template in ["{{ 'a' * 9000000000 }}", "{{ ('%9000000000d' | format(1)) | length }}"]:
        with row(template):
            with pytest.raises(templates.TemplateError, match="512 MB of memory"):
                templates.render_text(template, {})
            with pytest.raises(templates.TemplateError, match="512 MB of memory"):
                templates.evaluate(template.strip("{} "), {})


@pytest.mark.slow
def test_a_schema_that_wants_all_the_memory_there_is_is_refused() -> None:
    """Every alternative keeps what it says about an output that does not fit, with the whole output in it."""
    alternatives = {name: {"anyOf": [{"$ref": f"#/$defs/{below}"}] * 10} for name, below in ("ab", "bc", "cd")}
    schema = {"$ref": "#/$defs/a", "$defs": {**alternatives, "d": {"type": "integer"}}}
    assert find_misfit(schema, "x") is not None
    with pytest.raises(Failure, match="512 MB of memory"):
        find_misfit(schema, "x" * 5_000_000)


def test_a_number_may_stand_in_arithmetic(tmp_path: Path) -> None:
    assert shell_says("/bin/sh", "echo $(( {m} + 1 ))", "41", tmp_path) == "42\n"


def test_what_no_variable_can_hold_is_refused() -> None:
    for value in ["a\0b", "x" * 200_000, "\ud800"]:
        with row(value):
            with pytest.raises(Unsafe):
                with_references(f"echo {mark(0)}", [value])


SCOPE = {"outputs": {"fetch": {"items": [1, 2], "s": "a'b"}, "my-step": 5}, "inputs": {"n": 3}}


def test_templates() -> None:
    for template, text in [
        ("x {{ outputs.fetch.items }}", "x [1,2]"),
        ("{{outputs.my-step}}", "5"),
        ("{{ outputs['my-step'] }}", "5"),
        ("{{ outputs.fetch.items[1] }}", "2"),
        ("{% for i in outputs.fetch.items %}{{ i }},{% endfor %}", "1,2,"),
        ("{{ outputs.my-step + 1 }}", "6"),
        ("{{ outputs.fetch.s | upper }}", "A'B"),
        ("{{ outputs.fetch | tojson }}", '{"items": [1, 2], "s": "a\'b"}'),
    ]:
        with row(template, text):
            if templates.is_simple(template):
                assert templates.render_simple(template, SCOPE).text == text
            assert templates.render_text(template, SCOPE)[0] == text


def test_a_template_can_neither_break_out_nor_leave_a_gap() -> None:
    for template in [
        "{{ ''.__class__.__mro__ }}",
        "{{ outputs.fetch.items.append(1) }}",
        "{{ nobody }}",
        "{{ outputs.nobody }}",
        "{% for %}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'a' * 100000000 }}" * 3,
        "\ue0000\ue001 {{ inputs.n }}",
    ]:
        with row(template):
            with pytest.raises(templates.TemplateError):
                templates.render_text(template, SCOPE)


def test_a_name_with_dashes_is_read_in_tags_only() -> None:
    scope = {"outputs": {"my-file": "x"}, "inputs": {"a": "a"}}
    for template, text in (
        ("cat outputs.my-file {{ inputs.a|upper }}", "cat outputs.my-file A"),
        ("{{ outputs.my-file|upper }}{{ 'outputs.my-file'|upper }}", "XOUTPUTS.MY-FILE"),
        ("{% if outputs.my-file == 'x' %}inputs.a-b{% endif %}", "inputs.a-b"),
    ):
        assert templates.render_text(template, scope)[0] == text
