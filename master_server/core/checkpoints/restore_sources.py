"""Which generation a round loads, and from where. A pure choice between the nodes' memory and storage.

A generation in memory is a candidate only if it is complete: the images of all its ranks are held in the round. Every
new rank must find its image on its own node (of a sharded state at another world size: all images; MEMORY), or all
nodes must be able to fetch from each other (PEER). The newest generation wins. At equal age a node's own memory is
preferred to another node's, and that to storage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from dlrover_hooks.master.core.checkpoints.save_votes import Kept
from dlrover_hooks.protocol import Generation, Held, KeeperAddress, Manifest, Restore, Source


class LoadRefusal(msgspec.Struct, frozen=True):
    """A restore that a rank could not load."""

    generation: Generation
    source: Source
    world_size: int


def refusal(bad: Restore) -> LoadRefusal:
    """The refusal that keeps `bad` from being chosen again."""
    return LoadRefusal(generation=bad.generation, source=bad.source, world_size=bad.world_size)


class Neighbour(msgspec.Struct, frozen=True):
    """A node whose keeper takes part in replication, or (not `sends`) only serves its images."""

    keeper: KeeperAddress
    domain: str = ""
    sends: bool = True


class Offers(msgspec.Struct):
    """What the members of a round offer: slots by node, complete generations in storage and the folder's URL."""

    held: dict[str, tuple[Held, ...]] = {}
    stored: tuple[Manifest, ...] = ()
    stored_url: str | None = None
    damaged: tuple[tuple[int, int], ...] = ()
    heard: int = 0
    """See `Attach`."""
    neighbours: dict[str, Neighbour] = {}
    """By node."""


def is_url(resume: str) -> bool:
    """True if `resume` names a folder to start from, not one of the keywords."""
    return "/" in resume or resume.startswith("weights:")


def folder(resume: str) -> str:
    """The folder that `resume` names, with or without `weights:` before it."""
    return resume.removeprefix("weights:")


def takes_weights(resume: str) -> bool:
    """True if a run begins with weights alone."""
    return resume == "weights" or resume.startswith("weights:")


def in_memory(offers: Offers, ranks_by_node: dict[str, list[int]]) -> list[Restore]:
    """Generations that are complete in the round's memory. `ranks_by_node`: the new ranks."""
    where: dict[tuple[Generation, int], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    all_of: set[tuple[Generation, int]] = set()
    world_size = sum(len(ranks) for ranks in ranks_by_node.values())
    for node, slots in offers.held.items():
        if node in ranks_by_node:
            for slot in slots:
                where[slot.generation, slot.world_size][node].add(slot.rank)
                if slot.sharded and slot.world_size != world_size:
                    all_of.add((slot.generation, slot.world_size))
    linked = offers.neighbours.keys() >= ranks_by_node.keys()
    found: list[Restore] = []
    for (generation, saved), nodes in where.items():
        held = set[int]().union(*nodes.values())
        if len(held) >= saved and held.issuperset(range(saved)):
            choice = Restore(generation=generation, world_size=saved, source=Source.MEMORY)
            same = saved == world_size
            near = all(_served(nodes.get(node, set()), ranks, same) for node, ranks in ranks_by_node.items())
            if (generation, saved) in all_of:
                near = near and all(len(nodes[node]) == saved for node in ranks_by_node)
            twice = sum(map(len, nodes.values())) > saved
            found += [choice] * near
            if linked and (twice or not near):  # even if all are near, one may be damaged
                found.append(msgspec.structs.replace(choice, source=Source.PEER))
    return found


def _served(images: set[int], ranks: list[int], same_world: bool) -> bool:
    return images.issuperset(ranks) if same_world else bool(images)


def in_storage(offers: Offers, kept: Iterable[Kept], *, only_offered: bool) -> list[Restore]:
    """Complete generations in storage: those found by a scan and, unless `only_offered`, those committed here."""
    found = [
        Restore(
            generation=manifest.generation,
            world_size=manifest.world_size,
            source=Source.STORAGE,
            url=offers.stored_url,
        )
        for manifest in offers.stored
    ]
    if only_offered:
        return found
    return found + [
        Restore(generation=item.generation, world_size=item.world_size, source=Source.STORAGE, url=item.url)
        for item in kept
    ]


def adopted_run(offers: Offers, candidates: list[Restore], proposed: str) -> str:
    """The run that a job without a history continues: one from memory, else one from storage, else the proposed one."""
    memory = [found.generation.run for found in candidates if found.source is not Source.STORAGE]
    if memory:
        slots = Counter(slot.generation.run for held in offers.held.values() for slot in held)
        return max(set(memory), key=lambda run: (slots[run], run))
    made = {manifest.generation.run: manifest.created_at for manifest in offers.stored}
    for manifest in offers.stored:
        made[manifest.generation.run] = max(made[manifest.generation.run], manifest.created_at)
    stored = {found.generation.run for found in candidates}
    return max(stored, key=lambda run: (made.get(run, 0.0), run)) if stored else proposed


def newest(candidates: list[Restore], run: str, refused: list[LoadRefusal]) -> Restore | None:
    """The newest candidate of `run` that was not refused; of equals the one with the nearest source, see `_age`."""
    able = [found for found in candidates if found.generation.run == run and refusal(found) not in refused]
    return max(able, key=_age, default=None)


_NEARNESS = {Source.MEMORY: 2, Source.PEER: 1, Source.STORAGE: 0}


def _age(found: Restore) -> tuple[int, int, int, int, str]:
    """The sort key. More saved ranks win: each rank finds its own random state; a single-rank image has only one."""
    generation = found.generation
    return generation.attempt, generation.step, _NEARNESS[found.source], found.world_size, found.url or ""


def newest_attempt(offers: Offers, run: str) -> int:
    """The greatest attempt of any offered or stored generation, complete or not."""
    held = (slot.generation for slots in offers.held.values() for slot in slots)
    stored = (manifest.generation for manifest in offers.stored)
    known = (generation.attempt for source in (held, stored) for generation in source if generation.run == run)
    return max((offers.heard, *known))
