"""`dlrover-hooks roles`: its tables, and what it refuses. tests/contracts/test_job_backends.py has the real jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dlrover_hooks import protocol as p
from dlrover_hooks.cli.main import main
from dlrover_hooks.cli.role_tables import tables
from dlrover_hooks.launcher.running_jobs import listed
from tests.e2e.master_process import LiveMaster

ROOT = Path(__file__).parents[3]
RUNNING, INITIAL = p.WorkerState.RUNNING, p.WorkerState.INITIAL
STATE = p.Roles(
    number=9,
    phase=p.JobPhase.FAILED,
    reason="role rollout: more than 10 workers failed\nTraceback",
    workers=(
        p.RoleWorker("actor", 0, 1, RUNNING, node="node-a", pid=4711),
        p.RoleWorker("rollout", 11, 3, INITIAL, reason="killed: signal 9", waits="2 GPU\nthe cluster has 1"),
        p.RoleWorker("rollout", 12, 2, RUNNING, node="node-[b]", pid=4712, reason="\nraised: \x1b[31mno memory\nmore"),
    ),
    budgets=(
        p.RestartCount("worker", "rollout", 2, 10),
        p.RestartCount("role", "rollout", 0, p.UNLIMITED),
        p.RestartCount("job", "", 0, 3),
        p.RestartCount("preemption", "", 4, p.UNLIMITED),
        p.RestartCount("node", "node-a", 4, 3),
    ),
    avoid=("node-a",),
    events=(
        p.RoleEvent(0.0, "started", text="1 actor, 20 rollout"),
        p.RoleEvent(3.25, "lost", "rollout", 11, 1, "killed", "signal 9\nmore"),
        p.RoleEvent(4.0, "waits", "rollout", 11, 3, detail="2 GPU"),
    ),
    plugins=(p.RolePlugin("site", ("on_event",), 2, "on_event: ValueError"), p.RolePlugin("quiet")),
)


def lines(state: p.Roles, events: int = 10, width: int = 100) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(tables("ppo", state, events))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_every_part_of_the_state_has_its_table() -> None:
    assert lines(STATE) == [
        "job ppo: failed: role rollout: more than 10 workers failed",
        "too many workers failed on: node-a",
        "",
        "role     rank  life  state    node       pid  why it waits, or was started again",
        "actor       0     1  running  node-a    4711",
        "rollout    11     3  initial                  waits: 2 GPU",
        "rollout    12     2  running  node-[b]  4712  raised: [31mno memory",
        "",
        "budget                  used  limit",
        "workers of rollout         2     10",
        "restarts of the job        0      3",
        "preemptions                4   none",
        "workers on node node-a     4      3",
        "",
        "plug-in  failures  last failure",
        "site            2  on_event: ValueError",
        "",
        "seconds  event    role     rank  life  detail",
        "    0.0  started                       1 actor, 20 rollout",
        "    3.2  lost     rollout    11     1  killed: signal 9",
        "    4.0  waits    rollout    11     3  2 GPU",
    ]


@pytest.mark.parametrize(("most", "kinds"), [(0, []), (1, ["waits"]), (2, ["lost", "waits"]), (99, 3)])
def test_the_newest_events_are_shown(most: int, kinds: list[str] | int) -> None:
    shown = lines(msgspec.structs.replace(STATE, workers=(), budgets=(), plugins=(), avoid=()), most)[1:]
    found = [line.split()[1] for line in shown[2:]]
    assert (len(found) if isinstance(kinds, int) else found) == kinds


def test_a_long_reason_is_wrapped_and_a_long_event_is_cut_off() -> None:
    long = f"raised: {'long ' * 30}"
    worker = p.RoleWorker("rollout", 0, 2, RUNNING, node="node-a", pid=1, reason=long)
    event = p.RoleEvent(1.0, "lost", "rollout", 0, 1, detail=long)
    shown = lines(p.Roles(phase=p.JobPhase.RUNNING, workers=(worker,), events=(event,)))
    assert max(map(len, shown)) <= 100
    assert shown[3].startswith("rollout     0     2  running  node-a    1  raised: long long")
    assert " ".join(shown[3 : shown.index("", 3)]).count("long") == 30
    assert shown[-1].startswith("    1.0  lost   rollout     0     1  raised: long long")
    assert shown[-1].endswith("…")


def called(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other job of this machine is seen."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DLROVER_HOOKS_RUNTIME_DIR", str(folder))


def test_the_only_job_of_roles_needs_no_name(live_master: LiveMaster) -> None:
    role = p.RoleRules("server", 2)
    live_master.client("user").call(p.StartRoles("ppo", "user", "first", (role,)))
    with (
        listed("mine", live_master.url, live_master.token),
        listed("ppo", live_master.url, live_master.token, roles=True),
    ):
        assert called("roles").output.startswith("job ppo: running\n\nrole    rank  life  state")
        found = msgspec.json.decode(called("roles", "--json", "--restart", "server").output, type=p.Roles)
        assert [(one.role, one.life) for one in found.workers] == [("server", 2), ("server", 2)]
        assert "no job of several roles 'other' runs here (running on this machine: mine, ppo)" in (
            called("roles", "--job", "other").output
        )
        unknown = called("roles", "--restart", "client")
        assert (unknown.exit_code, "has no role 'client': it has ['server']" in unknown.output) == (1, True)
        with listed("sft", live_master.url, live_master.token, roles=True):
            several = called("roles")
            assert "which job? (running on this machine: ppo, sft)" in several.output
            assert several.exit_code == 78
    where = ("--job", "ppo", "--master", live_master.url, "--token", str(live_master.token))
    assert called("roles", *where, "--stop").output.startswith("job ppo: stopped: a user stopped it\n")
    refused = called("roles", *where, "--restart", "server")
    assert (refused.exit_code, "is over: stopped" in refused.output) == (1, True)


@pytest.mark.parametrize("command", [("vitals",), ("plans",), ("scale", "--job")])
def test_other_commands_say_that_a_job_has_roles(command: tuple[str, ...]) -> None:
    with listed("ppo", "http://127.0.0.1:1", None, roles=True):
        words = [command[0]] if "--job" in command else list(command)
        for called_with in (words, [*command, "ppo"]):
            refused = called(*called_with)
            assert refused.exit_code == 78
            assert "job ppo has several roles\nHINT: use dlrover-hooks roles --job ppo\n" in refused.output
        assert "'other' runs here (running on this machine: ppo)" in called(*command, "other").output
    with listed("mine", "http://127.0.0.1:1", None):
        assert "job mine has no roles\nHINT: use dlrover-hooks vitals mine\n" in called("roles").output


def test_a_master_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrover_hooks.cli.roles._PATIENCE_S", 0.2)
    with listed("ppo", "http://127.0.0.1:1", None, roles=True):
        away = called("roles")
    assert away.exit_code == 1
    assert "The master at http://127.0.0.1:1 gave no answer to ShowRoles in time" in away.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--restart", "server", "--stop"], "--restart and --stop do not go together"),
        (["--master", "http://127.0.0.1:1"], "--master needs a job"),
        (["--events", "-1"], "Invalid value for '--events'"),
    ],
)
def test_options_that_are_refused(words: list[str], said: str) -> None:
    refused = called("roles", *words)
    assert refused.exit_code == 78
    assert said in refused.output


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("local", 78, "'local' is no address of a Ray cluster"),
        ("127.0.0.1:1", 1, "no Ray cluster answers at '127.0.0.1:1': [Errno 111] Connection refused"),
    ],
)
def test_addresses_of_no_cluster(address: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--ray-address", address], ["--ray-address", "auto"]):
        monkeypatch.setenv("RAY_ADDRESS", address)
        refused = called("roles", "--job", "ppo", *words)
        assert (refused.exit_code, said in refused.output) == (code, True), refused.output


def test_without_ray_the_extra_is_named() -> None:
    code = "import sys; sys.modules['ray'] = None; from dlrover_hooks.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "roles", "--job", "ppo", "--ray-address", "auto"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 78
    said = "dlrover-hooks roles: Ray is not installed\nHINT: pip install 'dlrover-hooks[ray]'\n"
    assert done.stderr == said
