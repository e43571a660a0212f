"""What the Brain relies on, proven on SQLite and on a real PostgreSQL by the same tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from dlrover_hooks.errors import DatabaseFailed, UnknownJob, UsageError
from dlrover_hooks.master.brain.app import BrainService
from dlrover_hooks.master.brain.cluster_monitor import ClusterMonitor, ClusterSampler
from dlrover_hooks.master.brain.database import events, housekeeping, jobs
from dlrover_hooks.master.brain.database.database import Database, head
from dlrover_hooks.master.brain.database.events import EventKind, NewEvent
from dlrover_hooks.master.brain.database.tables import cluster_sample, job, metadata, optimize_event, resource_plan
from dlrover_hooks.master.brain.messages import AskPlan, EndJob, PlanAnswer, ReportSamples
from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
from dlrover_hooks.master.brain.records import ClusterView
from dlrover_hooks.master.scaling import NodeGroupResource, NodeType, OptimizeStage, ResourcePlan
from dlrover_hooks.protocol import Node
from dlrover_hooks.protocol.samples import ClusterSample
from tests.brain_jobs import SIZE, sample, timed, told
from tests.e2e.postgresql_process import PostgresqlProcess

ONE = PlanAnswer(ResourcePlan({"worker": NodeGroupResource(2, SIZE)}), algorithm="test", reason="for a test")
PERIODIC = NewEvent(EventKind.PERIODIC, OptimizeStage.RUNNING, "for a test")


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresqlProcess]:
    server = PostgresqlProcess()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "brain.db")
    return request.getfixturevalue("postgresql").database()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    made = Database(url)
    made.prepare()
    yield made
    made.close()


@pytest.fixture
def other(url: str, database: Database) -> Iterator[Database]:
    """Of another process of the Brain."""
    made = Database(url)
    made.prepare()
    yield made
    made.close()


def service(database: Database) -> BrainService:
    return BrainService(database, OptimizeProcessor(database))


def registered(database: Database, name: str = "job", **more: Any) -> int:
    service(database).register(told(name, **more))
    with database.reading() as connection:
        return jobs.find(connection, name).id


def rows(database: Database, query: sa.Select) -> list[sa.Row]:
    with database.reading() as connection:
        return list(connection.execute(query))


def test_the_migrations_make_the_tables_that_the_statements_use(database: Database) -> None:
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_two_processes_may_make_the_tables_at_the_same_time(url: str) -> None:
    made = [Database(url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(Database.prepare, made))
    assert {one.upgrade() for one in made} == {(head(), head())}
    for one in made:
        one.close()


@pytest.mark.parametrize(("revision", "hint"), [("0000", "newer version"), (None, "dlrover-hooks brain upgrade")])
def test_another_revision_is_refused_by_name(database: Database, revision: str | None, hint: str) -> None:
    with database.writing() as connection:
        connection.execute(sa.text("delete from alembic_version"))
        if revision:
            connection.execute(sa.text(f"insert into alembic_version values ('{revision}')"))
    with pytest.raises(UsageError, match=hint):
        database.prepare()


def test_a_job_that_registers_again_is_the_same_until_it_ends(database: Database) -> None:
    served = service(database)
    first = registered(database, user="ada")
    assert registered(database, user="eve") == first
    assert rows(database, sa.select(job.c.owner)) == [("eve",)]
    served.end(EndJob("job"))
    assert registered(database) != first
    with pytest.raises(UnknownJob):
        served.report(ReportSamples("stranger", timed(sample())))
    with pytest.raises(UnknownJob):
        served.plan(AskPlan("stranger", OptimizeStage.RUNNING))


def test_registering_at_the_same_time_makes_one_job(database: Database, other: Database) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(registered, [database, other] * 8))
    assert len(found) == 1
    assert rows(database, sa.select(sa.func.count()).select_from(optimize_event)) == [(1,)]


@pytest.mark.requirement("DL-35")
def test_all_samples_are_kept_and_an_algorithm_gets_the_newest_of_each_configuration(database: Database) -> None:
    job_id, served = registered(database), service(database)
    speeds = [float(number) for number in range(1, 31)]
    served.report(ReportSamples("job", timed(*(sample(1 + (n % 3), speed=s) for n, s in enumerate(speeds)))))
    with database.reading() as connection:
        assert [one.speed for one in jobs.all_samples(connection, job_id)] == speeds
        row = jobs.find(connection, "job")
        record, newest = jobs.record(connection, row, OptimizeStage.RUNNING, row.registered_at + 7)
    assert [one.speed for one in record.samples] == speeds[-3 * jobs.EACH :]
    assert record.samples[-1] == sample(3, speed=30.0)
    assert newest == 30
    assert record.age_s == pytest.approx(7)


def test_an_event_is_claimed_by_one_process_and_taken_over_after_the_deadline(
    database: Database, other: Database
) -> None:
    job_id = registered(database)
    with database.writing() as connection:
        event_id = events.create(connection, job_id, PERIODIC, 100.0)
        assert events.create(connection, job_id, PERIODIC, 101.0) == event_id, "one unfinished event of a kind"
        first = events.claim(connection, event_id, "a", 100.0, 60.0)
    assert first is not None
    assert first.deadline == 160.0
    with other.writing() as connection:
        assert events.claim(connection, event_id, "b", 159.0, 60.0) is None
        second = events.claim(connection, event_id, "b", 161.0, 60.0)
    assert second is not None
    assert second.attempt == 2
    with database.writing() as connection:
        assert not events.finish(connection, first, ONE, 162.0), "it was away for too long"
    with other.writing() as connection:
        assert events.finish(connection, second, ONE, 163.0)
        assert not events.finish(connection, second, ONE, 164.0)
    assert len(rows(database, sa.select(resource_plan))) == 1


def test_an_event_that_ends_its_processes_fails_in_the_end(database: Database) -> None:
    job_id = registered(database)
    with database.writing() as connection:
        event_id = events.create(connection, job_id, PERIODIC, 100.0)
        claims = [events.claim(connection, event_id, "a", 100.0 * (n + 1), 50.0) for n in range(events.ATTEMPTS + 1)]
        assert [claim is not None for claim in claims] == [True] * events.ATTEMPTS + [False]
        answer = events.outcome(connection, event_id)
    assert answer is not None
    assert answer.plan.empty
    assert "3 processes ended" in answer.reason


def test_each_of_many_events_is_processed_once_by_two_brains(database: Database, other: Database) -> None:
    names = [f"job-{number}" for number in range(12)]
    for name in names:
        registered(database, name)
    processors = [OptimizeProcessor(database), OptimizeProcessor(other)]
    ids = [row.id for row in rows(database, sa.select(optimize_event.c.id))]
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda one: one[0].process(one[1]), [(p, e) for e in ids for p in processors]))
    assert done.count(True) == len(names)
    assert sorted(rows(database, sa.select(resource_plan.c.event_id))) == [(one,) for one in sorted(ids)]


def test_plans_of_one_job_are_numbered_one_after_the_other(database: Database, other: Database) -> None:
    job_id = registered(database)
    kinds = [kind for kind in EventKind if kind is not EventKind.INIT]

    def one(where: Database, kind: EventKind) -> bool:
        with where.writing() as connection:
            event_id = events.create(connection, job_id, PERIODIC._replace(kind=kind), 100.0)
            claim = events.claim(connection, event_id, "a", 100.0, 60.0)
        assert claim is not None
        with where.writing() as connection:
            return events.finish(connection, claim, ONE, 101.0)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, [database, other] * 4, kinds))
    numbers = sorted(row.number for row in rows(database, sa.select(resource_plan.c.number)))
    assert numbers == list(range(1, len(kinds) + 1))


@pytest.mark.requirement("DL-98", "DL-99", "EZ-17")
def test_an_administer_creates_events_from_the_jobs_creation_to_its_end(database: Database, other: Database) -> None:
    """On creation, when stages are due, when a server is hot; two processes that look at once create one."""
    job_id, served = registered(database, ps=True), service(database)
    kinds = sa.select(optimize_event.c.kind).order_by(optimize_event.c.id)
    assert rows(database, kinds) == [("init",)]
    seen = ["init"]
    for kind in ("worker_initial", "ps_initial", "hot_ps"):
        served.report(ReportSamples("job", timed(*[sample(2, ps_cpu=[3.9, 3.9])] * 3)))
        with database.writing() as connection:
            connection.execute(sa.update(job).values(look_at=0.0))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(OptimizeProcessor.look, [OptimizeProcessor(database), OptimizeProcessor(other)]))
        seen.append(kind)
        assert [row.kind for row in rows(database, kinds)] == seen
    served.end(EndJob("job"))
    assert {row.state for row in rows(database, sa.select(optimize_event.c.state))} == {"failed"}
    with database.reading() as connection:
        assert jobs.by_id(connection, job_id) is None


@pytest.mark.requirement("DL-100", "DL-102", "EZ-16", "EZ-18", "EZ-19")
def test_a_plan_is_made_for_each_stage_and_handed_out_once(database: Database) -> None:
    registered(database)
    served, have = service(database), 0
    first = served.plan(AskPlan("job", OptimizeStage.CREATE))
    assert (first.number, first.algorithm) == (1, "first_plan")
    assert served.plan(AskPlan("job", OptimizeStage.CREATE)) == first, "its answer was lost: the same plan again"
    have = first.number
    served.report(ReportSamples("job", timed(*[sample(1, worker_cpu=1.0)] * 3)))
    initial = served.plan(AskPlan("job", OptimizeStage.WORKER_INITIAL, have))
    assert initial.algorithm == "workers_initial"
    assert initial.plan.node_group_resources["worker"].node_resource.cpu == 1.0
    running = served.plan(AskPlan("job", OptimizeStage.RUNNING, initial.number))
    assert running.algorithm == "running"
    assert running.plan.node_group_resources["worker"].count == 2
    nodes = (Node(NodeType.WORKER, 0, SIZE),)
    killed = served.plan(AskPlan("job", OptimizeStage.RUNNING, running.number, nodes))
    assert killed.algorithm == "oom_worker"
    assert killed.plan.node_group_resources["worker"].node_resource.memory == 2 * SIZE.memory
    assert served.plan(AskPlan("job", OptimizeStage.RUNNING, killed.number, model_only=True)).plan.empty


@pytest.mark.requirement("DL-36", "DL-94")
def test_finished_jobs_feed_the_first_plan_of_a_new_one(database: Database) -> None:
    served = service(database)
    like = {"user": "ada", "script_hash": "abc", "model_size": 7}
    for name, succeeded, workers in (("good", True, 6), ("bad", False, 20)):
        registered(database, name, **like)
        served.report(ReportSamples(name, timed(*[sample(workers, speed=50.0, worker_memory=5000)] * 6)))
        served.end(EndJob(name, succeeded))
    registered(database, "new", **like)
    answer = served.plan(AskPlan("new", OptimizeStage.CREATE))
    workers = answer.plan.node_group_resources["worker"]
    assert (answer.algorithm, answer.predicted) == ("plan_from_history", 50.0)
    assert (workers.count, workers.node_resource.cpu, workers.node_resource.memory) == (6, 2.0, 8000)
    registered(database, "stranger", user="ada", script_hash="other", model_size=7)
    assert served.plan(AskPlan("stranger", OptimizeStage.CREATE)).algorithm == "first_plan"


def test_history_prefers_the_same_user_and_size(database: Database) -> None:
    served = service(database)
    for name, owner, size in (("a", "ada", 7), ("b", "eve", 7), ("c", "ada", 9)):
        registered(database, name, user=owner, script_hash="abc", model_size=size)
        served.report(ReportSamples(name, timed(sample(1))))
        served.end(EndJob(name))

    def found(owner: str, size: int) -> list[str]:
        with database.reading() as connection:
            past = jobs.history(connection, told("new", user=owner, script_hash="abc", model_size=size))
        return sorted(one.registration.job for one in past)

    assert (found("ada", 7), found("bob", 7), found("ada", 11)) == (["a"], ["a", "b"], ["a", "c"])


def test_what_is_old_is_forgotten_and_a_lost_job_ends(database: Database) -> None:
    served = service(database)
    registered(database, "done")
    served.report(ReportSamples("done", timed(sample())))
    served.plan(AskPlan("done", OptimizeStage.CREATE))
    served.end(EndJob("done"))
    registered(database, "lost")
    with database.writing() as connection:
        now = database.now(connection)
        housekeeping.forget(connection, now + housekeeping.LOST_S - 60, 30 * 86400.0)
        assert {row.name for row in connection.execute(sa.select(job.c.name))} == {"done", "lost"}
        housekeeping.forget(connection, now + 31 * 86400.0, 30 * 86400.0)
        left = connection.execute(sa.select(job.c.name, job.c.succeeded)).all()
        assert left == [("lost", False)]
        assert connection.execute(sa.select(sa.func.count()).select_from(resource_plan)).scalar_one() == 0


@pytest.mark.deep
def test_a_job_that_is_asked_for_again_and_again_keeps_few_events(database: Database) -> None:
    registered(database)
    served = service(database)
    for _ in range(events.QUIET_EVENTS + 20):
        assert served.plan(AskPlan("job", OptimizeStage.PS_INITIAL, 9)).plan.empty
    (count,) = rows(database, sa.select(sa.func.count()).select_from(optimize_event))
    assert count[0] <= events.QUIET_EVENTS + 2


@pytest.mark.requirement("DL-103")
def test_the_cluster_is_the_sum_of_its_machines_newest_samples(database: Database) -> None:
    class Machine(ClusterMonitor):
        def __init__(self, name: str, *cores: int) -> None:
            self._name, self._cores = name, list(cores)

        def collect(self) -> ClusterSample:
            return ClusterSample("test", self._name, {"cpu": self._cores.pop(0), "v100": 2}, 0.0, 0, 0)

    one, two = ClusterSampler(Machine("one", 4, 8), database), ClusterSampler(Machine("two", 16), database)
    for sampler in (one, two, one):
        sampler.write()
    with database.reading() as connection:
        now = database.now(connection)
        assert jobs.cluster(connection, {"a": 3}, now) == ClusterView({"cpu": 24, "v100": 4}, (), {"a": 3})
        assert jobs.cluster(connection, {}, now + jobs.FRESH_S + 60).capacity == {}


@pytest.mark.requirement("DL-104")
def test_jobs_are_planned_from_the_database_alone(database: Database, other: Database) -> None:
    """A second Brain, which was told nothing, divides the cluster among jobs that were reported to the first."""
    served = service(database)
    with database.writing() as connection:
        view = ClusterSample("test", "", {"cpu": 24}, 0.0, 0, 0)
        connection.execute(sa.insert(cluster_sample).values(at=database.now(connection), platform="test", view=view))
    for name in ("a", "b"):
        registered(database, name, global_batch=256)
        steps = [sample(n, speed=1 / (0.1 + 0.9 / n)) for n in ((1, 2, 4, 5) if name == "a" else (4, 2, 1))]
        served.report(ReportSamples(name, timed(*steps)))
    served.plan(AskPlan("a", OptimizeStage.RUNNING))
    grown = service(other).plan(AskPlan("b", OptimizeStage.RUNNING))
    assert "its share of the cluster is what it has" in grown.reason, "a has 20 of the 24 cores"
    shrunk = service(other).plan(AskPlan("a", OptimizeStage.RUNNING, 99))
    assert shrunk.plan.node_group_resources["worker"].count == 4, "beside 2 workers of b, which doubles at most"


def change_and_fail(database: Database) -> None:
    with database.writing() as connection:
        connection.execute(sa.update(job).values(look_at=5.0))
        connection.execute(sa.text("select * from missing_table"))


def test_a_failing_statement_changes_nothing_and_names_the_database(database: Database) -> None:
    registered(database)
    with pytest.raises(DatabaseFailed, match=r"no such table|does not exist"):
        change_and_fail(database)
    assert rows(database, sa.select(job.c.look_at)) != [(5.0,)]
