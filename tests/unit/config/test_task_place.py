"""The place of a process in a parameter server job: from the launcher, or from TF_CONFIG."""

from __future__ import annotations

import json

import pytest

from dlrover_hooks import config
from dlrover_hooks.config import TaskPlace
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import NodeType

CLUSTER = {"chief": ["a:1"], "ps": ["b:1", "b:2"], "worker": ["c:1"]}


def tf_config(**task: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": task})}


def test_without_both_there_is_no_task() -> None:
    assert config.task({}) is None


def test_the_launchers_place_counts_before_tf_config() -> None:
    env = {"DLROVER_HOOKS_TASK": "worker:3:17:[::1]:23000", **tf_config(type="ps", index=1)}
    assert config.task(env) == TaskPlace(type=NodeType.WORKER, index=3, id=17, address="[::1]:23000")


def test_tf_config() -> None:
    found = config.task(tf_config(type="ps", index=1))
    assert found == TaskPlace(type=NodeType.PS, index=1, address="b:2", ps=2, workers=1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"cluster": CLUSTER}),
        tf_config(type="ps", index=2)["TF_CONFIG"],
        tf_config(type="ps", index=-1)["TF_CONFIG"],
        tf_config(type="ps", index="0")["TF_CONFIG"],
        tf_config(type="evaluator", index=0)["TF_CONFIG"],
    ],
)
def test_a_tf_config_without_a_task_of_its_cluster_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="TF_CONFIG cannot be used"):
        config.task({"TF_CONFIG": text})
