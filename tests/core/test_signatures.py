"""Functions that wrap others have the parameters and annotations that were declared, on every version of Python."""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import pytest

from shotclock import App, Context, Depends
from shotclock.core.signatures import declare, known_hints, read_parameters, read_signature, with_context, wraps

# An unquoted name that does not exist yet can be written from Python 3.14 on.
LATER = "Later" if sys.version_info >= (3, 14) else "'Later'"


def made(text: str) -> Any:
    """The function `f` of a program without the future import."""
    names: dict[str, Any] = {"Annotated": Annotated, "Depends": Depends, "Context": Context, "Iterator": Iterator}
    exec(compile(text, "<test>", "exec", dont_inherit=True), names)
    return names["f"]


def test_what_is_declared_stays_behind_any_number_of_wrappers() -> None:
    def written(first: str, gone: int) -> str:
        return first

    signature = read_signature(written)
    kept = [each for each in signature.parameters.values() if each.name != "gone"]

    @wraps(written)
    def inner(**named: Any) -> Any: ...

    declare(inner, with_context(signature.replace(parameters=kept, return_annotation=list[int]), Context))

    @wraps(inner)
    def middle(**named: Any) -> Any: ...

    @wraps(middle)
    def outer(**named: Any) -> Any: ...

    for each in (inner, middle, outer):
        assert get_type_hints(each) == {"first": str, "ctx": Context, "return": list[int]}
        assert read_signature(each) == inspect.signature(each) == inspect.signature(inner)
        assert list(read_parameters(each).parameters) == ["first", "ctx"]
        assert each.__name__ == "written" and inspect.unwrap(each) is written
    assert get_type_hints(written) == {"first": str, "gone": int, "return": str}


@pytest.mark.parametrize(
    "text",
    [
        f"def f(n: {LATER}): ...",
        f"def f(n: int) -> {LATER}: ...",
        f"def f(n: {LATER}) -> Iterator[int]:\n    yield 1",
        f"def db(): ...\ndef f(n: {LATER}, db=Depends(db)): ...",
        f"def db(): ...\ndef f(n: {LATER}, db: Annotated[int, Depends(db)]): ...",
        f"def f(ctx: Context, n: {LATER}): ...",
    ],
)
def test_an_annotation_that_cannot_be_resolved_is_one_sentence_at_the_declaration(text: str) -> None:
    for declare_at in (App("p").command, App("p").resource("docs://{n}"), App("p").prompt):
        with pytest.raises(TypeError, match=r"^f: annotation cannot be resolved: name 'Later' is not defined"):
            declare_at(made(text))


def test_an_annotation_that_nobody_needs_may_stay_unresolved() -> None:
    app = App("p")

    @app.command
    def command(n: Annotated[int, Depends(made(f"def f(ctx: Context) -> {LATER}: ..."))]) -> None: ...

    assert app.catalogue().commands[0].input_schema["properties"] == {}
    lenient: Callable[..., Any] = made(f"def f(n: {LATER}): ...")
    assert known_hints(lenient) == {} and list(read_parameters(lenient).parameters) == ["n"]
    App("p", lifespan=made(f"def f(app: {LATER}):\n    yield"))
