"""What an App takes, what it refuses when it is imported, and what it assumes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shotclock import App, Context
from shotclock.apps._manifest import build_manifest
from shotclock.apps.app import call_request
from shotclock.core.catalogue import Catalogue, Interruption


@pytest.fixture
def app() -> App:
    return App("tool")


def sync_command(path: Path) -> None: ...
async def async_command() -> None: ...


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such isolation": ({"isolation": "container"}, "must be one of"),
    "a loop for a sync function": ({"isolation": "inline"}, "not async"),
    "destructive without an effect": ({"destructive": True, "mutates": False}, "destructive"),
    "no confirmation of nothing": ({"confirm": False}, "destructive=True"),
    "no place at all": ({"concurrency": 0}, "at least 1"),
    "a lock on nothing": ({"single_flight": "device:{device}"}, "device"),
    "a lock on a position": ({"single_flight": "device:{}"}, "not one of its parameters"),
    "a lock on a part": ({"single_flight": "{path.name}"}, "not one of its parameters"),
    "a lock with a format": ({"single_flight": "{path:>5}"}, "takes no format"),
    "half a placeholder": ({"single_flight": "device:{path"}, "expected"),
    "a question about nothing": ({"requires_person": "wipe {name}"}, "name"),
    "the same step twice": ({"steps": ["a", "b", "a"]}, "step"),
    "an interruption that is none": ({"interruption": {"detach": False, "resume": False}}, "interrupt"),
    "a lifetime of nothing": ({"interruption": {"max_lifetime_ms": 10}}, "max_lifetime_ms"),
    "a name with spaces": ({"name": "two words"}, "name"),
    "a name that every app has": ({"name": "manifest"}, "every app"),
    "the word for jobs": ({"name": "job"}, "every app"),
    "a negative timeout": ({"timeout": "-5s"}, "-5s"),
    "a timeout that is none": ({"timeout": "soon"}, "soon"),
    "a soft limit after the timeout": ({"soft": "9s", "timeout": "5s"}, "soft must be shorter than the timeout of 5s"),
    "a soft limit after the default timeout": ({"soft": "30s"}, "soft must be shorter than the timeout of 30s"),
    "not even a duration": ({"idle": float("nan")}, "nan"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_is_refused_where_it_is_written(wrong: str, app: App):
    declared, said = WRONG[wrong]
    with pytest.raises(ValueError, match=said) as refused:
        app.command(**declared)(sync_command)
    assert len(str(refused.value)) > 10
    assert app.catalogue().commands == ()


def test_braces_may_be_meant_as_they_are(app: App):
    app.command(single_flight="{{x}} {path}")(sync_command)


def test_codes_have_to_be_registered_before_they_are_declared(app: App):
    with pytest.raises(LookupError, match="ACME_NOPE"):
        app.command(exit_codes=["ACME_NOPE"])(sync_command)


def test_an_option_that_does_not_exist_is_a_type_error(app: App):
    with pytest.raises(TypeError, match="tiemout"):
        app.command(tiemout="5s")(sync_command)
    with pytest.raises(TypeError, match="no option 'timout'"):
        call_request("any", {}, timout="5s")


def test_withdrawn_isolations_are_refused_with_the_new_word(app: App):
    for isolation, instead in (("loop", "'shared'"), ("thread", "'process'")):
        with pytest.raises(ValueError, match=instead):
            app.command(isolation=isolation)(async_command)  # type: ignore[call-overload]


def test_two_commands_of_one_name_are_one_too_many(app: App):
    app.command(sync_command)
    with pytest.raises(ValueError, match="already"):
        app.command(sync_command)


@pytest.mark.parametrize("name", ["help", "help_", "confirm_destructive"])
def test_a_parameter_with_a_name_that_means_something_for_every_command_is_refused(name: str, app: App):
    namespace: dict[str, Any] = {}
    exec(f"def take({name}: str = ''): ...", namespace)
    with pytest.raises(ValueError, match=f"--{name.strip('_').replace('_', '-')}"):
        app.command(namespace["take"])


def test_two_parameters_that_would_be_one_flag_are_refused(app: App):
    def take(from_: str = "", _from: str = "") -> None: ...

    with pytest.raises(ValueError, match="--from"):
        app.command(take)


def test_a_dry_run_is_for_destructive_commands(app: App):
    def take(dry_run: bool = False) -> None: ...

    with pytest.raises(ValueError, match="dry run"):
        app.command(take)
    app.command(destructive=True)(take)


def test_arguments_are_passed_by_name(app: App):
    def positional(a: int, /) -> None: ...
    def many(*a: int) -> None: ...

    for function in (positional, many):
        with pytest.raises(TypeError, match="is not supported"):
            app.command(function)


def test_an_annotation_that_means_nothing_is_named(app: App):
    def take(a: "Nothing") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match="Nothing"):
        app.command(take)


@pytest.mark.parametrize("name", ["", "Tool", "two words", "a_b", "-x", "tool\n"])
def test_an_app_has_a_name_that_can_be_typed(name: str):
    with pytest.raises(ValueError, match="name"):
        App(name)


@pytest.mark.parametrize("clock", ["default_timeout", "operation_timeout", "grace"])
@pytest.mark.parametrize("value", ["-1s", "five", "", "1s2"])
def test_the_clocks_of_an_app_are_durations(clock: str, value: str):
    with pytest.raises(ValueError):
        App("tool", **{clock: value})


def test_the_limits_of_an_app_may_be_given_in_milliseconds():
    app = App("tool", default_timeout_ms=2_000, operation_timeout_ms=60_000)
    assert (app.clocks.timeout_ms, app.operation_timeout_ms) == (2_000, 60_000)
    with pytest.raises(ValueError, match="default_timeout: -1 is negative"):
        App("tool", default_timeout_ms=-1)


def test_a_limit_is_written_once_as_a_duration_or_in_milliseconds() -> None:
    app = App("tool")

    @app.command(timeout_ms=300_000)
    def bring_in() -> int:
        return 1

    assert [spec.clocks.timeout_ms for spec in app.catalogue().commands] == [300_000]
    for given in (
        {"default_timeout": "7s", "default_timeout_ms": 900},
        {"default_timeout": "30s", "default_timeout_ms": 900},
        {"operation_timeout": "7s", "operation_timeout_ms": 900},
    ):
        with pytest.raises(ValueError, match="are one limit: leave one out"):
            App("tool", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout and timeout_ms are one limit: leave one out"):

        @app.command(timeout="5s", timeout_ms=5000)
        def other() -> int:
            return 1


@pytest.mark.requirement("F-011")
def test_every_command_has_a_timeout_and_its_own_wins(app: App):
    app.command(name="default")(sync_command)
    app.command(name="own", timeout="5m")(sync_command)
    app.command(name="none", timeout="0")(sync_command)
    timeouts = {spec.name: spec.clocks.timeout_ms for spec in app.catalogue().commands}
    assert timeouts == {"default": 30_000, "own": 300_000, "none": 0}


def test_what_is_not_declared_is_assumed_to_be_the_worse(app: App):
    app.command(sync_command)
    [spec] = app.catalogue().commands
    assert spec.mutates and not spec.idempotent and spec.interruption is None and spec.on_mcp


def test_a_command_for_a_person_is_no_tool_for_an_agent(app: App):
    app.command(requires_person="yes", mcp=True)(sync_command)
    [spec] = app.catalogue().commands
    assert not spec.on_mcp


@pytest.mark.requirement("F-081")
def test_an_interruption_has_the_limits_of_the_contract(app: App):
    app.command(name="a", interruption=True)(sync_command)
    app.command(name="b", interruption={"resume": True, "idle_timeout": "2s", "max_lifetime": "1m"})(sync_command)
    a, b = app.catalogue().commands
    assert a.interruption == Interruption(True, False, 300_000, 3_600_000)
    assert a.clocks.timeout_ms == 3_600_000 and a.clocks.idle_ms == 300_000
    assert b.interruption == Interruption(True, True, 2_000, 60_000)


def test_a_function_that_became_a_command_is_still_that_function(app: App):
    @app.command
    def bare(a: int) -> int:
        return a + 1

    @app.command(timeout="1s")
    def called(a: int) -> int:
        return a + 2

    assert bare(1) == 2 and called(1) == 3
    assert [spec.name for spec in app.catalogue().commands] == ["bare", "called"]


def test_the_context_is_no_argument(app: App):
    @app.command
    def take(ctx: Context, a: int = 1) -> None: ...

    [spec] = app.catalogue().commands
    assert list(spec.input_schema["properties"]) == ["a"]


def test_what_the_docstring_says_about_a_parameter_is_its_description(app: App):
    @app.command
    def take(a: int, b: int = 2) -> None:
        """Take two.

        More about it.

        Args:
            a: The first
                of them.
        """

    [spec] = app.catalogue().commands
    assert spec.summary == "Take two." and spec.description == "Take two.\n\nMore about it."
    assert spec.input_schema["properties"]["a"]["description"] == "The first of them."
    assert "description" not in spec.input_schema["properties"]["b"]


def test_a_catalogue_survives_being_written_down(app: App):
    app.command(
        interruption=True,
        steps=["a"],
        single_flight="x:{path}",
        concurrency=2,
        soft="1s",
        queue="2s",
        requires_person="{path}",
        exit_codes=["STORE_BUSY"],
    )(sync_command)
    plain = json.loads(json.dumps(app.catalogue().to_plain()))
    again = Catalogue.from_plain(plain)
    assert again.commands == app.catalogue().commands
    assert build_manifest(again, "1") == build_manifest(app.catalogue(), "1")


def test_apps_of_one_name_do_not_take_each_others_calls():
    """Two modules may both call theirs "tool"."""
    answers = []
    for number in (1, 2):
        app = App("twin", default_timeout="5s")

        @app.command(isolation="inline")
        async def which(number: int = number) -> int:
            return number

        answers.append(app)

    async def scenario() -> list[Any]:
        return [(await app.call("which")).value for app in answers]

    assert asyncio.run(scenario()) == [1, 2]


@pytest.mark.parametrize(
    ("version", "written"),
    [
        ("0", "0.0.0"),
        ("1.2", "1.2.0"),
        ("1.2.3", "1.2.3"),
        ("1.2.3-rc.1+x", "1.2.3-rc.1+x"),
        *((version, None) for version in ("2024.01", "1.2.3rc1", "", "v1", "1.2.3.4", "1.2.3\n")),
    ],
)
def test_the_version_in_an_envelope_is_the_apps_where_the_contract_can_hold_it(
    version: str, written: str | None, validate_envelope: Any
):
    app = App("versioned", version=version, default_timeout="5s")

    @app.command(isolation="inline")
    async def nothing() -> None: ...

    meta = validate_envelope(asyncio.run(app.call("nothing")).to_dict())["meta"]
    assert meta.get("tool_version") == written
