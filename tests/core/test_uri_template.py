"""URI templates, compared strictly and leniently."""

from shotclock.core.uri_template import matches_strictly, may_match


def test_a_trusted_template_matches_the_expansions_that_servers_agree_on() -> None:
    for template, uri, expected in (
        ("file:///{path}", "file:///notes", True),
        ("file:///{path}", "file:///a/b", False),
        ("file:///{path}", "FILE:///notes", False),
        ("file:///{+path}", "file:///a/b?c", True),
        ("http://x{/path*}", "http://x/a/b", True),
        ("http://x{/path*}", "http://x/a?b", False),
        ("http://x/{id}{?fields,limit}", "http://x/1?limit=2", True),
        ("http://x/{id}{?fields,limit}", "http://x/1", True),
        ("http://x/{id}{?fields,limit}", "http://x/1/2?limit=2", False),
        ("{name}.{ext}", "a.txt", True),
        ("{name}.{ext}", "atxt", False),
        ("x{", "x", True),
        ("plain", "plain", True),
        ("a.c", "abc", False),
    ):
        assert matches_strictly(template, uri) is expected, (template, uri)


def test_an_untrusted_template_matches_all_that_a_server_might_accept() -> None:
    for template, uri, expected in (
        ("file:///{path}", "FILE:///a/b?c#d", True),
        ("file:///{path}", "file%3A///a", True),
        ("db://{table}/{row}", "db://a/1", True),
        ("db://{table}/{row}", "db://a", False),
        ("{a}-{b}-{c}", "1-2", False),
        ("aa{x}aa", "aaa", False),
        ("plain", "plain/more", False),
    ):
        assert may_match(template, uri) is expected, (template, uri)


def test_hostile_templates_take_no_time() -> None:
    for template in ("{a}" * 500 + "!", "{a}x" * 500 + "!", "{+a}" * 500 + "!", "{/a*}" * 500 + "!"):
        for uri in ("x" * 50_000, "/x" * 25_000):
            assert not matches_strictly(template, uri) and not may_match(template, uri)
