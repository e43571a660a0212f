"""Where the workers of a job go, relative to each other, and what does not fit the nodes that the job says it has."""

from __future__ import annotations

import pytest

from dlrover_hooks.errors import JobSpecError
from dlrover_hooks.job import DLJobBuilder, JobSpec, placement
from dlrover_hooks.job.placement import Bundle, BundleGroup, PlacementPlan, WorkerSlot

ENTRY = "ppo.roles:work"


def job(nodes: int = 2, devices: int = 8, **workers: int) -> DLJobBuilder:
    """Roles with so many workers, each of which uses no CPU."""
    built = DLJobBuilder("ppo").nodes(nodes, devices_per_node=devices)
    for name, count in workers.items():
        built.role(name).run(ENTRY).workers(count).resource(cpu=0)
    return built


def one_node(*groups: tuple[int, float], devices: int = 2) -> DLJobBuilder:
    """A role for each of `groups`: so many workers on one node, each with such a part of the devices."""
    built = job(1, devices)
    for at, (workers, device) in enumerate(groups):
        built.role(f"r{at}").run(ENTRY).workers(workers).per_group(workers).resource(device=device)
    return built


def bundles(spec: JobSpec) -> tuple[Bundle, ...]:
    """Those of a job without roles that stay apart."""
    (group,) = spec.plan().groups
    assert (group.name, group.spread) == ("near", False)
    return group.bundles


def misfit(built: DLJobBuilder) -> str:
    with pytest.raises(JobSpecError) as found:
        built.build()
    (problem,) = found.value.problems
    return problem


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_each_worker_has_a_bundle_of_its_own() -> None:
    spec = (
        DLJobBuilder().nodes(2, devices_per_node=8)
        .role("actor").run(ENTRY).workers(2).resource(cpu=4, device=2, memory_gb=1.5, disk_gb=2, license=1)
        .role("reward").run(ENTRY).build()
    )  # fmt: skip
    actor = {"CPU": 4.0, "GPU": 2.0, "memory": 1.5e9, "disk": 2e9, "license": 1.0}
    assert bundles(spec) == (
        Bundle(actor, (("actor", 0),)),
        Bundle(actor, (("actor", 1),)),
        Bundle({"CPU": 1.0}, (("reward", 0),)),
    )
    assert spec.plan().slots(spec) == {
        ("actor", 0): WorkerSlot(0, 0, actor),
        ("actor", 1): WorkerSlot(0, 1, actor),
        ("reward", 0): WorkerSlot(0, 2, {"CPU": 1.0}),
    }


@pytest.mark.requirement("DL-17")
def test_roles_that_are_collocated_on_a_device_share_it() -> None:
    """Workers of one rank are in one bundle, and each has its part of that bundle's device."""
    share = {"actor": 0.5, "rollout": 0.3, "ref": 0.2}
    spec = job(actor=2, rollout=2, ref=2).collocate("actor", "rollout", "ref", share=share).build()
    assert bundles(spec) == (
        Bundle({"GPU": 1.0}, (("actor", 0), ("rollout", 0), ("ref", 0))),
        Bundle({"GPU": 1.0}, (("actor", 1), ("rollout", 1), ("ref", 1))),
    )
    slots = spec.plan().slots(spec)
    assert slots["actor", 1] == WorkerSlot(0, 1, {"GPU": 0.5})
    assert slots["rollout", 1] == WorkerSlot(0, 1, {"GPU": 0.3})
    assert slots["ref", 1] == WorkerSlot(0, 1, {"GPU": 0.2})


def test_a_share_takes_the_place_of_the_devices_of_a_role() -> None:
    built = job().role("actor").run(ENTRY).resource(cpu=2, device=1, memory_gb=1).end()
    spec = built.collocate("actor", share={"actor": 0.25}).build()
    assert bundles(spec) == (Bundle({"CPU": 2.0, "GPU": 0.25, "memory": 1e9}, (("actor", 0),)),)


@pytest.mark.requirement("DL-18")
def test_roles_with_affinity_share_a_node_and_have_their_own_devices() -> None:
    built = DLJobBuilder("ppo").nodes(2, devices_per_node=8)
    built.role("actor").run(ENTRY).workers(2).resource(device=1)
    built.role("rollout").run(ENTRY).workers(2).resource(device=2)
    spec = built.affinity("actor", "rollout").build()
    assert bundles(spec) == (
        Bundle({"CPU": 2.0, "GPU": 3.0}, (("actor", 0), ("rollout", 0))),
        Bundle({"CPU": 2.0, "GPU": 3.0}, (("actor", 1), ("rollout", 1))),
    )
    slots = spec.plan().slots(spec)
    assert slots["actor", 1] == WorkerSlot(0, 1, {"CPU": 1.0, "GPU": 1.0})
    assert slots["rollout", 1] == WorkerSlot(0, 1, {"CPU": 1.0, "GPU": 2.0})


@pytest.mark.requirement("DL-19")
def test_roles_with_anti_affinity_are_each_on_another_node() -> None:
    """They are a group of bundles of their own; the other roles are in another one."""
    built = job(nodes=4, trainer=2)
    built.role("actor").run(ENTRY).workers(2).resource(device=1)
    built.role("critic").run(ENTRY).workers(1).resource(device=2)
    spec = built.anti_affinity("actor", "critic").build()
    assert spec.plan() == PlacementPlan((
        BundleGroup("near", (Bundle({"CPU": 0.001}, (("trainer", 0),)), Bundle({"CPU": 0.001}, (("trainer", 1),)))),
        BundleGroup(
            "apart-actor-critic",
            (
                Bundle({"CPU": 1.0, "GPU": 1.0}, (("actor", 0),)),
                Bundle({"CPU": 1.0, "GPU": 1.0}, (("actor", 1),)),
                Bundle({"CPU": 1.0, "GPU": 2.0}, (("critic", 0),)),
            ),
            spread=True,
        ),
    ))  # fmt: skip
    slots = spec.plan().slots(spec)
    assert [(slots[place].group, slots[place].bundle) for place in (("trainer", 1), ("actor", 1), ("critic", 0))] == [
        (0, 1),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.requirement("DL-19")
def test_a_role_that_is_spread_has_no_two_workers_on_a_node() -> None:
    spec = job(nodes=3, actor=3).spread("actor").build()
    (group,) = spec.plan().groups
    assert (group.name, group.spread) == ("apart-actor", True)
    assert [bundle.workers for bundle in group.bundles] == [(("actor", 0),), (("actor", 1),), (("actor", 2),)]


def test_sets_of_roles_that_stay_apart_have_groups_with_different_names() -> None:
    """A platform finds a group by its name."""
    built = job(nodes=4, **{"a-b": 1, "c": 1, "a": 1, "b-c": 1})
    plan = built.anti_affinity("a-b", "c").anti_affinity("a", "b-c").build().plan()
    assert len({group.name for group in plan.groups}) == len(plan.groups) == 2


def test_the_workers_of_a_group_share_a_node() -> None:
    built = job()
    built.role("actor").train(ENTRY).workers(4).per_group(2).resource(device=4)
    assert bundles(built.build()) == (
        Bundle({"CPU": 2.0, "GPU": 8.0}, (("actor", 0), ("actor", 1))),
        Bundle({"CPU": 2.0, "GPU": 8.0}, (("actor", 2), ("actor", 3))),
    )


def test_collocated_roles_with_groups_share_nodes_by_group() -> None:
    built = job()
    built.role("actor").train(ENTRY).workers(4).per_group(2).resource(cpu=0, device=1)
    built.role("rollout").run(ENTRY).workers(2).resource(cpu=0, device=2)
    assert bundles(built.collocate("rollout", "actor").build()) == (
        Bundle({"GPU": 4.0}, (("rollout", 0), ("actor", 0), ("actor", 1))),
        Bundle({"GPU": 4.0}, (("rollout", 1), ("actor", 2), ("actor", 3))),
    )


def test_every_worker_has_exactly_one_slot() -> None:
    built = job(nodes=4, a=4, b=4, c=2, d=3)
    spec = built.collocate("b", "a").spread("d").build()
    plan = spec.plan()
    placed = [place for group in plan.groups for bundle in group.bundles for place in bundle.workers]
    expected = [(role.name, rank) for role in spec.roles for rank in range(role.workers)]
    assert sorted(placed) == sorted(expected)
    assert set(plan.slots(spec)) == set(expected)


@pytest.mark.parametrize("device", ["CPU", "GPU", "TPU"])
def test_devices_have_the_name_of_their_kind(device: str) -> None:
    built = DLJobBuilder().nodes(1, devices_per_node=8, device=device)
    built.role("actor").run(ENTRY).resource(cpu=3, device=0 if device == "CPU" else 2)
    expected = {"CPU": 3.0} if device == "CPU" else {"CPU": 3.0, device: 2.0}
    assert bundles(built.build())[0].resources == expected


@pytest.mark.parametrize("roles", [2, 3, 6, 7, 9, 11])
def test_equal_parts_of_a_device_never_exceed_it(roles: int) -> None:
    """Upstream rounds 1/3 to 0.33 and 1/6 to 0.17, of which six need more than a device."""
    names = [f"r{at}" for at in range(roles)]
    for share in (dict.fromkeys(names, 1 / roles), None):
        built = job(1, 1, **dict.fromkeys(names, 1))
        built = built.collocate(*names, share=share) if share is not None else built.with_collocation(*names)
        spec = built.build()
        (bundle,) = bundles(spec)
        assert 1 - roles / 10_000 <= bundle.resources["GPU"] <= 1
        used = [slot.resources["GPU"] for slot in spec.plan().slots(spec).values()]
        assert max(used) - min(used) < 1e-9
        assert sum(used) <= 1 + 1e-9


def test_three_equal_parts_are_a_third_each() -> None:
    spec = job(1, 1, a=1, b=1, c=1).with_collocation("a", "b", "c").build()
    assert {slot.resources["GPU"] for slot in spec.plan().slots(spec).values()} == {0.3333}


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_workers_of_one_node_that_need_more_devices_than_it_has() -> None:
    built = job(2, 4)
    built.role("actor").run(ENTRY).workers(2).per_group(2).resource(device=3)
    assert misfit(built) == "actor 0, actor 1 need 6 devices on one node, which has 4"


def test_collocated_workers_that_need_more_devices_than_a_node_has() -> None:
    built = job(2, 4)
    built.role("actor").run(ENTRY).resource(device=2)
    built.role("ref").run(ENTRY).resource(device=3)
    assert misfit(built.collocate("actor", "ref")) == "actor 0, ref 0 need 5 devices on one node, which has 4"


def test_more_workers_that_are_to_be_apart_than_nodes() -> None:
    problem = misfit(job(nodes=2, actor=2, critic=1).anti_affinity("actor", "critic"))
    assert "3 workers of actor, critic" in problem
    assert "another node" in problem
    assert "nodes(2)" in problem


def test_roles_are_named_as_they_are_in_what_does_not_fit() -> None:
    assert "3 workers of reward-model are" in misfit(job(nodes=2, **{"reward-model": 3}).spread("reward-model"))


def test_more_devices_than_all_nodes_have() -> None:
    built = job(2, 4)
    built.role("actor").run(ENTRY).workers(9).resource(device=1)
    assert misfit(built) == "the workers need 9 devices, which 2 nodes with 4 devices each cannot hold"
    assert built.nodes(3, devices_per_node=4).build().nodes == 3


def test_groups_that_would_have_to_be_split_between_nodes() -> None:
    built = job(2, 4)
    built.role("actor").run(ENTRY).workers(6).per_group(2).resource(device=1.0)
    built.role("ref").run(ENTRY).resource(device=2)
    assert len(bundles(built.build())) == 4
    built.role("critic").run(ENTRY).workers(1).resource(device=1)
    assert "9 devices" in misfit(built)
    three = job(2, 4)
    three.role("actor").run(ENTRY).workers(6).per_group(3).resource(device=1)
    three.role("ref").run(ENTRY).resource(device=2)
    assert "8 devices" in misfit(three), "one device is left on each node"


@pytest.mark.parametrize(("workers", "device", "fits"), [(2, 0.5, True), (3, 0.5, False), (3, 0.3333, True),
                                                         (2, 0.6, False), (1, 1.0, True), (10, 0.1, True)])  # fmt: skip
def test_a_part_of_a_device_is_a_part_of_one_device(workers: int, device: float, fits: bool) -> None:
    """0.6 + 0.6 do not fit two halves."""
    built = job(1, 1)
    built.role("actor").run(ENTRY).workers(workers).resource(device=device)
    if fits:
        assert len(bundles(built.build())) == workers
    else:
        assert "which 1 nodes with 1 devices each cannot hold" in misfit(built)


def test_parts_do_not_fit_although_their_sum_does() -> None:
    built = job(1, 2)
    built.role("actor").run(ENTRY).workers(3).resource(device=0.6)
    assert misfit(built) == "the workers need 1.8 devices, which 1 nodes with 2 devices each cannot hold"


@pytest.mark.parametrize(("workers", "device"), [(3, 0.6), (5, 0.4), (7, 0.3)])
def test_parts_of_a_group_do_not_fit_although_their_sum_does(workers: int, device: float) -> None:
    """The platform would give each of them a part of one device, and the last one would wait for ever."""
    built = one_node((workers, device))
    with pytest.raises(JobSpecError, match=r"(which has 2|with 2 devices)"):
        built.build()
    assert len(one_node((workers, device), devices=3).build().plan().groups) == 1


def test_parts_of_collocated_roles_do_not_fit_although_their_sum_does() -> None:
    built = one_node((1, 0.6), (1, 0.6), (1, 0.6))
    with pytest.raises(JobSpecError, match=r"(which has 2|with 2 devices)"):
        built.collocate("r0", "r1", "r2").build()


def test_whole_devices_and_parts_together() -> None:
    fits = one_node((1, 1), (2, 0.5))
    assert len(bundles(fits.build())) == 2
    assert "2.25 devices" in misfit(fits.role("more").run(ENTRY).resource(device=0.25).end())


def test_a_job_that_fits_is_not_refused() -> None:
    """4 + 2 + 2 and 3 + 3 + 2 devices: to take the largest ones first would leave no place for the last one."""
    built = job(2, 8)
    for name, groups, size in (("a", 1, 4), ("b", 2, 3), ("c", 3, 2)):
        built.role(name).run(ENTRY).workers(groups * size).per_group(size).resource(device=1)
    assert len(bundles(built.build())) == 6


def test_workers_that_are_to_be_apart_take_their_devices_on_different_nodes() -> None:
    """One device is left on each node, so there is no node with two for the other role."""
    built = job(2, 2)
    built.role("actor").run(ENTRY).workers(2).resource(device=1)
    built.role("ref").run(ENTRY).resource(device=2)
    assert len(built.build().plan().groups) == 1
    with pytest.raises(JobSpecError, match="4 devices"):
        built.spread("actor").build()


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_devices_are_not_checked_for_a_cluster_that_is_not_described(device: str) -> None:
    built = DLJobBuilder().nodes(1, devices_per_node=1 if device == "CPU" else 0, device=device)
    built.role("actor").run(ENTRY).workers(64).resource(cpu=64, device=0 if device == "CPU" else 8)
    assert len(bundles(built.build())) == 64


# ---- large jobs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "workers", "device"), [(200, 1600, 1), (128, 1000, 1), (2048, 16_384, 1),
                                                          (2048, 16_384, 0.3)])  # fmt: skip
def test_a_large_job_is_planned(nodes: int, workers: int, device: float) -> None:
    """The search once went as deep as there are bundles, and ended with RecursionError."""
    built = job(nodes, 8)
    built.role("actor").run(ENTRY).workers(workers).resource(device=device)
    assert len(bundles(built.build())) == workers


def test_a_large_job_that_does_not_fit_is_refused() -> None:
    built = job(200, 8)
    built.role("actor").run(ENTRY).workers(1601).resource(device=1)
    assert "1601 devices" in misfit(built)


def test_a_large_group_of_parts_of_devices_is_planned() -> None:
    built = job(1, 3000)
    built.role("actor").run(ENTRY).workers(8192).per_group(8192).resource(device=0.3)
    (bundle,) = bundles(built.build())
    assert bundle.resources["GPU"] == 2731, "three on each device"


def test_the_search_gives_up_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups of 5 devices on two nodes with 8: the search finds out with its third step."""
    built = job(2, 8)
    built.role("actor").run(ENTRY).workers(15).per_group(5).resource(device=1)
    monkeypatch.setattr(placement, "_MOST_STEPS", 3)
    assert "15 devices" in misfit(built)
    monkeypatch.setattr(placement, "_MOST_STEPS", 2)
    assert len(bundles(built.build())) == 3
