"""What the master's view of a broken round says to one node: who went, of what, and whether the others live on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dlrover_hooks.host.child_process import Child
from dlrover_hooks.launcher.failures import WorkerExit
from dlrover_hooks.protocol import Departure, JobView, MemberView

_LOST, _EXITED, _REPLACED = "lost", "exited", "replaced"
_DIED = (_LOST, Departure.FAILED.value, _EXITED)
"""Words of `MemberView.gone`. Others went politely, or because their agent starts them anew."""
_DONE, _LEFT = Departure.DONE.value, Departure.FAILED.value


def live_on(view: JobView, dead: Collection[str], whole: int) -> bool:
    """All that live keep their process and join again for themselves, so that only the dead need be replaced.

    Args:
        view: the job.
        dead: incarnations of this node's workers that have ended, though the master may not know yet.
        whole: the round that the agents joined for all their workers. Until everybody has attached to it nobody can
            tell what a worker does, and nothing is lost by starting all of them anew.
    """
    live = [member for member in view.members if member.alive and member.incarnation not in dead]
    attached = [member for member in live if member.attached]
    alone = view.round > whole  # whoever is in it has joined for itself, and may not have attached yet
    settled = alone or len(attached) == len(live)
    return bool(live if alone else attached) and settled and all(member.recovers for member in attached)


def needed_again(view: JobView, ends: Collection[str], coming: Collection[str], least: int) -> bool:
    """Without workers that were done before others failed there are too few for the next round.

    Args:
        view: the job.
        ends: incarnations of this node's workers that are replaced now.
        coming: those of newcomers of this node, which may not have a seat yet. Of those on other nodes nobody knows
            here, so that a worker may be called back in vain; the other way round all would wait for it.
        least: how many the job needs.
    """
    live = {member.incarnation for member in view.members if member.alive} | set(coming)
    return len(live - set(ends)) + len(ends) < least


def silent(view: JobView, running: Collection[str]) -> list[str]:
    """Of these processes those that the master has lost: they hang, and nobody waits for them any more."""
    return [one.incarnation for one in view.members if one.incarnation in running and one.gone == _LOST]


def left_only(view: JobView) -> bool:
    """Members left by an exception or by `sys.exit`, and no process has failed as far as is known: the script may be
    done, if it catches that exception behind its checkpointer. The exit codes will say it.
    """
    gone = [one for one in view.members if not one.alive]
    left = any(one.gone == _LEFT for one in gone)
    return left and all(one.gone in (_LEFT, _DONE, _EXITED) and not one.exit_code for one in gone)


def all_ended(view: JobView) -> bool:
    """Every process of the job has ended with 0."""
    return all(one.exit_code == 0 or one.gone == _DONE for one in view.members)


def ended_early(view: JobView, workers: Mapping[str, Child]) -> dict[str, WorkerExit]:
    """How those of `workers` ended that had not said that they were done: with 0, or not at all, though they left."""
    gone = {one.incarnation: one.gone for one in view.members}
    return {
        key: WorkerExit(child.name, child.exit_code(), left=gone[key] == _LEFT)
        for key, child in workers.items()
        if gone.get(key) in _DIED
    }


def is_restart(view: JobView) -> bool:
    """Another agent has asked for seats anew."""
    return any(one.gone == _REPLACED for one in view.members)


def elsewhere(view: JobView, node: str) -> list[WorkerExit]:
    """How members on other nodes ended."""
    return [
        WorkerExit(f"worker {one.rank} on node {one.node}", one.exit_code, here=False, left=one.gone == _LEFT)
        for one in view.members
        if one.node != node and one.gone in _DIED
    ]


def missing(view: JobView | None, node: str) -> str:
    """The other nodes that nobody is left of, in words; empty if there is none."""
    members: Iterable[MemberView] = view.members if view is not None else ()
    gone = {one.node for one in members if one.gone == _LOST} - {one.node for one in members if one.alive} - {node}
    return ", ".join(sorted(gone))
