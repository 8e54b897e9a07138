"""Jobs: one per invocation, whoever asks; how far it is, how it ended, and who was told."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shotclock.core.limits import WallTime
from shotclock.core.value_types import replace
from shotclock.store import jobs
from shotclock.store.jobs import RETENTION_MS, STARTING_LIMIT_MS, Ambiguous, Job, JobState
from shotclock.store.store import Store
from tests.store.work import NOW, all_alive, all_dead, holder, in_children, new_job

ENVELOPE = {"ok": True, "data": [1, {"ü": None}]}


def begun(store: Store, id: str = "job1", **given: Any) -> Job:
    job, created = store.jobs.attach_or_create(new_job(id, **given), all_alive)
    assert created
    return job


def running(store: Store, id: str = "job1", **given: Any) -> Job:
    begun(store, id, **given)
    job = store.jobs.assign_runner(id, holder(1), NOW)
    assert job is not None
    return job


def existing(store: Store, id: str = "job1") -> Job:
    job = store.jobs.get(id)
    assert job is not None
    return job


# --- one per invocation ---------------------------------------------------------------------------


def test_everything_that_is_given_comes_back(store: Store):
    new = new_job(
        arguments={"path": "/\udcff", "n": [1, None]},
        cwd="/tmp/\udcfe",
        idempotency_key="once",
        log_path="/l/\udcfd",
        stdin_path="/s",
        deadline_at=NOW + 5,
    )
    job, created = store.jobs.attach_or_create(new, all_alive)
    assert created and job == store.jobs.get("job1")
    for field in ("id", "key", "app", "command", "arguments", "cwd", "program", "tool_version", "idempotency_key",
                  "spec", "log_path", "stdin_path", "deadline_at", "max_lifetime_ms", "idle_timeout_ms"):  # fmt: skip
        assert getattr(job, field) == getattr(new, field), field
    assert (job.state, job.attempt, job.created_at, job.attempt_at) == (JobState.STARTING, 1, NOW, NOW)
    assert job.is_active and progress_of(job) is None and job.runner is None


def test_the_identical_invocation_attaches_while_the_job_starts_and_while_its_runner_lives(store: Store):
    begun(store)
    again = new_job("job2", at=NOW + STARTING_LIMIT_MS - 1)
    assert store.jobs.attach_or_create(again, all_dead)[1] is False
    job = store.jobs.assign_runner("job1", holder(1), NOW)
    assert store.jobs.attach_or_create(new_job("job2", at=NOW + 10 * STARTING_LIMIT_MS), all_alive) == (job, False)
    assert store.jobs.get("job2") is None


def test_another_invocation_is_another_job(store: Store):
    begun(store)
    assert begun(store, "job2", key="other").id == "job2"


def test_a_result_nobody_was_told_is_kept_for_the_next_who_asks_and_then_the_work_is_done_anew(store: Store):
    running(store)
    store.jobs.finish("job1", ENVELOPE, NOW + 1)
    job, created = store.jobs.attach_or_create(new_job("job2", at=NOW + 2), all_alive)
    assert not created and job.envelope == ENVELOPE
    assert store.jobs.deliver("job1", NOW + 3) and not store.jobs.deliver("job1", NOW + 4)
    assert store.jobs.get("job1").delivered_at == NOW + 3
    job, created = store.jobs.attach_or_create(new_job("job2", at=NOW + 5), all_alive)
    assert created and job.id == "job2" and job.attempt == 1


def test_a_result_nobody_was_told_is_not_given_out_when_it_is_older_than_the_retention(store: Store):
    running(store)
    store.jobs.finish("job1", ENVELOPE, NOW)
    assert not store.jobs.attach_or_create(new_job("job2", at=NOW + RETENTION_MS - 1), all_alive)[1]
    assert store.jobs.attach_or_create(new_job("job2", at=NOW + RETENTION_MS), all_alive)[1]


@pytest.mark.parametrize("ended", ["finished", "lost"])
def test_with_an_idempotency_key_the_answer_stays_the_same_for_as_long_as_it_is_kept(store: Store, ended: str):
    running(store, idempotency_key="once")
    if ended == "finished":
        store.jobs.finish("job1", ENVELOPE, NOW)
    else:
        store.jobs.mark_lost(existing(store), ENVELOPE, NOW)
    store.jobs.deliver("job1", NOW)
    for after in (1, RETENTION_MS - 1):
        again = new_job("job2", at=NOW + after, idempotency_key="once")
        job, created = store.jobs.attach_or_create(again, all_alive)
        assert not created and job.id == "job1" and job.envelope == ENVELOPE
    again = new_job("job2", at=NOW + RETENTION_MS, idempotency_key="once")
    assert store.jobs.attach_or_create(again, all_alive)[1]


def test_a_job_whose_runner_died_is_said_to_be_lost_once_and_then_done_anew(store: Store):
    running(store)
    job, created = store.jobs.attach_or_create(new_job("job2", at=NOW + 9), all_dead)
    assert (created, job.id, job.state, job.ended_at, job.envelope) == (False, "job1", JobState.LOST, NOW + 9, None)
    # Whoever found it writes down what to say about it. The first words stay.
    assert store.jobs.mark_lost(job, ENVELOPE, NOW + 10)
    assert not store.jobs.mark_lost(job, {}, NOW + 11)
    job, created = store.jobs.attach_or_create(new_job("job2", at=NOW + 12), all_dead)
    assert not created and job.envelope == ENVELOPE and job.ended_at == NOW + 9
    store.jobs.deliver("job1", NOW + 13)
    assert store.jobs.attach_or_create(new_job("job2", at=NOW + 14), all_dead)[0].id == "job2"


@pytest.mark.parametrize("found_before", [False, True])
@pytest.mark.parametrize("told_before", [False, True])
def test_a_lost_job_is_taken_up_again_under_its_id_with_its_progress(
    store: Store, found_before: bool, told_before: bool
):
    running(store, log_path="/log1", stdin_path="/in1")
    store.jobs.progress("job1", 70, 100, "rows", NOW + 1)
    store.jobs.request_cancel("job1", NOW + 2)
    if found_before:
        store.jobs.mark_lost(existing(store), ENVELOPE, NOW + 3)
        if told_before:
            store.jobs.deliver("job1", NOW + 3)
    again = new_job("job2", at=NOW + 4, log_path="/log2", stdin_path="/in2", deadline_at=NOW + 99, max_lifetime_ms=7)
    job, created = store.jobs.attach_or_create(again, all_dead, resume=True)
    assert created
    assert (job.id, job.attempt, job.state, job.created_at, job.attempt_at) == (
        "job1", 2, JobState.STARTING, NOW, NOW + 4,
    )  # fmt: skip
    assert progress_of(job) == Progress(70, 100, "rows", NOW + 1)
    assert (job.log_path, job.stdin_path, job.deadline_at, job.max_lifetime_ms) == ("/log1", "/in1", NOW + 99, 7)
    assert job.runner is job.heartbeat_at is job.cancel_requested_at is job.ended_at is job.envelope is None
    assert store.jobs.get("job2") is None
    # It is starting again, so the next one attaches.
    assert store.jobs.attach_or_create(new_job("job3", at=NOW + 5), all_dead, resume=True) == (job, False)


def test_one_that_never_got_a_runner_counts_as_lost_after_a_while(store: Store):
    begun(store)
    at = NOW + STARTING_LIMIT_MS
    assert store.jobs.attach_or_create(new_job("job2", at=at), all_alive, resume=True)[0].attempt == 2
    # A further attempt has the whole time again.
    assert store.jobs.attach_or_create(new_job("job2", at=at + STARTING_LIMIT_MS - 1), all_alive)[0].state == "starting"
    job, created = store.jobs.attach_or_create(new_job("job2", at=at + STARTING_LIMIT_MS), all_alive)
    assert (created, job.state, job.id) == (False, JobState.LOST, "job1")


def test_a_clock_that_was_set_back_keeps_no_job_starting_for_ever(store: Store):
    begun(store)
    assert not store.jobs.attach_or_create(new_job("job2", at=NOW - 1000), all_alive, resume=True)[1]
    assert store.jobs.attach_or_create(new_job("job2", at=NOW - STARTING_LIMIT_MS), all_alive, resume=True)[1]


def test_an_earlier_attempt_has_nothing_more_to_say(store: Store):
    running(store)
    store.jobs.attach_or_create(new_job("job2"), all_dead, resume=True)
    job = store.jobs.assign_runner("job1", holder(2), NOW)
    assert job is not None and job.attempt == 2
    assert not store.jobs.beat("job1", NOW + 5, attempt=1)
    store.jobs.progress("job1", 5, None, None, NOW + 5, attempt=1)
    assert not store.jobs.finish("job1", ENVELOPE, NOW + 5, attempt=1)
    assert not store.jobs.mark_lost(replace(job, attempt=1), ENVELOPE, NOW + 5)
    assert store.jobs.get("job1") == job
    assert store.jobs.finish("job1", ENVELOPE, NOW + 5, attempt=2)


def test_an_id_that_belongs_to_another_job_is_refused(store: Store):
    begun(store)
    with pytest.raises(ValueError, match="another job"):
        begun(store, key="other")
    for id in ("", "a b", "ä", "../x", "a\n"):
        with pytest.raises(ValueError, match="cannot be the id"):
            begun(store, id, key="other")


# --- runners --------------------------------------------------------------------------------------


def test_one_runner_takes_charge_and_may_do_so_again(store: Store):
    begun(store)
    job = store.jobs.assign_runner("job1", holder(1), NOW + 1)
    assert job is not None and (job.state, job.runner, job.heartbeat_at) == (JobState.RUNNING, holder(1), NOW + 1)
    assert store.jobs.assign_runner("job1", holder(2), NOW + 2) is None
    assert store.jobs.assign_runner("job1", holder(1), NOW + 2) == job
    store.jobs.finish("job1", ENVELOPE, NOW + 3)
    assert store.jobs.assign_runner("job1", holder(1), NOW + 4) is None
    assert store.jobs.assign_runner("nobody", holder(1), NOW + 4) is None


class Progress(NamedTuple):
    done: int | None
    total: int | None
    unit: str | None
    at: WallTime | None


def progress_of(job: Job) -> Progress | None:
    progress = Progress(job.progress_done, job.progress_total, job.progress_unit, job.progress_at)
    return None if progress.done is None else progress


def progressed(store: Store, id: str, done: int, total: int | None, unit: str | None, at: WallTime) -> Any:
    store.jobs.progress(id, done, total, unit, at)
    job = store.jobs.get(id)
    return None if job is None else progress_of(job)


def test_progress_never_decreases_and_what_is_kept_is_said(store: Store):
    running(store)
    say = partial(progressed, store)
    assert say("job1", 5, None, None, NOW + 1) == Progress(5, None, None, NOW + 1)
    assert say("job1", 3, 10, "rows", NOW + 2) == Progress(5, 10, "rows", NOW + 1)
    assert say("job1", 5, None, None, NOW + 3) == Progress(5, 10, "rows", NOW + 1)
    assert say("job1", 6, 8, None, NOW + 4) == Progress(6, 8, "rows", NOW + 4)
    assert store.jobs.get("job1").heartbeat_at == NOW + 4
    store.jobs.finish("job1", ENVELOPE, NOW + 5)
    assert say("job1", 9, None, None, NOW + 6) == Progress(6, 8, "rows", NOW + 4)
    assert say("nobody", 9, None, None, NOW + 6) is None


def test_progress_of_nothing_is_progress(store: Store):
    running(store)
    assert progressed(store, "job1", 0, None, None, NOW + 1) == Progress(0, None, None, NOW + 1)


@pytest.mark.parametrize("done", [-1, 2**63, 1.5, True, float("nan"), "1", None])
def test_progress_that_is_no_count_is_refused(store: Store, done: Any):
    running(store)
    with pytest.raises((ValueError, TypeError)):
        store.jobs.progress("job1", done, None, None, NOW)
    with pytest.raises((ValueError, TypeError)):
        store.jobs.progress("job1", 1, done if done is not None else "x", None, NOW)
    assert store.jobs.get("job1").progress_done is None


def test_a_heartbeat_is_kept_until_the_job_ends(store: Store):
    running(store)
    assert store.jobs.beat("job1", NOW + 7)
    assert store.jobs.get("job1").heartbeat_at == NOW + 7
    store.jobs.finish("job1", ENVELOPE, NOW + 8)
    assert not store.jobs.beat("job1", NOW + 9) and not store.jobs.beat("nobody", NOW)
    assert store.jobs.get("job1").heartbeat_at == NOW + 7


def test_the_first_request_to_cancel_counts_and_an_ended_job_is_left_alone(store: Store):
    running(store)
    assert store.jobs.request_cancel("job1", NOW + 1).cancel_requested_at == NOW + 1
    assert store.jobs.request_cancel("job1", NOW + 2).cancel_requested_at == NOW + 1
    assert store.jobs.request_cancel("nobody", NOW) is None
    running(store, "job2", key="other")
    store.jobs.finish("job2", ENVELOPE, NOW)
    assert store.jobs.request_cancel("job2", NOW).cancel_requested_at is None


def test_the_first_end_is_the_end(store: Store):
    job = running(store)
    assert not store.jobs.deliver("job1", NOW)
    assert store.jobs.finish("job1", ENVELOPE, NOW + 1)
    assert not store.jobs.finish("job1", {"ok": False}, NOW + 2)
    assert not store.jobs.mark_lost(job, {"ok": False}, NOW + 2)
    job = store.jobs.get("job1")
    assert (job.state, job.envelope, job.ended_at) == (JobState.FINISHED, ENVELOPE, NOW + 1)
    assert not store.jobs.finish("nobody", ENVELOPE, NOW)


# --- looking --------------------------------------------------------------------------------------


def test_a_prefix_finds_its_job_if_it_is_the_only_one(store: Store):
    for id in ("abc1", "abc2", "abd", "ab", "z", "Z_-"):
        begun(store, id, key=id)
    found = {prefix: store.jobs.find(prefix) for prefix in ("abc", "abc1", "ab", "abd", "z", "Z", "q", "", "%", "ab%")}
    assert found["abc"] == Ambiguous(("abc1", "abc2"))
    assert {p: job.id for p, job in found.items() if isinstance(job, Job)} == {
        "abc1": "abc1", "ab": "ab", "abd": "abd", "z": "z", "Z": "Z_-",
    }  # fmt: skip
    assert found["q"] is found[""] is found["%"] is found["ab%"] is None


def test_lists_are_newest_first_and_may_be_narrowed(store: Store):
    for number in range(6):
        running(store, f"j{number}", key=f"k{number}", app="ab"[number % 2])
    store.jobs.finish("j4", ENVELOPE, NOW)
    store.jobs.mark_lost(existing(store, "j1"), ENVELOPE, NOW)

    def ids(**given: Any) -> str:
        return "".join(job.id[1] for job in store.jobs.list(**given))

    assert ids() == "543210"
    assert ids(limit=2) == "54" and ids(limit=0) == ""
    assert ids(app="a") == "420" and ids(app="none") == ""
    assert ids(active_only=True) == "5320"
    assert ids(app="a", active_only=True, limit=1) == "2"
    with pytest.raises(ValueError):
        store.jobs.list(limit=-1)


def test_what_ended_long_ago_is_forgotten_the_oldest_first_and_handed_back_for_its_files(store: Store):
    for number in range(5):
        running(store, f"j{number}", key=f"k{number}", log_path=f"/log{number}")
        if number:
            store.jobs.finish(f"j{number}", ENVELOPE, NOW + 10 - number)
    before = NOW + 9
    assert [job.log_path for job in store.jobs.forget_ended_before(before, limit=2)] == ["/log4", "/log3"]
    assert [job.id for job in store.jobs.forget_ended_before(before)] == ["j2"]
    assert store.jobs.forget_ended_before(before) == ()
    assert [job.id for job in store.jobs.list()] == ["j1", "j0"]


def fill(store: Store, count: int) -> None:
    with store._database.write(durable=False) as connection:
        connection.execute("CREATE TEMP TABLE n (i)")
        connection.executemany("INSERT INTO n VALUES (?)", ((i,) for i in range(count)))
        connection.execute(
            "INSERT INTO jobs (id, key, app, command, arguments, cwd, program, tool_version, spec, state, attempt, "
            "created_at, attempt_at, max_lifetime_ms, idle_timeout_ms, ended_at, used_ms) "
            "SELECT printf('%08x', i), 'k' || i, 'app' || (i % 10), 'c', '{}', '/', '{}', '1', '{}', "
            "iif(i % 1000, 'finished', 'starting'), 1, i, i, 1, 1, iif(i % 1000, i, NULL), 0 FROM n"
        )


@pytest.mark.slow
def test_among_a_hundred_thousand_jobs_every_question_is_answered_from_an_index(store: Store):
    fill(store, 100_000)
    asked: list[str] = []
    connection = store._database._connection
    assert connection is not None
    connection.set_trace_callback(asked.append)
    assert [job.id for job in store.jobs.list(limit=2)] == [f"{99_999:08x}", f"{99_998:08x}"]
    assert store.jobs.list(app="app7", limit=1)[0].id == f"{99_997:08x}"
    assert len(store.jobs.list(active_only=True, limit=1000)) == 100
    assert len(store.jobs.list(app="app0", active_only=True, limit=1000)) == 100
    assert store.jobs.get(f"{5:08x}") is not None
    assert isinstance(store.jobs.find("0000"), Ambiguous)
    assert store.jobs.attach_or_create(new_job(key="k77", at=WallTime(10**9)), all_alive)[1]
    assert len(store.jobs.forget_ended_before(WallTime(50))) == 49
    connection.set_trace_callback(None)

    selects = [query for query in asked if query.lstrip().startswith(("SELECT", "DELETE", "UPDATE"))]
    assert len(selects) >= 9
    for query in selects:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert not any("TEMP B-TREE" in step for step in plan), (query, plan)
        by_index = all(step.startswith("SEARCH") or "USING INDEX jobs_active" in step for step in plan)
        # The one allowed walk: the newest of all, backwards along the primary key, as far as the limit.
        newest = query.endswith("FROM jobs ORDER BY seq DESC LIMIT 2")
        assert by_index or newest, (query, plan)


# --- many at once ---------------------------------------------------------------------------------


def attach(number: int, home: Path, resume: bool) -> tuple[str, bool, int]:
    with Store.open(home) as store:
        job, created = store.jobs.attach_or_create(new_job(f"by{number}", at=NOW + 1), all_dead, resume=resume)
        return job.id, created, job.attempt


def test_of_twenty_processes_with_the_same_invocation_one_creates_the_job(store: Store):
    answers = in_children(20, attach, store.home, False)
    assert sum(created for _, created, _ in answers) == 1
    assert len({id for id, _, _ in answers}) == 1 and len(store.jobs.list()) == 1


def test_of_twenty_processes_that_find_a_lost_job_one_takes_it_up(store: Store):
    running(store)
    answers = in_children(20, attach, store.home, True)
    assert sum(created for _, created, _ in answers) == 1
    assert {(id, attempt) for id, _, attempt in answers} == {("job1", 2)}


# --- against a model ------------------------------------------------------------------------------

KEYS = ("k1", "k2")


class JobsAgainstAModel(RuleBasedStateMachine):
    """The model is a plain list of jobs, and the rules of the brief written out the long way."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.store = Store.open(Path(self.folder) / "home")
        self.now = NOW
        self.dead: set[int] = set()
        self.made = 0
        self.model: list[Job] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def lives(self, who: Any) -> bool:
        return who.pid not in self.dead

    def change(self, job: Job, **fields: Any) -> Job:
        changed = replace(job, **fields)
        self.model[self.model.index(job)] = changed
        return changed

    def pick(self, index: int) -> Job | None:
        return self.model[index % len(self.model)] if self.model else None

    @rule(ms=st.sampled_from([0, 1, 1000, STARTING_LIMIT_MS - 1, STARTING_LIMIT_MS, RETENTION_MS - 1, RETENTION_MS]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(pid=st.integers(1, 5))
    def dies(self, pid: int) -> None:
        self.dead.add(pid)

    @rule(key=st.sampled_from(KEYS), idempotent=st.booleans(), resume=st.booleans())
    def is_asked_for(self, key: str, idempotent: bool, resume: bool) -> None:
        self.made += 1
        new = new_job(f"j{self.made}", key, at=self.now, idempotency_key="i" if idempotent else None)
        got, created = self.store.jobs.attach_or_create(new, self.lives, resume=resume)
        mine = [job for job in self.model if job.key == key]
        last = mine[-1] if mine else None
        lost = False
        if last is not None:
            waited = self.now - last.attempt_at
            if last.state == "starting" and waited < STARTING_LIMIT_MS:
                assert (got, created) == (last, False)
                return
            if last.state == "running" and self.lives(last.runner):
                assert (got, created) == (last, False)
                return
            lost = last.state in ("starting", "running")
            if (lost or last.state == "lost") and resume:
                assert created
                assert got == self.change(
                    last, state=JobState.STARTING, attempt=last.attempt + 1, attempt_at=self.now, runner=None,
                    heartbeat_at=None, cancel_requested_at=None, ended_at=None, envelope=None, delivered_at=None,
                )  # fmt: skip
                return
            if lost:
                assert (got, created) == (self.change(last, state=JobState.LOST, ended_at=self.now), False)
                return
            kept = self.now - last.ended_at < RETENTION_MS
            if kept and (last.delivered_at is None or last.idempotency_key):
                assert (got, created) == (last, False)
                return
        assert created and got.id == new.id and got.attempt == 1 and got.state == "starting"
        self.model.append(got)

    @rule(index=st.integers(0, 50), pid=st.integers(1, 5))
    def is_taken_charge_of(self, index: int, pid: int) -> None:
        job = self.pick(index)
        if job is None or pid in self.dead:
            return
        got = self.store.jobs.assign_runner(job.id, holder(pid), self.now)
        if job.state == "starting":
            assert got == self.change(job, state=JobState.RUNNING, runner=holder(pid), heartbeat_at=self.now)
        else:
            assert got == (job if job.state == "running" and job.runner == holder(pid) else None)

    @rule(index=st.integers(0, 50), done=st.integers(0, 20), total=st.none() | st.integers(0, 20))
    def makes_progress(self, index: int, done: int, total: int | None) -> None:
        if (job := self.pick(index)) is None:
            return
        got = progressed(self.store, job.id, done, total, None, self.now)
        if job.is_active:
            before = progress_of(job) or Progress(-1, None, None, self.now)
            grew = done > before.done
            kept = Progress(
                max(done, before.done),
                before.total if total is None else total,
                before.unit,
                self.now if grew else before.at,
            )
            shown = {f"progress_{name}": value for name, value in kept._asdict().items()}
            job = self.change(job, **shown, heartbeat_at=self.now)
        assert got == progress_of(job)

    @rule(index=st.integers(0, 50), how=st.sampled_from(["finish", "mark_lost"]), by=st.integers(-1, 0))
    def ends(self, index: int, how: str, by: int) -> None:
        if (job := self.pick(index)) is None:
            return
        if how == "finish":
            ours = self.store.jobs.finish(job.id, {"by": how}, self.now, attempt=job.attempt + by)
        else:
            ours = self.store.jobs.mark_lost(replace(job, attempt=job.attempt + by), {"by": how}, self.now)
        if by == 0 and job.is_active:
            state = JobState.FINISHED if how == "finish" else JobState.LOST
            self.change(job, state=state, envelope={"by": how}, ended_at=self.now)
            assert ours
        elif by == 0 and how == "mark_lost" and job.state == "lost" and job.envelope is None:
            self.change(job, envelope={"by": how})
            assert ours
        else:
            assert not ours

    @rule(index=st.integers(0, 50))
    def is_told(self, index: int) -> None:
        if (job := self.pick(index)) is None:
            return
        first = not job.is_active and job.delivered_at is None
        assert self.store.jobs.deliver(job.id, self.now) == first
        if first:
            self.change(job, delivered_at=self.now)

    @rule(index=st.integers(0, 50))
    def is_to_be_cancelled(self, index: int) -> None:
        if (job := self.pick(index)) is None:
            return
        got = self.store.jobs.request_cancel(job.id, self.now)
        if job.is_active and job.cancel_requested_at is None:
            job = self.change(job, cancel_requested_at=self.now)
        assert got == job

    @rule()
    def is_forgotten(self) -> None:
        old = [job for job in self.model if job.ended_at is not None and job.ended_at < self.now - RETENTION_MS]
        gone = self.store.jobs.forget_ended_before(self.now - RETENTION_MS)
        assert {job.id for job in gone} == {job.id for job in old}
        self.model = [job for job in self.model if job not in old]

    @rule()
    def is_opened_anew(self) -> None:
        self.store.close()
        self.store = Store.open(Path(self.folder) / "home")

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        if hasattr(self, "store"):
            assert list(self.store.jobs.list(limit=1000)) == self.model[::-1]
            active = [job for job in self.model[::-1] if job.is_active]
            assert list(self.store.jobs.list(active_only=True, limit=1000)) == active
            # However it came about, one invocation is never two active jobs.
            assert len({job.key for job in active}) == len(active)


JobsAgainstAModel.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestJobsAgainstAModel = pytest.mark.slow(JobsAgainstAModel.TestCase)


def test_the_limits_are_those_of_the_contract():
    assert jobs.RETENTION_MS == 24 * 3600 * 1000


def test_of_jobs_with_one_key_one_is_active(store: Store):
    assert store.jobs.create_unless_active(new_job("first", key="k"), all_alive) is None
    active = store.jobs.create_unless_active(new_job("second", key="k"), all_alive)
    assert active is not None and active.id == "first" and store.jobs.get("second") is None
    assert store.jobs.create_unless_active(new_job("other", key="l"), all_alive) is None
    store.jobs.assign_runner("first", holder(1), NOW)
    assert store.jobs.create_unless_active(new_job("second", key="k"), all_dead) is None
    assert existing(store, "first").state is JobState.LOST
    latest = store.jobs.find_latest("k")
    assert latest is not None and latest.id == "second"
    store.jobs.finish("second", ENVELOPE, NOW)
    assert store.jobs.create_unless_active(new_job("third", key="k"), all_alive) is None
    assert store.jobs.find_latest("m") is None


def test_values_of_a_spec_are_changed_one_by_one(store: Store):
    begun(store, spec={"a": 1, "b": 2})
    store.jobs.amend("job1", {"b": 3, "c": None})
    store.jobs.amend("nothing", {"b": 3})
    assert existing(store).spec == {"a": 1, "b": 3, "c": None}
