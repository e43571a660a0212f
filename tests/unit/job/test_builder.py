"""`DLJobBuilder` and `JobSpec`: what a job is described with, and what is said about a description that cannot run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import JobSpecError
from dlrover_hooks.job import DLJobBuilder, JobSpec
from dlrover_hooks.job.spec import Collocation, RoleResources, RoleSpec, find_problems
from dlrover_hooks.protocol import MOST_BUDGET, MOST_ROLE_WORKERS

ENTRY = "ppo.roles:work"


def job(name: str = "ppo") -> DLJobBuilder:
    """With the two roles of most tests, on a cluster that is large enough."""
    built = DLJobBuilder(name).nodes(2, devices_per_node=8)
    built.role("actor").train(ENTRY).workers(4).resource(device=1)
    built.role("reward").run(ENTRY).workers(2).not_driver()
    return built


def problems(build: Callable[[], object]) -> list[str]:
    with pytest.raises(JobSpecError) as found:
        build()
    return found.value.problems


# ---- what is described -----------------------------------------------------------------------------------------------


def test_everything_that_can_be_described_is_in_the_spec() -> None:
    built = (
        DLJobBuilder("ppo").nodes(2, devices_per_node=8, device="TPU").config({"lr": 0.1}, steps=[1, 2])
        .env({"A": "1"}, B="2").state("file:///state").restarts(job=5, preemption=7, node=2, window="2h")
        .ready_within("10m").silent_after(timedelta(seconds=30))
        .role("actor").train(ENTRY).workers(4, min=2).per_group(2).env({"A": "3"}, C="4")
        .resource(cpu=2, device=1, memory_gb=3.5, disk_gb=4, license=1).restarts(6, role=1, on_failure="rejoin").end()
        .role("reward").run("reward.py --batch 8").not_driver()
        .collocate("reward").spread("critic")
        .role("critic").run("ppo.critic.work").workers(2).restarts(worker=-1)
        .build()
    )  # fmt: skip
    assert built == JobSpec(
        name="ppo", nodes=2, devices_per_node=8, device="TPU", config={"lr": 0.1, "steps": [1, 2]},
        env={"A": "1", "B": "2"}, state="file:///state", job_restarts=5, preemptions=7, node_failures=2,
        window_s=7200.0, ready_s=600.0, silent_s=30.0, collocations=(Collocation(roles=("reward",)),),
        apart=(("critic",),),
        roles=(
            RoleSpec(
                name="actor", entry=ENTRY, trains=True, workers=4, min_workers=2, per_group=2,
                env={"A": "3", "C": "4"}, on_failure="rejoin", worker_restarts=6, role_restarts=1,
                resources=RoleResources(cpu=2, device=1, memory_gb=3.5, disk_gb=4, custom={"license": 1}),
            ),
            RoleSpec(name="reward", entry="reward.py --batch 8", driver=False),
            RoleSpec(name="critic", entry="ppo.critic.work", workers=2, worker_restarts=-1),
        ),
    )  # fmt: skip


def test_the_master_is_given_the_rules_and_budgets_of_the_spec() -> None:
    spec = job().restarts(job=5, preemption=7, node=2, window=60).ready_within(90).build()
    assert spec.rules() == (
        p.RoleRules("actor", 4, p.FailurePolicy.REPLACE, True, 10, 3),
        p.RoleRules("reward", 2, p.FailurePolicy.REPLACE, False, 10, 3),
    )
    assert spec.budgets() == p.RoleBudgets(5, 7, 2, 60.0, 90.0)


def test_what_is_not_said_has_the_defaults_of_the_messages() -> None:
    spec = DLJobBuilder().role("actor").run(ENTRY).build()
    assert spec.budgets() == p.RoleBudgets()
    assert spec.rules() == (p.RoleRules("actor", 1),)


@pytest.mark.parametrize("given", [{"lr": 0.1}, Namespace(lr=0.1)])
def test_config_is_a_mapping_or_an_object_with_attributes_and_is_merged(given: Any) -> None:
    assert job().config(given, steps=3).config(lr=0.2).build().config == {"lr": 0.2, "steps": 3}


def test_variables_are_text() -> None:
    assert job().env(THREADS=2).build().env == {"THREADS": "2"}  # pyright: ignore[reportArgumentType]


def test_a_role_is_found_by_its_exact_name() -> None:
    spec = job().build()
    assert spec.role("reward").workers == 2
    (problem,) = problems(lambda: spec.role("Reward"))
    assert "no role 'Reward'" in problem
    assert "['actor', 'reward']" in problem


def test_a_role_leads_back_to_the_job_with_end_and_without() -> None:
    with_end = (
        DLJobBuilder("ppo").role("actor").run(ENTRY).workers(2).end().nodes(2, devices_per_node=4)
        .role("reward").run(ENTRY).end().collocate("reward").config(lr=0.1).build()
    )  # fmt: skip
    without = (
        DLJobBuilder("ppo").role("actor").run(ENTRY).workers(2).nodes(2, devices_per_node=4)
        .role("reward").run(ENTRY).collocate("reward").config(lr=0.1).build()
    )  # fmt: skip
    assert with_end == without
    assert [one.name for one in without.roles] == ["actor", "reward"]


def test_methods_that_both_have_are_those_of_the_role() -> None:
    spec = job().role("critic").run(ENTRY).env(A="1").restarts(3).end().env(B="2").restarts(job=4).build()
    assert (spec.role("critic").env, spec.role("critic").worker_restarts) == ({"A": "1"}, 3)
    assert (spec.env, spec.job_restarts) == ({"B": "2"}, 4)


def test_a_role_has_no_other_methods() -> None:
    role = DLJobBuilder().role("actor")
    for name in ("gpus", "_fields_of_job"):
        with pytest.raises(AttributeError, match=f"neither a role nor a job has '{name}'"):
            getattr(role, name)


# ---- DLRover's spellings ---------------------------------------------------------------------------------------------


def test_the_spellings_of_dlrover_describe_the_same_job() -> None:
    theirs = (
        DLJobBuilder("ppo").node_num(2).device_per_node(8).device_type("GPU").global_env({"A": "1"})
        .config({"lr": 0.1})
        .role("actor").train(ENTRY).nnodes(2).nproc_per_node(4).resource(accelerator=1, memory=2000, disk=500)
        .workload("reward", ENTRY).total(8).per_group(4).resource(accelerator=0.5).not_driver()
        .with_collocation("actor", "reward")
        .build()
    )  # fmt: skip
    ours = (
        DLJobBuilder("ppo").nodes(2, devices_per_node=8, device="GPU").env(A="1").config(lr=0.1)
        .role("actor").train(ENTRY).workers(8).per_group(4).resource(device=1, memory_gb=2, disk_gb=0.5)
        .role("reward").run(ENTRY).workers(8).per_group(4).resource(device=0.5).not_driver()
        .collocate("actor", "reward", share={"actor": 0.5, "reward": 0.5})
        .build()
    )  # fmt: skip
    assert theirs == ours


@pytest.mark.parametrize("state", ["", "state", "/state", "file:///state", "etcd://host", "etcds://me@a:1,b:2/name"])
def test_states_that_a_master_can_use_are_accepted(state: str) -> None:
    assert job().state(state).build().state == state


def test_the_largest_budgets_and_numbers_are_accepted() -> None:
    """By the messages and the master as well."""
    built = job().nodes(MOST_ROLE_WORKERS, devices_per_node=1)
    built.role("a").run(ENTRY).workers(MOST_ROLE_WORKERS - 6).restarts(MOST_BUDGET, role=MOST_BUDGET)
    spec = built.restarts(job=MOST_BUDGET, preemption=MOST_BUDGET, node=MOST_BUDGET).build()
    rules = list(spec.rules())
    assert msgspec.convert(msgspec.to_builtins(rules), list[p.RoleRules]) == rules
    assert msgspec.convert(msgspec.to_builtins(spec.budgets()), p.RoleBudgets) == spec.budgets()


@pytest.mark.parametrize("processes_first", [False, True])
def test_nodes_and_processes_of_a_role_multiply_in_either_order(processes_first: bool) -> None:
    role = DLJobBuilder().role("actor").train(ENTRY)
    if processes_first:
        role.nproc_per_node(4).nnodes(3)
    else:
        role.nnodes(3).nproc_per_node(4)
    spec = role.end().build()
    assert (spec.roles[0].workers, spec.roles[0].per_group) == (12, 4)


def test_all_roles_but_some_can_be_collocated() -> None:
    spec = job().role("critic").run(ENTRY).workers(4).with_collocation_all("reward").build()
    assert spec.collocations == (Collocation(roles=("actor", "critic"), share={"actor": 0.5, "critic": 0.5}),)


@pytest.mark.parametrize(("named", "works"), [("actor", True), ("ACTOR", False), ("Actor", False)])
def test_names_are_case_sensitive_everywhere(named: str, works: bool) -> None:
    """Upstream's defect 6: names of collocations were upper-cased, those of roles were not."""
    built = DLJobBuilder().role("actor").run(ENTRY).role("ref").run(ENTRY).with_collocation(named, "ref")
    if works:
        assert built.build().collocations[0].roles == ("actor", "ref")
    else:
        assert problems(built.build) == [f"collocate(): there is no role {named!r}"]


def test_names_that_differ_in_case_are_different_roles() -> None:
    spec = DLJobBuilder().role("actor").run(ENTRY).role("Actor").run(ENTRY).spread("Actor").build()
    assert [one.name for one in spec.roles] == ["actor", "Actor"]
    assert spec.apart == (("Actor",),)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_a_job_is_the_same_after_it_was_written_and_read() -> None:
    spec = (
        job().config(lr=0.1, layers=[{"n": 1}, None, "x"]).env(A="1").state("etcd://host:2379").silent_after(12)
        .role("ref").run("ref.py 'a b'").workers(4).resource(cpu=0, license=0.25).restarts(-1, on_failure="job").end()
        .collocate("actor", "ref", share={"actor": 0.75, "ref": 0.25}).spread("reward")
        .build()
    )  # fmt: skip
    assert JobSpec.from_json(spec.to_json()) == spec
    assert JobSpec.from_json(spec.to_json().encode()) == spec


def test_what_is_written_has_no_defaults_and_can_be_read_by_a_person() -> None:
    text = DLJobBuilder("ppo").role("actor").run(ENTRY).build().to_json()
    assert json.loads(text) == {"name": "ppo", "roles": [{"name": "actor", "entry": ENTRY}]}
    assert "\n" in text


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, {"limits": [math.inf]}])
def test_a_config_that_json_cannot_carry_is_refused(value: Any) -> None:
    """It would reach the workers as None."""
    assert "config" in problems(job().config(limit=value).build)[0]


def test_a_config_that_is_no_data_is_refused() -> None:
    (problem,) = problems(job().config(model=object()).build)
    assert "config()" in problem
    assert "numbers, text, lists and dicts" in problem


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"name": "x", "roles": [{"name": "a", "entry": "m:f", "on_failuer": "job"}]}', "on_failuer"),
        ('{"name": "x", "role": []}', "role"),
        ('{"name": "x", "roles": [{"name": "a", "entry": "m:f", "resources": {"gpu": 1}}]}', "gpu"),
        ('{"name": "x", "roles": [{"name": "a", "entry": "m:f"}], "collocations": [{"names": []}]}', "names"),
        ('{"roles": []}', "name"),
        ('{"name": "x", "roles": [{"name": "a"}]}', "entry"),
        ('{"name": "x", "roles": [{"name": "a", "entry": "m:f", "on_failure": "retry"}]}', "retry"),
        ('{"name": "x", "roles": [{"name": "a", "entry": "m:f", "workers": "2"}]}', "workers"),
        ('{"name": "x", "device": "NPU"}', "NPU"),
        ("{", "truncated"),
        ("[]", "object"),
    ],
)
def test_json_that_describes_no_job_is_refused(text: str, word: str) -> None:
    """An unknown field may be a mistyped one."""
    assert word in problems(lambda: JobSpec.from_json(text))[0]


def test_json_of_a_job_that_cannot_run_is_refused() -> None:
    assert problems(lambda: JobSpec.from_json('{"name": "x"}')) == [
        "it has no role: add one with role(NAME).run(ENTRY) or role(NAME).train(ENTRY)"
    ]


# ---- what is wrong ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], DLJobBuilder], tuple[str, ...]]] = {
    "name": (lambda: job("a/b"), ("the job's name is 'a/b'", "letters, digits")),
    "long name": (lambda: job("a" * 65), ("the job's name", "at most 64")),
    "empty name": (lambda: job(""), ("the job's name is ''",)),
    "no roles": (DLJobBuilder, ("no role", "role(NAME).run(ENTRY)")),
    "no driver": (
        lambda: DLJobBuilder().role("a").run(ENTRY).not_driver().end(),
        ("no role is a driver", "leave out not_driver()"),
    ),
    "no nodes": (lambda: job().nodes(0, devices_per_node=8), ("0 nodes with 8 devices",)),
    "negative devices": (lambda: job().nodes(1, devices_per_node=-1), ("1 nodes with -1 devices",)),
    "job budget": (lambda: job().restarts(job=-2), ("restarts(job=-2)", "0 or more, or -1")),
    "preemption budget": (lambda: job().restarts(preemption=-2), ("restarts(preemption=-2)",)),
    "node budget": (lambda: job().restarts(node=-3), ("restarts(node=-3)",)),
    "silent": (lambda: job().silent_after(5), ("silent_after(5 s)", "at least 6 s")),
    "no window": (lambda: job().restarts(window=0), ("window (0 s)", "above 0")),
    "no ready": (lambda: job().ready_within(0), ("ready (0 s)", "above 0")),
    "window words": (lambda: job().restarts(window="soon"), ("restarts(window=)", "'soon' is no duration")),
    "ready words": (lambda: job().ready_within("soon"), ("ready_within()", "'soon'")),
    "silent words": (lambda: job().silent_after("soon"), ("silent_after()", "'soon'")),
    "same role": (lambda: job().role("actor").run(ENTRY).end(), ("role 'actor' is defined twice",)),
    "role name": (lambda: job().role("-a").run(ENTRY).end(), ("role '-a'", "its name", "a letter or digit first")),
    "no entry": (lambda: job().role("a").end(), ("role 'a'", "no function", "run(ENTRY) or train(ENTRY)")),
    "entry": (lambda: job().role("a").run("work").end(), ("role 'a'", "'work' is no entry point", "module:function")),
    "no workers": (lambda: job().role("a").run(ENTRY).workers(0).end(), ("role 'a'", "workers(0)", "1 or more")),
    "min": (
        lambda: job().role("a").train(ENTRY).workers(2, min=3).restarts(on_failure="rejoin").end(),
        ("role 'a'", "workers(2, min=3)", "between 1 and"),
    ),
    "negative min": (
        lambda: job().role("a").train(ENTRY).workers(2, min=-1).restarts(on_failure="rejoin").end(),
        ("workers(2, min=-1)",),
    ),
    "min without rejoin": (
        lambda: job().role("a").train(ENTRY).workers(2, min=1).end(),
        ("role 'a'", "workers(min=)", "train() and on_failure='rejoin'"),
    ),
    "per group": (
        lambda: job().role("a").run(ENTRY).workers(4).per_group(3).end(),
        ("role 'a'", "per_group(3) does not divide 4 workers"),
    ),
    "no group": (lambda: job().role("a").run(ENTRY).per_group(0).end(), ("role 'a'", "per_group(0)")),
    "rejoin": (
        lambda: job().role("a").run(ENTRY).restarts(on_failure="rejoin").end(),
        ("role 'a'", "on_failure='rejoin' is for roles with train()"),
    ),
    "worker budget": (lambda: job().role("a").run(ENTRY).restarts(-2).end(), ("role 'a'", "restarts()", "-1 for no")),
    "role budget": (lambda: job().role("a").run(ENTRY).restarts(role=-9).end(), ("role 'a'", "restarts()")),
    "cpu": (lambda: job().role("a").run(ENTRY).resource(cpu=-1).end(), ("role 'a'", "resource(cpu=-1)", "0 or more")),
    "memory": (lambda: job().role("a").run(ENTRY).resource(memory_gb=math.nan).end(), ("resource(memory_gb=nan)",)),
    "disk": (lambda: job().role("a").run(ENTRY).resource(disk_gb=math.inf).end(), ("resource(disk_gb=inf)",)),
    "custom": (lambda: job().role("a").run(ENTRY).resource(license=-1).end(), ("resource(license=-1)",)),
    "endless devices": (lambda: job().role("a").run(ENTRY).resource(device=math.inf).end(), ("resource(device=inf)",)),
    "part of devices": (
        lambda: job().role("a").run(ENTRY).resource(device=1.5).end(),
        ("role 'a'", "resource(device=1.5)", "a part of one device"),
    ),
    "device of CPU": (
        lambda: DLJobBuilder().device_type("CPU").role("a").run(ENTRY).resource(device=1).end(),
        ("role 'a'", "resource(device=1)", "device_type is CPU", "resource(cpu=)"),
    ),
    "collocate unknown": (lambda: job().collocate("actor", "critic"), ("collocate()", "no role 'critic'")),
    "collocate twice": (
        lambda: job().collocate("actor").collocate("actor"),
        ("role 'actor' is in two collocations",),
    ),
    "collocate itself": (lambda: job().collocate("actor", "actor"), ("collocate()", "'actor'")),
    "groups": (
        lambda: job().collocate("actor", "reward"),
        ("as many groups of workers as the others", "'actor': 4", "'reward': 2"),
    ),
    "share of some": (
        lambda: job().role("ref").run(ENTRY).workers(4).collocate("actor", "ref", share={"ref": 0.5}),
        ("collocate(share=)", "['actor', 'ref']", "['ref']"),
    ),
    "share of nothing": (
        lambda: job().collocate("actor", share={"actor": 0}),
        ("collocate(share=)", "parts above 0"),
    ),
    "share of more": (
        lambda: job().role("ref").run(ENTRY).workers(4).collocate("actor", "ref", share={"actor": 0.6, "ref": 0.5}),
        ("collocate(share=)", "together at most 1, not 1.1"),
    ),
    "spread unknown": (lambda: job().spread("critic"), ("spread()", "no role 'critic'")),
    "spread collocated": (lambda: job().collocate("actor").spread("actor"), ("role 'actor' is collocated",)),
    "spread group": (
        lambda: job().role("a").run(ENTRY).workers(2).per_group(2).spread("a"),
        ("role 'a' has per_group() above 1",),
    ),
    "empty variable": (lambda: job().env({"": "1"}), ("env(): ''", "not be empty")),
    "variable with =": (lambda: job().env({"A=B": "1"}), ("env(): 'A=B'", "contain '='")),
    "variable with NUL": (lambda: job().env({"A\0B": "1"}), ("env(): 'A\\x00B'",)),
    "value with NUL": (lambda: job().env(A="x\0y"), ("env(): the value of 'A' contains NUL",)),
    "value of a role with NUL": (
        lambda: job().role("a").run(ENTRY).env(A="\0").end(),
        ("role 'a'", "the value of 'A' contains NUL"),
    ),
    "variables": (lambda: job().env(5), ("env(): 5 is not a mapping",)),  # pyright: ignore[reportArgumentType]
    "config": (lambda: job().config(5), ("config(): 5 is neither a mapping nor",)),
    "large job budget": (
        lambda: job().restarts(job=MOST_BUDGET + 1),
        ("restarts(job=2147483649)", "at most 2147483648, or -1"),
    ),
    "large worker budget": (
        lambda: job().role("a").run(ENTRY).restarts(10**12).end(),
        ("role 'a'", "worker=1000000000000", "at most 2147483648"),
    ),
    "many workers": (
        lambda: job().role("a").run(ENTRY).workers(MOST_ROLE_WORKERS - 5).end(),
        ("16385 workers", "at most 16384"),
    ),
    "many nodes": (lambda: job().nodes(1 << 70, devices_per_node=8), ("nodes with 8", "at most")),
    "long window": (lambda: job().restarts(window=1e10), ("window", "at most 10^9 s")),
    "long ready": (lambda: job().ready_within(1e10), ("ready", "at most 10^9 s")),
    "long silence": (lambda: job().silent_after(1e10), ("silent_after", "at most 10^9 s")),
    "state": (lambda: job().state("s3://bucket/job"), ("state('s3://bucket/job')", "a folder, file://")),
    "state of etcd": (lambda: job().state("etcd:///name"), ("state(", "etcd://HOST")),
    "state with a password": (lambda: job().state("etcds://me:secret@host"), ("state(", "without a password")),
    "state without folder": (lambda: job().state("file://"), ("state('file://')", "a folder")),
    "state with NUL": (lambda: job().state("/a\0"), ("state(", "contains NUL")),
    "surrogate in a value": (lambda: job().env(A="x\udcff"), ("the value of 'A'", "lone surrogate")),
    "surrogate in a config": (lambda: job().config(path=[{"a": "x\udcff"}]), ("config()", "lone surrogate", "\\udcff")),
    "surrogate in a name": (lambda: job("x\udcff"), ("the job's name is 'x\\udcff'",)),
    "surrogate in a role": (lambda: job().role("x\udcff").run(ENTRY).end(), ("role 'x\\udcff'", "its name")),
    "surrogate in an entry": (
        lambda: job().role("a").run("run.py x\udcff").end(),
        ("role 'a'", "'run.py x\\udcff'", "lone surrogate"),
    ),
    "surrogate in a resource": (
        lambda: job().role("a").run(ENTRY).resource(**{"x\udcff": 1}).end(),
        ("role 'a'", "resource()", "lone surrogate"),
    ),
    "surrogate in a state": (lambda: job().state("x\udcff"), ("state(", "lone surrogate")),
    "surrogate in a policy": (
        lambda: job().role("a").run(ENTRY).restarts(on_failure="x\udcff").end(),  # pyright: ignore[reportArgumentType]
        ("role 'a': on_failure",),
    ),
    "share of NaN": (
        lambda: job().collocate("actor", share={"actor": math.nan}),
        ("collocate(share=)", "parts above 0"),
    ),
    "small share": (lambda: job().collocate("actor", share={"actor": 1e-5}), ("collocate(share=)", "part is 0.0001")),
    "share of a wrong type": (
        lambda: job().collocate("actor", share="x"),  # pyright: ignore[reportArgumentType]
        ("collocations[0].share: Expected `object`",),
    ),
    "small device": (
        lambda: job().role("a").run(ENTRY).resource(device=0.00001).end(),
        ("role 'a'", "resource(device=1e-05)", "smallest part is 0.0001"),
    ),
    "large resource": (lambda: job().role("a").run(ENTRY).resource(memory_gb=1e300).end(), ("memory_gb=1e+300",)),
    "memory of a wrong type": (
        lambda: job().role("a").run(ENTRY).resource(memory="x").end(),  # pyright: ignore[reportArgumentType]
        ("role 'a': resources.memory_gb: Expected `float`",),
    ),
    "spread twice": (lambda: job().spread("reward").spread("reward"), ("role 'reward' is in two sets",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_what_to_do(case: str) -> None:
    build, words = WRONG[case]
    with pytest.raises(JobSpecError) as found:
        build().build()
    (problem,) = found.value.problems
    for word in words:
        assert word in problem
    assert problem in str(found.value)


def test_a_value_of_a_wrong_type_is_named() -> None:
    (problem,) = problems(job().nodes("two").build)  # pyright: ignore[reportArgumentType]
    assert "`int`" in problem
    assert "nodes" in problem


def test_all_values_of_a_wrong_type_are_named_and_hide_nothing_else() -> None:
    """A value of a wrong type causes no second problem: neither `min` nor `per_group` of role a is one."""
    wrong: Any = "2"
    built = job().nodes(wrong, devices_per_node=wrong).restarts(job=-5)
    built.role("a").train(ENTRY).workers(wrong, min=3).per_group(2).restarts(on_failure="rejoin").resource(cpu=wrong)
    built.role("b").run("").workers(0).env({wrong: "\0"})
    built.role("c").run(wrong).per_group(wrong).restarts(wrong, on_failure=wrong).collocate("c", "actor")
    built.collocate("x").spread("y")
    assert problems(built.build) == [
        "role 'a': workers: Expected `int`, got `str`",
        "role 'a': resources.cpu: Expected `float`, got `str`",
        "role 'c': per_group: Expected `int`, got `str`",
        "role 'c': on_failure: Invalid enum value '2': give one of replace, rejoin, role, job, fail",
        "role 'c': worker_restarts: Expected `int`, got `str`",
        "nodes: Expected `int`, got `str`",
        "devices_per_node: Expected `int`, got `str`",
        "restarts(job=-5): give 0 or more, or -1 for no limit",
        "role 'b': it has no function: call run(ENTRY) or train(ENTRY)",
        "role 'b': workers(0): give 1 or more",
        "role 'b': env(): the value of '2' contains NUL",
        "role 'c': '2' is no entry point: write package.module:function, or 'script.py ARGUMENTS'",
        "collocate(): there is no role 'x'",
        "spread(): there is no role 'y'",
    ]


def test_names_of_a_wrong_type_cause_no_other_problems() -> None:
    wrong: Any = 5
    built = job(wrong).role(wrong).run(wrong).role(wrong).run(ENTRY).collocate("actor", "5").spread(wrong)
    assert problems(built.build) == [
        "name: Expected `str`, got `int`",
        "role 5: name: Expected `str`, got `int`",
        "role 5: entry: Expected `str`, got `int`: give it as 'package.module:function'",
        "role 5: name: Expected `str`, got `int`",
        "apart[0][0]: Expected `str`, got `int`",
    ]


def test_a_spec_that_was_made_with_wrong_types_is_refused() -> None:
    wrong: Any = "2"
    roles: Any = [RoleSpec(name="a", entry=ENTRY, workers=wrong, env={"X": wrong, "Y": 1}), 5]  # pyright: ignore[reportArgumentType]
    spec = JobSpec(name="x", roles=roles, nodes=wrong, config={"a": object()})
    said = problems(spec.checked)
    assert said[:4] == [
        "role 'a': workers: Expected `int`, got `str`",
        "role 'a': env['Y']: Expected `str`, got `int`",
        "roles[1]: Expected `object`, got `int`",
        "nodes: Expected `int`, got `str`",
    ]
    assert ["config()" in one for one in said[4:]] == [True]
    assert problems(spec.to_json) == said


def test_a_spec_that_was_made_with_other_types_is_converted() -> None:
    roles: Any = [RoleSpec(name="a", entry=ENTRY, resources=RoleResources(device=1))]
    spec = JobSpec(name="x", roles=roles).checked()
    assert (spec.roles, type(spec.roles[0].resources.device)) == (tuple(roles), float)


def test_text_that_cannot_be_encoded_is_one_problem_in_json_too() -> None:
    spec = JobSpec(name="x", roles=(RoleSpec(name="a", entry=ENTRY, env={"A": "x\udcff"}),))
    (problem,) = problems(spec.to_json)
    assert problem == "role 'a': env(): the value of 'A' contains a lone surrogate, which UTF-8 cannot represent"
    assert problems(lambda: JobSpec.from_json('{"name": "\udcff"}'))


def test_processes_of_a_node_may_be_given_again() -> None:
    """They are not checked before `build`, not even if they are 0 or no number."""
    wrong: Any = "2"
    built = DLJobBuilder().role("a").run(ENTRY).nproc_per_node(0).nproc_per_node(0)
    assert problems(built.end().build) == [
        "role 'a': workers(0): give 1 or more",
        "role 'a': per_group(0) does not divide 0 workers",
    ]
    spec = built.nproc_per_node(3).nnodes(2).nproc_per_node(4).end().build()
    assert (spec.roles[0].workers, spec.roles[0].per_group) == (8, 4)
    assert len(problems(built.nnodes(wrong).nproc_per_node(wrong).end().build)) == 2


def test_all_that_is_wrong_is_said_at_once() -> None:
    built = (
        DLJobBuilder("a b").restarts(job=-2, window="soon").ready_within("soon").config(model=object())
        .role("actor").run("work").workers(0).resource(cpu=-1)
        .role("actor").run(ENTRY).per_group(0)
        .collocate("critic").spread("ref")
    )  # fmt: skip
    with pytest.raises(JobSpecError) as found:
        built.build()
    said = found.value.problems
    for words in (
        "'a b'", "job=-2", "restarts(window=)", "ready_within()", "config()", "no entry point", "workers(0)",
        "cpu=-1", "defined twice", "per_group(0)", "no role 'critic'", "no role 'ref'",
    ):  # fmt: skip
        assert sum(words in problem for problem in said) == 1, words
    assert str(found.value).startswith("job 'a b' cannot run as described:\n  - ")
    assert str(found.value).count("\n  - ") == len(said)


def test_a_job_that_can_run_has_no_problems() -> None:
    assert find_problems(job().build()) == []


# ---- what a description costs ----------------------------------------------------------------------------------------

DESCRIBE = """
import sys
from dlrover_hooks.job import DLJobBuilder
spec = (DLJobBuilder("ppo").nodes(2, devices_per_node=8).ready_within("10m").config(lr=0.1)
        .role("actor").train("ppo:actor").workers(4).resource(device=1)
        .role("reward").run("ppo:reward").workers(4).not_driver().collocate("actor", "reward").build())
spec.plan().slots(spec)
assert type(spec).from_json(spec.to_json()) == spec
print([name for name in ("ray", "torch", "requests", "starlette", "pydantic") if name in sys.modules])
"""


def test_a_job_is_described_without_ray_torch_and_a_web_framework() -> None:
    done = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
