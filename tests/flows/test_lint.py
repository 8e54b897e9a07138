"""Every rule fires where it should, and not one step before."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.flows.check.lint import lint
from shotclock.flows.check.plan import find_cycle, graph_of
from shotclock.flows.file.loader import FINDINGS_LIMIT, Finding, Loaded, Source, load_text
from shotclock.flows.file.schema import WorkflowFile
from tests.flows.conftest import Lint
from tests.rows import row


def rules(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


def only(findings: list[Finding], rule: str) -> Finding:
    assert rules(findings) == [rule], findings
    return findings[0]


# rule: (fires, the field it names) and (does not, though it nearly does). One line is one file.
CASES: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "budget/longer-than-run": (
        [
            ("timeout: 10\nsteps: {a: {exec: x, timeout: 9501ms}}", "steps.a.timeout"),
            ("timeout: 10s\nsteps: {a: {exec: x, timeout: 10}}", "steps.a.timeout"),
            ("timeout: 1s\nsteps: {a: {exec: x, timeout: 901ms}}", "steps.a.timeout"),
            (
                "timeout: 1s\nsteps: {a: {type: git-checkout, repository: r, clone_timeout_ms: 5000}}",
                "steps.a.clone_timeout_ms",
            ),
            ("timeout: 1s\nchecks: {a: {type: http_client, url: u, timeout: 2000}}", "steps.a.timeout"),
        ],
        [
            "timeout: 10\nsteps: {a: {exec: x, timeout: 9500ms}}",
            "timeout: 1s\nsteps: {a: {exec: x, timeout: 900ms}}",
            "timeout: 1s\nsteps: {a: {type: http_client, url: u, timeout: 900}}",
            "timeout: 0\nsteps: {a: {exec: x, timeout: 1h}}",
            "steps: {a: {exec: x, timeout: 1h}}",
        ],
    ),
    "schema/invalid": (
        [
            ("steps: {a: {exec: x, output_schema: {type: nonsense}}}", "steps.a.output_schema"),
            ("steps: {a: {exec: x, output_schema: {$ref: '#/$defs/none'}}}", "steps.a.output_schema"),
            ("steps: {a: {exec: x, output_schema: {items: {$ref: 'http://x/y'}}}}", "steps.a.output_schema"),
            ("steps: {a: {exec: x, output_schema: {properties: {n: {pattern: '('}}}}}", "steps.a.output_schema"),
            ("steps: {a: {exec: x, output_schema: {patternProperties: {'(': {}}}}}", "steps.a.output_schema"),
            (
                "steps: {a: {type: ai, prompt: x, ai: {base_url: 'http://x', model: m}, schema: {required: 1}}}",
                "steps.a.output_schema",
            ),
            (
                "tools: {t: {exec: x, input_schema: {type: object, properties: 3}}}\nsteps: {a: {exec: x}}",
                "tools.t.input_schema",
            ),
        ],
        [
            "steps: {a: {exec: x, output_schema: {$ref: '#/$defs/n', $defs: {n: {type: integer}}}}}",
            "steps: {a: {exec: x, output_schema: {properties: {n: {$ref: '#'}, m: {$ref: '#/properties/n'}}}}}",
            "steps: {a: {exec: x, output_schema: {items: {$ref: '#it'}, $defs: {x: {$anchor: it}}}}}",
            "steps: {a: {exec: x, output_schema: {const: {$ref: '#/none', pattern: '('}}}}",
            "steps: {a: {exec: x, output_schema: {properties: {$ref: {type: string}, pattern: {enum: ['(']}}}}}",
        ],
    ),
    "template/unknown-step": (
        [
            ("steps: {a: {exec: 'echo {{ outputs.b }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: x, if: steps.b.status == 1}}", "steps.a.if"),
            ("steps: {a: {type: http_client, url: u, headers: {X: '{{ outputs.b }}'}}}", "steps.a.headers.X"),
            ("steps: {a: {exec: x}}\noutputs: {o: '{{ outputs.b.c }}'}", "outputs.o"),
        ],
        [
            "steps: {a: {exec: 'echo outputs.b'}}",
            "steps: {a: {exec: 'echo {{ inputs.outputs.b }}'}}",
            "steps: {a: {exec: x, description: '{{ outputs.b }}'}}",
        ],
    ),
    "shell/value-in-script": (
        [
            ("steps: {a: {exec: 'sh -c \"echo {{ run.id }}\"'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'echo x | /usr/bin/python3.11 -u -c \"print(1, {{ run.id }})\"'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'eval \"{{ run.id }}\"'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'ssh host \"ls {{ run.id }}\"'}}", "steps.a.exec"),
            ("tools: {t: {exec: 'bash -ec \"{{ args.x }}\"'}}\nsteps: {a: {type: tool, tool: t}}", "tools.t.exec"),
        ],
        [
            "steps: {a: {exec: 'sh -c \"echo $1\" sh {{ run.id }}'}}",
            'steps: {a: {exec: \'echo "{{ run.id }}" | python3 -c "print(1)"\'}}',
            "steps: {a: {exec: 'sh build.sh \"{{ run.id }}\"'}}",
            "steps: {a: {exec: 'push \"{{ run.id }}\"'}}",
            "steps: {a: {exec: './deploy.sh \"{{ run.id }}\"'}}",
        ],
    ),
    "shell/pipe": (
        [
            ("steps: {a: {exec: 'false | cat'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'cd x && make 2>&1 | tee log'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'curl {{ run.id }} | jq .', shell: dash}}", "steps.a.exec"),
            ("tools: {t: {exec: '(a; b) | c'}}\nsteps: {a: {type: tool, tool: t}}", "tools.t.exec"),
        ],
        [
            "steps: {a: {exec: 'false | cat', shell: bash}}",
            "steps: {a: {exec: 'false | cat', shell: [/usr/bin/bash, -eu]}}",
            "defaults: {shell: bash}\nsteps: {a: {exec: 'false | cat'}}",
            "steps: {a: {exec: 'echo {{ run.id }} | jq .'}}",
            "steps: {a: {exec: 'false || cat; a \"|\" b'}}",
            "steps: {a: {exec: 'set -o pipefail; false | cat'}}",
        ],
    ),
    "template/not-waited-for": (
        [
            ("steps: {a: {exec: x}, b: {exec: 'echo {{ outputs.a }}'}}", "steps.b.exec"),
            ("steps: {a: {exec: x}, b: {exec: x, if: 'steps.a.status == 1'}}", "steps.b.if"),
        ],
        [
            "steps: {a: {exec: x}, b: {exec: x, depends_on: a}, c: {exec: 'echo {{ outputs.a }}', depends_on: b}}",
            "steps: {a: {exec: x}, b: {exec: 'echo {{ steps.a.status }}', depends_on: a}}",
            "steps: {a: {exec: x, on_success: {run: b}}, b: {exec: 'echo {{ outputs.a }}'}}",
            "steps: {a: {exec: 'echo {{ outputs.b }}'}, b: {exec: x, depends_on: a, on_success: {goto: a}}}",
        ],
    ),
    "budget/retries": (
        [
            ("timeout: 10\nsteps: {a: {exec: x, timeout: 3, on_fail: {retry: {max: 3}}}}", "steps.a.on_fail"),
            (
                "timeout: 10\nsteps: {a: {exec: x, timeout: 4, on_fail: {retry: {max: 1, backoff: {delay_ms: 1501}}}}}",
                "steps.a.on_fail",
            ),
        ],
        [
            "timeout: 10\nsteps: {a: {exec: x, timeout: 4, on_fail: {retry: {max: 1, backoff: {delay_ms: 1500}}}}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 9, on_fail: {retry: {max: 0}}}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 9, on_fail: {}}}",
        ],
    ),
    "budget/waits": (
        [
            (
                "timeout: 10\nsteps: {a: {exec: x, timeout: 1, on_fail: {retry: {max: 1, backoff: {delay_ms: 9501}}}}}",
                "steps.a.on_fail",
            ),
        ],
        [
            "timeout: 10\nsteps: {a: {exec: x, timeout: 1ms, on_fail: {retry: {max: 1, backoff: {delay_ms: 9490}}}}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 1ms, on_fail: {retry: {max: 1, backoff:"
            " {delay_ms: 99999, max_delay_ms: 100}}}}}",
        ],
    ),
    "budget/critical-path": (
        [
            ("timeout: 10\nsteps: {a: {exec: x, timeout: 5}, b: {exec: x, timeout: 4501ms, depends_on: a}}", "timeout"),
            ("timeout: 10\nsteps: {a: {exec: x}}", "timeout"),
            ("timeout: 10\nsteps: {a: {exec: x, timeout: 0}}", "timeout"),
        ],
        [
            "timeout: 10\nsteps: {a: {exec: x, timeout: 5}, b: {exec: x, timeout: 4500ms, depends_on: a}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 5}, b: {exec: x, timeout: 5}}",
            "steps: {a: {exec: x, timeout: 0}}",
        ],
    ),
    "budget/clean-up": (
        [
            (
                "timeout: 10\nsteps: {a: {exec: x, timeout: 1, on_fail: {run: b}}, b: {exec: x, timeout: 5}}",
                "steps.b.timeout",
            ),
            (
                "timeout: 10\nsteps: {a: {exec: x, timeout: 9, on_fail: {run: b}}, b: {exec: x, timeout: 1}}",
                "steps.a.timeout",
            ),
        ],
        [
            "timeout: 10\nsteps: {a: {exec: x, timeout: 5, on_fail: {run: b}}, b: {exec: x, timeout: 4}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 8, on_fail: {run: b}}, b: {exec: x}}",
            "timeout: 10\nsteps: {a: {exec: x, timeout: 9, on_success: {run: b}}, b: {exec: x, timeout: 9}}",
            "steps: {a: {exec: x, timeout: 9, on_fail: {run: b}}, b: {exec: x, timeout: 9}}",
        ],
    ),
    "budget/parallelism": (
        [
            (
                "timeout: 10\nmax_parallelism: 1\nsteps: {a: {exec: x, timeout: 5}, b: {exec: x, timeout: 5}}",
                "max_parallelism",
            ),
        ],
        [
            "timeout: 10\nmax_parallelism: 1\nsteps: {a: {exec: x, timeout: 5}, b: {exec: x, timeout: 4500ms}}",
            "timeout: 10\nmax_parallelism: 2\nsteps: {a: {exec: x, timeout: 9}, b: {exec: x, timeout: 9}}",
        ],
    ),
    "clock/unit": (
        [
            ("steps: {a: {exec: x, timeout: 60000}}", "steps.a.timeout"),
            ("steps: {a: {exec: x, timeout: '60000'}}", "steps.a.timeout"),
            ("steps: {a: {exec: x, timeout: 5000}}", "steps.a.timeout"),
            ("steps: {a: {exec: x, timeout: 90000}}", "steps.a.timeout"),
            ("steps: {a: {exec: x, timeout: 3600000}}", "steps.a.timeout"),
            ("steps: {a: {type: mcp, url: u, method: m, timeout: 30000}}", "steps.a.timeout"),
            ("steps: {a: {type: human-input, prompt: p, timeout: 300000}}", "steps.a.timeout"),
            ("steps: {a: {type: http_client, url: http://u, timeout: 30}}", "steps.a.timeout"),
            ("steps: {a: {type: http_client, url: u, timeout: 99}}", "steps.a.timeout"),
            ("steps: {a: {type: git-checkout, repository: r, clone_timeout_ms: 60}}", "steps.a.clone_timeout_ms"),
            ("tools: {t: {exec: x, timeout: 5}}\nsteps: {a: {type: tool, tool: t}}", "tools.t.timeout"),
            ("timeout: 300000\nsteps: {a: {exec: x}}", "timeout"),
            ("steps: {a: {exec: x, timeout: 0, idle: 60000}}", "steps.a.idle"),
        ],
        [
            "steps: {a: {exec: x, timeout: 60}}",
            "steps: {a: {exec: x, timeout: 3599}}",
            "steps: {a: {exec: x, timeout: 3500}}",
            "steps: {a: {exec: x, timeout: 3600}}",
            "steps: {a: {exec: x, timeout: 7200}}",
            "steps: {a: {exec: x, timeout: 86400}}",
            "steps: {a: {exec: x, timeout: 172800}}",
            "steps: {a: {exec: x, timeout: 3661}}",
            "steps: {a: {exec: x, timeout: 60000ms}}",
            "steps: {a: {exec: x, timeout: 16h40m}}",
            "steps: {a: {type: http_client, url: u, timeout: 100}}",
            "steps: {a: {type: http_client, url: u, timeout: 60000}}",
            "steps: {a: {type: http_client, url: u, timeout: 30ms}}",
            "steps: {a: {type: http_client, url: u, timeout: 0}}",
            "timeout: 300\nsteps: {a: {exec: x}}",
        ],
    ),
    "clock/never-rings": (
        [
            ("steps: {a: {exec: x, timeout: 10, soft: 10}}", "steps.a.soft"),
            ("steps: {a: {exec: x, timeout: 10s, idle: 11}}", "steps.a.idle"),
            ("steps: {a: {exec: x, soft: 60}}", "steps.a.soft"),
            ("steps: {a: {type: http_client, url: u, idle: 30000}}", "steps.a.idle"),
            ("defaults: {timeout: 5s}\nsteps: {a: {exec: x, soft: 5}}", "steps.a.soft"),
            ("steps: {a: {type: mcp, url: u, method: m, timeout: 5, connect_timeout: 5}}", "steps.a.connect_timeout"),
        ],
        [
            "steps: {a: {exec: x, timeout: 10, soft: 9999ms}}",
            "steps: {a: {exec: x, timeout: 0, soft: 1h}}",
            "steps: {a: {exec: x, soft: 59, idle: 0}}",
            "steps: {a: {type: workflow, workflow: '{{ x }}', soft: 1h}}",
            "steps: {a: {type: http_client, url: u, soft: 29999}}",
        ],
    ),
    "clock/not-used": (
        [
            ("steps: {a: {type: git-checkout, repository: r, timeout: 5s, clone_timeout_ms: 5000}}", "steps.a.timeout"),
        ],
        [
            "steps: {a: {type: git-checkout, repository: r, timeout: 5s}}",
            "steps: {a: {type: git-checkout, repository: r, clone_timeout_ms: 5000}}",
        ],
    ),
    "clock/overtime": (
        [
            ("steps: {a: {exec: x, timeout: 0, overtime: true}}", "steps.a.overtime"),
            (
                "steps: {a: {type: human-input, prompt: x, timeout: 9, overtime: {hard_extends: true}}}",
                "steps.a.overtime",
            ),
        ],
        [
            "steps: {a: {exec: x, overtime: false}}",
            "steps: {a: {exec: x, overtime: true}}",
            "steps: {a: {exec: x, overtime: {observer: progress, budget: 2m, hard_extends: true}}}",
            "steps: {a: {exec: x, timeout: 0, overtime: {budget: 30}}}",
        ],
    ),
    "graph/items": (
        [
            (
                "steps: {a: {exec: x, for_each: true}, b: {exec: x, forEach: true}, c: {exec: x, depends_on: [a, b]}}",
                "steps.c.depends_on",
            ),
        ],
        [
            "steps: {a: {exec: x, for_each: true}, b: {exec: x}, c: {exec: x, depends_on: [a, b]}}",
            "steps: {a: {exec: x, for_each: true}, b: {exec: x, for_each: true},"
            " c: {exec: x, depends_on: [a, b], for_each: [1]}}",
            "steps: {a: {exec: x, for_each: true}, b: {exec: x, for_each: true},"
            " c: {exec: x, depends_on: [a, b], for_each: false}}",
        ],
    ),
    "graph/missing-dependency": (
        [
            ("steps: {a: {exec: x, depends_on: b}}", "steps.a.depends_on"),
            ("steps: {a: {exec: x, needs: [b]}}", "steps.a.depends_on"),
            ("steps: {a: {exec: x}, c: {exec: x, depends_on: 'a|b'}}", "steps.c.depends_on"),
        ],
        ["steps: {a: {exec: x}, b: {exec: x, depends_on: [a, ' a | a ']}}"],
    ),
    "graph/unknown-target": (
        [
            ("steps: {a: {exec: x, on_fail: {run: b}}}", "steps.a.on_fail.run"),
            ("steps: {a: {exec: x, on_success: {run: [a, b]}}}", "steps.a.on_success.run"),
            ("steps: {a: {exec: x, on_fail: {goto: b}}}", "steps.a.on_fail.goto"),
            ("defaults: {on_fail: {run: b}}\nsteps: {a: {exec: x}}", "defaults.on_fail.run"),
        ],
        ["steps: {a: {exec: x, on_fail: {run: b, goto: a}}, b: {exec: x}}"],
    ),
    "graph/cycle": (
        [
            ("steps: {a: {exec: x, depends_on: a}}", "steps.a.depends_on"),
            ("steps: {a: {exec: x, needs: b}, b: {exec: x, needs: 'a|c'}, c: {exec: x}}", "steps.a.depends_on"),
        ],
        [
            "steps: {a: {exec: x, depends_on: b}, b: {exec: x}}",
            "steps: {a: {exec: x, on_fail: {goto: a}}}",
        ],
    ),
    "graph/unreachable": (
        [
            ("steps: {a: {exec: x, if: false}}", "steps.a.if"),
            ("steps: {a: {exec: x, if: 'false'}}", "steps.a.if"),
            ("steps: {a: {exec: x, if: False }}", "steps.a.if"),
        ],
        [
            "steps: {a: {exec: x, if: true}}",
            "steps: {a: {exec: x, if: '{{ falsehood }}'}}",
            "steps: {a: {exec: x}}",
        ],
    ),
    "tool/unknown": (
        [
            ("steps: {a: {type: tool, tool: count}}", "steps.a.tool"),
            ("inputs: {tool: {}}\nsteps: {a: {type: tool, tool: '{{ inputs.tool }}'}}", "steps.a.tool"),
        ],
        ["tools: {count: {exec: wc}}\nsteps: {a: {type: tool, tool: count}}"],
    ),
    "template/syntax": (
        [
            ("steps: {a: {exec: x, fail_if: 'output.includes(1) && true'}}", "steps.a.fail_if"),
            ("steps: {a: {exec: x, if: '1 2'}}", "steps.a.if"),
            ("steps: {a: {exec: x, if: '{{ (1 }}'}}", "steps.a.if"),
            ("steps: {a: {exec: 'echo {% if 1 %}'}}", "steps.a.exec"),
            ("steps: {a: {exec: '{% assign x = 1 %}'}}", "steps.a.exec"),
            ("steps: {a: {exec: x, env: {A: '{{ 1 + }}'}}}", "steps.a.env.A"),
            ("env: {A: '{{ 1 + }}'}\nsteps: {a: {exec: x}}", "env.A"),
            ("outputs: {o: '{{ 1 + }}'}\nsteps: {a: {exec: x}}", "outputs.o"),
            ("tools: {t: {exec: '{{ 1 + }}'}}\nsteps: {a: {exec: x}}", "tools.t.exec"),
            ("steps: {a: {exec: x, for_each: '{{ 1 + }}'}}", "steps.a.for_each"),
            ("steps: {a: {type: human-input, timeout: 1, prompt: '{{ 1 + }}'}}", "steps.a.prompt"),
            ("steps: {a: {type: http_client, url: u, body: {b: [1, '{{ 1 + }}']}}}", "steps.a.body.b.1"),
            ("steps: {a: {type: http_client, url: u, headers: {h: '{{ 1 + }}'}}}", "steps.a.headers.h"),
            ("steps: {a: {exec: \"{% include 'x' %}\"}}", "steps.a.exec"),
            (f"steps: {{a: {{exec: x, if: '{'(' * 5000}'}}}}", "steps.a.if"),
        ],
        [
            "steps: {a: {exec: 'echo {% raw %}{{ (( {% endraw %}'}}",
            "steps: {a: {exec: x, if: \"{{ '}}' == '&&' }}\"}}",
            "steps: {a: {exec: 'echo ${#name} a && b || c'}}",
            "steps: {a: {exec: x, description: '{{ 1 + }}'}}",
        ],
    ),
    "template/unknown-name": (
        [
            ("steps: {a: {exec: 'echo {{ item }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'echo {{ args.x }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'echo {{ item | upper }}', if: 'true'}}", "steps.a.exec"),
            ("steps: {a: {exec: x, for_each: [1], if: item == 1}}", "steps.a.if"),
            ("steps: {a: {exec: 'echo {{ output }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: x, if: always()}}", "steps.a.if"),
            ("steps: {a: {exec: x, if: run.id == null}}", "steps.a.if"),
            ("steps: {a: {exec: 'echo {{ run.nmae }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: 'echo {{ deadline.left }}'}}", "steps.a.exec"),
            ("steps: {a: {exec: x}, b: {exec: 'echo {{ steps.a.exit_status }}', depends_on: a}}", "steps.b.exec"),
            ("steps: {a: {exec: x}, b: {exec: x, depends_on: a, if: \"steps['a'].state == 'x'\"}}", "steps.b.if"),
        ],
        [
            "steps: {a: {exec: 'echo {{ item }} {{ index }}', for_each: [1], fail_if: item == 1}}",
            "steps: {l: {exec: x, for_each: true}, a: {exec: 'echo {{ item }}', depends_on: l}}",
            "tools: {t: {exec: 'echo {{ args.x }}'}}\nsteps: {a: {type: tool, tool: t}}",
            "steps: {a: {exec: '{% for x in [1] %}{{ x }}{{ loop.index }}{% endfor %}{% set y = 1 %}{{ y }}'}}",
            "steps: {a: {exec: x, stdin: '{% macro m(x) %}{{ x }}{% endmacro %}{{ m(1) }}'}}",
            "steps: {a: {exec: '{{ range(3) | join }}', fail_if: output == run.name, transform: '{{ output | min }}'}}",
            "steps: {a: {exec: x, if: true and none == false}}",
            "steps: {a: {exec: x}, b: {exec: '{{ steps.a.error.code }} {{ steps.a.items() | list }}', depends_on: a}}",
            "steps: {a: {exec: x}, b: {exec: '{{ steps.a.output.n | int }} {{ deadline.remaining }}', depends_on: a}}",
            "steps: {a: {exec: \"{% set steps = {'a': {'n': 1}} %}{{ steps.a.n }}\"}}",
        ],
    ),
    "template/unknown-input": (
        [
            ("steps: {a: {exec: 'echo {{ inputs.nope }}'}}", "steps.a.exec"),
            ("inputs: {n: {}}\nsteps: {a: {exec: x, if: \"inputs['m'] == 1\"}}", "steps.a.if"),
        ],
        ["inputs: {n: {}, a-b: {}}\nsteps: {a: {exec: 'echo {{ inputs.n }} {{ inputs.a-b | upper }}'}}"],
    ),
    "template/unknown-filter": (
        [("steps: {a: {exec: 'echo {{ run.id | json }}'}}", "steps.a.exec")],
        ["steps: {a: {exec: 'echo {{ run | tojson }} {{ run.id | bool }}'}}"],
    ),
    "template/unknown-test": ([("steps: {a: {exec: x, if: run.id is set}}", "steps.a.if")], ["steps: {a: {exec: x}}"]),
    "template/unknown-method": (
        [("steps: {a: {exec: x, if: run.id.includes('x')}}", "steps.a.if")],
        ["steps: {a: {exec: x, if: run.id.startswith('x') or run.get('x')}}"],
    ),
    "template/foreign": (
        [("steps: {a: {exec: x, if: run.id.length == 5}}", "steps.a.if")],
        ["steps: {a: {exec: x, if: run.id | length == 5}}"],
    ),
    "template/text-compared": (
        [
            ("steps: {a: {exec: x}, b: {exec: x, depends_on: a, if: outputs.a > 4}}", "steps.b.if"),
            ("steps: {a: {exec: x, fail_if: output == 5}}", "steps.a.fail_if"),
            ("steps: {a: {exec: x}, b: {exec: 'echo {{ outputs.a + 1 }}', depends_on: a}}", "steps.b.exec"),
            ("steps: {a: {exec: x}, b: {exec: x, depends_on: a, if: outputs.a == true}}", "steps.b.if"),
        ],
        [
            "steps: {a: {exec: x}, b: {exec: x, depends_on: a, if: outputs.a | int > 4}}",
            "steps: {a: {exec: x, output_format: json, fail_if: output == 5}}",
            "steps: {a: {exec: x, transform: '{{ 5 }}'}, b: {exec: x, depends_on: a, if: outputs.a > 4}}",
            "steps: {a: {exec: x}, b: {exec: x, depends_on: a, if: outputs.a.n > 4 or outputs.a == '5'}}",
            "steps: {a: {type: function, target: x, command: y}, b: {exec: x, depends_on: a, if: outputs.a > 4}}",
        ],
    ),
    "graph/never-called": (
        [
            ("steps: {x: {exec: x}, a: {exec: x, on_fail: {run: a}}}", "steps.a"),
            ("steps: {x: {exec: x, on_fail: {run: b}}, b: {exec: x}, a: {exec: x, on_success: {run: a}}}", "steps.a"),
        ],
        [
            "steps: {a: {exec: x, on_fail: {run: b}}, b: {exec: x, on_fail: {run: c}}, c: {exec: x, on_fail: {run: b}}}",  # noqa: E501
            "steps: {a: {exec: x, on_fail: {run: b}}, b: {exec: x, on_fail: {run: a}}, c: {exec: x, depends_on: a}}",
        ],
    ),
    "human/default": (
        [("steps: {a: {type: human-input, prompt: p, timeout: 1, choices: [a, b], default: c}}", "steps.a.default")],
        [
            "steps: {a: {type: human-input, prompt: p, timeout: 1, choices: [a, b], default: b}}",
            "steps: {a: {type: human-input, prompt: p, timeout: 1, choices: [a], default: '{{ run.id }}'}}",
        ],
    ),
    "human/outlasts-run": (
        [
            ("timeout: 40s\nsteps: {a: {exec: x, timeout: 9s, approval: {ttl: 1h}}}", "steps.a.approval.ttl"),
        ],
        [
            "timeout: 2h\nsteps: {a: {exec: x, approval: {ttl: 1h}}}",
            "timeout: 40s\nsteps: {a: {exec: x, timeout: 9s, approval: true}}",
            "steps: {a: {exec: x, approval: {ttl: 1h}}}",
        ],
    ),
    "human/unbounded": (
        [
            ("steps: {a: {type: human-input, prompt: p}}", "steps.a"),
            ("steps: {a: {type: human-input, prompt: p, timeout: 0}}", "steps.a"),
            ("steps: {a: {type: human-input, prompt: p, timeout: 0s, default: x}}", "steps.a"),
        ],
        [
            "steps: {a: {type: human-input, prompt: p, timeout: 60}}",
            "defaults: {timeout: 60s}\nsteps: {a: {type: human-input, prompt: p}}",
        ],
    ),
}
ERRORS = {
    "schema/invalid",
    "shell/value-in-script",
    "budget/longer-than-run",
    "budget/retries",
    "budget/waits",
    "graph/missing-dependency",
    "clock/overtime",
}
ERRORS |= {"graph/unknown-target", "graph/cycle", "graph/never-called", "tool/unknown", "human/default"}
ERRORS |= {rule for rule in CASES if rule.startswith("template/")} - {"template/not-waited-for", "template/foreign"}

FIRES = [(rule, text, field) for rule, (fires, _) in CASES.items() for text, field in fires]
DOES_NOT = [(rule, text) for rule, (_, quiet) in CASES.items() for text in quiet]


def test_a_rule_fires(linted: Lint) -> None:
    for rule, text, field in FIRES:
        with row(rule, text, field):
            found = [finding for finding in linted(text) if finding.rule == rule]
            assert [(finding.field, finding.is_error) for finding in found] == [(field, rule in ERRORS)]


def test_a_rule_does_not_fire_where_it_nearly_would(linted: Lint) -> None:
    for rule, text in DOES_NOT:
        with row(rule, text):
            assert rule not in rules(linted(text))


def test_tries_of_a_timeout_that_nobody_wrote_are_only_warned_of(linted: Lint) -> None:
    for text in [
        "timeout: 90\nsteps: {a: {exec: x, on_fail: {retry: {max: 1}}}}",
        "timeout: 90\ndefaults: {on_fail: {retry: {max: 1}}}\nsteps: {a: {exec: x}}",
    ]:
        with row(text):
            found = linted(text)
            assert rules(found) == ["budget/critical-path", "budget/retries"]
            assert not any(finding.is_error for finding in found)


# --- what is said -----------------------------------------------------------------------------------------


def test_a_number_in_the_wrong_unit_is_told_what_was_meant(linted: Lint) -> None:
    for text, suggestion in [
        ("steps: {a: {exec: x, timeout: 60000}}", "did you mean 1m?"),
        ("steps: {a: {exec: x, timeout: 5000}}", "did you mean 5s?"),
        ("steps: {a: {type: http_client, url: http://u, timeout: 30}}", "did you mean 30s?"),
        ("steps: {a: {type: git-checkout, repository: r, clone_timeout_ms: 60}}", "did you mean 60000?"),
    ]:
        with row(text, suggestion):
            assert only(linted(text), "clock/unit").suggestion == suggestion


def test_a_number_in_the_wrong_unit_is_told_what_it_means(linted: Lint) -> None:
    found = only(linted("steps: {a: {exec: x, timeout: 60000}}"), "clock/unit")
    assert found.message == "60000 on a command is seconds: 16h40m"


def test_a_missing_dependency_is_told_what_was_meant(linted: Lint) -> None:
    meant = {
        "biuld": "did you mean 'build'?",
        "Build": "did you mean 'build'?",
        "zzz": "there are build, test",
    }
    for name, suggestion in meant.items():
        text = f"steps: {{build: {{exec: x}}, test: {{exec: x, depends_on: {name}}}}}"
        found = only(linted(text), "graph/missing-dependency")
        assert (found.message, found.suggestion) == (f"there is no step {name!r}", suggestion)


def test_a_circle_is_told_with_its_path_and_its_place(linted: Lint) -> None:
    found = linted(
        """\
        steps:
          start: {exec: x}
          a:
            exec: x
            depends_on: [start, c]
          b: {exec: x, depends_on: a}
          c: {exec: x, depends_on: b}
        """
    )
    circle = only(found, "graph/cycle")
    assert circle.message == "steps wait for each other: a → c → b → a"
    assert (circle.place.line, circle.place.column) == (5, 5)


def test_what_is_said_about_a_key_is_said_where_its_other_name_stands(linted: Lint) -> None:
    found = linted(
        """\
        checks:
          a:
            exec: x
            needs:
              - b
          c: {type: tool, tool: none}
        """
    )
    assert [(finding.field, finding.place.line, finding.place.column) for finding in found] == [
        ("steps.a.depends_on", 4, 5),
        ("steps.c.tool", 6, 19),
    ]


def test_what_waits_for_what_never_starts_never_starts_and_is_told_why(linted: Lint) -> None:
    found = linted(
        """\
        steps:
          off: {exec: x, if: false}
          a: {exec: x, depends_on: off}
          b: {exec: x, depends_on: [c, a]}
          c: {exec: x}
          d: {exec: x, depends_on: "off|c"}
        """
    )
    assert [(finding.field, finding.message) for finding in found] == [
        ("steps.off.if", "can never start: its condition is always false"),
        ("steps.a", "can never start: it waits for off, which never does"),
        ("steps.b", "can never start: it waits for a, which never does"),
    ]


def test_a_tool_is_told_what_was_meant(linted: Lint) -> None:
    found = linted("tools: {count: {exec: wc}}\nsteps: {a: {type: tool, tool: conut}, b: {type: tool, tool: zz}}")
    assert [finding.suggestion for finding in found] == ["did you mean 'count'?", "there are count"]


def test_nobody_is_warned_of_a_person_who_is_there(linted: Lint) -> None:
    assert linted("steps: {a: {type: human-input, prompt: p}}", unattended=False) == []


def test_errors_come_first_each_as_they_stand(linted: Lint) -> None:
    found = linted(
        """\
        timeout: 60000
        steps:
          a: {exec: x, timeout: 70000, soft: 80000}
          b: {exec: x, depends_on: c}
          d: {exec: x, timeout: 90000}
        """
    )
    assert [(finding.is_error, finding.place.line) for finding in found] == [
        (True, 3),
        (True, 4),
        (True, 5),
        (False, 1),
        (False, 1),
        (False, 3),
        (False, 3),
        (False, 5),
    ]


def test_the_callers_limit_counts_where_it_is_the_shorter(linted: Lint) -> None:
    text = "timeout: 10m\nsteps: {a: {exec: x, timeout: 5m}}"
    assert linted(text) == []
    assert linted(text, timeout_ms=600_000) == []
    assert linted(text, timeout_ms=0) == []
    found = linted(text, timeout_ms=60_000)
    assert sorted(rules(found)) == ["budget/critical-path", "budget/longer-than-run"]
    assert not any(finding.is_error for finding in found), "the file is not wrong"
    found.sort(key=lambda finding: finding.rule == "budget/critical-path")
    assert "the caller of the run has 1m" in found[0].message
    assert found[0].suggestion == "write at most 59.5s, or give the run more time"
    assert linted("timeout: 1m\nsteps: {a: {exec: x, timeout: 5m}}", timeout_ms=600_000)[0].message.endswith(
        "the run has 1m"
    )


def test_a_wrong_file_is_not_linted_but_told_what_is_wrong() -> None:
    loaded = load_text(b"stesp: {}")
    assert lint(loaded) == list(loaded.findings) != []


# --- large, and any ---------------------------------------------------------------------------------------


def test_a_long_circle_and_a_long_way_are_told_short(linted: Lint) -> None:
    steps = "\n".join(f"  s{n}: {{exec: x, depends_on: s{n - 1}}}" for n in range(1, 300))
    (circle,) = linted(f"steps:\n  s0: {{exec: x, depends_on: s299}}\n{steps}")
    (way,) = linted(f"timeout: 10\nsteps:\n  s0: {{exec: x}}\n{steps}")
    assert len(circle.message) < 300
    assert len(way.message) < 300


def broken(count: int) -> Loaded:
    """Every step waits for one that is not there, and is nearly called like one that is."""
    steps = {f"step_{n}": {"type": "command", "exec": "x", "depends_on": [f"stepp_{n}"]} for n in range(count)}
    return Loaded(Source("flow.yaml"), WorkflowFile.model_validate({"steps": steps}))


@pytest.mark.slow
def test_a_large_file_that_is_all_wrong_is_told_so_in_bounded_time() -> None:
    began = time.process_time()
    found = lint(broken(5_000))
    assert len(found) == FINDINGS_LIMIT
    assert sum(len(finding.message) + len(finding.suggestion or "") for finding in found) < 100_000
    assert time.process_time() - began < 20


def chain(count: int) -> Loaded:
    steps = {
        f"s{n}": {"type": "command", "exec": "x", "timeout": 1, "depends_on": [f"s{n - 1}"] if n else []}
        for n in range(count)
    }
    return Loaded(Source("flow.yaml"), WorkflowFile.model_validate({"timeout": "10h", "steps": steps}))


def fan(count: int) -> Loaded:
    steps = {
        f"s{n}": {"type": "command", "exec": "x", "timeout": 1, "depends_on": ["s0"] if n else [], "if": n > 0}
        for n in range(count)
    }
    return Loaded(Source("flow.yaml"), WorkflowFile.model_validate({"timeout": "10h", "steps": steps}))


@pytest.mark.slow
def test_ten_times_as_many_steps_take_about_ten_times_as_long() -> None:
    for shape in [chain, fan]:
        with row(shape):

            def took_s(loaded: Loaded) -> float:
                times = []
                for _ in range(3):
                    began = time.process_time()
                    lint(loaded)
                    times.append(time.process_time() - began)
                return min(times)

            # A square would be a hundred times; caches and the collector make more of ten than ten.
            assert took_s(shape(1_000)) < 30 * max(took_s(shape(100)), 0.001)


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=2).map("|".join), max_size=3),
        min_size=1,
    )
)
def test_a_cycle_is_found_exactly_where_there_is_one_and_missing_names_beside_it(waits: dict[str, list[str]]) -> None:
    steps = {name: {"type": "command", "exec": "x", "depends_on": others} for name, others in waits.items()}
    workflow = WorkflowFile.model_validate({"steps": steps})
    found = lint(Loaded(Source("flow.yaml"), workflow))
    assert ("graph/cycle" in rules(found)) == (find_cycle(graph_of(workflow)) is not None)
    missing = {(name, other) for name, others in waits.items() for each in others for other in each.split("|")}
    missing = {(name, other) for name, other in missing if other not in waits}
    told = {(finding.path[1], finding.message) for finding in found if finding.rule == "graph/missing-dependency"}
    assert told == {(name, f"there is no step {other!r}") for name, other in missing}


# --- all mistakes at once ---------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_whatever_kind_they_are_of() -> None:
    text = """
steps:
  a: {run: echo hi, needs: nobody, if: "a && b"}
  b: {type: http, url: x, timeout: banana, depends_on: [a, nope]}
  c: {exec: [x], deppends_on: a, depends_on: zzz, fail_if: "output.x("}
  d: {type: mcp, command: x, url: y, method: z, depends_on: b}
  e: {exec: "echo {{ outputs.c }} {{ outputs.gone }}", depends_on: c, on_fail: {retry: {}}}
  f: hello
  g: {type: mcp, command: x, method: y, transport: stdio, depends_on: f}
"""
    found = [(finding.rule, finding.field) for finding in lint(load_text(text.encode()))]
    assert found == [
        ("schema/type", "steps.a"),
        ("graph/missing-dependency", "steps.a.depends_on"),
        ("template/syntax", "steps.a.if"),
        ("schema/type", "steps.b.type"),
        ("schema/value", "steps.b.timeout"),
        ("graph/missing-dependency", "steps.b.depends_on"),
        ("schema/value", "steps.c.exec"),
        ("schema/unknown-key", "steps.c.deppends_on"),
        ("graph/missing-dependency", "steps.c.depends_on"),
        ("template/syntax", "steps.c.fail_if"),
        ("schema/value", "steps.d"),
        ("template/unknown-step", "steps.e.exec"),
        ("schema/missing", "steps.e.on_fail.retry.max"),
        ("schema/value", "steps.f"),
    ]


WRONG_IN_MANY_WAYS = """
timeout: 10
inputs: {n: {type: integer, default: abc}}
steps:
  a: {exec: "echo {{ outputs.gone }} {{ inputs.gone }}", timeout: 60}
  b: {exec: x, output_schema: {type: nonsense}, soft: 9, timeout: 5}
  c: {exec: "echo 'unclosed", depends_on: b}
  d: {type: http_client, url: "htp:/bad", headers: {X: "a\\r\\nb"}, timeout: 60ms}
  e: {type: git-checkout, repository: "ext::sh", ref: "--x"}
  f: {type: function, target: nofile.py:app, command: x}
"""
FOUND_IN_IT = {
    ("input/default", "inputs.n.default"),
    ("template/unknown-step", "steps.a.exec"),
    ("template/unknown-input", "steps.a.exec"),
    ("budget/longer-than-run", "steps.a.timeout"),
    ("schema/invalid", "steps.b.output_schema"),
    ("clock/never-rings", "steps.b.soft"),
    ("shell/syntax", "steps.c.exec"),
    ("http/invalid", "steps.d.url"),
    ("http/invalid", "steps.d.headers"),
    ("git/invalid", "steps.e.repository"),
    ("git/invalid", "steps.e.ref"),
    ("function/missing", "steps.f.target"),
}


def test_a_cycle_or_a_wrong_key_hides_no_other_mistake(tmp_path: Path) -> None:
    more = {
        "": set(),
        "  z: {exec: x, depends_on: z}": {("graph/cycle", "steps.z.depends_on")},
        "  z: {exec: x, idle: nope}": {("schema/value", "steps.z.idle")},
        "version: 9.9": {("schema/value", "version")},
        "x: 1\nx: 2": {("file/duplicate-key", "file"), ("schema/unknown-key", "x")},
    }
    for line, expected in more.items():
        loaded = load_text(f"{WRONG_IN_MANY_WAYS}{line}\n".encode(), folder=tmp_path)
        found = {(finding.rule, finding.field) for finding in lint(loaded)}
        assert found - {("budget/critical-path", "timeout")} >= FOUND_IN_IT | expected, line


def test_a_command_that_its_own_shell_can_read_is_not_a_syntax_error(linted: Lint) -> None:
    for shell, script in (
        ("bash", "a=(1 2); [[ ${a[0]} == {{ run.id }} ]] && cat <(echo)"),
        ("sh", "if true; then echo {{ run.id }}; fi"),
        ("bash", "shopt -s extglob\nls !(a)"),
        ("/no/such/bash", "if"),
    ):
        text = json.dumps({"steps": {"a": {"exec": script, "shell": shell}}})
        assert [finding for finding in linted(text) if finding.rule == "shell/syntax"] == [], script
    assert rules(linted("steps: {a: {exec: 'a=(1 2)', shell: dash}}")) == ["shell/syntax"]


def test_a_file_whose_name_comes_from_a_block_is_known_when_it_runs(linted: Lint) -> None:
    assert linted("steps: {a: {type: workflow, workflow: '{% if 1 %}a.yaml{% endif %}'}}") == []


def test_a_check_runs_no_program_of_the_file(linted: Lint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bash", "own.sh"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (tmp_path / name).chmod(0o755)
    for shell in ("./bash", [str(tmp_path / "bash")], ["bash", "./own.sh"], ["bash", "--", "./own.sh"]):
        linted(json.dumps({"steps": {"a": {"exec": "if true; then echo; fi", "shell": shell}}}))
        assert not (tmp_path / "ran").exists(), shell
    assert rules(linted("steps: {a: {exec: 'if true', shell: [bash, -eu, -o, pipefail]}}")) == ["shell/syntax"]
    assert rules(linted("steps: {a: {exec: 'ls !(a)', shell: [bash, -O, extglob]}}")) == []


def test_a_short_time_for_a_model_or_a_clone_is_told_as_a_wrong_unit(linted: Lint) -> None:
    clone = "a: {type: git-checkout, repository: r, clone_timeout_ms: 300}"
    text = f"steps: {{{clone}, b: {{type: ai, prompt: p, ai: {{timeout: 120}}}}}}"
    hints = [(finding.field, finding.suggestion) for finding in linted(text) if finding.rule == "clock/unit"]
    assert hints == [
        ("steps.a.clone_timeout_ms", "did you mean 300000?"),
        ("steps.b.ai.timeout", "did you mean 120s?"),
    ]


def test_what_is_left_out_of_a_broken_file_is_not_missed_elsewhere() -> None:
    text = """
inputs: {n: 5}
tools: {t: 5}
steps:
  a: {type: tool, tool: t, arguments: {n: "{{ inputs.n }} {{ outputs.b }}"}, depends_on: b}
  b: {type: oracle, prompt: "{{ whatever }}"}
"""
    found = [(finding.rule, finding.field) for finding in lint(load_text(text.encode()))]
    assert found == [("schema/value", "inputs.n"), ("schema/value", "tools.t"), ("schema/type", "steps.b.type")]


def test_what_other_languages_write_is_told_as_it_is_written_here(linted: Lint) -> None:
    for condition, hint in [
        ("a && b", "and"),
        ("a || b", "or"),
        ("a === 1", "=="),
        ("!a", "not"),
        ("a ? 1 : 2", "if"),
        ("xs.map(x => x)", "filters"),
        ("outputs.b.includes('x')", "in"),
        ("steps.b == null", "none"),
        ("outputs.b | size > 2", "length"),
    ]:
        with row(condition, hint):
            found = linted(f'steps: {{b: {{exec: x}}, a: {{exec: x, depends_on: b, if: "{condition}"}}}}')
            assert any(hint in str(finding.suggestion) for finding in found if finding.is_error), found


def test_a_template_is_read_and_not_computed(linted: Lint) -> None:
    assert linted("steps: {a: {exec: \"echo {{ 'a' * 9999999999 }}\"}}") == []


def test_a_value_is_refused_in_a_variable_of_an_agents_server_that_would_run_it(linted: Lint) -> None:
    server = "hands: {command: server, env: {LD_PRELOAD: '{{ inputs.x }}'}}"
    text = f"inputs: {{x: {{}}}}\nsteps: {{a: {{type: ai, prompt: p, ai: {{mcp_servers: {{{server}}}}}}}}}"
    (found,) = [each for each in linted(text) if each.rule == "shell/value-in-script"]
    assert found.is_error and found.field == "steps.a.ai.mcp_servers.hands.env.LD_PRELOAD"
