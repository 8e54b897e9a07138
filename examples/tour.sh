#!/usr/bin/env bash
# A tour of `shotclock exec` on commands that hang. Run it with `make demo`, or with shotclock on PATH.
# Every command shown is the command that runs. The last lines look for anything that was left behind.
set -euo pipefail

# Everything started below inherits this, however it daemonises, so that `ps` can find it at the end.
trace=$(printf '%032x' "$$")
traceparent="00-$trace-$(printf '%016x' "$$")-01"
# What a flood spills to a file goes here, and goes away with us.
export SHOTCLOCK_HOME
SHOTCLOCK_HOME=$(mktemp -d)
trap 'rm -rf "$SHOTCLOCK_HOME"' EXIT

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
else
    bold='' dim='' green='' red='' plain=''
fi

# The envelope, in two lines. `shotclock exec` prints a line like it on a terminal; here it is read from --json.
read -r -d '' summary <<'PYTHON' || true
import json, sys
envelope = json.load(sys.stdin)
meta, data, error = envelope["meta"], envelope["data"] or {}, envelope["error"]
survivors = ", ".join(str(each["pid"]) for each in meta["survivors"]) or "none"
print(f"  {error['code'] if error else 'OK'} | exit {meta['exit_code']} | {meta['ending']} after"
      f" {meta['duration_ms']} ms | survivors: {survivors}")
if error:
    print(f"  {error['message']}")
for warning in envelope["warnings"]:
    message = warning["message"].split(", ")[0] if warning["code"] == "OUTPUT_TRUNCATED" else warning["message"]
    print(f"  {warning['code']}: {message}")
text = data.get("stdout", "")
if text:
    print(f"  output kept: {text[:30]!r}{'...' if len(text) > 30 else ''} ({len(text.encode())} bytes)")
PYTHON

stop() { # headline, command
    printf '\n%s%s%s\n%s$ %s%s\n' "$bold" "$1" "$plain" "$dim" "$2" "$plain"
    # A stopped command is a failed one; the tour goes on.
    { TRACEPARENT=$traceparent bash -c "$2" || true; } | python3 -c "$summary"
}

left_behind() { # the processes that carry our trace in their environment
    if command -v ps >/dev/null; then
        ps axeww -o pid=,command= | grep "TRACEPARENT=00-$trace" | grep -v grep || true
    else # a small container without procps
        grep -l "TRACEPARENT=00-$trace" /proc/[0-9]*/environ 2>/dev/null || true
    fi
}

printf '%sShotclock: commands that hang, and what becomes of them%s\n' "$bold" "$plain"

stop '1. A command that hangs' \
    'shotclock exec --json --timeout 1s -- sleep 600'

stop '2. A child that ignores SIGTERM: killed when the grace is over' \
    "shotclock exec --json --timeout 1s --grace 500ms -- bash -c 'trap \"\" TERM; while :; do sleep 1; done'"

stop '3. A daemon in a session of its own, ignoring SIGTERM: still below its supervisor, so killed with the rest' \
    "shotclock exec --json --timeout 1s --grace 500ms -- bash -c 'trap \"\" TERM; setsid sleep 600 & sleep 600'"

stop '4. A command that ends and leaves a grandchild holding its pipe: nobody waits for it' \
    "shotclock exec --json --timeout 1m -- bash -c 'sleep 600 & echo done'"

stop '5. A flood: counted to the last byte, kept up to a limit' \
    'shotclock exec --json --timeout 1s --output-limit 64k -- yes'

stop '6. Silence: stopped long before the timeout' \
    "shotclock exec --json --timeout 10m --idle 1s -- bash -c 'echo working; sleep 600'"

printf '\n%s7. And if shotclock itself is killed with SIGKILL?%s\n' "$bold" "$plain"
command="shotclock exec --timeout 1h -- bash -c 'setsid sleep 600 & sleep 600'"
printf '%s$ %s & sleep 1; kill -9 $!%s\n' "$dim" "$command" "$plain"
{ TRACEPARENT=$traceparent bash -c "exec $command" 2>/dev/null & } 2>/dev/null
victim=$!
sleep 1
before=$(left_behind | wc -l)
kill -9 "$victim"
wait "$victim" 2>/dev/null || true
for _ in $(seq 50); do # a few milliseconds are enough
    [ -z "$(left_behind)" ] && break
    sleep 0.02
done
printf '  before: %d processes, after: %d\n' "$before" "$(left_behind | wc -l)"

printf '\n%sWhat is left of all this%s\n%s$ ps axeww | grep TRACEPARENT=00-%s%s\n' "$bold" "$plain" "$dim" "$trace" "$plain"
if [ -z "$(left_behind)" ]; then
    printf '  %snothing%s\n' "$green" "$plain"
else
    left_behind
    printf '  %ssomething survived%s\n' "$red" "$plain"
    exit 1
fi
