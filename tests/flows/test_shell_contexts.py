"""Where a value in a shell command would be run: it is refused there, by `check` and before the step runs."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.check.lint import lint
from shotclock.flows.file.loader import load_text
from shotclock.flows.file.shell_quoting import Unsafe, find_refusals, mark, with_references
from shotclock.flows.file.templates import with_marks
from tests.flows.conftest import step

# What bash makes a file of where it computes with it, and what any shell does where it reads it as a script.
INDEX, SCRIPT, LIST = "a[$(touch pwned)]", "$(touch pwned)", "($(touch pwned))"

COMPUTED = [
    "[[ {{ x }} -gt 3 ]]",
    "if [[ -n a && {{ x }} -le 3 ]]; then :; fi",
    "[[ -v {{ x }} ]]",
    "[[ $(echo {{ x }}) -gt 3 ]]",
    "let n={{ x }}",
    "declare -i n={{ x }}",
    "f() { local -i n={{ x }}; }; f",
    "declare -i n; n={{ x }}",
    "declare '{{ x }}=1'",
    "declare -n n={{ x }}; echo $n",
    "echo $[ {{ x }} ]",
    "arr[{{ x }}]=1",
    "arr=([{{ x }}]=1)",
    "printf -v {{ x }} y",
    "test -v {{ x }}",
    "read {{ x }} <<< y",
    "RANDOM={{ x }}",
    "n=abc; echo ${n:{{ x }}:1}",
    "echo $(( $(echo {{ x }}) ))",
    "test -n x && [ ! -v {{ x }} ]",
    "declare -i i; read i <<< {{ x }}",
    "declare -i i; echo {{ x }} | { read -r i; }",
    "declare -i i; while read -r i; do :; done <<< {{ x }}",
    "declare -ia a; a+=({{ x }})",
    "declare -ia a; mapfile -t a <<< {{ x }}",
    "declare -i i; for i in {{ x }}; do :; done",
    "declare -i i; printf -v i %s {{ x }}",
    'declare -i i; : ${i:="{{ x }}"}',
    'declare -i i; : ${i:="$(echo {{ x }})"}',
    "n=i; declare -i $n; read i <<< {{ x }}",
    "read RANDOM <<< {{ x }}",
]
RUN_VARIABLES = [
    "BASH_ENV={{ x }} bash -c :",
    "ENV={{ x }} sh -i -c : < /dev/null",
    "export BASH_ENV; BASH_ENV={{ x }}; bash -c :",
    "env BASH_ENV={{ x }} bash -c :",
    'export BASH_ENV="$(echo {{ x }})"; bash -c :',
    "export BASH_ENV; read BASH_ENV <<< {{ x }}; bash -c :",
    'export BASH_ENV; : "${BASH_ENV:="{{ x }}"}"; bash -c :',
]
# The value that the program behind such a variable makes the file of.
CODE_IN_VARIABLES = {
    "GIT_SSH_COMMAND={{ x }} git ls-remote ssh://nowhere.invalid/a": "touch pwned;",
    "PERL5OPT={{ x }} perl -e 1": "-Mstrict;open(F,q(>pwned));",
    "PYTHONSTARTUP={{ x }} python3 -i < /dev/null": "evil.py",
    "MAKEFLAGS={{ x }} make": r"--eval=x:=$$(shell\ touch\ pwned)",
    "TAR_OPTIONS={{ x }} tar -cf a.tar evil.py": "--checkpoint=1 --checkpoint-action=exec='touch pwned'",
}
# Values that are options, assignments or names, by the command that would run them.
OPEN_WORDS = {
    "env {{ x }} ls": "-Ssh -c 'touch pwned'",
    "env -i A=1 {{ x }}": "./evil",
    "env {-i,{{ x }}} ls": "-Ssh -c 'touch pwned'",
    "timeout 5 {{ x }}": "./evil",
    "find . -maxdepth 0 -exec {{ x }} \\;": "./evil",
    "export {{ x }}; bash -c true": "BASH_ENV=./evil",
    "$(echo {{ x }})": "touch pwned",
    "e=eval; $e {{ x }}": "touch pwned",
    "e=eval; nice -n 0 ${e:-/bin/true} -- {{ x }}; ${e:-/bin/true} {{ x }}": "touch pwned",
    "{eval,} {{ x }}": "touch pwned",
    "coproc eval {{ x }}; wait": "touch pwned",
    "time -p eval {{ x }}": "touch pwned",
    "SRANDOM={{ x }}": INDEX,
    'a["{{ x }}"]=1': INDEX,
    "exec {a[{{ x }}]}> /dev/null": SCRIPT,
    "printf {{ x }} y": f"-v{INDEX}",
    "sleep 0 & wait -n -p {{ x }}": INDEX,
    "a=(1); declare a={{ x }}": LIST,
    "[[ $(basename {{ x }}) -gt 3 ]]": INDEX,
    "make -s -f - <<E\nall:\n\t{{ x }}\nE": "touch pwned",
    "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=alias.x GIT_CONFIG_VALUE_0={{ x }} git x": "!touch pwned",
    "python3 {{ x }}": "-cimport os; os.system('touch pwned')",
    "perl -ne 1 {{ x }}": "-e;BEGIN{open(F,q(>pwned))}",
    "echo {{ x }} | xargs env": "-S 'touch pwned'",
    "echo {{ x }} | sh 3< /dev/null": "touch pwned",
    "echo a | sh | echo {{ x }} | sh": "touch pwned",
    "exec 3<<< {{ x }}; sh < /dev/null <&3": "touch pwned",
    "env --unset X {{ x }}": "./evil",
    "flock --timeout 5 lock {{ x }}": "./evil",
    "echo a | xargs --max-args 1 {{ x }}": "./evil",
    "echo {{ x }} | xargs --max-args 1 env": "-S'touch pwned'",
    "echo {{ x }} | timeout --signal KILL 5 bash": "touch pwned",
    'setpriv --no-new-privs sh -c "{{ x }}"': "touch pwned",
    "case b in\na) true;;\n(b) (eval {{ x }});;\nesac": "touch pwned",
    "$'eval' {{ x }}": "touch pwned",
    "perl -ne 'print' file.txt {{ x }}": "touch pwned|",
    "hash -p {{ x }} ls; ls": "./evil",
    "echo {{ x }} | sh -c 'cd . && sh'": "touch pwned",
    "echo {{ x }} | env -S 'bash -s'": "touch pwned",
    "echo {{ x }} | flock l -c bash": "touch pwned",
    "echo {{ x }} | python3 -i evil.txt": "open('pwned', 'w')",
    "echo {{ x }} | xargs --replace=X sh -c X": "touch pwned",
    "bash //dev/./stdin <<< {{ x }}": "touch pwned",
    "$'\\x65val' {{ x }}": "touch pwned",
}
COMPUTED_LISTS = ["declare -a n={{ x }}", "PS4={{ x }}; set -x; :"]
SCRIPTS = [
    "eval {{ x }}",
    'eval "$(echo {{ x }})"',
    "trap {{ x }} EXIT",
    "sh -c {{ x }}",
    'bash -c "echo {{ x }}"',
    "bash -c echo\\ x{{ x }}",
    "bash -euo pipefail -c 'echo {{ x }}'",
    "env A=b bash -c 'echo {{ x }}'",
    "timeout 5 bash -c 'echo {{ x }}'",
    'flock lock -c "echo {{ x }}"',
    "echo {{ x }} | sh",
    "echo {{ x }} | tee /dev/null | /bin/sh -e",
    "printf '%s\\n' {{ x }} | env bash",
    "{ echo a; echo {{ x }}; } | sh",
    "cat <<E | sh\n{{ x }}\nE",
    "bash <<E\n{{ x }}\nE",
    "sh <<< {{ x }}",
    "sh < <(echo {{ x }})",
    "bash <(echo {{ x }})",
    ". /dev/stdin <<E\n{{ x }}\nE",
    "echo a | xargs sh -c 'echo {{ x }}'",
    "echo {{ x }} | xargs -d '\\n' sh -c",
    "echo {{ x }} | xargs -I% sh -c 'echo %'",
    "find . -maxdepth 0 -exec sh -c 'echo {{ x }}' \\;",
    'sh -c "$(cat <<E\n{{ x }}\nE\n)"',
    "echo $(eval {{ x }})",
    'echo "`eval "{{ x }}"`"',
    "cat <<E\n$(eval {{ x }})\nE",
    "case a in a) sh -c 'echo {{ x }}';; esac",
    "f() { sh -c 'echo {{ x }}'; }; f",
    "function f { eval {{ x }}; }; f",
    "case a in (a) eval {{ x }};; esac",
    "\\eval {{ x }}",
    "2>/dev/null eval {{ x }}",
    "echo {{ x }} > >(sh); sleep 0.2",
    "echo {{ x }} | tee >(bash) > /dev/null; sleep 0.2",
    "xargs -I% sh -c 'echo %' <<< {{ x }}",
    "bash /dev/fd/0 <<E\n{{ x }}\nE",
    "echo {{ x }} | (sh)",
    "echo {{ x }} | if true; then sh; fi",
    "echo {{ x }} | { cat | bash; }",
    "echo {{ x }} | case a in a) sh;; esac",
    "echo {{ x }} | { true; { (sh); }; }",
    "echo {{ x }} | echo $(sh)",
    "{ sh; } <<E\n{{ x }}\nE",
    "while true; do sh; break; done <<< {{ x }}",
    "{ echo {{ x }}; } > >(sh); sleep 0.2",
    "f() { sh; }; echo {{ x }} | f",
    "function f { sh; }; f <<< {{ x }}",
    "f() { sh; }; g() { f; }; echo {{ x }} | { g; }",
    "exec <<< {{ x }}; sh",
    "exec 3<<< {{ x }}; sh <&3",
    "{ sh <&3; } 3<<< {{ x }}",
    "bash /dev/fd/3 3<<< {{ x }}",
    "exec > >(sh); echo {{ x }}; exec >&-; sleep 0.2",
    "coproc sh; echo {{ x }} >&${COPROC[1]}; sleep 0.2",
    "${SHELL:-sh} -c {{ x }}",
    "SHELL=sh; $SHELL -c {{ x }}",
    "S=sh; $S -c {{ x }}",
    "S=sh; env $S -c {{ x }}",
    "$(echo sh) -c {{ x }}",
    "S=sh; echo {{ x }} | $S",
    "echo {{ x }} | ${S:-sh}",
    "compgen -W {{ x }}",
    "compgen -C {{ x }}",
]
OTHER_PROGRAMS = [
    "ssh host rm {{ x }}",
    "ssh host <<E\nrm {{ x }}\nE",
    "echo {{ x }} | ssh host",
    "ssh host 'cd src && sh' <<E\n{{ x }}\nE",
    "ssh -o ProxyCommand='nc {{ x }}' host",
    "su -c 'echo {{ x }}'",
    "su - user -c 'echo {{ x }}'",
    "echo {{ x }} | env --split-string='A=1 bash'",
    "sudo -u me sh -c 'echo {{ x }}'",
    "sudo --user root {{ x }}",
    "docker exec c sh -lc 'echo {{ x }}'",
    "kubectl exec pod -- bash -c 'echo {{ x }}'",
    "python -c 'print({{ x }})'",
    "python3.11 -u -c \"print('{{ x }}')\"",
    "python3 <<E\nprint('{{ x }}')\nE",
    "python3 -u /dev/stdin <<E\nprint('{{ x }}')\nE",
    "echo {{ x }} | parallel -j2",
    "[ {{ x }} {{ x }} ]",
    "perl -e 'print {{ x }}'",
    "ruby -e 'puts {{ x }}'",
    "node --eval 'f({{ x }})'",
    "php -r 'f({{ x }});'",
    "awk '{print {{ x }}}'",
    "awk -F, -v a=b '$1 == \"{{ x }}\"' file",
    "watch ls {{ x }}",
    "echo a | parallel echo {{ x }}",
    "unset {{ x }}",
    "alias a={{ x }}",
    "mapfile {{ x }}",
    "python3 -X utf8 -c 'print({{ x }})'",
    "echo {{ x }} | { python3; }",
    "python3 -m timeit -s {{ x }}",
    "P=python3; $P -c {{ x }}",
    "$PYTHON -c {{ x }}",
    "ruby -rdate -e {{ x }}",
    "node -r ./a.js -e {{ x }}",
    "php -d a=b -r {{ x }}",
    "env -iS {{ x }}",
    "awk -f program.awk -e {{ x }}",
    "env --split-string={{ x }}",
    "awk -f - <<E\n{{ x }}\nE",
    "echo {{ x }} | awk -f /dev/stdin file",
    "awk -f <(echo {{ x }}) file",
]
NEVER_REPLACED = [
    "cat <<'E'\n{{ x }}\nE",
    "cat <<'E-F'\n{{ x }}\nE-F\n",
    "cat <<{{ x }}\na\n",
    "echo $'{{ x }}'",
    "echo `echo {{ x }}`",
    'echo "`echo "{{ x }}"`"',
    "echo ${A:-{{ x }}}",
    "echo \\{{ x }}",
    "cat <<E\n\\{{ x }}\nE",
]
OTHER_VARIABLES = [
    "GIT_PAGER={{ x }} git --paginate log",
    "GIT_EDITOR={{ x }} git commit",
    "env EDITOR={{ x }} git commit",
    "LD_PRELOAD={{ x }} ls",
    "NODE_OPTIONS={{ x }} node a.js",
    "RUBYOPT={{ x }} ruby a.rb",
    "JAVA_TOOL_OPTIONS={{ x }} java -jar a.jar",
    "sudo LD_PRELOAD={{ x }} ls",
    "docker run -e BASH_ENV={{ x }} image",
    "docker run --env=BASH_ENV={{ x }} image",
    "PS1={{ x }} bash -i",
    "PROMPT_COMMAND={{ x }} bash -i",
]
# No shell runs a value here as it stands. The rules are simple, and refuse these too: `env` is another way.
REFUSED_TO_BE_SIMPLE = [
    "bash {{ x }}",
    "ssh {{ x }} uptime",
    "awk -f program.awk {{ x }}",
    "perl -ne 'print' {{ x }}",
    "read -r -p {{ x }} line",
    "$SHELL script.sh {{ x }}",
    "echo {{ x }} | $PAGER",
    "declare -i n=0; for i in {{ x }}; do n+=1; done",
    "declare -i n; read -r line <<< {{ x }}",
    "declare -i n; arr+=({{ x }})",
    "compgen -f {{ x }}",
    "(cd {{ x }} && sh)",
    "$CC -c {{ x }}",
    "${CC:-cc} -c {{ x }}",
    "$TAR -czf {{ x }} .",
    "$TOOL {{ x }}",
    "sed -f - file <<E\n{{ x }}\nE",
    "echo {{ x }} | sed -n -f /dev/stdin file",
]
REFUSED = (
    COMPUTED
    + RUN_VARIABLES
    + [*CODE_IN_VARIABLES]
    + [*OPEN_WORDS]
    + OTHER_VARIABLES
    + COMPUTED_LISTS
    + SCRIPTS
    + OTHER_PROGRAMS
    + NEVER_REPLACED
    + REFUSED_TO_BE_SIMPLE
)

ALLOWED = [
    "sudo systemctl restart {{ x }}",
    "sudo -u deploy -n systemctl restart {{ x }}",
    "sudo -u {{ x }} ls",
    "timeout -k 5 10 ./job {{ x }}",
    "timeout --signal=KILL 10 ./job {{ x }}",
    "echo {{ x }} | xargs --null rm --",
    "IFS=$'\\n\\t' ./job $'a\\'b' {{ x }}",
    "case a in\n(a) echo;;\n(b|{{ x }}) (echo {{ x }});;\nesac",
    "env -u A B={{ x }} ./job {{ x }}",
    "command -v {{ x }}",
    "bash ./{{ x }}",
    "ssh -i {{ x }} -- {{ x }} uptime",
    "ssh -fN -L 1:a:1 host; echo {{ x }}",
    "perl -ne 'print' < {{ x }}",
    "perl -Mstrict -e 'print shift' -- {{ x }}",
    "sh -c 'curl -s host | sh; sh < file; cat'; echo {{ x }}",
    "echo {{ x }} | python3 -Wignore script.py",
    'sh -c "$(curl -sSf https://sh.example)"; cargo build {{ x }}',
    "{{ x }}/bin/python script.py {{ x }}",
    "{{ x }} --version",
    '"$HOME/bin/tool" {{ x }}',
    "$(npm bin)/eslint {{ x }}",
    "python3 --version; echo {{ x }}",
    "curl -sSf https://sh.example | sh -s -- -y; cargo build {{ x }}",
    "pip install pkg[{{ x }}]",
    "GIT_SSH_COMMAND='ssh -i key' git clone {{ x }}",
    "export PAGER; git log {{ x }}",
    "export $(cat .env); ./job {{ x }}",
    "flock lock ./job {{ x }}",
    "node --max-old-space-size={{ x }} app.js",
    "apt-get install bash {{ x }}",
    "find {{ x }} -name '*.py' -exec grep a {} +",
    "printf '{{ x }}\\n'",
    "[ {{ x }} -gt 3 ]",
    "[[ {{ x }} = y && -n {{ x }} ]]",
    "[[ -f {{ x }} || $n -gt 3 ]]",
    "[[ $(wc -l < {{ x }}) -gt 3 ]]",
    "echo $(( {{ x }} + 1 ))",
    "echo bash -c {{ x }}",
    "echo {{ x }} | python3 -c 'import sys; print(sys.stdin.read())'",
    "echo {{ x }} | python3 -m json.tool",
    "echo {{ x }} | python3 script.py",
    "python3 -c 'import sys; print(sys.argv[1])' {{ x }}",
    "python3 script.py -c {{ x }}",
    "sh -c 'grep -- \"$1\" log' sh {{ x }}",
    "bash -o pipefail -c 'echo \"$1\"' bash {{ x }}",
    "sh script.sh {{ x }}",
    "bash ./deploy.sh -c {{ x }}",
    "echo {{ x }} | sh script.sh",
    "echo {{ x }} | xargs -0 rm --",
    "echo {{ x }} | xargs sh -c 'echo \"$@\"' sh",
    "printf '%s\\0' {{ x }} | ssh host 'xargs -0 rm --'",
    "ssh host 'cat > file' <<E\n{{ x }}\nE",
    "curl -s -o out {{ x }}; sh install.sh",
    "git commit -m {{ x }}",
    "git -c user.name={{ x }} log",
    "npm run watch {{ x }}",
    "awk -v a={{ x }} '{print a}' file",
    "printf -v n '%s' {{ x }}",
    "declare n={{ x }}",
    "export N={{ x }}",
    "N={{ x }} sh script.sh",
    "n={{ x }}; echo \"$n\"",
    "arr=({{ x }} {{ x }})",
    "trap 'rm -f tmp' EXIT; echo {{ x }}",
    "case {{ x }} in a) echo;; {{ x }}) echo;; esac",
    "for i in {{ x }} 'a b'; do echo $i; done | sort",
    "cat <<E > file\n{{ x }}\nE\nsh file",
    "cat <<E\n{{ x }}\nE\necho a | sh",
    "# eval {{ x }}\necho a",
    "echo {{ x }}; sh <<E\necho a\nE",
    "docker run --rm -v {{ x }}:/a image make",
    "echo ${A:-\"{{ x }}\"}",
    "jq --arg a {{ x }} '.b == $a' file",
    "find . -name {{ x }} -exec sh -c 'echo \"$1\"' sh {} \\;",
    "source {{ x }}",
    "set -- {{ x }}; echo \"$1\"",
    "python3 -u script.py <<E\n{{ x }}\nE",
    "echo {{ x }} > >(tee log)",
    "echo {{ x }} | tee >(grep sh)",
    "for i in {{ x }} do; do echo; done",
    "case {{ x }} in (a|b) echo;; ({{ x }}) echo;; esac",
    "echo {{ x }} | { read -r line; sh script.sh \"$line\"; }",
    "echo {{ x }} | while read -r line; do echo a | sh; done",
    "while read -r line; do sh <<E\necho a\nE\ndone <<< {{ x }}",
    "{ echo {{ x }}; sh script.sh; }",
    "if [ {{ x }} = a ]; then sh < install.sh; fi",
    "f() { sh < script.sh; }; f {{ x }}",
    "exec > log 2>&1; echo {{ x }}; sh script.sh",
    "python3 -W ignore script.py -c {{ x }}",
    "python3 -m pytest -k {{ x }}",
    "echo {{ x }} | python3 -X utf8 script.py",
    "echo {{ x }} | perl -lne 'print'",
    "env -i A={{ x }} sh script.sh",
    "env A=1 ls -S {{ x }}",
    "sed -f script.sed <<E\n{{ x }}\nE",
    "ENV={{ x }} ./deploy.sh",
    "export ENV={{ x }}; sh deploy.sh -i",
    "docker run -e ENV={{ x }} image",
    "PYTHONPATH={{ x }} python3 a.py",
    "BROWSER={{ x }} npm test",
    "curl -d PAGER={{ x }} host",
]  # fmt: skip


def check(command: str) -> list[str]:
    steps = "".join(f"\n      {line}" for line in command.splitlines())
    loaded = load_text(f"steps:\n  a:\n    exec: |{steps}\n".replace("{{ x }}", "{{ inputs.x }}").encode())
    assert loaded.workflow is not None, loaded.findings
    return [found.message for found in lint(loaded) if found.is_error]


def test_check_refuses_a_value_where_it_would_be_run_or_not_replaced() -> None:
    assert [command for command in REFUSED if not any("a value" in message for message in check(command))] == []


def test_a_step_refuses_a_value_where_it_would_be_run_or_not_replaced() -> None:
    def is_refused(command: str) -> bool:
        try:
            with_references(with_marks(command), ["1"])
        except Unsafe as unsafe:
            return "a value" in str(unsafe)
        return False

    assert [command for command in REFUSED if not is_refused(command)] == []


def test_a_value_that_is_only_data_is_not_refused() -> None:
    for command in ALLOWED:
        assert [refusal for refusal in find_refusals(with_marks(command)) if refusal.is_error] == [], command
        with_references(with_marks(command), ["1"])


def test_check_points_at_a_value_that_another_program_may_take_for_commands_without_refusing_it() -> None:
    for command in (
        "sed 's/a/{{ x }}/' file",
        "sed -i -e 's/a/{{ x }}/' file",
        "sed -f script.sed -e 's/a/{{ x }}/' file",
        "make -j2 V={{ x }} all",
        "make -j2 {{ x }}",
    ):
        assert [refusal.is_error for refusal in find_refusals(with_marks(command))] == [False], command


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_every_variable_that_bash_computes_is_known() -> None:
    told = subprocess.run(["bash", "-c", "declare -pi"], capture_output=True, text=True, check=True, timeout=20).stdout
    names = [line.split()[2].partition("=")[0] for line in told.splitlines() if "r" not in line.split()[1]]
    assert "RANDOM" in names
    for name in names:
        assert [refusal.is_error for refusal in find_refusals(with_marks(name + "={{ x }}"))] == [True], name


def test_the_reason_of_a_refusal_shows_dots_for_a_value() -> None:
    for command in ("./{{ x }}", "echo {{ x }} | ./{{ x }}"):
        messages = [refusal.message for refusal in find_refusals(with_marks(command))]
        assert messages and all("a script for ./…," in message for message in messages), command


def test_check_warns_where_a_value_may_be_read_as_an_option() -> None:
    warned = {
        "grep {{ x }} log": True,
        "sudo systemctl restart {{ x }}": True,
        "tar cf /dev/null '{{ x }}' --checkpoint=1 .": True,
        "grep -- {{ x }} log": False,
        "grep -e {{ x }} log": False,
        "cat ./{{ x }}": False,
        "echo {{ x }}": False,
    }
    for command, is_warned in warned.items():
        rules = [refusal.rule for refusal in find_refusals(with_marks(command)) if not refusal.is_error]
        assert rules == ["shell/value-as-option"] * is_warned, command


@pytest.mark.parametrize(
    "written",
    [
        "steps:\n  a: {exec: 'true', env: {BASH_ENV: '{{ inputs.x }}'}, shell: bash}",
        "steps:\n  a: {exec: 'sh -i script', env: {ENV: '{{ inputs.x }}'}}",
        "steps:\n  a: {exec: 'true', env: {GIT_SSH_COMMAND: 'ssh -i {{ inputs.x }}'}}",
        "steps:\n  a: {exec: 'true', env: {'BASH_FUNC_ls%%': '() { {{ inputs.x }}; }'}}",
        "env: {LD_PRELOAD: '{{ inputs.x }}'}\nsteps:\n  a: {exec: 'true'}",
        "defaults: {env: {PERL5OPT: '{{ inputs.x }}'}}\nsteps:\n  a: {exec: 'true'}",
        "tools: {t: {exec: 'true', env: {PAGER: '{{ inputs.x }}'}}}\nsteps:\n  a: {type: tool, tool: t}",
        "steps:\n  a: {type: mcp, command: server, method: m, env: {NODE_OPTIONS: '{{ inputs.x }}'}}",
    ],
)
def test_a_value_in_a_variable_that_would_be_run_is_refused_by_check_and_by_the_step(
    written: str, run: Callable[..., Envelope], tmp_path: Path
) -> None:
    text = "inputs: {x: {type: string, default: $(touch pwned)}}\n" + written
    loaded = load_text(text.encode())
    assert loaded.workflow is not None, loaded.findings
    (found,) = [found for found in lint(loaded) if found.is_error]
    assert found.rule == "shell/value-in-script" and "would run" in found.message
    envelope = run(text)
    assert step(envelope, "a")["error"]["code"] == "STEP_INVALID", envelope
    assert "would run" in step(envelope, "a")["error"]["message"] and step(envelope, "a")["attempts"] == 0
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "written",
    [
        "steps:\n  a: {exec: 'true', env: {ENV: '{{ inputs.x }}', NAME: '{{ inputs.x }}'}}",
        "steps:\n  a: {exec: 'true', env: {BASH_ENV: /dev/null, PAGER: '${PAGER:-cat}'}}",
    ],
)
def test_a_variable_that_is_only_data_or_that_the_file_itself_writes_is_not_refused(
    written: str, run: Callable[..., Envelope]
) -> None:
    assert run("inputs: {x: {type: string, default: y}}\n" + written).ok


def test_what_blocks_of_a_template_will_make_of_a_command_is_judged_when_it_is_known() -> None:
    command = "{% if env.x %}sh -c '{% else %}echo '{% endif %}{{ env.x }}'"
    assert check(command) == []


def test_commands_deep_inside_each_other_are_refused_and_not_an_error_of_ours() -> None:
    with pytest.raises(Unsafe, match="deep"):
        with_references("echo " + "$(echo " * 5000 + mark(0), ["1"])
    with pytest.raises(Unsafe, match="deep"):
        with_references("echo " + "${a:-" * 5000 + mark(0), ["1"])


@pytest.mark.soak  # what bash does with the table changes with the table alone
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_what_is_refused_would_really_have_been_run_by_bash(tmp_path: Path) -> None:
    """So the table holds no case that is merely guessed: the value is put there as data, and bash runs it."""
    rows = [
        *((command, INDEX) for command in COMPUTED),
        *((command, LIST if "declare" in command else SCRIPT) for command in COMPUTED_LISTS),
        *((command, SCRIPT) for command in SCRIPTS),
        *((command, SCRIPT) for command in RUN_VARIABLES),
        *CODE_IN_VARIABLES.items(),
        *OPEN_WORDS.items(),
    ]
    with ThreadPoolExecutor(4) as pool:
        have_run = pool.map(
            bash_runs_the_value, *zip(*rows, strict=True), (tmp_path / str(n) for n in range(len(rows)))
        )
        assert [row for row, has_run in zip(rows, have_run, strict=True) if not has_run] == []


def bash_runs_the_value(command: str, value: str, folder: Path) -> bool:
    folder.mkdir()
    texts = [command.replace("'{{ x }}", "'\"$V\"'{{ x }}").replace("{{ x }}", "$V")]  # as one would write it by hand
    texts += [command.replace("{{ x }}", text) for text in ('"$V"', "$V", value)]
    (folder / "evil.py").write_text("open('pwned', 'w')")
    (folder / "evil").write_text("#!/bin/sh\ntouch pwned\n")
    (folder / "evil").chmod(0o755)
    if "git" in command:
        subprocess.run(["git", "init", "-q", folder], check=True, timeout=20)
    for text in texts:
        if not (folder / "pwned").exists():
            subprocess.run(
                ["bash", "-c", text], env={**os.environ, "V": value}, cwd=folder, capture_output=True, timeout=20,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
    return (folder / "pwned").exists()


FRAGMENTS = [
    *("echo ", "{m}", "{m}", " ", '"', "'", "$(", ")", "`", "\n", "|", "; ", "(", "\\", "# ", "&& ", "! ", "{ ", "; }"),
    *("cat <<E\n", "\nE\n", "cat <<'E'\n", "<<-E\n", "<<<", "<(", "$'", "$[", "]", "((", "))", "$((", "${A:-", "}"),
    *("[[ ", "]] ", "-gt 3 ", "eval ", "sh -c ", "let ", "x=", "[ ", "declare -i n=", "arr[", "]=1", "printf "),
    *("env ", "export ", "coproc ", "exec ", "e=eval; $e ", "nice ", "time ", "xargs ", "declare ", "{a,", ","),
    *("if true; then ", "fi\n", "case a in a) ", ";; esac\n", "for i in a; do ", "done\n", "while false; do ", "f() "),
]  # fmt: skip
EVIL = [
    INDEX,
    SCRIPT,
    LIST,
    "'; touch pwned; '",
    '"; touch pwned; "',
    "`touch pwned`",
    "\ntouch pwned\n",
    "E\ntouch pwned\nE",
    "-Stouch pwned",
    f"-v{INDEX}",
    "touch pwned",
]


@pytest.mark.slow
@pytest.mark.parametrize("shell", [shell for shell in ("bash", "dash") if shutil.which(shell)])
def test_in_no_random_script_is_a_value_run(shell: str, tmp_path: Path) -> None:
    choose = random.Random(shell)
    ran = 0
    while ran < 60:
        script = "".join(choose.choices(FRAGMENTS, k=choose.randint(3, 14))) + "{m}"
        with contextlib.suppress(Unsafe):
            command, variables = with_references(script.replace("{m}", mark(0)), [choose.choice(EVIL)])
            env = {"PATH": os.environ["PATH"], **variables}
            subprocess.run(
                [shell, "-c", command], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=20
            )
            assert not (tmp_path / "pwned").exists(), script
            ran += 1
