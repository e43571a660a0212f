"""A process takes its own seat at a real master."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dlrover_hooks import config, protocol as p
from dlrover_hooks.errors import JobFinished, MasterAway
from dlrover_hooks.worker.round_join import join_request, seat_environment, take_seat
from tests.e2e.master_process import LiveMaster

CONFIG = config.Config(job="job", master="http://127.0.0.1:1")


def place(local_rank: int, *, of: int = 2) -> config.Place:
    return config.Place(
        local_rank=local_rank, local_world_size=2, node="n", launcher="agent", min_workers=of, max_workers=of
    )


def test_two_workers_join_for_themselves_and_their_environment_names_their_places(live_master: LiveMaster) -> None:
    """Each gets its own rank of one round; a worker leaves with its place as `config.place` reads it back."""

    def come(local_rank: int) -> config.Place:
        join = join_request(CONFIG, place(local_rank), f"w{local_rank}")
        assert (join.launcher, join.min_workers, join.max_workers) == ("agent", 2, 2)
        seated = take_seat(live_master.client(join.incarnation), join, patience_s=20)
        env = seat_environment(seated, incarnation=join.incarnation, local_rank=local_rank, local_world_size=2)
        assert env["MASTER_PORT"].isdigit()
        assert env["RANK"] == env["ROLE_RANK"]
        return config.place(env)

    with ThreadPoolExecutor(2) as both:
        found = list(both.map(come, (0, 1)))
    assert sorted(one.rank for one in found) == [0, 1]
    assert {(one.world_size, one.local_world_size, one.round) for one in found} == {(2, 2, 1)}
    assert [(one.local_rank, one.incarnation) for one in found] == [(0, "w0"), (1, "w1")]


def test_a_job_that_is_finished_says_so_and_gives_no_seat(live_master: LiveMaster) -> None:
    """A newcomer that comes too late does not train from step 0."""
    join = join_request(CONFIG, place(0, of=1), "w0")
    client = live_master.client("w0")
    seated = take_seat(client, join, patience_s=20)
    assert seated.ranks == (0,)
    client.call(p.Attach("job", "w0", "n", 1))
    client.call(p.Leave("job", "w0", p.Departure.DONE, 7))
    late = join_request(CONFIG, place(1, of=1), "w1")
    with pytest.raises(JobFinished, match="finished at step 7"):
        take_seat(live_master.client("w1"), late, patience_s=20)


def test_a_round_that_does_not_form_is_told_with_who_waited(live_master: LiveMaster) -> None:
    join = join_request(CONFIG, place(0), "w0")
    with pytest.raises(MasterAway, match=r"job job: no round formed within 0\.5 s \(node n, local rank 0, 2 to 2"):
        take_seat(live_master.client("w0"), join, patience_s=0.5)
