"""The registry of error and warning codes, with endings, side effects and retries.

All exit codes, HTTP statuses and MCP errors come from here. Apps add codes with a namespace: `ACME_NO_STOCK`.

Contract (AGENTS.md): registered codes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal

from .value_types import value

_CODE = r"[A-Z][A-Z0-9_]+"


class Ending(StrEnum):
    """How the work of a call ended."""

    FINISHED = "finished"
    KILLED = "killed"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    NOT_STARTED = "not_started"
    DETACHED = "detached"


class SideEffects(StrEnum):
    """Whether a call has changed something."""

    NONE = "none"
    PARTIAL = "partial"
    COMPLETE = "complete"
    UNKNOWN = "unknown"


def side_effects_of(*, ending: Ending, ok: bool, mutates: bool) -> SideEffects:
    """Return the side effects. Work that mutates and failed may have done anything."""
    if ending is Ending.NOT_STARTED or not mutates:
        return SideEffects.NONE
    if ok and ending is Ending.FINISHED:
        return SideEffects.COMPLETE
    return SideEffects.UNKNOWN


def effects_of_all(parts: Iterable[SideEffects], *, ended_well: bool) -> SideEffects:
    seen = set(parts)
    for worse in (SideEffects.UNKNOWN, SideEffects.PARTIAL):
        if worse in seen:
            return worse
    if SideEffects.COMPLETE not in seen:
        return SideEffects.NONE
    return SideEffects.COMPLETE if ended_well else SideEffects.PARTIAL


def may_retry(*, registered: bool, effects: SideEffects, mutates: bool, idempotent: bool) -> bool:
    """Return whether to retry: as registered, but never where a repeat could do the same thing twice."""
    may_have_changed = effects is not SideEffects.NONE
    return registered and not (mutates and not idempotent and may_have_changed)


@value
class ErrorEntry:
    code: str
    exit_code: int
    http_status: int
    retryable: bool  # the identical call may succeed, unless the operation's declaration lowers it
    side_effects: SideEffects  # where the operation does not declare whether it mutates
    summary: str
    hint: str


NONE, UNKNOWN = SideEffects.NONE, SideEffects.UNKNOWN

_ERRORS: dict[str, ErrorEntry] = {
    entry.code: entry
    for entry in (
        # Clocks. Every clock that runs out exits 10, except the caller's own budget.
        ErrorEntry("TIMEOUT", 10, 504, True, UNKNOWN, "The work ran out of its time and was stopped.",
                   "allow more time (--timeout), or do less in one call"),
        ErrorEntry("STALLED", 10, 504, True, UNKNOWN, "The work was silent for longer than its idle clock.",
                   "raise the idle clock, or make the work say that it is alive"),
        ErrorEntry("INPUT_WANTED", 10, 504, False, UNKNOWN, "The command waited for input that nobody gave.",
                   "give the answer on stdin, use a non-interactive option such as -y, or wait with --input-wait 0"),
        ErrorEntry("NOT_READY", 10, 504, False, UNKNOWN, "The background command was not ready in time.",
                   "it was stopped; read error.context.log_tail, and allow more time with --ready-within"),
        ErrorEntry("QUEUE_TIMEOUT", 10, 503, True, NONE, "No place came free in time; the work never started.",
                   "try again later, or raise the queue clock"),
        ErrorEntry("NO_TIME_LEFT", 10, 504, True, NONE, "The caller's deadline left no time to start.",
                   "give the caller more time, or call earlier"),
        ErrorEntry("OPERATION_TIMEOUT", 10, 408, True, UNKNOWN, "A backstop rang: the server's, or an execution's own.",
                   "raise the server's operation timeout above the longest tool's, or timeoutMs of the execution"),
        ErrorEntry("NOT_EXTENDABLE", 4, 409, False, NONE, "The call cannot be given more time.",
                   "declare `overtime`, or give the caller more time"),
        ErrorEntry("OBSERVER_UNAVAILABLE", 4, 412, False, NONE, "There is no observer for overtime here.",
                   "choose another observer"),
        ErrorEntry("OVERTIME_DECLINED", 4, 409, False, NONE, "The call asked for overtime and got none.",
                   "finish with what there is until the deadline in meta.remaining_ms"),
        ErrorEntry("CALL_NOT_FOUND", 5, 404, False, NONE, "The named call does not run, or cannot be reached.",
                   "see what runs with `shotclock job list --active` or `shotclock report`"),
        ErrorEntry("INCOMPLETE", 14, 202, False, UNKNOWN, "The caller's budget ran out; the work continues as a job.",
                   "run data.continue_command"),
        # Mistakes of the caller. Nothing ran.
        ErrorEntry("ARG_ERROR", 2, 422, False, NONE, "The arguments are wrong; nothing ran.",
                   "correct the arguments that error.message names, then call again"),
        ErrorEntry("CONFIRMATION_REQUIRED", 2, 428, False, NONE, "Destructive, and not confirmed: nothing ran.",
                   "look at data, then call again with --confirm-destructive, over MCP with confirm_destructive: true"),
        ErrorEntry("WORKFLOW_INVALID", 2, 422, False, NONE, "The workflow file is wrong; nothing ran.",
                   "correct what error.errors lists"),
        ErrorEntry("FILE_NOT_FOUND", 5, 404, False, NONE, "There is no such file.",
                   "check the spelling and the directory"),
        ErrorEntry("FILE_UNREADABLE", 7, 403, False, NONE, "The file is there but cannot be read.",
                   "look at its permissions"),
        ErrorEntry("INPUT_REQUIRED", 4, 412, False, NONE, "An answer is needed, and there is no terminal to ask at.",
                   "pass the answer as an argument"),
        ErrorEntry("CWD_UNUSABLE", 4, 412, False, NONE, "The working directory cannot be entered.",
                   "name a directory that exists and may be entered"),
        ErrorEntry("LOCK_HELD", 4, 409, True, NONE, "Another call holds the place this one needs; nothing ran.",
                   "try again after error.retry_after_ms, or give it a longer queue clock"),
        ErrorEntry("PERSON_REQUIRED", 4, 412, False, NONE, "A person has to confirm this at a terminal; nothing ran.",
                   "ask a person to run the command"),
        ErrorEntry("KEY_REUSED", 6, 409, False, NONE, "The idempotency key was used before, with other arguments.",
                   "use a new key for a new call"),
        ErrorEntry("JOB_NOT_FOUND", 5, 404, False, NONE, "There is no job of that id, or it was deleted.",
                   "list the jobs of this store (SHOTCLOCK_HOME); ended ones are kept for a day"),
        ErrorEntry("TARGET_NOT_FOUND", 5, 404, False, NONE, "What should be served is not there.",
                   "name a module or file and the App in it: package.module:app or path/to/file.py:app"),
        ErrorEntry("TARGET_UNUSABLE", 4, 412, False, NONE, "What should be served cannot be imported or is not an App.",
                   "import it by itself first; error.context.traceback says where it fails"),
        ErrorEntry("ADDRESS_UNAVAILABLE", 4, 412, False, NONE, "The server cannot listen on that address.",
                   "choose another port, or 0 for any that is free"),
        ErrorEntry("UNKNOWN_OPERATION", 5, 404, False, NONE, "There is no operation of that name.",
                   "list the operations, and check the spelling"),
        ErrorEntry("UNKNOWN_CODE", 5, 404, False, NONE, "There is no error or warning of that code.",
                   "run `shotclock errors` for all of them"),
        ErrorEntry("RUN_NOT_FOUND", 5, 404, False, NONE, "There is no run of that id, or it was deleted.",
                   "check the spelling; `shotclock report` lists the runs"),
        ErrorEntry("RUN_TAKEN", 6, 409, False, NONE, "A run of that id is under way, or there was one before.",
                   "choose another id, or resume that run once its process is gone"),
        # The inbox.
        ErrorEntry("PROPOSAL_NOT_FOUND", 5, 404, False, NONE, "There is no proposal of that id.",
                   "list the proposals of this store (SHOTCLOCK_HOME), and check the spelling"),
        ErrorEntry("INBOX_FULL", 11, 429, True, NONE, "As many proposals are open as may be; this one was not made.",
                   "withdraw what is not wanted any more, or call again once some of them are decided or expired"),
        ErrorEntry("ALREADY_DECIDED", 6, 409, False, NONE, "This proposal is already decided.",
                   "the first decision counts; make a new proposal for another one"),
        ErrorEntry("PROPOSAL_EXPIRED", 6, 409, False, NONE, "The proposal expired without a decision.",
                   "propose it again; an open one can be extended before it expires"),
        ErrorEntry("PROPOSAL_REJECTED", 7, 403, False, NONE, "The operator rejected the proposal.",
                   "read data.notes, and propose something else"),
        ErrorEntry("PROPOSAL_WITHDRAWN", 6, 409, False, NONE, "The proposal was withdrawn by its author.",
                   "propose it again if it is still wanted"),
        ErrorEntry("ACTION_CHANGED", 6, 409, False, NONE, "The action differs from the approved one.",
                   "read the proposal again, or propose the new action"),
        ErrorEntry("CONFIRMATION_NEEDED", 4, 412, False, NONE, "This is destructive and must be confirmed by typing.",
                   "repeat it with the confirmation that error.context names"),
        ErrorEntry("NOT_ALLOWED", 7, 403, False, NONE, "The caller is not allowed to do this.",
                   "agents propose, operators decide; see error.message for who may"),
        ErrorEntry("AUDIT_BROKEN", 1, 500, False, NONE, "The audit trail was changed.",
                   "data.problems names each entry; compare with a copy of audit.jsonl"),
        ErrorEntry("TOKEN_NOT_FOUND", 5, 404, False, NONE, "There is no such token, or it was revoked before.",
                   "run `shotclock token list` for all of them"),
        # At the entrance of a server. Nothing ran.
        ErrorEntry("TOKEN_INVALID", 8, 401, False, NONE, "The token is missing, not known, revoked or expired.",
                   "send `Authorization: Bearer TOKEN` with one that an operator has issued"),
        ErrorEntry("HOST_REFUSED", 7, 421, False, NONE, "The server was asked for under a name that is not its own.",
                   "use its address, or name it in SHOTCLOCK_HTTP_HOSTS"),
        ErrorEntry("ORIGIN_REFUSED", 7, 403, False, NONE, "A page from elsewhere asked; only the server's own may.",
                   "open the page that the server itself serves"),
        ErrorEntry("REQUEST_TOO_LARGE", 2, 413, False, NONE, "The request is larger than this server reads.",
                   "send less; error.message says how much is taken"),
        ErrorEntry("COMMAND_NOT_FOUND", 5, 404, False, NONE, "The command is not on PATH.",
                   "install it, or give its path"),
        ErrorEntry("COMMAND_NOT_EXECUTABLE", 7, 403, False, NONE, "The file is there but may not be executed.",
                   "make it executable, or run it through its interpreter"),
        ErrorEntry("DEPTH_EXCEEDED", 4, 508, False, NONE, "Commands called each other too deeply; most likely a loop.",
                   "break the cycle of operations calling each other"),
        # For handlers, by the names of the contract's exit codes.
        ErrorEntry("GENERAL_ERROR", 1, 500, False, UNKNOWN, "The command failed.",
                   "read error.message, and look at what was done before calling again"),
        ErrorEntry("ARGUMENT_REFUSED", 1, 422, False, UNKNOWN, "The command began, then refused its arguments.",
                   "change the arguments; error.message says what is wrong with them"),
        ErrorEntry("PARTIAL_FAILURE", 3, 500, False, UNKNOWN, "Some of the work was done, some of it failed.",
                   "read data, which lists the finished part, before calling again"),
        ErrorEntry("PRECONDITION", 4, 412, False, NONE, "Something has to be there or be done first.",
                   "error.message names the missing thing"),
        ErrorEntry("NOT_FOUND", 5, 404, False, NONE, "Something that the command needs does not exist.",
                   "check the spelling"),
        ErrorEntry("CONFLICT", 6, 409, False, NONE, "Something that is there already prevents it.",
                   "look at what is there, then choose another name or remove it"),
        ErrorEntry("PERMISSION_DENIED", 7, 403, False, UNKNOWN, "The command may not do that.",
                   "look at the permissions of what error.message names"),
        ErrorEntry("AUTH_REQUIRED", 8, 401, False, UNKNOWN, "The command needs credentials that it was not given.",
                   "log in, or give it credentials"),
        ErrorEntry("PAYMENT_REQUIRED", 9, 402, False, UNKNOWN, "A payment is required first.",
                   "error.message names the payment"),
        ErrorEntry("UNAVAILABLE", 12, 503, True, NONE, "Something that the command needs does not answer.",
                   "call again later; error.message says what did not answer"),
        ErrorEntry("REDIRECTED", 13, 410, False, UNKNOWN, "It is somewhere else now.",
                   "read error.message for where"),
        # Stopped from outside.
        ErrorEntry("CANCELLED", 143, 499, False, UNKNOWN, "The caller or a signal stopped the call.",
                   "it may have done a part of its work: check that before calling again"),
        # The work itself failed.
        ErrorEntry("COMMAND_FAILED", 1, 500, False, UNKNOWN, "The command ended with a non-zero exit code.",
                   "read data.stderr; data.exit_code is the command's own"),
        ErrorEntry("STEPS_FAILED", 3, 500, False, UNKNOWN, "Some steps of the workflow did not succeed.",
                   "look at data.failed and data.steps; what succeeded is in data.completed"),
        # Models and agents.
        ErrorEntry("LIMIT_REACHED", 3, 429, False, UNKNOWN, "The agent has used up what it was given, and was ended.",
                   "raise the limit that error.context names, or ask for less; the output is what it said until then"),
        ErrorEntry("MODEL_AUTH_FAILED", 8, 401, False, NONE, "The provider of the model did not take the key.",
                   "set its variable to a key that is valid; `ai.api_key_env` names that of another server"),
        ErrorEntry("MODEL_RATE_LIMITED", 11, 429, True, NONE, "The provider of the model takes no more requests now.",
                   "try again after error.retry_after_ms, raise `ai.retry`, or name a model in `ai.fallback`"),
        ErrorEntry("MODEL_QUOTA_EXCEEDED", 9, 402, False, NONE, "The account at the provider of the model is used up.",
                   "raise its quota or pay for more, or name another model in `ai.fallback`"),
        ErrorEntry("MODEL_REQUEST_REFUSED", 1, 422, False, NONE, "The model does not take the request as it is.",
                   "error.message is what its provider said: look at the model's name, the prompt and its size"),
        ErrorEntry("MODEL_UNAVAILABLE", 12, 503, True, NONE, "The model does not answer: no connection, or an error.",
                   "try again later, raise `ai.retry`, or name another model in `ai.fallback`"),
        ErrorEntry("MODEL_ANSWER_INVALID", 1, 502, True, NONE, "The model's answer cannot be used.",
                   "try again; with `output_schema`, say in the prompt what is wanted, or ask for something simpler"),
        ErrorEntry("STEP_INVALID", 1, 500, False, NONE, "A step cannot be run as it is written.",
                   "correct the step; error.message says what is wrong"),
        ErrorEntry("TEMPLATE_FAILED", 1, 500, False, NONE, "A template could not be rendered.",
                   "look at the names it uses: steps that failed or were skipped have no output"),
        ErrorEntry("TEMPLATE_TIMEOUT", 10, 504, True, NONE, "A template took too long.",
                   "templates are for names and small loops: do the work in a step"),
        ErrorEntry("OUTPUT_INVALID", 1, 500, False, UNKNOWN, "A step's output does not fit, or cannot be passed on.",
                   "read error.message for why, then correct the step, its `output_schema` or its `output_format`"),
        ErrorEntry("FAIL_IF", 1, 500, False, UNKNOWN, "The step ended well, but its fail_if holds.",
                   "look at the step's output"),
        # UI executions. As with a process, an action may have happened without a report.
        ErrorEntry("EXECUTION_VALIDATION_FAILED", 2, 422, False, NONE, "The execution is not valid; nothing ran.",
                   "correct what error.errors lists; --validate-only looks without running anything"),
        ErrorEntry("MISSING_ARGUMENT", 2, 422, False, NONE, "An argument that is needed was not given; nothing ran.",
                   "give what error.errors names"),
        ErrorEntry("EXECUTION_CONFLICT_IN_FLIGHT", 4, 423, True, NONE, "Another execution has the device; nothing ran.",
                   "call again after error.retry_after_ms; error.context.holder says who has it, and since when"),
        ErrorEntry("RESULT_ENVELOPE_TIMEOUT", 10, 504, True, UNKNOWN, "The device gave no result in its time and 5 s.",
                   "run `shotclock doctor ui` first; error.context.events is what the device said last"),
        ErrorEntry("RESULT_ENVELOPE_MALFORMED", 1, 502, False, UNKNOWN, "The result of the device cannot be read.",
                   "look at error.message, and at the device itself before calling again"),
        ErrorEntry("WAIT_TIMEOUT", 10, 504, True, UNKNOWN, "The awaited state did not occur in the action's budget.",
                   "take a snapshot to see what is there; correct the matcher, or raise the action's timeoutMs"),
        ErrorEntry("NODE_NOT_FOUND", 5, 404, False, NONE, "The node is not there, and waiting would not help.",
                   "take another snapshot, and use a ref of that one"),
        ErrorEntry("EVAL_TIMEOUT", 10, 504, True, UNKNOWN, "The page did not answer a question about itself in time.",
                   "the page is busy or frozen; data.page says whether it is still there"),
        ErrorEntry("DEVICE_LOST", 1, 502, False, UNKNOWN, "The page, the browser or the phone went away in between.",
                   "the next call gets a fresh one; data.stepResults says what was done: look before doing it again"),
        ErrorEntry("DEVICE_UNAVAILABLE", 12, 503, True, NONE, "The device cannot be started or reached.",
                   "run `shotclock ui devices`; error.message says what is missing"),
        ErrorEntry("ACTION_FAILED", 1, 500, False, UNKNOWN, "The device could not do what the action asks for.",
                   "take a snapshot to see what is there; error.message is what the device said"),
        ErrorEntry("ACTION_UNSUPPORTED", 4, 501, False, NONE, "This device cannot do that.",
                   "error.message says what it cannot do; use another action, or another device"),
        # Answers of other servers. A status does not tell about effects before it.
        ErrorEntry("FETCH_FAILED", 1, 502, False, UNKNOWN, "No usable answer: name, connection or protocol failed.",
                   "error.message says how far it got; look at the address, then try again"),
        ErrorEntry("HTTP_STATUS", 1, 502, False, UNKNOWN, "The server answered with a status that means failure.",
                   "read data.body; error.context.status is the server's own"),
        ErrorEntry("RATE_LIMITED", 11, 429, True, NONE, "The server wants fewer requests, and took none.",
                   "try again after error.retry_after_ms"),
        ErrorEntry("SERVICE_UNAVAILABLE", 12, 503, True, NONE, "The server, or one behind it, cannot answer now.",
                   "try again, after error.retry_after_ms where it says so"),
        ErrorEntry("BODY_TOO_LARGE", 1, 502, False, UNKNOWN, "The answer is larger than it may be; the rest is left.",
                   "raise max_body_bytes, or ask for less"),
        ErrorEntry("ARTIFACT_MISSING", 1, 500, False, UNKNOWN, "The step did not leave a file that it has to leave.",
                   "look at where the step writes it; error.message names the pattern"),
        ErrorEntry("FILE_UNWRITABLE", 7, 403, False, UNKNOWN, "The file cannot be written there.",
                   "look at the folder, its permissions and the space left"),
        ErrorEntry("GIT_FAILED", 1, 500, False, UNKNOWN, "git did not do what the step needs.",
                   "read data.stderr; it is what git said"),
        ErrorEntry("CONNECT_FAILED", 12, 502, True, NONE, "The server could not be reached, or does not start.",
                   "check that the server is there and starts by itself; data.stderr has its last lines"),
        ErrorEntry("CONNECTION_LOST", 1, 502, False, UNKNOWN, "The server left in the middle of the call.",
                   "look at error.message and data.stderr, and at what was done before calling again"),
        ErrorEntry("TOOL_FAILED", 1, 502, False, UNKNOWN, "The server's tool answered that it failed.",
                   "the message is the tool's own"),
        ErrorEntry("WORKER_CRASHED", 1, 500, False, UNKNOWN, "The process running the function died under it.",
                   "SIGSEGV is a native crash, SIGKILL often a lack of memory; an exit code is its own"),
        # The interrupted call was not at fault and may succeed; the operation decides, as for clocks.
        ErrorEntry("HOST_REPLACED", 3, 503, True, UNKNOWN, "Another call blocked the process that this one ran in.",
                   "call again; find the handler that blocks the event loop or does not stop"),
        ErrorEntry("LIFESPAN_FAILED", 12, 503, True, NONE, "The state of the App could not be opened; nothing ran.",
                   "correct what the lifespan of the App needs; the next call opens it again"),
        ErrorEntry("STATE_UNAVAILABLE", 1, 500, False, UNKNOWN, "The function read ctx.state where there is none.",
                   "declare the command with isolation='shared', and the state with @app.lifespan"),
        ErrorEntry("RESULT_NOT_SERIALIZABLE", 1, 500, False, UNKNOWN, "The result cannot leave the place it was made.",
                   "return plain data: dicts, lists, strings, numbers, dataclasses or models"),
        ErrorEntry("RESULT_TOO_LARGE", 1, 500, False, UNKNOWN, "The result is larger than a tool's answer may be.",
                   "return less, or write it to a file and return its path"),
        ErrorEntry("RESULT_INVALID", 1, 500, False, UNKNOWN, "The result is not of the type that the command declares.",
                   "correct the function or its return annotation; data is what it returned"),
        ErrorEntry("HANDLER_NOT_IMPORTABLE", 1, 500, False, NONE, "A worker process cannot find this function.",
                   "define it and its App at the top level of a module, or serve file.py:create()"),
        ErrorEntry("INTERNAL_ERROR", 1, 500, False, UNKNOWN, "The handler raised an unexpected exception.",
                   "a bug in the function: its traceback is on stderr; to give callers a message, raise Failure(text)"),
        ErrorEntry("CHECKPOINTS_UNAVAILABLE", 1, 500, False, UNKNOWN, "A checkpoint could not be kept or looked up.",
                   "call the command through its app; error.message says what is wrong with the store"),
        # Questions to the client.
        ErrorEntry("CANNOT_ASK", 1, 412, False, UNKNOWN, "The function asked, and its caller cannot be asked.",
                   "pass the answer as an argument, or use an MCP client that can do what error.message names"),
        ErrorEntry("NO_ANSWER", 10, 504, False, UNKNOWN, "The client gave no answer to a question in time.",
                   "call again when a person can answer"),
        ErrorEntry("BAD_ANSWER", 1, 502, False, UNKNOWN, "The client's answer does not fit the question.",
                   "answer with the fields that the question names; error.message says what is wrong"),
        # This machine or this process cannot take the call now.
        ErrorEntry("ORPHANS_EXHAUSTED", 12, 503, True, NONE, "Too much abandoned work is still running.",
                   "find the handlers that block or swallow cancellation, or isolate them in processes"),
        ErrorEntry("SPAWN_FAILED", 12, 503, True, NONE, "The machine would not start another process.",
                   "see `shotclock doctor`; the limit on processes or memory may be reached"),
        ErrorEntry("MACHINE_UNFIT", 4, 503, False, NONE, "Something needed to stop work is missing on this machine.",
                   "run `shotclock doctor`, and put right what it lists as fail"),
        ErrorEntry("SUPERVISOR_LOST", 1, 500, False, UNKNOWN, "The process that guarded the work was killed.",
                   "something outside killed it; meta.survivors names what it guarded and is still there"),
        ErrorEntry("JOB_LOST", 1, 500, False, UNKNOWN, "The process that ran the job died under it.",
                   "call the command again: one with checkpoints continues from the last"),
        ErrorEntry("INTERRUPTED", 1, 500, False, UNKNOWN, "The work was cut off when its process died.",
                   "look at what was done, then call again (with a new key, if there was one)"),
        ErrorEntry("SHUTTING_DOWN", 12, 503, True, NONE, "The runtime is closing and takes no new calls.",
                   "call again once it is back"),
        ErrorEntry("STORE_BUSY", 12, 503, True, NONE, "Others kept the store of this user busy for too long.",
                   "wait until they are done; if it stays so, look for a stopped process that uses the store"),
        ErrorEntry("STORE_UNUSABLE", 4, 503, False, NONE, "The store of this user cannot be used as it is.",
                   "put right what error.message names, or set SHOTCLOCK_HOME to another directory"),
    )
}  # fmt: skip

_WARNINGS: dict[str, str] = {
    "DESCENDANTS_STOPPED": "Processes outlived the command that started them and were stopped.",
    "APPROVED_FILE_CHANGED": "A file that an approval binds changed while the approved step ran.",
    "JOB_CONTINUES": "A job that was started meanwhile continues; data.jobs has its id.",
    "SURVIVORS": "Processes could not be stopped and are still there.",
    "PROC_UNFIT": "/proc shows another PID namespace, so processes are stopped as children of the supervisor only, and "
    "not named; mount it anew (unshare --mount-proc).",
    "END_UNSEEN": "Work has ended unseen; whether processes of it are still there is unknown.",
    "OUTPUT_TRUNCATED": "More output came than is kept; the file named holds the rest, up to its cap.",
    "OUTPUT_NOT_UTF8": "The output is not UTF-8; the exact bytes are in the field ending in _base64.",
    "DEADLINE_INHERITED": "The caller's deadline is earlier than the timeout asked for, and wins.",
    "SOFT_LIMIT": "The soft clock rang before the work ended.",
    "WOUND_DOWN": "The work was asked to end early; its result may be partial.",
    "DEVICE_REPLACED": "The device was replaced; its earlier pages, with their forms and logins, are gone.",
    "HOST_REPLACED": "The shared process was replaced; the state in its memory is lost.",
    "STATE_REBUILT": "The lifespan was opened anew before this call; the state from before is lost.",
    "CHECKPOINT_DISCARDED": "The checkpoints are of another input; the work starts over.",
    "CHECKPOINT_LEFT": "The checkpoint could not be deleted: the identical call would continue from it.",
    "HUMAN_DEFAULTED": "The question was not answered; its default is the answer.",
    "OUTPUT_MISSING": "An output of the run could not be made, and is null.",
    "NUMBER_KEPT_AS_TEXT": "A number that was printed cannot be kept exactly, so it is passed on as text.",
    "CLEAN_UP_MISSING": "The run was cancelled, and its clean-up steps could not run.",
    "NOT_TOLD": "The watcher of the run could not be reached any more; the run continued.",
    "NO_WORKER": "No worker served the queue of a step, soon after the run began.",
    "NOT_NOTIFIED": "A notification was not sent; the run itself is not affected.",
    "NOT_WRITTEN_DOWN": "The end of the run is not in the store, only in this answer.",
    "STORE_NOT_SHRUNK": "What was deleted is gone, but its room on the disk was not given back; try again later.",
    "RUN_REPLACED": "A newer run of the group has cancelled this one and takes its place.",
    "ARTIFACTS_LEFT_OUT": "Files of a step were not kept as artifacts; context.files says why.",
    "ARTIFACT_MISSING": "A step did not leave a file that it should leave as an artifact.",
    "LOOP_CAP": "A step sent the run back too often; the run continues without it.",
    "REPLAYED": "This call was answered before; nothing ran again.",
    "RESULT_CHANGED": "Part of the result was converted for JSON; context.changes lists the places.",
    "LOG_INCOMPLETE": "The client read slowly and did not get all log messages of the call.",
    "DEADLINE_UNREADABLE": "An inherited deadline could not be read and was not used.",
}


_RAISED: tuple[tuple[type[Exception], str], ...] = (
    (FileNotFoundError, "NOT_FOUND"),
    (NotADirectoryError, "NOT_FOUND"),
    (FileExistsError, "CONFLICT"),
    (PermissionError, "PERMISSION_DENIED"),
    (ConnectionError, "UNAVAILABLE"),
    # The handler's own, of a socket or a lock: our clocks never raise it.
    (TimeoutError, "UNAVAILABLE"),
)


RAISED_CODES = tuple(dict.fromkeys(code for _, code in _RAISED))


def code_of(error: BaseException) -> str:
    """Return the code of an exception of a handler. One outside the table is a bug of the handler."""
    return next((code for kind, code in _RAISED if isinstance(error, kind)), "INTERNAL_ERROR")


def shown_failure(error: BaseException, errors_shown: tuple[type[Exception], ...]) -> BaseException:
    """Return an exception, as a failure with its text if its App names its class as one for callers."""
    if isinstance(error, Failure) or not isinstance(error, errors_shown):
        return error
    name = type(error).__name__
    return Failure("GENERAL_ERROR", str(error) or name, context={"exception": name})


class Failure(Exception):
    """An error for the caller, who gets its message on every surface.

    A first argument in capitals is a registered code. Any other single argument is a message, under `GENERAL_ERROR`.
    """

    # The defaults are for subclasses that do not call `__init__`.
    code: str = "GENERAL_ERROR"
    entry: ErrorEntry = _ERRORS["GENERAL_ERROR"]
    """Pickled with the failure: the receiver may not have registered the code."""
    data: object = None
    context: dict[str, object] = {}  # noqa: RUF012
    suggestion: str | None = None
    side_effects: SideEffects | None = None
    retry_after_ms: int | None = None
    exit_code: int | None = None  # chosen by a command with `sys.exit`; None is the registered one

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        data: object = None,
        context: Mapping[str, object] | None = None,
        suggestion: str | None = None,
        side_effects: SideEffects | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        if message is None and not re.fullmatch(_CODE, code):
            code, message = "GENERAL_ERROR", code
        self.entry = error_entry(code)
        super().__init__(message or self.entry.summary)
        self.code = code
        self.data = data
        self.context = dict(context or {})
        self.suggestion = suggestion
        self.side_effects = side_effects
        self.retry_after_ms = retry_after_ms
        self.exit_code = None

    def __reduce__(self) -> tuple[object, ...]:
        names = ("code", "entry", "data", "context", "suggestion", "side_effects", "retry_after_ms", "exit_code")
        return (rebuild_failure, (str(self), {name: getattr(self, name) for name in names}))


def rebuild_failure(message: str, state: dict[str, object]) -> Failure:
    failure = Failure.__new__(Failure)
    Exception.__init__(failure, message)
    vars(failure).update(state)
    return failure


def error_entry(code: str) -> ErrorEntry:
    try:
        return _ERRORS[code]
    except KeyError:
        hint = f"register it with register_error({code!r}, ...), or raise Failure with a message alone"
        raise LookupError(f"unknown error code {code!r}; {hint}") from None


def warning_summary(code: str) -> str:
    try:
        return _WARNINGS[code]
    except KeyError:
        raise LookupError(f"warning code {code!r} is not registered") from None


def error_entries() -> Iterable[ErrorEntry]:
    return tuple(_ERRORS.values())


def warning_entries() -> Mapping[str, str]:
    return dict(_WARNINGS)


def register_error(
    code: str,
    *,
    summary: str,
    hint: str = "",
    exit_code: int = 1,
    http_status: int = 500,
    retryable: bool = False,
    side_effects: SideEffects | Literal["none", "partial", "complete", "unknown"] = UNKNOWN,
) -> ErrorEntry:
    """Register an application's own code, with a namespace. Raises where it redefines another."""
    side_effects = SideEffects(side_effects)
    entry = ErrorEntry(code, exit_code, http_status, retryable, side_effects, summary, hint)
    if _ERRORS.get(code) == entry:
        return entry
    if not re.fullmatch(_CODE, code):
        raise ValueError(f"error code {code!r} must be upper case words joined by underscores")
    if code in _ERRORS:
        raise ValueError(f"error code {code!r} is already registered and means something else")
    if "_" not in code:
        raise ValueError(f"error code {code!r} needs a namespace, as in ACME_{code}")
    if not (1 <= exit_code <= 14 or 79 <= exit_code <= 125):
        raise ValueError(f"exit code {exit_code} is not for applications: use 1-14 as specified, or 79-125")
    if retryable and side_effects is not SideEffects.NONE:
        raise ValueError(f"{code!r} cannot be retryable and leave side effects: say side_effects='none'")
    if not summary:
        raise ValueError(f"error code {code!r} needs a summary")
    _ERRORS[code] = entry
    return entry
