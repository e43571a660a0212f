"""A script as a user has it: two servers, each on another node, and a driver that asks them where they are."""

from __future__ import annotations

import os

from dlrover_hooks.job import DLJobBuilder, current_worker

MODULE = "tests.integrations.ray_deployed"
SERVERS = 2


def serve() -> None:
    import ray

    current_worker().serve(node=lambda: ray.get_runtime_context().get_node_id())


def ask() -> None:
    nodes = current_worker().role("server").broadcast("node")
    assert len(set(nodes)) == SERVERS, nodes


def main() -> int:
    job = DLJobBuilder("deployed").nodes(SERVERS).env(PYTHONPATH=os.environ["PYTHONPATH"])
    job.role("server").run(f"{MODULE}:serve").workers(SERVERS).not_driver()
    job.role("main").run(f"{MODULE}:ask")
    code = job.anti_affinity("server").build().submit(backend="ray")
    assert isinstance(code, int)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
