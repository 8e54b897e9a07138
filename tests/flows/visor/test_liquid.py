"""Liquid templates give the same text here."""

import pytest

from shotclock.flows.file.templates import render_text
from shotclock.flows.visor._expression import NameScope, Unsayable
from shotclock.flows.visor._liquid import template
from tests.rows import row

SCOPE = {
    "outputs": {
        "o": {
            "name": "Web API",
            "zero": 0,
            "empty": "",
            "no": False,
            "nothing": None,
            "words": ["b", "a", "b"],
            "rows": [{"k": "x", "v": 1}, {"k": "y"}],
            "map": {"a": 1},
        },
        "ask": "blue",
    },
    "env": {"STAGE": "test"},
}
NAMES = NameScope({"o": "ai", "ask": "human-input", "gone": "ai"})

TABLE = {
    "{{ outputs.o.name }}!": "Web API!",
    "{{ outputs['o'].name | upcase }}": "WEB API",
    "{{ outputs.o.name | downcase | replace: ' ', '-' | append: '.x' }}": "web-api.x",
    "{{ outputs.o.map | json }}": '{"a": 1}',
    "{{ outputs.o.absent | default: 'none' }}": "none",
    "{{ outputs.o.empty | default: 'none' }}": "none",
    "{{ outputs.o.zero | default: 'none' }}": "0",
    "{{ outputs.o.no | default: 'none' }}": "none",
    "{{ outputs.o.nothing | default: 'none' }}": "none",
    "{{ outputs.ask.text }}": "blue",
    "{{ env.STAGE | prepend: 'in ' }}": "in test",
    "{{ outputs.o.words | size }} {{ outputs.o.words.size }}": "3 3",
    "{{ outputs.o.words | uniq | sort | join: ', ' }}": "a, b",
    "{{ outputs.o.words | first }}{{ outputs.o.words | last }}": "bb",
    "{{ outputs.o.rows | map: 'k' | join: '+' }}": "x+y",
    "{% if outputs.o.empty %}yes{% else %}no{% endif %}": "yes",
    "{% if outputs.o.zero %}yes{% else %}no{% endif %}": "yes",
    "{% if outputs.o.no %}yes{% else %}no{% endif %}": "no",
    "{% if outputs.o.nothing %}yes{% else %}no{% endif %}": "no",
    "{% if outputs.o.absent %}yes{% else %}no{% endif %}": "no",
    "{% if outputs.gone %}yes{% else %}no{% endif %}": "no",
    "{% unless outputs.o.absent %}yes{% endunless %}": "yes",
    "{% if outputs.o.zero == 0 and outputs.o.no == false %}yes{% endif %}": "yes",
    "{% if true or false and false %}yes{% endif %}": "yes",
    "{% if false and false or true %}yes{% else %}no{% endif %}": "no",
    "{% if outputs.o.words contains 'a' %}yes{% endif %}": "yes",
    "{% if outputs.o.absent contains 'a' %}yes{% else %}no{% endif %}": "no",
    "{% if outputs.o.empty == empty %}yes{% endif %}": "yes",
    "{% if outputs.o.absent == nil %}yes{% endif %}": "yes",
    "{% if outputs.o.zero > 1 %}a{% elsif outputs.o.zero < 1 %}b{% endif %}": "b",
    "{% for w in outputs.o.words %}{{ forloop.index }}{{ w }}{% endfor %}": "1b2a3b",
    "{% for w in outputs.o.absent %}x{% else %}none{% endfor %}": "none",
    "{% for w in outputs.o.words %}{{ w }}{% unless forloop.last %},{% endunless %}{% endfor %}": "b,a,b",
    "{% for r in outputs.o.rows %}{{ r.v | default: 'no' }} {% endfor %}": "1 no ",
    "a{%- assign x = outputs.o.words | size -%} {{ x }}": "a3",
    "{% comment %}{{ nothing }}{% endcomment %}{% raw %}{{ x }}{% endraw %}": "{{ x }}",
    "no tags {# at all #}": "no tags {# at all #}",
}
REFUSED = [
    "{{ pr.title }}",
    "{% readfile 'x' %}",
    "{% include 'x' %}",
    "{{ 'a' | memory_get }}",
    "{{ outputs.nobody }}",
    "{{ outputs.o.x | date: '%Y' }}",
    "{% for w in outputs.o.words %}{% assign n = w %}{% endfor %}",
    "{% if a %}",
    "{% endif %}",
    "{{ open",
    "{% capture x %}a{% endcapture %}",
    "{{ outputs.o.name | shell_escape }}",
    "{% for w in outputs.o.words limit: 2 %}{% endfor %}",
    "{% if outputs.o.name == blank %}{% endif %}",
    "{% assign h = '' | chat_history: 'ask' %}",
    "{{ outputs.o.name | times: 3 }}",
    "{{ outputs.o.zero | plus: 2 }}",
    "{{ outputs.o.rows | where: 'k', 'y' }}",
    "{% for i in (1..3) %}{{ i }}{% endfor %}",
    "{% for w in outputs.o.words reversed %}{{ w }}{% endfor %}",
    "{% case outputs.o.zero %}{% when 0 %}none{% endcase %}",
    "{% if x == %}{% endif %}",
    "{{ }}",
    "{% for p in outputs.o.map %}{{ p[0] }}{% endfor %}",
]


def test_a_template_gives_the_text_of_liquid() -> None:
    for source, text in TABLE.items():
        with row(source):
            written = template(source, NAMES)
            assert render_text(written, SCOPE)[0] == text, written


def test_what_cannot_be_said_is_refused() -> None:
    for source in REFUSED:
        with row(source), pytest.raises(Unsayable):
            template(source, NAMES)
