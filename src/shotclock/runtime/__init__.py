"""The runtime: a call is admitted here, runs in a process or on a loop that can be stopped, and is answered once.

The way of one call:

     1  a surface reads it: cli/app_cli, server/tool_calls, app, providers/function -> CallRequest (runtime/call)
     2  dispatch/dispatcher  begin: Runtime.begin starts its clocks, once -> Call (runtime/call)
     3                       rehearse: --dry-run, --validate-only, an unconfirmed destructive command
     4                       approve: inbox/approval asks a person; that time is not counted
     5                       run as a job: dispatch/job_client, in a process of its own (job_runner)
     6                       run under a key: dispatch/admission
     7  runtime/runtime      perform: depth, time left, limits (dispatch/admission)
     8  runtime/executor     a worker or the shared process, or the caller's loop (handler_call)
     9  process/worker_main  arguments checked, function run; process/supervisor holds its clock and kills
    10  runtime/outcomes     the reply becomes an Outcome
    11  runtime/runtime      Answering: answered once (runtime/call.answer), approvals and observers get the envelope
    12  the surface shows the envelope (core/envelope)
"""
