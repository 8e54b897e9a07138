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

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from string import Formatter
from types import TracebackType, UnionType
from typing import (
    Any,
    NamedTuple,
    Self,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from .cli.output import Signalled, is_the_end, leave_soon, raise_on_stop
from .core.arguments import (
    CONTEXT_NAME,
    HandlerParameter,
    NotSerializable,
    find_conversions,
    misfit,
    parameters_of,
    plain_schema,
    signature_of,
    to_jsonable,
)
from .core.catalogue import (
    ApprovedFile,
    Catalogue,
    CommandSpec,
    HandlerReference,
    Interruption,
    Isolation,
    Operation,
    SecretParameter,
    hyphenate,
)
from .core.clocks import CLOCK_NAMES, Clocks, DurationError, format_duration, parse_duration_ms
from .core.content import holds_content, mentions_content
from .core.envelope import Envelope
from .core.errors import Failure, SideEffects, error_entry
from .core.manifest import CONFIRM_FLAG, flag_name
from .core.overtime import OvertimeError, OvertimePolicy
from .core.proposal import Policy
from .core.served import ServedOptions, check_served_options, read_listing, served_spec
from .core.streaming import collect_items, yields
from .core.value_types import replace
from .dispatch.dispatcher import Dispatcher
from .process import worker_main
from .process.context import Progress
from .process.running_call import MAIN_ALIAS
from .runtime.call import CallRequest
from .runtime.executor import DEFAULT_WARM
from .runtime.preloaded_zygote import Program
from .runtime.runtime import Runtime

F = TypeVar("F", bound=Callable[..., Any])

RESERVED = {CONFIRM_FLAG, "help"}
"""Names that a parameter cannot have. The first is an argument over MCP as well; the second describes the command."""
DEFAULT_GRACE = "500ms"  # shorter than that of `exec`: the caller of a tool waits for it
BUILT_IN = frozenset({"manifest", "job", "help"})
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# The characters of MCP tool names.
_COMMAND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")

APPS: dict[str, App] = {}  # every App of this process by its key, the same in a worker that imports the program


class Declared(TypedDict, total=False):
    """Options of `@app.command`."""

    name: str | None
    timeout: object
    soft: object
    idle: object
    queue: object
    grace: object
    wind_down: object
    overtime: object
    min_time: object
    isolation: Isolation
    mutates: bool
    idempotent: bool
    destructive: bool
    steps: Iterable[str]
    interruption: Interruption | Mapping[str, Any] | bool | None
    exit_codes: Iterable[str]
    requires_person: str | None
    approval: Policy | Mapping[str, Any] | bool | None
    single_flight: str | None
    concurrency: int | None
    stdin: bool
    mcp: bool
    title: str | None
    description: str | None
    icons: Iterable[Any] | None
    open_world: bool | None
    meta: Mapping[str, Any] | None


DEFAULT_OPTIONS: Declared = {
    **{"isolation": "auto", "mutates": True, "idempotent": False, "destructive": False},
    **{"steps": (), "exit_codes": (), "stdin": False, "mcp": True},
}


class App:
    """A set of commands that share a name, a version and default clocks."""

    def __init__(
        self,
        name: str,
        *,
        default_timeout: object = "30s",
        default_timeout_ms: int | None = None,
        operation_timeout: object = "120s",
        operation_timeout_ms: int | None = None,
        grace: object = DEFAULT_GRACE,
        version: str = "0",
        help: str = "",
        workers: int | None = None,
        proposals: bool = False,
        debug: bool = False,
        elicitation: bool = False,
        list_page_size: int | None = None,
    ) -> None:
        """Make an app without commands. The options are described in docs/reference/app.md.

        `elicitation` never covers destructive calls: nothing proves that a person answered.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"an app's name is lower case words joined by hyphens, not {name!r}")
        self.name = name
        self.version = version
        self.help = help
        timeout_ms = _read_limit_ms("default_timeout", default_timeout, default_timeout_ms)
        self.clocks = Clocks(timeout_ms=timeout_ms).over(Clocks.of(grace=grace))
        self.operation_timeout_ms = _read_limit_ms("operation_timeout", operation_timeout, operation_timeout_ms)
        self.workers = workers
        self.proposals = proposals
        self.debug = debug
        self.elicitation = elicitation
        if list_page_size is not None and list_page_size < 1:
            raise ValueError("list_page_size must be at least 1")
        self.list_page_size = list_page_size
        self._module = sys._getframe(1).f_globals.get("__name__", "__main__")
        self._commands: dict[str, CommandSpec] = {}
        self._served: dict[str, CommandSpec] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._running: Dispatcher | None = None
        self._inside = 0
        # Unique in its module, not among all: a worker imports this module alone.
        self._key = key = name if self._module in ("__main__", MAIN_ALIAS) else f"{self._module}/{name}"
        for number in range(2, 1000):
            if self._key not in APPS:
                break
            self._key = f"{key}-{number}"
        APPS[self._key] = self

    # --- declaring ----------------------------------------------------------------------------------------

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
        if secrets := _find_secrets(function, self.name):
            from .core.secret_parameters import supply_secrets  # imports pydantic

            function = supply_secrets(function, secrets, os.environ)
        parameters = [parameter for parameter in parameters_of(function) if parameter.name != CONTEXT_NAME]
        options["steps"] = tuple(options["steps"])
        _check_options(name, options, parameters)
        interruption = _read_interruption(options.get("interruption"))
        approved_file = _read_approved_file(name, options.get("approval"), parameters)
        if approved_file is not None and interruption is not None:
            raise ValueError(f"{name!r}: approval: a command that writes an approved file cannot go on as a job")
        clocks = _read_clocks(name, options, interruption, self.clocks)
        documentation = _read_documentation(function)
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
            output_schema=_output_schema(function),
            positionals=tuple(p.name for p in parameters if p.kind == "by place or name" and p.name != decision),
            isolation=options["isolation"],
            clocks=clocks,
            mutates=options["mutates"],
            idempotent=options["idempotent"],
            destructive=options["destructive"],
            steps=tuple(options["steps"]),
            interruption=interruption,
            error_codes=tuple(error_entry(code).code for code in options["exit_codes"]),
            requires_person=options.get("requires_person"),
            approval=_read_approval(name, options.get("approval")),
            approved_file=approved_file,
            single_flight=options.get("single_flight"),
            concurrency=options.get("concurrency"),
            reads_stdin=options["stdin"],
            on_mcp=options["mcp"] and options.get("requires_person") is None,
            overtime=_read_overtime(name, options.get("overtime"), clocks),
            min_time_ms=_read_min_time(name, options.get("min_time"), clocks),
            open_world=options.get("open_world"),
            listing=read_listing(options),
            secrets=secrets,
            streams=is_streaming,
        )
        spec.operation()  # rejects an impossible isolation
        self._commands[name] = spec
        if not is_async and not options["stdin"]:
            function = _refuse_questions(function, name)
        self._functions[name] = _keep_exit_code(_check_result(function, spec), name)

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
        from .process.served_results import conversion_of  # takes 2 ms, which Apps with commands only do not need

        check_served_options(kind, options)
        written: Any = options
        clocks = _read_clocks(f"{kind} {subject}", written, None, self.clocks)
        documentation = _read_documentation(function)
        spec = served_spec(kind, subject, function, options, clocks, self._reference, documentation)
        if spec.name in self._served:
            raise ValueError(f"{self.name} already has the {spec.name}")
        _check_placeholders(spec.name, spec.single_flight or "", set(spec.input_schema["properties"]))
        spec.operation()
        self._served[spec.name] = spec
        ready = function if inspect.iscoroutinefunction(function) else _refuse_questions(function, spec.name)
        self._functions[spec.name] = _change_result(ready, conversion_of(kind, spec.listing.mime_type))
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
        return Catalogue(
            name=self.name,
            version=self.version,
            summary=self.help,
            operation_timeout_ms=self.operation_timeout_ms,
            proposals=self.proposals,
            elicitation=self.elicitation,
            commands=tuple(self._commands.values()),
            served=tuple(self._served.values()),
            list_page_size=self.list_page_size,
            debug=self.debug,
            clocks=self.clocks,
            file=self._file() if any(spec.approval is not None for spec in self._commands.values()) else None,
        )

    def _file(self) -> str | None:
        file = getattr(sys.modules.get(self._module), "__file__", None)
        return None if file is None else os.path.realpath(file)

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the function of a command; for a name with a question mark, the one that only checks arguments."""
        if name.endswith("?") and name not in self._functions:
            return _argument_checker(self._functions[name[:-1]])
        return self._functions[name]

    @property
    def program(self) -> Program:
        """Return the modules of this app for another process."""
        program = Program.running_here() if self._module == "__main__" else Program(imports=(self._module,))
        # Absolute: the other process may run later, in another directory.
        return program._replace(path=tuple(os.path.abspath(entry) for entry in sys.path))

    # --- the surfaces -------------------------------------------------------------------------------------

    def __call__(self, argv: list[str] | None = None) -> None:
        """Run the command line: write one envelope and exit. Exit hooks have a few seconds, threads none."""
        if worker_main.inside_worker:
            return  # a worker imports the program for its functions and has no command line
        try:
            raise_on_stop()
            from .cli.app_cli import main

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
        self,
        command: str,
        arguments: Mapping[str, object],
        *,
        timeout: object = None,
        budget: object = None,
        idempotency_key: str | None = None,
        on_progress: Progress | None = None,
        on_item: Callable[[object], None] | None = None,
        confirm_destructive: bool = False,
    ) -> Envelope:
        request = call_request(
            command,
            arguments,
            timeout=timeout,
            budget=budget,
            idempotency_key=idempotency_key,
            on_progress=on_progress,
            on_item=on_item,
            confirm_destructive=confirm_destructive,
        )
        async with self:  # calls without a context share the running one, too
            assert self._running is not None  # it was entered
            return await self._running.call(request)

    async def __aenter__(self) -> Self:
        if self._running is None:
            self._running = await self.dispatcher().__aenter__()
        self._inside += 1
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
            operation = spec.operation()
            if operation.place == "inline":
                operation = replace(operation, handler=self._functions[spec.name])
            made.append(operation)
        return made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._inside:
            return
        running, self._running = self._running, None
        if running is not None:
            await running.__aexit__(kind, error, trace)


class CallOptions(TypedDict, total=False):
    """Options of `App.call_with`."""

    timeout: object
    budget: object
    idempotency_key: str | None
    on_progress: Progress | None
    on_item: Callable[[object], None] | None
    confirm_destructive: bool


def call_request(command: str, arguments: Mapping[str, object], **options: Unpack[CallOptions]) -> CallRequest:
    """Return the request for a call of a command."""
    budget = options.get("budget")
    return CallRequest(
        command,
        arguments,
        Clocks.of(timeout=options.get("timeout")),
        budget_ms=None if budget is None else parse_duration_ms(budget),
        idempotency_key=options.get("idempotency_key"),
        on_progress=options.get("on_progress"),
        on_item=options.get("on_item"),
        confirmed=options.get("confirm_destructive", False),
    )


def find_handler(address: str) -> Callable[..., Any]:
    """Return the function of `app:command` in a process that has imported it."""
    key, _, name = address.partition(":")
    if key not in APPS:
        raise LookupError(f"{name!r} is defined in a notebook or a REPL and cannot run in a process; use a module")
    return APPS[key].handler(name)


def describe(attribute: str, module: str) -> dict[str, Any]:
    """Return the catalogue of an app in a process that has imported it. Raises Failure."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise Failure("TARGET_UNUSABLE", "it could not be imported")
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Failure("TARGET_NOT_FOUND", f"there is no {attribute!r}") from None
    if not isinstance(found, App):
        raise Failure("TARGET_UNUSABLE", f"{attribute} is a {type(found).__name__}, not an App")
    return found.catalogue().to_plain()


def _find_secrets(function: Callable[..., Any], app: str) -> tuple[SecretParameter, ...]:
    """Return the parameters of type `Secret[str]`, or `Secret[str] | None`."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # reported with the other mistakes of the signature
        return ()
    found = []
    for parameter in parameters_of(function):
        hint = hints.get(parameter.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if any(_is_secret(get_origin(kind) or kind) for kind in kinds):
            variable = re.sub(r"\W", "_", f"{app}_{parameter.name.strip('_')}").upper()
            found.append(SecretParameter(parameter.name, variable, parameter.default is ...))
    return tuple(found)


def _is_secret(kind: Any) -> bool:
    """Return whether a type is `Secret`, which is pydantic's; programs that do not use it do not import that."""
    return getattr(kind, "__qualname__", "") == "Secret" and kind.__module__ == "pydantic.types"


def _check_options(name: str, options: Declared, parameters: list[HandlerParameter]) -> None:
    flags: dict[str, str] = {}
    for parameter in parameters:
        flag = flag_name(parameter.name)
        if flag in RESERVED:
            raise ValueError(f"{name!r}: --{flag} has a meaning for every command; call the parameter something else")
        if flags.setdefault(flag, parameter.name) != parameter.name:
            raise ValueError(f"{name!r}: {flags[flag]!r} and {parameter.name!r} would both be --{flag}")
        if parameter.name == "dry_run" and not options["destructive"]:
            raise ValueError(f"{name!r}: only a destructive command has a dry run")
    if options["destructive"] and not options["mutates"]:
        raise ValueError(f"{name!r} cannot be destructive and not mutate anything")
    if (concurrency := options.get("concurrency")) is not None and concurrency < 1:
        raise ValueError(f"{name!r}: concurrency must be at least 1")
    if len(set(options["steps"])) < len(tuple(options["steps"])):
        raise ValueError(f"{name!r}: every step needs a name of its own")
    for template in (options.get("single_flight"), options.get("requires_person")):
        _check_placeholders(name, template or "", {parameter.name for parameter in parameters})


def _check_placeholders(name: str, template: str, parameters: set[str]) -> None:
    try:
        fields = [(field, spec, conversion) for _, field, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{name!r}: {template!r}: {error}") from None
    for field, spec, conversion in fields:
        if field is not None and field not in parameters:
            raise ValueError(f"{name!r}: {{{field}}} in {template!r} is not one of its parameters")
        if spec or conversion:
            raise ValueError(f"{name!r}: {{{field}}} in {template!r} takes no format and no conversion")


def _read_clocks(name: str, options: Declared, interruption: Interruption | None, defaults: Clocks) -> Clocks:
    clocks = Clocks.of(**{name: limit for name, limit in options.items() if name in CLOCK_NAMES})
    if interruption is not None:  # the work of a job is bounded by its lifetime, not by the App's timeout
        job = Clocks(timeout_ms=interruption.max_lifetime_ms, idle_ms=interruption.idle_timeout_ms)
        clocks = clocks.over(job)
    clocks = clocks.over(defaults)
    if clocks.soft_ms and clocks.timeout_ms and clocks.soft_ms >= clocks.timeout_ms:
        limit = format_duration(clocks.timeout_ms)
        raise ValueError(f"{name!r}: soft must be shorter than the timeout of {limit}, or it has no effect")
    return clocks


class _Documentation(NamedTuple):
    summary: str
    text: str
    parameters: dict[str, str]


def _read_documentation(function: Callable[..., Any]) -> _Documentation:
    written = (function.__doc__ or "").strip()
    if "\n" not in written and ":" not in written:
        return _Documentation(written, written, {})
    import docstring_parser

    parsed = docstring_parser.parse(inspect.cleandoc(written))
    texts = [text for text in (parsed.short_description, parsed.long_description) if text]
    parameters = {param.arg_name: " ".join((param.description or "").split()) for param in parsed.params}
    return _Documentation(texts[0] if texts else "", "\n\n".join(texts), {k: v for k, v in parameters.items() if v})


def _read_overtime(name: str, written: object, clocks: Clocks) -> dict[str, Any] | bool | str | None:
    if written is None or written is False:
        return None
    plain: Any = dict(written) if isinstance(written, Mapping) else written
    try:
        OvertimePolicy.of(plain, clocks.timeout_ms or 0)
    except OvertimeError as error:
        raise ValueError(f"{name!r}: overtime: {error}") from None
    return plain  # type: ignore[no-any-return]


def _read_min_time(name: str, written: object, clocks: Clocks) -> int:
    if written is None:
        return 0
    min_time_ms = parse_duration_ms(written)
    if clocks.timeout_ms and min_time_ms > clocks.timeout_ms:
        raise ValueError(f"{name!r}: min_time is longer than the timeout: it could never start")
    return min_time_ms


def _read_interruption(declared: Interruption | Mapping[str, Any] | bool | None) -> Interruption | None:
    if declared is None or isinstance(declared, Interruption):
        return declared
    if isinstance(declared, bool):
        return Interruption() if declared else None
    return Interruption(**_in_ms(declared, "idle_timeout", "max_lifetime"))


def _in_ms(declared: Mapping[str, Any], *durations: str) -> dict[str, Any]:
    """Return a declaration with durations in milliseconds: `ttl` becomes `ttl_ms`."""
    fields = dict(declared)
    for name in durations:
        if name in fields:
            fields[f"{name}_ms"] = parse_duration_ms(fields.pop(name))
    return fields


def _read_approval(name: str, declared: Policy | Mapping[str, Any] | bool | None) -> Policy | None:
    if declared is None or isinstance(declared, Policy):
        return declared
    if isinstance(declared, bool):
        return Policy() if declared else None
    fields = _in_ms(declared, "ttl", "remind")
    fields["deciders"] = tuple(fields.get("deciders", ()))
    fields.pop("file", None)
    try:
        policy = Policy(**fields)
    except TypeError as error:
        raise ValueError(f"{name!r}: approval: {error}") from None
    if policy.when_expired not in ("expire", "reject", "default"):
        raise ValueError(f"{name!r}: approval: when_expired is 'expire', 'reject' or 'default'")
    return policy


def _read_approved_file(name: str, declared: object, parameters: list[HandlerParameter]) -> ApprovedFile | None:
    """Read an approved file. Raises ValueError unless the operator sees every argument."""
    written = declared.get("file") if isinstance(declared, Mapping) else None
    if written is None:
        return None
    try:
        file = ApprovedFile(**{**written, "path": os.fspath(written["path"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name!r}: approval: file has path, proposed and perhaps decision: {error}") from None
    if not os.path.isabs(file.path):
        raise ValueError(f"{name!r}: approval: {file.path!r} must be an absolute path")
    by_name = {parameter.name: parameter for parameter in parameters}
    if file.proposed not in by_name or (file.decision is not None and file.decision not in by_name):
        raise ValueError(f"{name!r}: approval: file: proposed and decision name parameters of the command")
    if file.decision is not None and by_name[file.decision].default is ...:
        raise ValueError(f"{name!r}: approval: {file.decision!r} needs a default: callers do not pass it")
    if unseen := by_name.keys() - {file.proposed, file.decision, "justification"}:
        message = f"the operator sees the file, and would not see {', '.join(sorted(unseen))}"
        raise ValueError(f"{name!r}: approval: {message}")
    return file


def _read_limit_ms(name: str, written: object, ms: int | None) -> int:
    try:
        return parse_duration_ms(written) if ms is None else parse_duration_ms(ms, bare="ms")
    except DurationError as error:
        raise DurationError(f"{name}: {error}") from None


def _refuse_questions(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make `input()` in a command the failure INPUT_REQUIRED: commands have no terminal."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except EOFError as error:
            if str(error) != "EOF when reading a line":  # not from `input`
                raise
            message = f"{name} asks a question, and there is no terminal to answer it"
            raise Failure("INPUT_REQUIRED", message, side_effects=SideEffects.UNKNOWN) from None

    return run


def _keep_exit_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make `sys.exit(3)` in a command a failure with that exit code, and `sys.exit(text)` one with that message."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(*arguments: Any, **named: Any) -> Any:
            try:
                return await function(*arguments, **named)
            except SystemExit as error:
                raise _failure_of_exit(error, name) from None

        return run_async

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except SystemExit as error:
            raise _failure_of_exit(error, name) from None

    return run


def _failure_of_exit(error: SystemExit, name: str) -> BaseException:
    """Return the failure for an exit; the exit itself where it reports success, which is no answer."""
    if error.code is None or error.code == 0:
        return error
    if not isinstance(error.code, int):
        return Failure("GENERAL_ERROR", str(error.code))
    exit_code = error.code & 0xFF or 1  # as the system cuts it
    failure = Failure("GENERAL_ERROR", f"{name} left with exit code {exit_code}")
    failure.exit_code = exit_code
    return failure


def _check_result(function: Callable[..., Any], spec: CommandSpec) -> Callable[..., Any]:
    """Make a result that does not fit the declared schema a failure: a client would discard it."""
    schema = spec.output_schema
    if schema is None:
        return function

    def check(result: object) -> object:
        if holds_content(result):
            how = "put its type into the return annotation, as in -> Image or -> list[str | Image]"
            raise Failure("RESULT_INVALID", f"{spec.name} returned content and does not declare it: {how}")
        try:
            reason = misfit(result, schema)
        except NotSerializable:  # reported when the result is sent
            return result
        if reason is None:
            return result
        raise Failure("RESULT_INVALID", f"{spec.name} did not return what it declares: {reason}", data=result)

    return _change_result(function, check)


def _change_result(function: Callable[..., Any], change: Callable[[object], object]) -> Callable[..., Any]:
    """Return the function with its result passed through another one."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(*arguments: Any, **named: Any) -> Any:
            return change(await function(*arguments, **named))

        return run_async

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return change(function(*arguments, **named))

    return run


def _argument_checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that only checks the arguments."""

    @wraps(function)
    def check(given: Mapping[str, object], converted: Mapping[str, object]) -> dict[str, object]:
        return find_conversions(signature_of(function), given, converted)._asdict()

    check.looks_at_arguments = True  # type: ignore[attr-defined]
    return check


def _output_schema(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the schema of the return type, if it has one. A list of anything has none: it may hold content."""
    annotation = get_type_hints(function, include_extras=True).get("return")
    if annotation in (None, Any, list, list[Any], tuple) or mentions_content(annotation):
        return None
    if (schema := plain_schema(annotation)) is not None:
        return schema
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(annotation).json_schema(mode="serialization")
    except Exception:  # pydantic knows no schema of this type
        return None
