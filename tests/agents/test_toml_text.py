"""Places in the text of a TOML file."""

import tomllib

from shotclock.agents import _toml_text as toml_text

TEXT = """\
# [servers.a]
top = "x" # y
day = 1979-05-27 07:32:00 # a space inside
text = \"\"\"a "" \\\\"\\" ]
[servers.no]
""\"""
[ servers . "a.b" ] # ]
command = 'C:\\x' # =
args = [ # one ]
  "a", # two ]
  '''b''', ["c", { d = "]" }],
]
[servers]
x = { command = "}", args = [], env = { A.B = "," } }
y.'command' = "z"
[[list]]
command = 1
[[list]]
command = 2
"""


def test_every_value_is_found_where_it_is_written() -> None:
    data = tomllib.loads(TEXT)
    for path in (
        ("top",),
        ("day",),
        ("text",),
        ("servers", "a.b", "command"),
        ("servers", "a.b", "args"),
        ("servers", "x"),
        ("servers", "x", "command"),
        ("servers", "x", "args"),
        ("servers", "x", "env", "A", "B"),
        ("servers", "y", "command"),
    ):
        item = toml_text.locate(TEXT, path)
        assert item is not None, path
        value = data
        for key in path:
            value = value[key]
        assert tomllib.loads(f"value = {TEXT[item.value_start : item.end]}")["value"] == value
        assert item.key == path[-1]
        assert tomllib.loads(TEXT[item.start : item.end]), "the key and the value"


def test_elements_of_a_list_are_found_between_comments() -> None:
    item = toml_text.locate(TEXT, ("servers", "a.b", "args"))
    assert item is not None
    found = [TEXT[each.start : each.end] for each in toml_text.list_items(TEXT, item.value_start)]
    assert found == ['"a"', "'''b'''", '["c", { d = "]" }]']


def test_tables_and_elements_of_lists_of_tables_have_no_place() -> None:
    for path in (("servers",), ("servers", "a.b"), ("servers", "no"), ("list", "command"), ("command",), ("none",)):
        assert toml_text.locate(TEXT, path) is None, path
