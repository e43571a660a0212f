"""The loops of the documentation, taken from its pages as they are, at 2, then 1, then 3 workers: the same steps, the
same samples in each, and the weights of the run that nobody broke off.

A block takes part by `<!-- any world -->` above its mark; `<!-- any world: alone -->` where it is for one process.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.deep import deep
from tests.e2e.master_process import LiveMaster

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SCRIPT = ranks.ROOT / "tests/contracts/page_script.py"
BLOCK = re.compile(r"<!-- any world(: alone)? -->\n<!-- runnable[^\n]*-->\n```python\n(.*?)^```", re.M | re.S)
NEEDS = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning"}
LIVES = ((2, 6), (1, 11), (3, 0))
"""World size, and the step at which it is broken off."""


def blocks(page: str) -> list[tuple[bool, str]]:
    """(for one process?, text) of each loop on the page."""
    return [(bool(alone), text) for alone, text in BLOCK.findall((ranks.ROOT / page).read_text())]


def pages() -> dict[str, tuple[str, str]]:
    """Of each page the script for several workers and the one for one: they make the same job."""
    found: dict[str, tuple[str, str]] = {}
    ((_, several),) = [one for one in blocks("docs/pytorch.md") if not one[0]]
    for page in ("README.md", "docs/pytorch.md"):
        ((_, single),) = [one for one in blocks(page) if one[0]]
        found[Path(page).stem.lower()] = (several, single)
    for name, needed in NEEDS.items():
        ((_, both),) = blocks(f"docs/{name}.md")
        if importlib.util.find_spec(needed):
            found[name] = (both, both)
    return found


PAGES = pages()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    live = LiveMaster(tmp_path_factory.mktemp("master"))
    yield live
    live.close()


def run(page: str, text: str, folder: Path, world: int, crash: int, master: LiveMaster) -> list[dict[str, Any]]:
    """What each rank of one life of a page's loop reported."""
    script = folder.parent / f"{folder.name}-{world}.py"
    script.write_text(text)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(folder), str(crash), str(script)]
    warm = ["torch._dynamo", "tests.contracts.page_script", "dlrover_hooks.integrations.torch"]
    warm += [f"dlrover_hooks.integrations.{page}"] if page in NEEDS else []
    return ranks.run(command, world, master, timeout_s=200, warm=warm)


def samples(life: list[dict[str, Any]]) -> dict[int, set[int]]:
    """Of each step that the life has made, over all ranks."""
    return {int(step): set().union(*(rank["steps"][step] for rank in life)) for step in life[0]["steps"]}


@pytest.mark.parametrize("page", [page if page == "readme" else deep(page) for page in PAGES])
def test_a_loop_of_the_pages_makes_the_same_steps_at_any_world_size(
    page: str, tmp_path: Path, master: LiveMaster
) -> None:
    several, single = PAGES[page]
    with ranks.named_job(f"page-{page}") as job:
        whole = run(page, several, tmp_path / f"{job}-whole", 2, 0, master)
        scripts = {1: single}
        lives = [run(page, scripts.get(world, several), tmp_path / job, world, crash, master) for world, crash in LIVES]
    wanted, made = samples(whole), dict[int, set[int]]()
    for (_, crash), life in zip(LIVES, lives, strict=True):
        assert all(rank["steps"].keys() == life[0]["steps"].keys() for rank in life)
        here = samples(life)
        assert min(here) > 1 or life is lives[0], "it began at step 0"
        assert max(here) == (crash - 1 if crash else max(wanted))
        made = {step: ids for step, ids in made.items() if step < min(here)} | here
    assert made == wanted
    assert len({tuple(rank["weights"]) for rank in lives[-1]}) == 1
    differences = zip(whole[0]["weights"], lives[-1][0]["weights"], strict=True)
    assert max(abs(one - other) for one, other in differences) < 1e-12
