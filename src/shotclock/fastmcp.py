"""The words of FastMCP 4 for functions that move to an App: docs/howto/from-fastmcp.md.

Only what the functions themselves use. Decorators and the App are ours.
"""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from .core.errors import Failure
from .core.foreign_words import CONTEXT, ExplainsMembers
from .core.value_types import JsonObject, value
from .worker import context

T = TypeVar("T")


class ToolError(Failure):
    """A failure whose message the client sees."""

    def __init__(self, message: object = "") -> None:
        super().__init__("GENERAL_ERROR", str(message))


class ResourceError(ToolError):
    """The same, of a resource."""


class PromptError(ToolError):
    """The same, of a prompt."""


@value
class AcceptedElicitation(Generic[T]):
    """The answer of the person."""

    data: T
    action: Literal["accept"] = "accept"


@value
class DeclinedElicitation:
    """The person declined to answer."""

    action: Literal["decline"] = "decline"


@value
class CancelledElicitation:
    """The person closed the question."""

    action: Literal["cancel"] = "cancel"


class Context(context.Context[JsonObject], ExplainsMembers):
    """The call as its function sees it, with FastMCP's methods beside ours. They are awaited."""

    _instead_of = CONTEXT

    @property
    def lifespan_context(self) -> JsonObject:
        """Return the value that the lifespan has yielded."""
        return self.state

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report how far the work is."""
        # Fractions, because a message beside whole numbers is a unit for `progress`.
        self.progress(float(progress), None if total is None else float(total), message)

    async def log(  # type: ignore[override]  # ours is not awaited
        self,
        message: str,
        level: str | None = None,
        logger_name: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Send a message to the log of the client, with `extra` as JSON behind it."""
        text = f"{message} {json.dumps(extra, default=str)}" if extra else message
        super().log(text, level or "info", logger_name)

    async def debug(self, message: str, logger_name: str | None = None, extra: Mapping[str, Any] | None = None) -> None:
        await self.log(message, "debug", logger_name, extra)

    async def info(self, message: str, logger_name: str | None = None, extra: Mapping[str, Any] | None = None) -> None:
        await self.log(message, "info", logger_name, extra)

    async def warning(
        self, message: str, logger_name: str | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        await self.log(message, "warning", logger_name, extra)

    async def error(self, message: str, logger_name: str | None = None, extra: Mapping[str, Any] | None = None) -> None:
        await self.log(message, "error", logger_name, extra)

    async def elicit(
        self,
        message: str,
        response_type: Any,
        *,
        response_title: str | None = None,
        response_description: str | None = None,
    ) -> AcceptedElicitation[Any] | DeclinedElicitation | CancelledElicitation:
        """Ask the person at the client. Raises as `ask` does."""
        is_form = _is_form(response_type)
        if is_form and (response_title or response_description):
            raise TypeError("response_title and response_description are for single values: give them to the fields")
        form = response_type if is_form else _form_of_value(response_type, response_title, response_description)
        answer = self.ask(message, form)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer.action != "accept":
            return DeclinedElicitation() if answer.action == "decline" else CancelledElicitation()
        return AcceptedElicitation(answer.data if is_form else answer.data.value)


def CurrentContext() -> Any:
    """Mark the parameter of the context, which is found by its annotation."""
    return None


def _is_form(of: Any) -> bool:
    return isinstance(of, type) and not issubclass(of, (str, int, float, enum.Enum))


def _form_of_value(of: Any, title: str | None, description: str | None) -> Any:
    """Return a model with the one field `value`, the name that clients of FastMCP know."""
    from pydantic import Field, create_model

    return create_model("Asked", value=(_type_of_choices(of), Field(title=title, description=description)))


def _type_of_choices(of: Any) -> Any:
    """Return the type of choices that are written as values: ["a", "b"], {"a": {"title": "A"}}, or a list of these."""
    from pydantic import WithJsonSchema

    match of:
        case dict():
            titled = [{"const": name, "title": given.get("title", name)} for name, given in of.items()]
            return Annotated[Literal[tuple(of)], WithJsonSchema({"type": "string", "oneOf": titled})]
        case [list() | dict()]:
            return list[_type_of_choices(of[0])]  # type: ignore[misc]
        case list():
            return Literal[tuple(of)]
        case _:
            return of
