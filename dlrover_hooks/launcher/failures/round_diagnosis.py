"""Reads the master's view of a broken round for one node: lost members, causes, and whether the others recover.

The view lists the node's members, and those of other nodes that are gone; see `JobView.members`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dlrover_hooks.host.child_process import Child
from dlrover_hooks.launcher.failures.verdict import WorkerExit
from dlrover_hooks.protocol import Departure, JobView

LOST, _STALLED, _SLOW, _EXITED, _REPLACED = "lost", "stalled", "slow", "exited", "replaced"
_ENDED = (LOST, _STALLED, _SLOW)
_DIED = (*_ENDED, Departure.FAILED.value, _EXITED)
"""Values of `MemberView.gone`. Members with another value left in order, or their agent restarts them."""
_DONE, _LEFT = Departure.DONE.value, Departure.FAILED.value


def live_on(view: JobView, dead: Collection[str], whole: int) -> bool:
    """All living members keep their process and join again by themselves, so only the dead ones need be replaced.

    Args:
        view: the job.
        dead: incarnations of this node's workers that have ended, though the master may not have detected it yet.
        whole: the round that the agents joined for all their workers. Until every worker has attached to it, it is
            unknown whether all recover, and restarting all of them loses nothing.
    """
    here = [member for member in view.members if member.alive and member.incarnation not in dead]
    attached_here = [member for member in here if member.attached]
    live, attached = len(here) + view.unlisted.alive, len(attached_here) + view.unlisted.attached
    recover = sum(member.recovers for member in attached_here) + view.unlisted.recovers
    alone = view.round > whole  # its members joined by themselves, and may not have attached yet
    settled = alone or attached == live
    return bool(live if alone else attached) and settled and recover == attached


def living(view: JobView, ends: Collection[str] = ()) -> int:
    """How many members live, on all nodes, without `ends` of this node."""
    return sum(one.alive and one.incarnation not in ends for one in view.members) + view.unlisted.alive


def needed_again(view: JobView, ends: Collection[str], coming: Collection[str], least: int) -> bool:
    """Too few workers are left for the next round without those that were done before others failed.

    Args:
        view: the job.
        ends: incarnations of this node's workers that are replaced now.
        coming: those of this node's new workers, which may not have joined yet. New workers of other nodes are unknown
            here, so a worker may be restarted needlessly; the opposite error would make all others wait for it.
        least: how many the job needs.
    """
    live = {member.incarnation for member in view.members if member.alive} | set(coming)
    return len(live - set(ends)) + view.unlisted.alive + len(ends) < least


def ended_by_master(view: JobView, running: Collection[str]) -> dict[str, str]:
    """Those of the `running` processes that the master has ended, so that the others wait no longer: how."""
    members = (one for one in view.members if one.incarnation in running)
    return {one.incarnation: one.gone for one in members if one.gone in _ENDED}


def lost_worker(name: str, gone: str, where: str = "") -> WorkerExit:
    """The end of a worker that the master has ended. `gone`: how; `where`: see `WorkerExit`."""
    return WorkerExit(name, None, stalled=gone == _STALLED, slow=gone == _SLOW, where=where)


def left_only(view: JobView) -> bool:
    """Members left by an exception or by `sys.exit`, and no process is known to have failed.

    The script may be done, if it catches that exception after its checkpointer; the exit codes will show it.
    """
    gone = [one for one in view.members if not one.alive]
    left = any(one.gone == _LEFT for one in gone)
    return left and all(one.gone in (_LEFT, _DONE, _EXITED) and not one.exit_code for one in gone)


def all_ended(view: JobView) -> bool:
    """Every process of the job has ended with 0."""
    return not view.unlisted.unended and all(one.exit_code == 0 or one.gone == _DONE for one in view.members)


def ended_early(view: JobView, workers: Mapping[str, Child]) -> dict[str, WorkerExit]:
    """The ends of `workers` that had not reported that they were done: exited with 0, or left and still running."""
    gone = {one.incarnation: one.gone for one in view.members}
    return {
        key: WorkerExit(child.name, child.exit_code(), left=gone[key] == _LEFT)
        for key, child in workers.items()
        if gone.get(key) in _DIED
    }


def is_restart(view: JobView) -> bool:
    """Another agent has joined again for its workers."""
    return any(one.gone == _REPLACED for one in view.members)


def elsewhere(view: JobView, node: str) -> list[WorkerExit]:
    """How members on other nodes ended."""
    return [
        WorkerExit(
            f"worker {one.rank} on node {one.node}",
            None if one.gone in (_STALLED, _SLOW) else one.exit_code,
            here=False,
            left=one.gone == _LEFT,
            stalled=one.gone == _STALLED,
            slow=one.gone == _SLOW,
        )
        for one in view.members
        if one.node != node and one.gone in _DIED
    ]


def missing(view: JobView | None, node: str) -> str:
    """Names of the other nodes that have lost all members, comma-separated; empty if there are none."""
    return ", ".join(one for one in (view.lost_nodes if view is not None else ()) if one != node)
