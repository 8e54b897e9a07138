"""The App: a typed function becomes a command line, an MCP tool and a library call, each of them on the clock.

    app = App("tool", default_timeout="30s")

    @app.command(timeout="5m", mutates=True)
    def import_(path: Path) -> dict: ...

    app()                                   # the command line
    app.serve_mcp()                         # the same commands as MCP tools
    await app.call("import", path=p)        # the same again, from Python

The composition root: it imports every surface.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import re
import sys
import warnings
from asyncio import get_running_loop
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack, overload

from ..calls.call import CallRequest
from ..calls.executor import DEFAULT_WARM
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..core.arguments import context_name, parameters_of, signature_of, to_jsonable
from ..core.catalogue import Catalogue, CommandSpec, HandlerReference, Operation, hyphenate
from ..core.envelope import Envelope
from ..core.errors import Failure, error_entry
from ..core.foreign_words import APP, ExplainsMembers
from ..core.limits import Clocks, parse_duration_ms
from ..core.value_types import JsonObject, record, replace
from ..dispatch.dispatcher import Dispatcher
from ..terminal.output import Signalled, StopListener, is_the_end, leave_soon
from ..worker import main as worker_main
from ..worker import running_call
from ..worker.context import Progress
from ..worker.dependencies import dependency_functions, supply_dependencies
from ..worker.lifespan import Lifespan, check_lifespan
from ..worker.running_call import MAIN_ALIAS
from ._command_function import (
    argument_checker,
    around,
    check_result,
    collect_items,
    keep_exit_code,
    output_schema,
    reads_state,
    refuse_questions,
    takes_context,
    yields,
)
from ._declared import (
    DEFAULT_OPTIONS,
    Declared,
    ServedOptions,
    check_app_name,
    check_options,
    check_placeholders,
    check_served_options,
    find_idle_completions,
    find_secrets,
    read_approval,
    read_approved_file,
    read_clocks,
    read_documentation,
    read_interruption,
    read_limit_ms,
    read_listing,
    read_min_time,
    read_overtime,
    served_spec,
)

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_GRACE = "500ms"  # shorter than that of `exec`: the caller of a tool waits for it
BUILT_IN = frozenset({"manifest", "job", "help"})
_MAIN = ("__main__", MAIN_ALIAS)
# The characters of MCP tool names.
_COMMAND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")

APPS: dict[str, App] = {}  # every App of this process by its key, the same in a worker that imports the program


class App(ExplainsMembers):
    """A set of commands that share a name, a version and default clocks."""

    _instead_of = APP

    def __init__(
        self,
        name: str,
        *,
        default_timeout: object = None,
        default_timeout_ms: int | None = None,
        operation_timeout: object = None,
        operation_timeout_ms: int | None = None,
        grace: object = DEFAULT_GRACE,
        version: str = "0",
        help: str = "",
        workers: int | None = None,
        proposals: bool = False,
        debug: bool = False,
        elicitation: bool = False,
        list_page_size: int | None = None,
        lifespan: Callable[..., Any] | None = None,
        errors_shown: tuple[type[Exception], ...] = (),
    ) -> None:
        """Make an app without commands. The options are described in docs/reference/app.md.

        `elicitation` never covers destructive calls: nothing proves that a person answered.
        """
        check_app_name(name)
        self.name = name
        self.version = version
        self.help = help
        timeout_ms = read_limit_ms("default_timeout", default_timeout, default_timeout_ms, "30s")
        self.clocks: Clocks = Clocks(timeout_ms=timeout_ms).over(Clocks.of(grace=grace))
        self.operation_timeout_ms: int = read_limit_ms(
            "operation_timeout", operation_timeout, operation_timeout_ms, "120s"
        )
        self.workers = workers
        self.proposals = proposals
        self.debug = debug
        self.elicitation = elicitation
        if list_page_size is not None and list_page_size < 1:
            raise ValueError("list_page_size must be at least 1")
        self.list_page_size = list_page_size
        made_in = sys._getframe(1)
        classes: Sequence[object] = errors_shown
        if not all(isinstance(each, type) and issubclass(each, Exception) for each in classes):
            raise TypeError(f"errors_shown: name classes of exceptions, as in (ValueError,), not {errors_shown!r}")
        self.errors_shown = errors_shown
        self._module = made_in.f_globals.get("__name__", "__main__")
        self._maker = made_in.f_code.co_name
        self._commands: dict[str, CommandSpec] = {}
        self._served: dict[str, CommandSpec] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lifespan: Lifespan | None = None
        self._has_reported = False
        self._entered: dict[object, _Entered] = {}
        """By event loop: loops in several threads have processes, and a state, of their own."""
        # Unique in its module, not among all: a worker imports this module alone.
        self._key = key = name if self._module in _MAIN else f"{self._module}/{name}"
        for number in range(2, 1000):
            if self._key not in APPS:
                break
            self._key = f"{key}-{number}"
        APPS[self._key] = self
        if lifespan is not None:
            self.lifespan(lifespan)

    # --- declaring ----------------------------------------------------------------------------------------

    def lifespan(self, function: F) -> F:
        """Make the value that a function yields the state of the app: `ctx.state` of commands in the shared process.

        It is opened before the first call that needs it, and closed at the end of the server or of `async with app`.
        """
        check_lifespan(function)
        if self._lifespan is not None:
            other = getattr(self._lifespan.function, "__qualname__", "")
            raise ValueError(f"{self.name} already has the lifespan {other}: one function opens everything")
        self._lifespan = Lifespan(self, self._key, function, self.clocks.timeout_ms)
        for spec in self._commands.values():
            self._refuse_state_of_job(spec)
        return function

    def _uses_state(self, spec: CommandSpec) -> bool:
        """Return whether the state is opened before a call of it. In the shared process a helper may read it unseen."""
        if self._lifespan is None or spec.isolation not in ("auto", "shared"):
            return False
        function = self._functions[spec.name]
        written = [inspect.unwrap(function), *dependency_functions(function)]
        return any(map(reads_state if spec.isolation == "auto" else takes_context, written))

    def _refuse_state_of_job(self, spec: CommandSpec) -> None:
        if spec.interruption is not None and self._uses_state(spec):
            message = "a command with interruption runs in a process of its own, and cannot use the state"
            raise ValueError(f"{spec.name!r}: {message}: keep what it needs in a file or a database")

    def _placed(self, spec: CommandSpec) -> CommandSpec:
        """Return the declaration with the effective isolation: known once the lifespan is declared."""
        return replace(spec, isolation="shared", uses_state=True) if self._uses_state(spec) else spec

    @overload
    def command(self, function: F, /, **declared: Unpack[Declared]) -> F: ...

    @overload
    def command(self, function: None = None, /, **declared: Unpack[Declared]) -> Callable[[F], F]: ...

    def command(self, function: F | None = None, /, **declared: Unpack[Declared]) -> F | Callable[[F], F]:
        """Make a function a command; by default it mutates and is not idempotent. See docs/reference/app.md.

        The function itself is unchanged and can be called directly, without clocks.
        """
        names = Declared.__annotations__
        for option in declared.keys() - names.keys():
            close = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise TypeError(f"@app.command has no option {option!r}; {hint}")
        options: Declared = {**DEFAULT_OPTIONS, **declared}

        def decorate(decorated: F) -> F:
            self._declare(decorated, options)
            return decorated

        return decorate if function is None else decorate(function)

    def _declare(self, function: Callable[..., Any], options: Declared) -> None:
        name = options.get("name") or function.__name__.strip("_")
        self._check_name(name)
        if is_streaming := yields(function):
            function = collect_items(function)
        function = supply_dependencies(function)
        if secrets := find_secrets(function, self.name):
            from .secret_parameters import supply_secrets  # imports pydantic

            function = supply_secrets(function, secrets, os.environ)
        context = context_name(function)
        parameters = [parameter for parameter in parameters_of(function) if parameter.name != context]
        options["steps"] = tuple(options["steps"])
        check_options(name, options, parameters)
        interruption = read_interruption(options.get("interruption"))
        approved_file = read_approved_file(name, options.get("approval"), parameters)
        if approved_file is not None and interruption is not None:
            raise ValueError(f"{name!r}: approval: a command that writes an approved file cannot go on as a job")
        clocks = read_clocks(name, options, interruption, self.clocks)
        documentation = read_documentation(function)
        schema = to_jsonable(signature_of(function).json_schema())  # a default may be infinite, which JSON cannot hold
        for parameter_name, text in documentation.parameters.items():
            if parameter_name in schema["properties"]:
                schema["properties"][parameter_name].setdefault("description", text)
        decision = None if approved_file is None else approved_file.decision
        schema["properties"].pop(decision, None)  # set by the approval, not by the caller
        is_async = inspect.iscoroutinefunction(function)
        spec = CommandSpec(
            name=name,
            handler=self._reference(name, is_async),
            summary=documentation.summary,
            description=options.get("description") or documentation.text,
            input_schema=schema,
            output_schema=output_schema(function),
            positionals=tuple(p.name for p in parameters if p.kind == "by place or name" and p.name != decision),
            isolation=options["isolation"],
            clocks=clocks,
            mutates=options["mutates"],
            idempotent=options["idempotent"],
            destructive=options["destructive"],
            confirm=options["confirm"],
            steps=tuple(options["steps"]),
            interruption=interruption,
            error_codes=tuple(error_entry(code).code for code in options["exit_codes"]),
            requires_person=options.get("requires_person"),
            approval=read_approval(name, options.get("approval")),
            approved_file=approved_file,
            single_flight=options.get("single_flight"),
            concurrency=options.get("concurrency"),
            reads_stdin=options["stdin"],
            on_mcp=options["mcp"] and options.get("requires_person") is None,
            overtime=read_overtime(name, options.get("overtime"), clocks),
            min_time_ms=read_min_time(name, options.get("min_time"), clocks),
            open_world=options.get("open_world"),
            listing=read_listing(options),
            secrets=secrets,
            streams=is_streaming,
        )
        spec.operation()  # rejects an impossible isolation
        self._commands[name] = spec
        if not is_async and not options["stdin"]:
            function = refuse_questions(function, name)
        self._functions[name] = ready = keep_exit_code(check_result(function, spec), name)
        setattr(ready, "errors_shown", self.errors_shown)  # noqa: B010  read where it runs
        self._refuse_state_of_job(spec)

    def _reference(self, name: str, is_async: bool) -> HandlerReference:
        return HandlerReference(__name__, f"find_handler:{self._key}:{name}", is_async)

    def resource(self, uri: str, /, **options: Unpack[ServedOptions]) -> Callable[[F], F]:
        """Make a function a resource of the server; with `{name}` parts in the URI, a template of resources.

        It returns a text, bytes, content, a list of these, or a value that is sent as JSON.
        """
        if not isinstance(uri, str):
            raise TypeError("@app.resource needs a URI, as in @app.resource('docs://readme')")
        return lambda function: self._serve(function, "resource", uri, options)

    @overload
    def prompt(self, function: F, /) -> F: ...

    @overload
    def prompt(self, name: str | None = None, /, **options: Unpack[ServedOptions]) -> Callable[[F], F]: ...

    def prompt(self, name: Any = None, /, **options: Unpack[ServedOptions]) -> Any:
        """Make a function a prompt of the server. It returns a text, a `Message`, content, or a list of these."""
        if callable(name):
            return self._serve(name, "prompt", name.__name__, options)
        shown = name or options.get("name")
        return lambda function: self._serve(function, "prompt", shown or function.__name__, options)

    @overload
    def completion(self, function: F, /) -> F: ...

    @overload
    def completion(
        self, of: str | None = None, argument: str | None = None, /, **options: Unpack[ServedOptions]
    ) -> Callable[[F], F]: ...

    def completion(self, of: Any = None, argument: str | None = None, /, **options: Unpack[ServedOptions]) -> Any:
        """Make a function complete an argument of a prompt or of a resource template.

        It gets the `value` so far and, if it has such a parameter, the other `arguments`. Without a prompt or template
        it completes all others, and gets `ref`, `argument` and `context` as the protocol has them.
        """
        if callable(of):
            return self._serve(of, "completion", "*", options)
        if (of is None) != (argument is None):
            raise TypeError("@app.completion needs a prompt or a template, and the name of its argument")
        subject = "*" if of is None else f"{of} {argument}"
        return lambda function: self._serve(function, "completion", subject, options)

    def _serve(self, function: F, kind: str, subject: str, options: ServedOptions) -> F:
        from ..worker.served_results import conversion_of  # takes 2 ms, which Apps with commands only do not need

        check_served_options(kind, options)
        written: Any = options
        clocks = read_clocks(f"{kind} {subject}", written, None, self.clocks)
        documentation = read_documentation(function)
        supplied = supply_dependencies(function)
        spec = served_spec(kind, subject, supplied, options, clocks, self._reference, documentation)
        if spec.name in self._served:
            raise ValueError(f"{self.name} already has the {spec.name}")
        check_placeholders(spec.name, spec.single_flight or "", set(spec.input_schema["properties"]))
        spec.operation()
        self._served[spec.name] = spec
        ready = supplied if inspect.iscoroutinefunction(supplied) else refuse_questions(supplied, spec.name)
        self._functions[spec.name] = ready = around(ready, change=conversion_of(kind, spec.listing.mime_type))
        setattr(ready, "errors_shown", self.errors_shown)  # noqa: B010
        return function

    def _check_name(self, name: str) -> None:
        if not _COMMAND_NAME.fullmatch(name):
            message = "a command's name is up to 128 letters, digits, hyphens, underscores and dots, a letter first"
            raise ValueError(f"{message}, not {name!r}")
        written = hyphenate(name)
        if written in BUILT_IN:
            raise ValueError(f"{written!r} is a command that every app has: choose another name")
        if (other := next((each for each in self._commands if hyphenate(each) == written), None)) is not None:
            raise ValueError(f"{self.name} already has a command {other!r}: both are {written!r} on the command line")

    # --- the description ----------------------------------------------------------------------------------

    def catalogue(self) -> Catalogue:
        """Return the commands, resources and prompts of the app as data."""
        return Catalogue(
            name=self.name,
            version=self.version,
            summary=self.help,
            operation_timeout_ms=self.operation_timeout_ms,
            proposals=self.proposals,
            elicitation=self.elicitation,
            commands=tuple(map(self._placed, self._commands.values())),
            served=tuple(map(self._placed, self._served.values())),
            list_page_size=self.list_page_size,
            debug=self.debug,
            clocks=self.clocks,
            file=self._file() if any(spec.approval is not None for spec in self._commands.values()) else None,
        )

    def describe(self) -> Catalogue:
        """Return the catalogue for a server, with notes for the author."""
        return replace(self.catalogue(), notes=tuple(find_idle_completions(self.name, self._served.values())))

    def _file(self) -> str | None:
        file = getattr(sys.modules.get(self._module), "__file__", None)
        return None if file is None else os.path.realpath(file)

    def use_key(self, key: str) -> None:
        """Be found by this key, also by workers that make the app with the same factory."""
        self._key, APPS[key] = key, self
        for declared in (self._commands, self._served):
            for name, spec in declared.items():
                declared[name] = replace(spec, handler=self._reference(name, spec.handler.is_async))

    def explain_missing(self) -> str:
        """Return why a worker process that imports the program does not have this app, or not all of it."""
        if self._maker == "<module>":
            return "it is defined where a worker process does not run, such as below `if __name__ == '__main__'`"
        target = f"{os.path.basename(self._file() or 'file.py')}:{self._maker}()"
        made = f"it is made inside of {self._maker}(), which a worker process does not call: make it at the top level"
        return f"{made} of its module, or serve that function: shotclock serve '{target}'"

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the function of a command; for a name with a question mark, the one that only checks arguments."""
        if name.endswith("?") and name not in self._functions:
            return argument_checker(self._functions[name[:-1]])
        function = self._functions[name]
        if self._uses_state(self._commands.get(name) or self._served[name]):
            setattr(function, "lifespan", self._lifespan)  # noqa: B010  for the shared process
        return function

    @property
    def program(self) -> Program:
        """Return the modules of this app for another process."""
        maker = self._key if self._key.endswith("()") else ""
        module = maker.partition("/")[0] or self._module
        program = Program.running_here() if module in _MAIN else Program(imports=(module,))
        # Absolute: the other process may run later, in another directory.
        return program._replace(path=tuple(os.path.abspath(entry) for entry in sys.path), maker=maker)

    # --- the surfaces -------------------------------------------------------------------------------------

    def __call__(self, argv: list[str] | None = None) -> None:
        """Run the command line: write one envelope and exit. Exit hooks have a few seconds, threads none."""
        if worker_main.inside_worker or self._module == MAIN_ALIAS:
            return  # imported for its functions, by a worker or by a process of multiprocessing
        try:
            StopListener.raise_at_once()
            from .cli import main

            code = main(self, sys.argv[1:] if argv is None else argv)
        except Signalled as signalled:  # during an import
            code = 128 + signalled.number
        if argv is None and is_the_end(self._module.partition(".")[0], sys._getframe(1)):
            leave_soon(code)
        sys.exit(code)

    def serve_mcp(self, **options: Any) -> None:
        """Serve the commands as MCP tools, on stdin and stdout, or over HTTP with `http="HOST:PORT"`.

        Returns when the client disconnects. The options are those of `shotclock serve`.
        """
        if worker_main.inside_worker:
            return
        from .server.serve import serve_app

        serve_app(self, **options)

    async def call(self, command: str, /, **arguments: Any) -> Envelope:
        """Call a command on the clock. Inside `async with app:` the workers stay warm between calls.

        A destructive command runs only with `confirm_destructive=True` beside its arguments.
        """
        return await self.call_with(command, arguments)

    async def call_with(
        self, command: str, arguments: Mapping[str, object], **options: Unpack[CallOptions]
    ) -> Envelope:
        """Call a command with a mapping of arguments, and with limits and callbacks of this one call.

        The options are `timeout`, `budget`, `idempotency_key`, `on_progress`, `on_item` and `confirm_destructive`.
        """
        request = call_request(command, arguments, **options)
        async with self:  # calls without a context share the running one, too
            return await self._entered[get_running_loop()].dispatcher.call(request)

    async def __aenter__(self) -> Self:
        loop = get_running_loop()
        if loop not in self._entered:
            if not self._has_reported:
                self._has_reported = True
                for note in find_idle_completions(self.name, self._served.values()):
                    warnings.warn(note, RuntimeWarning, stacklevel=2)
            self._entered[loop] = _Entered(await self.dispatcher().__aenter__())
        self._entered[loop].times += 1
        return self

    def dispatcher(self) -> Dispatcher:
        """Return a dispatcher of the commands with workers of its own, to be entered."""
        runtime = Runtime(
            operations=self._operations(),
            clocks=self.clocks,
            workers=self.workers or DEFAULT_WARM,
            program=self.program,
        )
        return Dispatcher(self.catalogue(), runtime, program=self.program)

    def _operations(self) -> list[Operation]:
        """Return the operations: by reference for worker processes, as functions for this process."""
        made = []
        for spec in (*self._commands.values(), *self._served.values()):
            operation = self._placed(spec).operation()
            if operation.place == "inline":
                operation = replace(operation, handler=self._functions[spec.name])
            made.append(operation)
        return made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered[get_running_loop()]
        entered.times -= 1
        if not entered.times:
            del self._entered[get_running_loop()]
            await entered.dispatcher.__aexit__(kind, error, trace)


@record
class _Entered:
    """The running dispatcher of an App on one event loop."""

    dispatcher: Dispatcher
    times: int = 0


class CallOptions(TypedDict, total=False):
    """Options of `App.call_with`."""

    timeout: object
    budget: object
    idempotency_key: str | None
    on_progress: Progress | None
    on_item: Callable[[object], None] | None
    confirm_destructive: bool


def call_request(
    command: str,
    arguments: Mapping[str, object],
    *,
    timeout: object = None,
    budget: object = None,
    confirm_destructive: bool = False,
    **options: Any,
) -> CallRequest:
    """Return the request for a call of a command, with the options of `App.call_with`."""
    if unknown := options.keys() - CallOptions.__annotations__.keys():
        raise TypeError(f"a call has no option {min(unknown)!r}; there are {', '.join(CallOptions.__annotations__)}")
    budget_ms = None if budget is None else parse_duration_ms(budget)
    limit = Clocks.of(timeout=timeout)
    return CallRequest(command, arguments, limit, budget_ms=budget_ms, confirmed=confirm_destructive, **options)


def find_handler(address: str, why: str = "importing the program does not define it") -> Callable[..., Any]:
    """Return the function of `app:command` in a process that has imported it. Raises Failure with the reason."""
    key, _, name = address.partition(":")
    if key.endswith("()"):
        make_app(key)
    elif key not in APPS and "/" in key:
        importlib.import_module(key.partition("/")[0])  # raises what kept this process from importing it before
    if key in APPS:
        with contextlib.suppress(KeyError):
            return APPS[key].handler(name)
    if running_call.main_import_error:
        reason = f"a worker process cannot import the program: {running_call.main_import_error}"
    elif "/" not in key and MAIN_ALIAS not in sys.modules:
        reason = f"{name!r} is defined in a notebook or a REPL and cannot run in a process; use a module"
    else:
        app = key.rpartition("/")[2]
        missing = f"App {app!r} has no {name!r}" if key in APPS else f"there is no App {app!r}"
        reason = f"{missing} in a worker process: {why}"
    raise Failure("TARGET_UNUSABLE", reason)


def require_handlers(addresses: list[str], why: str) -> None:
    """Raise Failure, or what importing raises, if this process cannot find one of these functions."""
    for address in addresses:
        find_handler(address, why)


def make_app(key: str) -> App:
    """Call the function that makes an app, as `module/create()` names it, once in each process. Raises Failure."""
    if key not in APPS:
        module, _, path = key.removesuffix("()").partition("/")
        maker = _look_up(path, module)
        made = maker() if callable(maker) else maker
        if not isinstance(made, App):
            raise Failure("TARGET_UNUSABLE", f"{path}() returned a {type(made).__name__}, not an App")
        made.use_key(key)
    return APPS[key]


def app_made_by(maker: App | Callable[[], App]) -> App:
    """Return the app itself, or the one that a function makes, which workers find by its name."""
    return maker if isinstance(maker, App) else make_app(f"{maker.__module__}/{maker.__qualname__}()")


def describe(attribute: str, module: str) -> JsonObject:
    """Return the catalogue of an app in a process that has imported it. Raises Failure."""
    found = make_app(f"{module}/{attribute}") if attribute.endswith("()") else _look_up(attribute, module)
    if not isinstance(found, App):
        hint = f"; for the App that it makes, name {attribute}()" if callable(found) else ""
        raise Failure("TARGET_UNUSABLE", f"{attribute} is a {type(found).__name__}, not an App{hint}")
    return found.describe().to_plain()


def _look_up(attribute: str, module: str) -> object:
    """Return what a module of this process has under a name. Raises Failure."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise Failure("TARGET_UNUSABLE", "it could not be imported")
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            apps = [repr(name) for name, each in vars(sys.modules[module]).items() if isinstance(each, App)]
            others = f", but {' and '.join(apps)}" if apps else ""
            raise Failure("TARGET_NOT_FOUND", f"there is no {attribute!r}{others}") from None
    return found
