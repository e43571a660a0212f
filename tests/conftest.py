"""Fixtures of several rooms."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import deep, keepers, warm
from tests.e2e.master_process import LiveMaster
from tests.kubernetes import control_plane
from tests.ranks import ROOT, named_job
from tests.requirements import Recorder

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras' own default is not installed here
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own, 15, leaves a worker 3 % of a core beside a busy process
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # workers that no test uses: 5 s of CPU time
settings.register_profile("slow cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow cores")
SUITES = {
    name.lower(): [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    for name, patterns in re.findall("^(KUBERNETES|RAY) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
}
"""Where tests may have this marker: `make test-kubernetes` and `make test-ray` import no other files."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def pytest_addoption(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("chaos", "rounds of tests/chaos")
    chaos.addoption("--chaos-rounds", type=int, default=200, metavar="N", help="with torch-free trainers (200)")
    chaos.addoption("--chaos-real-rounds", type=int, default=10, metavar="N", help="with real ones (10)")
    chaos.addoption("--chaos-run-rounds", type=int, default=1, metavar="N", help="each kind of fault so often (1)")
    chaos.addoption("--chaos-seed", type=int, metavar="S", help="of the first batch; the seed is printed")
    parser.addoption(
        "--deep-part", type=deep.part, metavar="I/N", help="of the deep tests only part I of N, such as 1/2"
    )
    parser.addoption("--requirements", type=Path, metavar="FILE", help="add to FILE how tests with requirements ended")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers none is left with a long one when the others are done.

    With --deep-part all deep tests of the other parts are deselected.

    Raises pytest.UsageError for a test of a suite in a file that `make` does not collect for it.
    """
    for item in items:
        for suite, places in SUITES.items():
            if item.get_closest_marker(suite) is not None and not any(map(item.path.is_relative_to, places)):
                raise pytest.UsageError(f"{item.nodeid} is not in a file of {suite.upper()} in the Makefile")
    if (part := config.option.deep_part) is not None:
        here = {path for path in {one.path for one in items} if part.has(path.relative_to(ROOT).as_posix())}
        others = [one for one in items if one.get_closest_marker("deep") is not None and one.path not in here]
        config.hook.pytest_deselected(items=others)
        items[:] = [one for one in items if one not in others]
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A launcher tells its children things by `os.environ`; one that runs inside a test must not tell the next test.

    Nor must a test that plays another rank: Lightning's loggers write where the rank is 0, and a process group puts its
    rank before what is raised. A Trainer that has failed leaves the signal handlers that it found, which had ended; one
    for several ranks leaves torch with one thread. What torch draws does not hang on what ran before, as
    pytest-randomly sees to for `random` and NumPy.
    """
    before, excepthook = dict(os.environ), sys.excepthook
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    threads = torch.get_num_threads() if torch is not None else 0
    yield
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    sys.excepthook = excepthook
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(before)
    for name in ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"):
        if (module := sys.modules.get(name)) is not None:
            module.rank_zero_only.rank = 0


@pytest.fixture(scope="session", autouse=True)
def no_server_left() -> Iterator[None]:
    """See `tests.warm` and `tests.keepers`."""
    with keepers.serving():
        yield
        warm.close()
        control_plane.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[str]:
    """See `named_job`."""
    with named_job(request.path.stem.removeprefix("test_")) as name:
        yield name


@pytest.fixture
def live_master(tmp_path: Path) -> Iterator[LiveMaster]:
    """A real master process with a token and a journal; `.url .token .pid .kill() .restart()`."""
    master = LiveMaster(tmp_path)
    yield master
    master.close()


def pytest_configure(config: pytest.Config) -> None:
    """A shell that runs the tests in the background may ignore Ctrl-C, and what they start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (file := config.getoption("--requirements")) is not None:
        config.pluginmanager.register(Recorder(config.rootpath / file))
