"""Jobs of several roles, rule by rule: SubMasters, worker processes and users are only their requests."""

from __future__ import annotations

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Conflict, JobAlive, Stale
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.effects import Deadline, Wake
from dlrover_hooks.master.core.events import ForgetFinished, Key, Lost
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.roles.role_state import MOST_EVENTS
from dlrover_hooks.protocol import MOST_ROLE_WORKERS, FailurePolicy, JobPhase, RoleBudgets, RoleRules, WorkerCause
from tests.unit.master.role_world import (
    DONE,
    FAIL,
    INITIAL,
    JOB,
    KILLED,
    NODE_LOST,
    RAISED,
    REJOIN,
    REPLACE,
    REWARD,
    ROLE,
    RUNNING,
    RoleWorld,
    actor,
)

# ---- the start -------------------------------------------------------------------------------------------------------


def test_all_workers_are_to_be_started_and_run_once_they_have_registered() -> None:
    world = RoleWorld(up=False)
    shown = world.show()
    assert [(one.role, one.rank, one.life, one.state) for one in shown.workers] == [
        ("actor", 0, 1, INITIAL),
        ("actor", 1, 1, INITIAL),
        ("reward", 0, 1, INITIAL),
    ]
    assert (shown.phase, shown.submission, shown.spec) == (JobPhase.RUNNING, "first", "{}")
    reply = world.register(1)
    assert reply == p.RoleWorker("actor", 1, 1, RUNNING, "actor:1:1", "n1", 101, "host:1")
    assert reply == world.worker(1)
    assert world.worker(0).state is INITIAL


def test_a_deadline_is_set_for_the_next_registration() -> None:
    world = RoleWorld(up=False)
    assert Deadline("job", 1060.0) in world.effects
    assert Wake("roles job") in world.effects
    world.now = 1030.0
    world.register(0)
    world.register(1)
    world.end(0)
    world.register(0, "reward")
    world.tick(30.0)
    assert Deadline("job", 1090.0) in world.effects, "that of the replacement"
    world.register(0)
    world.tick(30.0)
    assert not any(isinstance(effect, Deadline) for effect in world.effects), "all are up"
    assert world.phase is JobPhase.RUNNING


def test_registering_again_changes_nothing_and_another_process_is_refused() -> None:
    world = RoleWorld()
    number = world.show().number
    assert world.register(0) == world.worker(0)
    assert world.show().number == number
    with pytest.raises(Stale, match="worker 0 of role 'actor' of job 'job' is held by process 'actor:0:1'"):
        world.register(0, name="another")
    world.end(0)
    with pytest.raises(Stale, match=r"Life 1 of worker 0 of role 'actor' .* life 2 is current"):
        world.register(0, life=1)
    with pytest.raises(Stale):
        world.register(0, life=3)


def test_the_same_submission_changes_nothing_and_another_one_is_a_conflict() -> None:
    world = RoleWorld()
    world.end(0)
    before = world.show()
    assert world.submit("first", actor(JOB, 5)) == before
    assert world.show() == before
    with pytest.raises(Conflict, match="'job' already runs"):
        world.submit("second", actor())
    assert world.show() == before


def test_a_job_that_is_over_is_started_afresh_by_another_submission() -> None:
    world = RoleWorld(actor(worker=0))
    world.end(0)
    assert world.phase is JobPhase.FAILED
    over = world.show()
    assert world.submit("first", actor()) == over, "a request that is sent again starts nothing"
    world.now += 10.0
    world.submit("second", actor(workers=3), spec="other")
    shown = world.show()
    assert (shown.phase, shown.reason, shown.submission, shown.spec) == (JobPhase.RUNNING, "", "second", "other")
    assert [(one.state, one.former) for one in shown.workers] == [(INITIAL, "")] * 3
    assert (world.used("worker", "actor"), world.kinds) == (0, ["started"])
    world.register_all()
    for rank in range(3):
        world.done(rank)
    assert world.phase is JobPhase.DONE


@pytest.mark.parametrize("second_runs", [True, False])
def test_a_late_copy_of_an_earlier_submission_is_refused(second_runs: bool) -> None:
    world = RoleWorld()
    world.stop()
    world.submit("second", actor())
    if not second_runs:
        world.stop()
    with pytest.raises(Stale, match="'first' of job 'job' was replaced by a later one"):
        world.send(p.StartRoles("job", "user", "first", (actor(),), takes_over=second_runs))
    assert world.show().submission == "second"


def test_lives_go_on_where_those_of_the_former_submission_ended() -> None:
    """A process of it that nobody has killed yet, and reports of its end that come late, mean no worker of the next."""
    world = RoleWorld()
    world.stop()
    world.submit("second", actor())
    with pytest.raises(Stale):
        world.register(0, life=1, name="left over")
    world.end(1, life=1)
    assert world.used("worker", "actor") == 0
    assert world.worker(1).state is INITIAL


def test_lives_go_on_for_ranks_that_there_were_not_in_between() -> None:
    """A submission with fewer workers does not make those of an earlier one current again."""
    world = RoleWorld(actor(workers=3))
    for submission, workers in (("second", 1), ("third", 3)):
        world.stop()
        world.submit(submission, actor(workers=workers))
    with pytest.raises(Stale):
        world.register(2, life=1, name="left over from the first")


def test_the_number_of_changes_goes_on_with_another_submission() -> None:
    """A request that waits for a change of the former one is answered by the new one."""
    world = RoleWorld()
    world.stop()
    seen = world.show().number
    world.submit("second", actor())
    assert world.awaited(seen) == world.show()


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ((), "needs roles"),
        ((actor(), actor()), "different names"),
        ((RoleRules("", 1),), "different names"),
        ((REWARD,), "no driver role"),
        ((actor(workers=0),), "at least one"),
        ((actor(workers=MOST_ROLE_WORKERS), REWARD), f"at most {MOST_ROLE_WORKERS}"),
        ((actor(worker=-2),), "-1 for no limit"),
        ((actor(role=-7),), "-7"),
        ((actor(worker=1 << 40),), str(1 << 40)),
    ],
)
def test_roles_that_cannot_run_are_refused(roles: tuple[RoleRules, ...], words: str) -> None:
    state = job_registry.Master()
    with pytest.raises(BadRequest) as refused:
        job_registry.apply(state, p.StartRoles("job", "user", "s", roles), 1.0)
    assert words in str(refused.value)
    assert state.jobs == {}


@pytest.mark.parametrize("name", ["job_restarts", "preemptions", "node_failures"])
def test_a_budget_of_the_job_below_unlimited_is_refused(name: str) -> None:
    state = job_registry.Master()
    for count, works in ((-2, False), (p.UNLIMITED, True)):
        event = p.StartRoles("job", "user", "s", (actor(),), RoleBudgets(**{name: count}))
        if works:
            assert isinstance(job_registry.apply(state, event, 1.0).reply, p.Roles)
        else:
            with pytest.raises(BadRequest, match="-2"):
                job_registry.apply(state, event, 1.0)


def test_a_job_is_either_of_roles_or_of_parameter_servers() -> None:
    state = job_registry.Master()
    job_registry.apply(state, p.ScaleTasks("job", "cli", 1, 1), 1.0)
    with pytest.raises(BadRequest, match="Use another name"):
        job_registry.apply(state, p.StartRoles("job", "user", "s", (actor(),)), 1.0)


def test_unknown_roles_ranks_and_jobs_without_roles_are_refused() -> None:
    world = RoleWorld()
    for role, rank in (("critic", 0), ("actor", 2)):
        for event in (
            p.RegisterWorker("job", "x", role, rank, 1, "n"),
            p.WorkerEnded("job", "x", role, rank, 1, KILLED),
            p.WorkerWaits("job", "x", role, rank, 1, "no CPU"),
        ):
            with pytest.raises(BadRequest, match=f"no worker {rank} of role '{role}'"):
                world.send(event)
    with pytest.raises(BadRequest, match=r"no role 'critic': it has \['actor', 'reward'\]"):
        world.restart("critic")
    with pytest.raises(BadRequest, match="no role 'critic'"):
        world.show("critic")
    world.send(p.ScaleTasks("plain", "cli", 1, 1))
    for event in (p.StopRoles("plain", "user", "enough"), p.MasterRestarted("plain", "prime")):
        with pytest.raises(BadRequest, match="has no roles"):
            world.send(event)


# ---- policies --------------------------------------------------------------------------------------------------------


def test_replace_starts_the_rank_again_and_nobody_else() -> None:
    world = RoleWorld()
    world.end(0)
    assert world.lives == {"actor": [2, 1], "reward": [1]}
    assert world.worker(0) == p.RoleWorker("actor", 0, 2, INITIAL, reason="killed: exit code -9", former="actor:0:1")
    assert world.kinds[-2:] == ["lost", "replace"]
    assert world.events("replace") == [("actor", 0, 2)]
    world.register(0)
    assert (world.worker(0).reason, world.worker(0).former) == ("killed: exit code -9", "actor:0:1")


def test_rejoin_starts_one_rank_again_if_the_others_recover() -> None:
    world = RoleWorld(actor(REJOIN, 3), REWARD)
    world.end(1, recovers=True)
    assert world.lives == {"actor": [1, 2, 1], "reward": [1]}
    assert world.events("rejoin") == [("actor", 1, 2)]
    assert world.used("role", "actor") == 0


def test_rejoin_starts_the_role_again_if_the_others_do_not_recover() -> None:
    world = RoleWorld(actor(REJOIN, 3), REWARD)
    world.end(1, recovers=False)
    assert world.lives == {"actor": [2, 2, 2], "reward": [1]}
    assert world.used("role", "actor") == 1
    assert world.kinds[-2:] == ["lost", "role"]


def test_rejoin_starts_the_role_again_if_some_worker_of_it_is_done() -> None:
    """A worker that is done forms no round any more."""
    world = RoleWorld(actor(REJOIN, 3), REWARD)
    world.done(2)
    world.end(1, recovers=True)
    assert world.lives["actor"] == [2, 2, 2]
    assert world.worker(2).state is INITIAL
    assert world.used("role", "actor") == 1


def test_rejoin_of_an_only_worker_needs_no_other_one() -> None:
    world = RoleWorld(actor(REJOIN, 1), REWARD)
    world.end(0, recovers=False)
    assert world.lives == {"actor": [2], "reward": [1]}
    assert world.used("role", "actor") == 0


def test_role_starts_all_workers_of_the_role_again() -> None:
    world = RoleWorld(actor(ROLE), REWARD)
    world.end(0)
    assert world.lives == {"actor": [2, 2], "reward": [1]}
    assert [world.worker(rank).former for rank in range(2)] == ["actor:0:1", "actor:1:1"]
    assert (world.used("worker", "actor"), world.used("role", "actor"), world.used("job")) == (1, 1, 0)


def test_job_starts_all_workers_of_the_job_again_also_those_that_are_done() -> None:
    world = RoleWorld(actor(), RoleRules("reward", 1, JOB, driver=False))
    world.done(1)
    world.end(0, RAISED, "reward", detail="ValueError: no prompt")
    assert world.lives == {"actor": [2, 2], "reward": [2]}
    assert {one.state for one in world.show().workers} == {INITIAL}
    assert {one.reason for one in world.show().workers} == {"raised: ValueError: no prompt"}
    assert (world.used("worker", "reward"), world.used("role", "reward"), world.used("job")) == (1, 0, 1)


def test_fail_ends_the_job() -> None:
    world = RoleWorld(actor(FAIL))
    world.end(1, RAISED, detail="ValueError: no prompt\nTraceback")
    shown = world.show()
    assert shown.phase is JobPhase.FAILED
    assert (
        shown.reason == "worker 1 of role 'actor': raised: ValueError: no prompt; on_failure of role 'actor' is 'fail'"
    )
    assert world.lives == {"actor": [1, 1]}
    assert world.kinds[-2:] == ["lost", "failed"]


@pytest.mark.parametrize("own", [REPLACE, ROLE, FAIL])
def test_a_plug_in_chooses_another_policy_and_the_budgets_still_count(own: FailurePolicy) -> None:
    world = RoleWorld(actor(own, worker=3, role=1), REWARD)
    world.end(0, policy=REPLACE)
    assert world.lives["actor"] == [2, 1]
    world.end(1, policy=ROLE)
    assert world.lives == {"actor": [3, 2], "reward": [1]}
    assert (world.used("worker", "actor"), world.used("role", "actor")) == (2, 1)
    world.end(1, policy=ROLE)
    assert world.phase is JobPhase.FAILED
    assert "'role actor'" in world.show().reason


def test_a_plug_in_may_end_the_job_but_cannot_save_one_with_a_wrong_setting() -> None:
    world = RoleWorld(actor(REPLACE))
    world.end(0, policy=FAIL)
    assert world.phase is JobPhase.FAILED
    assert world.show().reason.endswith("a plug-in ends the job")
    world = RoleWorld(actor(REPLACE))
    world.end(0, WorkerCause.WRONG_SETTING, policy=REPLACE)
    assert world.phase is JobPhase.FAILED


def test_plug_ins_are_listed_and_their_failures_counted() -> None:
    world = RoleWorld()
    plugins = (p.RolePlugin("a", ("on_event",)), p.RolePlugin("b", (), 1, "import: no module"))
    world.stop()
    world.send(p.StartRoles("job", "user", "second", (actor(),), plugins=plugins))
    assert world.show().plugins == plugins
    for _ in range(2):
        world.send(p.PluginFailed("job", "prime", "a", "on_event", "ValueError: no"))
    world.send(p.PluginFailed("job", "sub-master", "unknown", "worker_env", "it is not installed"))
    first, second = world.show().plugins
    assert (first.failures, first.problem) == (2, "on_event: ValueError: no")
    assert second == plugins[1]
    assert [one.text for one in world.show().events if one.kind == "plugin"] == [
        "a: on_event failed", "a: on_event failed", "unknown: worker_env failed"
    ]  # fmt: skip
    assert world.phase is JobPhase.RUNNING


def test_a_wrong_setting_ends_the_job_whatever_the_policy_is() -> None:
    for policy in FailurePolicy:
        world = RoleWorld(actor(policy, worker=p.UNLIMITED))
        world.end(0, WorkerCause.WRONG_SETTING, detail="there is no module 'ppo'")
        assert world.phase is JobPhase.FAILED
        assert "there is no module 'ppo'; a restart does not help" in world.show().reason


def test_the_reason_begins_with_the_first_line_however_long_the_traceback_is() -> None:
    """A worker reports the exception first, then its traceback."""
    world = RoleWorld(actor(FAIL))
    trace = "\n".join(f'  File "model.py", line {line}, in forward' for line in range(400))
    world.end(0, RAISED, detail=f"ValueError: shapes differ\n{trace}")
    assert len(world.show().events[-2].detail) <= 4100, "it is shortened"
    assert "ValueError: shapes differ" in world.show().reason


# ---- each end once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [REPLACE, REJOIN, ROLE, JOB])
def test_an_end_is_counted_once_per_life(policy: FailurePolicy) -> None:
    """Reported twice, or of a life that is over, it changes nothing."""
    world = RoleWorld(actor(policy), REWARD)
    world.end(0, life=1)
    world.register_all()
    before = job_registry.encode(world.state)
    for _ in range(2):
        world.end(0, life=1)
        world.end(0, None, life=1)
        world.end(0, life=7)
    assert job_registry.encode(world.state) == before
    assert world.events("lost") == [("actor", 0, 1)]
    assert world.used("worker", "actor") == 1


def test_a_worker_that_is_done_cannot_end_again() -> None:
    world = RoleWorld()
    world.done(0)
    world.end(0)
    world.done(0)
    assert world.worker(0).state is DONE
    assert world.events("done") == [("actor", 0, 1)]
    assert world.events("lost") == []
    with pytest.raises(Stale):
        world.register(0)


def test_a_process_that_is_declared_dead_and_then_reaped_is_counted_once() -> None:
    world = RoleWorld()
    world.lose(0)
    assert world.worker(0) == p.RoleWorker(
        "actor", 0, 2, INITIAL, reason="silent: it was declared dead", former="actor:0:1"
    )
    world.end(0, life=1)
    world.send(Lost("job", "actor:0:1", "no heartbeat"))
    assert world.events("lost") == [("actor", 0, 1)]
    assert world.used("worker", "actor") == 1


def test_a_process_that_is_reaped_and_then_declared_dead_is_counted_once() -> None:
    world = RoleWorld()
    world.end(0)
    world.register(0)
    world.send(Lost("job", "actor:0:1", "no heartbeat"))
    assert world.lives["actor"] == [2, 1]
    assert world.worker(0).state is RUNNING
    assert world.used("worker", "actor") == 1


def test_a_worker_that_leaves_is_not_lost_before_its_end_is_reported() -> None:
    world = RoleWorld()
    world.send(p.Leave("job", "actor:0:1", p.Departure.STOPPED))
    assert world.worker(0).state is RUNNING
    world.done(0)
    assert world.worker(0).state is DONE


def test_a_process_may_end_before_it_registers() -> None:
    world = RoleWorld(up=False)
    world.end(0, RAISED)
    assert world.lives["actor"] == [2, 1]
    world.done(1)
    assert world.worker(1).state is DONE


def test_a_second_death_of_a_role_is_not_skipped() -> None:
    """Upstream's defect 2: it kept the role "in failover" after the first one, and ignored the next death in it."""
    for policy in (REPLACE, REJOIN, ROLE, JOB):
        world = RoleWorld(actor(policy), REWARD)
        for life in (1, 2, 3):
            world.end(1, recovers=True)
            assert world.worker(1).life == life + 1
            world.register_all()
        assert world.used("worker", "actor") == 3


def test_a_second_death_of_a_role_before_the_first_one_is_repaired_is_not_skipped() -> None:
    """Upstream's defect 2, while the first replacement is not up yet, or dies at its start."""
    world = RoleWorld(actor(REPLACE), REWARD)
    world.end(0)
    world.end(1)
    world.end(0)
    assert world.lives["actor"] == [3, 2]
    assert world.used("worker", "actor") == 3


def test_which_failure_was_first_is_in_the_order_of_events() -> None:
    """Upstream's defects 3 and 4: no failure was ever the root cause, and all had the time of an import."""
    world = RoleWorld(actor(ROLE, 3), REWARD)
    world.now += 2.5
    world.end(2, NODE_LOST, detail="n2 is gone")
    world.now += 1.0
    world.end(0, RAISED, "reward", detail="CallFailed")
    lost = [one for one in world.show().events if one.kind == "lost"]
    assert [(one.at, one.role, one.rank, one.text, one.detail) for one in lost] == [
        (2.5, "actor", 2, "node_lost", "n2 is gone"),
        (3.5, "reward", 0, "raised", "CallFailed"),
    ]
    assert [one.at for one in world.show().events] == sorted(one.at for one in world.show().events)


# ---- planned restarts ------------------------------------------------------------------------------------------------


def test_a_planned_restart_counts_in_no_budget_and_makes_old_lives_void() -> None:
    world = RoleWorld(actor(worker=0, role=0), REWARD)
    world.done(1)
    world.restart()
    assert world.lives == {"actor": [2, 2], "reward": [1]}
    assert world.worker(1).state is INITIAL
    assert {one.used for one in world.show().budgets} == {0}
    with pytest.raises(Stale, match="life 2 is current"):
        world.register(0, life=1)
    world.end(0, life=1)
    world.send(Lost("job", "actor:0:1", "no heartbeat"))
    with pytest.raises(Stale):
        views.query(world.state, Nodes(), p.Heartbeat("job", "actor:0:1"))
    assert world.phase is JobPhase.RUNNING
    assert world.worker(0).reason == "a user asked for it"
    assert world.events("lost") == []


def test_a_planned_restart_that_is_sent_again_restarts_once() -> None:
    """A client sends a request again whose answer it did not get."""
    world = RoleWorld()
    for _ in range(2):
        world.send(p.RestartRole("job", "user", "actor"), Key("user", "calls", 1))
    assert world.lives["actor"] == [2, 2]


# ---- workers that do not come up -------------------------------------------------------------------------------------


def test_a_worker_that_does_not_register_in_time_has_failed_for_the_reason_that_it_waits_for() -> None:
    world = RoleWorld(actor())
    world.end(1)
    world.wait(1, "no node has 1 GPU free")
    assert (world.worker(1).waits, world.worker(1).reason) == ("no node has 1 GPU free", "killed: exit code -9")
    world.tick(59.9)
    assert world.lives["actor"] == [1, 2]
    world.tick(0.1)
    assert world.lives["actor"] == [1, 3]
    lost = [one for one in world.show().events if one.kind == "lost"][-1]
    assert (lost.life, lost.text) == (2, "never_started")
    assert lost.detail == "it was not up after 60 s: no node has 1 GPU free"
    assert world.worker(1).reason == f"never_started: {lost.detail}"
    assert world.worker(1).waits == ""
    assert world.used("worker", "actor") == 2
    world.tick(59.0)
    assert world.lives["actor"] == [1, 3], "the next life has as long"


@pytest.mark.parametrize("policy", FailurePolicy)
def test_a_worker_that_never_had_a_place_ends_the_job(policy: FailurePolicy) -> None:
    """Whatever its budget is: to wait again would not help."""
    world = RoleWorld(actor(policy), up=False)
    world.register(0)
    world.wait(1, "no node has 1 GPU free")
    world.tick(60.0)
    assert world.phase is JobPhase.FAILED
    assert world.lives["actor"] == [1, 1]
    assert world.show().reason == (
        "worker 1 of role 'actor': never_started: it was not up after 60 s: no node has 1 GPU free; no process of it "
        "has ever registered"
    )


def test_what_a_worker_waits_for_is_noted_once_and_only_of_its_current_life() -> None:
    world = RoleWorld(up=False)
    world.wait(0, "no GPU")
    number = world.show().number
    world.wait(0, "no GPU")
    world.wait(0, "no CPU", life=2)
    assert world.show().number == number
    assert world.events("waits") == [("actor", 0, 1)]
    world.register(0)
    assert world.worker(0).waits == ""
    world.wait(0, "late")
    assert world.worker(0).waits == ""
    world.end(0)
    world.wait(0, "late", life=1)
    assert world.worker(0).waits == ""


def test_a_role_that_does_not_come_up_again_is_one_failure_of_the_role() -> None:
    """All its workers are late together: the first one has all of them started again."""
    world = RoleWorld(actor(ROLE, 4))
    world.end(0)
    world.tick(60.0)
    assert world.lives["actor"] == [3] * 4
    assert (world.used("worker", "actor"), world.used("role", "actor")) == (2, 2)


def test_a_job_whose_workers_do_not_come_up_again_ends_when_its_budget_is_used_up() -> None:
    world = RoleWorld(actor(worker=1, workers=4))
    world.restart()
    world.tick(60.0)
    assert world.phase is JobPhase.FAILED
    assert world.used("worker", "actor") == 2
    assert world.lives["actor"] == [3, 2, 2, 2]
    world.tick(600.0)
    assert world.used("worker", "actor") == 2


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_the_job_is_done_once_all_workers_of_all_driver_roles_are() -> None:
    world = RoleWorld(actor(), RoleRules("critic", 1), REWARD)
    world.done(0)
    world.done(1)
    assert world.phase is JobPhase.RUNNING
    world.done(0, "critic")
    shown = world.show()
    assert (shown.phase, shown.reason) == (JobPhase.DONE, "all workers of the driver roles are done")
    assert world.worker(0, "reward").state is RUNNING
    assert {Wake("roles job"), Wake("watch job")} <= set(world.effects)
    assert world.kinds[-1] == "done"


def test_the_end_of_a_role_that_is_no_driver_does_not_end_the_job() -> None:
    world = RoleWorld()
    world.done(0, "reward")
    assert world.phase is JobPhase.RUNNING
    assert world.worker(0, "reward").state is DONE


@pytest.mark.parametrize(("failed", "phase"), [(False, JobPhase.STOPPED), (True, JobPhase.FAILED)])
def test_a_user_stops_the_job(failed: bool, phase: JobPhase) -> None:
    world = RoleWorld()
    world.stop(failed=failed)
    shown = world.show()
    assert (shown.phase, shown.reason) == (phase, "enough")
    assert {Wake("roles job"), Wake("watch job")} <= set(world.effects)
    world.stop(failed=not failed)
    assert world.show() == shown


def test_workers_hear_of_the_end_at_their_watch_and_are_refused_after_it() -> None:
    world = RoleWorld()
    watch = p.Watch("job", "actor:0:1")
    assert views.query(world.state, Nodes(), watch) is None
    world.stop()
    assert views.query(world.state, Nodes(), watch) == p.Notice(round=0, finished=True)
    for life in (0, 2):
        with pytest.raises(Stale, match="is over: stopped"):
            world.register(0, life=life)
    with pytest.raises(Stale, match="is over: stopped"):
        world.restart()


def test_nothing_changes_after_the_end() -> None:
    """Whatever comes late from SubMasters, the failure detector or a timer."""
    world = RoleWorld(actor(worker=0), REWARD, up=False)
    world.register(0)
    world.end(0)
    assert world.phase is JobPhase.FAILED
    before = world.show()
    world.end(0)
    world.end(1, None)
    world.send(Lost("job", "actor:0:1", "no heartbeat"))
    world.stop()
    world.tick(1000.0)
    assert world.show().workers == before.workers
    assert (world.show().events, world.show().number) == (before.events, before.number)


def test_what_a_worker_waits_for_is_not_noted_after_the_end() -> None:
    world = RoleWorld(up=False)
    world.stop()
    before = world.show()
    world.wait(0, "no GPU")
    assert world.show() == before


def test_a_job_that_is_over_can_be_forgotten_and_one_that_runs_cannot() -> None:
    world = RoleWorld()
    world.send(ForgetFinished(before=world.now))
    with pytest.raises(JobAlive, match="3 workers"):
        world.send(p.DeleteJob("job"))
    world.stop()
    world.send(ForgetFinished(before=world.now))
    assert world.state.jobs == {}


# ---- queries and events ----------------------------------------------------------------------------------------------


def test_a_query_for_a_role_lists_its_workers_only_and_no_events() -> None:
    world = RoleWorld()
    shown = world.show("reward")
    assert [(one.role, one.rank) for one in shown.workers] == [("reward", 0)]
    assert (shown.events, shown.budgets, shown.spec) == ((), (), "")
    assert (shown.number, shown.phase, shown.submission) == (world.show().number, JobPhase.RUNNING, "first")
    assert {one.role for one in world.show().workers} == {"actor", "reward"}


def test_a_waiting_query_is_answered_by_each_change() -> None:
    world = RoleWorld(up=False)
    number = world.show().number
    assert world.awaited(number) is None
    assert world.awaited(number - 1) == world.show()
    request = p.AwaitRoles("job", "sub-master", number, "actor")
    assert views.topics(world.state, request) == ("roles job",)
    assert views.nothing(request) == p.Roles(number=number)
    for change in (
        lambda: world.wait(0, "no GPU"),
        lambda: world.register(0),
        lambda: world.end(0),
        lambda: world.restart("reward"),
        lambda: world.send(p.MasterRestarted("job", "sub-master", "actor")),
        lambda: world.stop(),
    ):
        number = world.show().number
        change()
        assert Wake("roles job") in world.effects
        answer = world.awaited(number, "actor")
        assert answer is not None
        assert answer == world.show("actor")
        assert {one.role for one in answer.workers} == {"actor"}


def test_events_are_in_order_and_tell_of_masters_that_were_started_again() -> None:
    world = RoleWorld(actor(workers=1))
    world.now += 1.25
    world.send(p.MasterRestarted("job", "prime"))
    world.send(p.MasterRestarted("job", "sub-master", "actor"))
    world.end(0)
    world.register(0)
    world.done(0)
    assert world.kinds == [
        "started", "running", "prime_master", "sub_master", "lost", "replace", "running", "done", "done",
    ]  # fmt: skip
    events = world.show().events
    assert events[0] == p.RoleEvent(0.0, "started", text="1 actor")
    assert events[1] == p.RoleEvent(0.0, "running", "actor", 0, 1, detail="node n0, pid 101")
    assert events[3] == p.RoleEvent(1.25, "sub_master", "actor", text="started again")
    assert events[4] == p.RoleEvent(1.25, "lost", "actor", 0, 1, "killed", "exit code -9")
    assert [(one.rank, one.life) for one in events[-2:]] == [(0, 2), (-1, -1)]


def test_only_the_newest_events_are_kept_and_the_others_counted() -> None:
    world = RoleWorld(actor(workers=1), up=False)
    for number in range(MOST_EVENTS + 40):
        world.wait(0, f"reason {number}")
    shown = world.show()
    assert (len(shown.events), shown.dropped) == (MOST_EVENTS, 41)
    assert shown.events[0].detail == "reason 40"
    assert shown.events[-1].detail == f"reason {MOST_EVENTS + 39}"
    assert world.worker(0).waits == shown.events[-1].detail


def test_budgets_do_not_depend_on_events_that_are_dropped() -> None:
    world = RoleWorld(actor(workers=1, worker=p.UNLIMITED))
    for _ in range(300):
        world.end(0)
    assert world.show().dropped > 0
    assert world.used("worker", "actor") == 300


def test_a_state_that_is_written_and_read_back_gives_the_same_answers() -> None:
    world = RoleWorld(actor(REJOIN, 3), REWARD)
    world.end(0, recovers=True)
    world.wait(0, "no GPU")
    world.lose(1)
    world.done(0, "reward")
    copy = RoleWorld()
    copy.state, copy.now = job_registry.decode(job_registry.encode(world.state)), world.now
    assert copy.state == world.state
    for each in (world, copy):
        each.tick(60.0)
        each.register_all()
        each.end(2)
        each.done(1)
    assert copy.show() == world.show()
    assert job_registry.encode(copy.state) == job_registry.encode(world.state)
    with pytest.raises(Stale):
        copy.register(0, life=1)
