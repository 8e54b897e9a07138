"""The manifest of an app: every command, flag and exit code, for a caller that has never seen it."""

from __future__ import annotations

import hashlib
import json
import re

from ..core.catalogue import BUDGET_VARIABLE, CONFIRMATION, Catalogue, CommandSpec, JsonSchema
from ..core.errors import RAISED_CODES, SideEffects, error_entry
from ..core.value_types import as_dict

SCHEMA_VERSION = "3.21"
CONFIRM_FLAG = CONFIRMATION.replace("_", "-")

COMMON_CODES = (
    "ARG_ERROR",
    "TIMEOUT",
    "STALLED",
    "NO_TIME_LEFT",
    "QUEUE_TIMEOUT",
    "INTERNAL_ERROR",
    "WORKER_CRASHED",
    "RESULT_NOT_SERIALIZABLE",
    "RESULT_INVALID",
    "INPUT_REQUIRED",
    "SUPERVISOR_LOST",
    "HANDLER_NOT_IMPORTABLE",
    "CANCELLED",
    "SPAWN_FAILED",
    "KEY_REUSED",
    "INTERRUPTED",
    "STORE_BUSY",
    "STORE_UNUSABLE",
)
APPROVAL_CODES = (
    "INCOMPLETE",
    "PROPOSAL_REJECTED",
    "PROPOSAL_EXPIRED",
    "PROPOSAL_WITHDRAWN",
    "ACTION_CHANGED",
    "INBOX_FULL",
    "FILE_UNREADABLE",
)
EXIT_NAMES = {
    0: "SUCCESS",
    1: "GENERAL_ERROR",
    2: "ARG_ERROR",
    3: "PARTIAL_FAILURE",
    4: "PRECONDITION",
    5: "NOT_FOUND",
    6: "CONFLICT",
    7: "PERMISSION_DENIED",
    8: "AUTH_REQUIRED",
    9: "PAYMENT_REQUIRED",
    10: "TIMEOUT",
    11: "RATE_LIMITED",
    12: "UNAVAILABLE",
    13: "REDIRECTED",
    14: "INCOMPLETE",
    130: "SIGINT",
    143: "SIGTERM",
}
_TYPES = {"string", "integer", "number", "boolean", "array", "object"}


def build_manifest(catalogue: Catalogue, framework_version: str) -> JsonSchema:
    commands = {spec.hyphenated: _command(spec) for spec in catalogue.commands}
    commands["manifest"] = _builtin_command("This list: every command, flag and exit code.")
    if any(spec.interruption for spec in catalogue.commands):
        verbs = {
            "list": "List the jobs of this app.",
            "status": "Say how far a job is.",
            "wait": "Wait for a job, up to the budget, and answer with its result.",
            "cancel": "Stop a job.",
        }
        commands["job"] = {
            **_builtin_command("Jobs: work that continues after its caller left."),
            "subcommands": list(verbs),
        }
        for verb, description in verbs.items():
            commands[f"job {verb}"] = _job_command(verb, description)
    body: JsonSchema = {
        "schema_version": SCHEMA_VERSION,
        "framework_version": framework_version,
        "commands": commands,
        "flags": {
            "json": _flag("boolean", "The envelope alone on stdout, also on a terminal."),
            "format": {
                **_flag("enum", "json is --json; text is for people. Without it: text on a terminal, json elsewhere."),
                "enum_values": ["text", "json"],
            },
            "timeout": _flag("string", "Stop the work after this time (500ms, 30s, 5m; 0 means none)."),
            "debug": _flag("boolean", "Put the traceback of what a command raised into the envelope."),
        },
        "env_vars": [
            {
                "name": BUDGET_VARIABLE,
                "description": "How long a call waits for a command that may become a job, in ms.",
            },
            {"name": "SHOTCLOCK_HOME", "description": "Where jobs, checkpoints and locks are kept."},
            {
                "name": "SHOTCLOCK_REMAINING_MS",
                "description": "The caller's own remaining time; it caps every timeout.",
            },
            *({"name": name, "description": "A secret."} for name in catalogue.secret_variables),
        ],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return {**body, "etag": digest[:32]}


def _command(spec: CommandSpec) -> JsonSchema:
    properties: JsonSchema = spec.input_schema.get("properties", {})
    required = set(spec.input_schema.get("required", ()))
    definitions = spec.input_schema.get("$defs", {})
    flags = {
        flag_name(name): _flag_of(resolve_schema(schema, definitions), definitions, name in required)
        for name, schema in properties.items()
        if name != "dry_run"
    }
    flags |= {
        f"{flag_name(each.name)}-file": _flag("string", f"File with the secret, - for stdin [else: {each.variable}]")
        for each in spec.secrets
    }
    flags = {**option_flags(spec), **flags}
    entry: JsonSchema = {
        "description": spec.description or spec.name,
        "danger_level": "destructive" if spec.destructive else "mutating" if spec.mutates else "safe",
        "idempotent": spec.idempotent or not spec.mutates,
        "required_scopes": [],
        "flags": flags,
        "exit_codes": _exit_codes(spec),
    }
    if spec.name != spec.hyphenated:
        entry["aliases"] = [spec.name]
    positionals = [
        _positional(name, resolve_schema(properties[name], definitions), name in required)
        for name in spec.positionals
        if name in properties
    ]
    if positionals and all(positionals):
        entry["positionals"] = positionals
    if spec.output_schema is not None:
        entry["output_schema"] = data_schema(spec.output_schema)
    if spec.steps:
        entry["steps"] = list(spec.steps)
    if spec.interruption is not None:
        entry["interruption"] = as_dict(spec.interruption)
        entry["spawns_background_process"] = spec.interruption.detach
        entry["cleanup_command"] = "job cancel"
    if spec.needs_confirmation:
        entry["confirm_flag"] = CONFIRM_FLAG
    if spec.requires_person is not None:
        entry |= {"requires_person": True, "interactive": True}
    if not spec.on_mcp:
        entry["mcp"] = False
    if spec.isolation == "shared":
        entry["isolation"] = spec.isolation
    if spec.reads_stdin:
        entry["stdin"] = {"mode": "buffered"}
    return entry


def flag_name(parameter: str) -> str:
    """Return the flag of a parameter: `from_` becomes `--from`."""
    return parameter.strip("_").replace("_", "-") or parameter


def option_flags(spec: CommandSpec) -> JsonSchema:
    flags = {
        "validate-only": _flag("boolean", "Check the arguments and run nothing."),
        "idempotency-key": _flag("string", "A repeat with this key gets the first call's answer, and runs nothing."),
        "heartbeat-interval": _flag("string", "Report on stderr that the work is running, this often, as text."),
        "heartbeat-ms": _flag("integer", "Report on stderr that the work is running, this often, as JSON lines."),
    }
    if spec.destructive:
        flags["dry-run"] = _flag("boolean", "Show the planned action, and do nothing.")
    if spec.needs_confirmation:
        flags[CONFIRM_FLAG] = _flag("boolean", "Do it. Without this it only shows the planned action, exit code 2.")
    if spec.interruption is not None and spec.interruption.detach:
        flags["budget"] = _flag("string", "How long this call waits; after that the work continues as a job.")
    elif spec.approval is not None:
        flags["budget"] = _flag("string", "How long this call waits for the operator; the proposal stays queued.")
    if spec.approval is not None and "justification" not in spec.input_schema.get("properties", {}):
        flags["justification"] = _flag("string", "Why the operator should approve it.")
    if spec.steps:
        flags["resume-from"] = {**_flag("enum", "Skip the steps before this one."), "enum_values": list(spec.steps)}
    return flags


def data_schema(own: JsonSchema) -> JsonSchema:
    """Return the schema of an envelope's data: a bare result is named `result`."""
    definitions = own.get("$defs", {})
    shape = _name_bare_value(_without(own, "$defs"), definitions)
    return {**shape, "$defs": definitions} if definitions else shape


def _name_bare_value(schema: JsonSchema, definitions: JsonSchema) -> JsonSchema:
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            options = [_name_bare_value(option, definitions) for option in schema[choice]]
            return {**_without(_without(schema, choice), "discriminator"), "anyOf": options}
    meant = schema
    for _ in range(16):  # a definition that refers to itself ends somewhere
        if "$ref" not in meant:
            break
        meant = definitions.get(meant["$ref"].rpartition("/")[2], {})
    if any(choice in meant for choice in ("anyOf", "oneOf")) and meant is not schema:
        return _name_bare_value(meant, definitions)
    values = meant.get("enum", [meant["const"]] if "const" in meant else [])
    if meant.get("type") in _BARE or any(isinstance(value, str | int | float) for value in values):
        return {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    return schema


_BARE = ("string", "integer", "number", "boolean")


def resolve_schema(schema: JsonSchema, definitions: JsonSchema) -> JsonSchema:
    """Return the schema without references, and `X | None` as X."""
    for _ in range(16):  # a definition that refers to itself ends somewhere
        if "$ref" in schema:
            schema = {**definitions.get(schema["$ref"].rpartition("/")[2], {}), **_without(schema, "$ref")}
        elif "anyOf" in schema:
            others = [option for option in schema["anyOf"] if option.get("type") != "null"]
            if len(others) != 1:
                return schema
            schema = {**others[0], **_without(schema, "anyOf")}
        else:
            return schema
    return schema


def _without(schema: JsonSchema, key: str) -> JsonSchema:
    return {name: value for name, value in schema.items() if name != key}


def _flag(kind: str, description: str) -> JsonSchema:
    return {"type": kind, "required": False, "description": description}


def choices_of(schema: JsonSchema) -> list[str] | None:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None or not all(isinstance(value, str) for value in values):
        return None
    return list(values)


def _flag_of(schema: JsonSchema, definitions: JsonSchema, required: bool) -> JsonSchema:
    kind = schema.get("type")
    entry: JsonSchema = {
        "type": kind if kind in _TYPES else "string",
        "required": required,
        "description": str(schema.get("description") or schema.get("title") or ""),
    }
    if (choices := choices_of(schema)) is not None:
        entry |= {"type": "enum", "enum_values": choices}
    if entry["type"] == "object":
        entry["schema"] = {**schema, **({"$defs": definitions} if definitions else {})}
    if "default" in schema:
        entry["default"] = schema["default"]
    return entry


def _positional(name: str, schema: JsonSchema, required: bool) -> JsonSchema | None:
    kind = schema.get("type", "string")
    variadic = kind == "array"
    if variadic:
        kind = schema.get("items", {}).get("type", "string")
    if kind not in ("string", "integer", "number") or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        return None
    entry = {"name": name, "type": kind, "required": required, "description": str(schema.get("description") or name)}
    if (choices := choices_of(schema)) is not None:
        entry |= {"type": "enum", "enum_values": choices}
    if variadic:
        entry["variadic"] = True
    return entry


def _exit_codes(spec: CommandSpec) -> JsonSchema:
    codes = [*COMMON_CODES]
    if spec.interruption is not None:
        codes += ["INCOMPLETE", "JOB_LOST"]
    if spec.approval is not None:
        codes += APPROVAL_CODES
    if spec.single_flight is not None or spec.concurrency is not None:
        codes.append("LOCK_HELD")
    if spec.isolation == "shared":
        codes.append("HOST_REPLACED")
    if spec.uses_state:
        codes.append("LIFESPAN_FAILED")
    if spec.requires_person is not None:
        codes += ["PERSON_REQUIRED"]
    if spec.needs_confirmation:
        codes += ["CONFIRMATION_REQUIRED"]
    raised = (*RAISED_CODES, "GENERAL_ERROR", "ARGUMENT_REFUSED", *spec.error_codes)
    return _by_exit_code(codes, mutates=spec.mutates, raised=raised)


def _by_exit_code(codes: list[str], *, mutates: bool, raised: tuple[str, ...] = ()) -> JsonSchema:
    """Group codes by exit code. `raised` are those of a handler that has begun, so they do not promise `none`."""
    table: JsonSchema = {
        "0": {
            "name": "SUCCESS",
            "description": "It was done.",
            "retryable": False,
            "side_effects": "complete" if mutates else "none",
        }
    }
    for code in dict.fromkeys([*codes, *raised]):
        entry = error_entry(code)
        ran = mutates and (entry.side_effects is not SideEffects.NONE or code in raised)
        # An exit code of several errors promises only what is true of all of them.
        row = table.setdefault(
            str(entry.exit_code),
            {
                "name": EXIT_NAMES.get(entry.exit_code, code),
                "description": entry.summary[:120],
                "retryable": True,
                "side_effects": "none",
                "error_codes": [],
            },
        )
        row["error_codes"].append(code)
        if ran:
            row["side_effects"] = "partial"
        row["retryable"] = row["retryable"] and entry.retryable and row["side_effects"] == "none"
    if "143" in table:
        table["130"] = {**table["143"], "name": "SIGINT"}
    return table


def _builtin_command(description: str) -> JsonSchema:
    return {
        "description": description,
        "danger_level": "safe",
        "idempotent": True,
        "required_scopes": [],
        "flags": {},
        "exit_codes": _by_exit_code(["ARG_ERROR", "TIMEOUT", "INTERNAL_ERROR"], mutates=False),
        "builtin": True,
        "mcp": False,
    }


def _job_command(verb: str, description: str) -> JsonSchema:
    codes = ["ARG_ERROR", "TIMEOUT", "INTERNAL_ERROR", "STORE_BUSY", "STORE_UNUSABLE"]
    entry = {**_builtin_command(description), "danger_level": "mutating" if verb == "cancel" else "safe"}
    if verb != "list":
        codes += ["JOB_NOT_FOUND", "JOB_LOST"]
        entry["positionals"] = [
            {"name": "job-id", "type": "string", "required": True, "description": "Its id, or the beginning of it."}
        ]
    if verb == "wait":
        codes += ["INCOMPLETE", "STALLED"]
        entry["flags"] = {"budget": _flag("string", "How long to wait at most.")}
    entry["exit_codes"] = _by_exit_code(codes, mutates=verb == "cancel")
    return entry
