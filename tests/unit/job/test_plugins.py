"""Plug-ins of jobs of several roles: which are used, and what a call of one comes to. Each is really installed."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.job import DLJobBuilder, EndedWorker
from dlrover_hooks.job.plugins import FUNCTIONS, JobPlugins, PluginFailure, select
from dlrover_hooks.protocol import FailurePolicy, RoleEvent, WorkerCause

SPEC = DLJobBuilder("job").role("main").run("os:getpid").build()
END = EndedWorker(0, 1, WorkerCause.KILLED, "exit code -9")
EVENT = RoleEvent(0.0, "lost", "main", 0, 1)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a plug-in: its name, and the text of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(name: str, text: str, *, target: str = "") -> None:
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[dlrover_hooks.plugins]\n{name} = {target or f'plug_{name}'}\n")
        (tmp_path / f"plug_{name}.py").write_text(text)

    yield installed
    for name in [one for one in sys.modules if one.startswith("plug_")]:
        del sys.modules[name]


class Loaded:
    """`JobPlugins`, and how they failed."""

    def __init__(self, *names: str, call_s: float = 60.0) -> None:
        self.failures: list[PluginFailure] = []
        self.plugins = JobPlugins("job", names, self.failures.append, call_s=call_s)

    def only_failure(self) -> PluginFailure:
        (found,) = self.failures
        return found


def test_the_functions_are_those_of_the_protocol() -> None:
    assert FUNCTIONS == ("prepare_job", "worker_env", "on_worker_ended", "on_event", "relaunch_nodes")


def test_all_that_are_installed_are_used_unless_the_setting_says_otherwise(install: Install) -> None:
    for name in ("c", "a", "b"):
        install(name, "")
    assert select(None) == select("") == ["a", "b", "c"]
    assert select("b, a") == ["a", "b"]
    assert select("-b") == select("-b,-x") == ["a", "c"]
    assert select("a,b,-b") == ["a"]
    assert select("none") == []
    with pytest.raises(UsageError, match=r"(?s)'x', 'y'.*installed are a, b, c"):
        select("y,a,x")


def test_a_plug_in_may_be_an_object_and_leave_functions_out(install: Install) -> None:
    install("one", "class Plugin:\n  def worker_env(self, spec, role, rank): return {'A': role}\nmade = Plugin()",
            target="plug_one:made")  # fmt: skip
    loaded = Loaded("one")
    assert loaded.plugins.listed()[0].functions == ("worker_env",)
    assert loaded.plugins.environment(SPEC, "main", 0) == {"A": "main"}
    assert loaded.plugins.prepared(SPEC) is SPEC
    assert loaded.plugins.policy("main", END) is None
    assert loaded.plugins.relaunched(("n0",)) == ()
    loaded.plugins.tell(EVENT)
    assert loaded.failures == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import plug_that_is_missing", "No module named 'plug_that_is_missing'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def on_workers_ended(job, role, end): pass", "has none of the functions"),
        ("def worker_env(spec, role): return {}", r"worker_env must take \(spec, role, rank\)"),
        ("worker_env = {}", "worker_env is not a function"),
    ],
)
def test_one_that_cannot_be_used_is_listed_without_functions(install: Install, text: str, problem: str) -> None:
    install("bad", text)
    install("good", "def worker_env(spec, role, rank): return {'A': str(rank)}")
    loaded = Loaded("bad", "good")
    failure = loaded.only_failure()
    assert (failure.plugin, failure.function) == ("bad", "import")
    assert re.search(problem, failure.detail), failure.detail
    assert [(one.name, one.functions) for one in loaded.plugins.listed()] == [("bad", ()), ("good", ("worker_env",))]
    assert loaded.plugins.environment(SPEC, "main", 2) == {"A": "2"}


def test_one_that_is_not_installed_in_this_process_is_a_failure() -> None:
    loaded = Loaded("elsewhere")
    assert "'elsewhere' is not installed" in loaded.only_failure().detail


def test_they_are_called_in_the_order_of_their_names(install: Install) -> None:
    prepare = "import msgspec\ndef prepare_job(spec): return msgspec.structs.replace(spec, state=spec.state + {!r})\n"
    install("a", prepare.format("a") + "def worker_env(spec, role, rank): return {'X': 'a', 'A': 'a'}")
    install("b", prepare.format("b") + "def worker_env(spec, role, rank): return {'X': 'b', 'B': 'b'}")
    loaded = Loaded("a", "b")
    assert loaded.plugins.prepared(SPEC).state == "ab"
    assert loaded.plugins.environment(SPEC, "main", 0) == {"X": "b", "A": "a", "B": "b"}
    assert loaded.failures == []


def test_the_first_policy_counts(install: Install) -> None:
    answer = "from dlrover_hooks.protocol import FailurePolicy\ndef on_worker_ended(job, role, end): return {}"
    install("a", answer.format("None"))
    install("b", answer.format("FailurePolicy.FAIL"))
    install("c", answer.format("FailurePolicy.JOB"))
    assert Loaded("a", "b", "c").plugins.policy("main", END) is FailurePolicy.FAIL
    assert Loaded("a", "c").plugins.policy("main", END) is FailurePolicy.JOB
    assert Loaded("a").plugins.policy("main", END) is None


def test_nodes_that_one_has_relaunched_are_not_given_to_the_next(install: Install) -> None:
    install("a", "def relaunch_nodes(job, nodes): return ['n1', 'another']")
    install("b", "def relaunch_nodes(job, nodes):\n  assert nodes == ('n0', 'n2')\n  return nodes[:1]")
    loaded = Loaded("a", "b")
    assert loaded.plugins.relaunched(("n0", "n1", "n2")) == ("n0", "n1")
    assert loaded.failures == []


@pytest.mark.parametrize(
    ("text", "call", "problem"),
    [
        ("def prepare_job(spec): return spec.name", "prepare_job", "not a JobSpec"),
        ("import msgspec\ndef prepare_job(spec): return msgspec.structs.replace(spec, name='x')", "prepare_job",
         "with the name 'job'"),
        ("import msgspec\ndef prepare_job(spec): return msgspec.structs.replace(spec, roles=())", "prepare_job",
         "it has no role"),
        ("def worker_env(spec, role, rank): return {'A': 1}", "worker_env", "Expected `str`"),
        ("def worker_env(spec, role, rank): return None", "worker_env", "TypeError"),
        ("def worker_env(spec, role, rank): return {'A': 'x\\0y'}", "worker_env", "the value of 'A' contains NUL"),
        ("def worker_env(spec, role, rank): return {'A=B': 'x'}", "worker_env", "'A=B' is no name of a variable"),
        ("def worker_env(spec, role, rank): return {'': 'x'}", "worker_env", "'' is no name of a variable"),
        ("def worker_env(spec, role, rank): return {'A': 'x\\udcff'}", "worker_env", "lone surrogate"),
        ("import msgspec\ndef prepare_job(spec): return msgspec.structs.replace(spec, env={'X': 1})", "prepare_job",
         "env['X']: Expected `str`, got `int`"),
        ("def prepare_job(spec):\n  spec.env['X'] = 1\n  return spec", "prepare_job", "env['X']"),
        ("import msgspec\ndef prepare_job(spec):\n"
         "  roles = [msgspec.structs.replace(one, worker_restarts=1.5) for one in spec.roles]\n"
         "  return msgspec.structs.replace(spec, roles=roles)", "prepare_job", "role 'main': worker_restarts"),
        ("class Odd(Exception):\n  def __str__(self): raise RuntimeError\n"
         "def worker_env(spec, role, rank): raise Odd", "worker_env", "Odd: its text could not be made: RuntimeError"),
        ("class Odd(Exception):\n  def __str__(self): raise KeyboardInterrupt\n"
         "def on_worker_ended(job, role, end): raise Odd", "on_worker_ended", "Odd: its text could not be made"),
        ("def on_worker_ended(job, role, end): raise ValueError('x\\udcff')", "on_worker_ended",
         "ValueError: x\\udcff"),
        ("from dlrover_hooks.errors import UsageError\ndef on_event(job, event): raise UsageError('x\\udcff')",
         "on_event", "x\\udcff"),
        ("def on_worker_ended(job, role, end): raise KeyboardInterrupt", "on_worker_ended", "KeyboardInterrupt"),
        ("def on_event(job, event): raise SystemExit(3)", "on_event", "SystemExit: 3"),
        ("def relaunch_nodes(job, nodes): raise GeneratorExit", "relaunch_nodes", "GeneratorExit"),
        ("def on_worker_ended(job, role, end): return 'job'", "on_worker_ended", "not a FailurePolicy"),
        ("def on_event(job, event): 1 / 0", "on_event", "ZeroDivisionError"),
        ("def relaunch_nodes(job, nodes): return 3", "relaunch_nodes", "TypeError"),
    ],
)  # fmt: skip
def test_a_call_that_fails_changes_nothing(install: Install, text: str, call: str, problem: str) -> None:
    install("bad", text)
    loaded = Loaded("bad")
    assert loaded.plugins.prepared(SPEC) is SPEC
    assert loaded.plugins.environment(SPEC, "main", 0) == {}
    assert loaded.plugins.policy("main", END) is None
    assert loaded.plugins.relaunched(("n0",)) == ()
    loaded.plugins.tell(EVENT)
    failure = loaded.only_failure()
    assert (failure.plugin, failure.function) == ("bad", call)
    assert problem in failure.detail
    assert failure.detail.encode()
    assert SPEC.env == {}


def test_a_long_text_of_a_failure_is_cut(install: Install) -> None:
    install("bad", "def on_event(job, event): raise ValueError('x' * 10_000_000)")
    loaded = Loaded("bad")
    loaded.plugins.tell(EVENT)
    assert len(loaded.only_failure().detail) == 4000


def test_a_job_that_one_prepared_has_the_types_of_its_fields(install: Install) -> None:
    install("one", "import msgspec\ndef prepare_job(spec):\n  spec.env['X'] = '1'\n"
                   "  return msgspec.structs.replace(spec, roles=list(spec.roles), silent_s=20)")  # fmt: skip
    loaded = Loaded("one")
    found = loaded.plugins.prepared(SPEC)
    assert (found.roles, found.silent_s, type(found.silent_s), found.env) == (SPEC.roles, 20.0, float, {"X": "1"})
    assert SPEC.env == {}
    assert loaded.failures == []


def test_one_that_hangs_is_left_alone_from_then_on(install: Install) -> None:
    install("bad", "import threading\nlet_go = threading.Event()\nasked = []\n"
                   "def on_event(job, event):\n  asked.append(event)\n  let_go.wait(60)")  # fmt: skip
    importlib.import_module("plug_bad")  # on a busy machine that may take longer than the timeout
    loaded = Loaded("bad", call_s=0.5)
    loaded.plugins.tell(EVENT)
    loaded.plugins.tell(EVENT)
    let_go: threading.Event = sys.modules["plug_bad"].let_go
    let_go.set()
    assert "did not return within 0.5 s" in loaded.only_failure().detail
    assert sys.modules["plug_bad"].asked == [EVENT]
    assert not loaded.plugins.have("on_event")


def test_the_plug_in_of_the_page_works(install: Install) -> None:
    page = (Path(__file__).parents[3] / "docs/concepts/roles.md").read_text()
    (text,) = re.findall(r"```python\n# our_site/jobs.py\n(.*?)```", page, re.DOTALL)
    install("site", text + "\n\ndef reboot(node):\n    return node == 'n1'\n")
    loaded = Loaded("site")
    assert loaded.plugins.listed()[0].functions == FUNCTIONS
    assert loaded.plugins.prepared(SPEC).env == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert loaded.plugins.environment(SPEC, "main", 2) == {"LOG_FILE": "/var/log/jobs/job-main-2"}
    assert loaded.plugins.policy("main", END) is None
    bad = END._replace(detail="CUDA error: an illegal memory access was encountered")
    assert loaded.plugins.policy("main", bad) is FailurePolicy.FAIL
    assert loaded.plugins.relaunched(("n0", "n1")) == ("n1",)
    loaded.plugins.tell(EVENT)
    assert loaded.failures == []
