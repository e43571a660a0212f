"""Warm standbys with real processes: as a fresh process is, the launcher's own children, and gone with it.

Each test is a small launcher of its own: a process that keeps standbys adopts the orphans below it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from dlrover_hooks.worker import preimport_list
from tests.e2e.launched import REPOSITORY, all_gone
from tests.e2e.test_bootstrap import SCRIPTS
from tests.waiting import until

LAUNCHER = """
import json, logging, os, select, signal, subprocess, sys, time
import psutil
from dlrover_hooks.launcher.warm.standby_pool import Standbys
from tests import waiting

logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
ENV = dict(os.environ)

def until(condition, standbys):
    waiting.until(condition, "the standbys", 90.0, between=standbys.refill)

def warm(count=1):
    standbys = Standbys(count, ENV["DLROVER_HOOKS_PRELOAD"], ENV)
    until(lambda: standbys.ready == count, standbys)
    return standbys

def say(**what):
    print(json.dumps(what), flush=True)
"""


class Launcher:
    """Python code that keeps standbys, as a process; `said` are its lines."""

    def __init__(self, folder: Path, code: str, wanted: preimport_list.Imported, **environment: str) -> None:
        file = folder / "preload"
        file.write_bytes(msgspec.json.encode(wanted))
        env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", LAUNCHER + textwrap.dedent(code)],
            env=env | {"DLROVER_HOOKS_PRELOAD": str(file)}, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> dict:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, self.process.communicate(timeout=20)
        return json.loads(text)

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=100)
        return self.process.returncode, output, errors


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(code: str, *modules: str, **environment: str) -> Launcher:
        """`modules`: what a worker says that it has imported."""
        packages = {name.partition(".")[0] for name in modules}
        origins = {name: origin for name in packages if (origin := preimport_list.origin(name)) is not None}
        local = {name: str(tmp_path / f"{name}.py") for name in packages - set(origins)}
        local |= {name: str(tmp_path / name / "__init__.py") for name in local if (tmp_path / name).is_dir()}
        wanted = preimport_list.Imported(origins | local, list(modules))
        started.append(Launcher(tmp_path, code, wanted, **environment))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        with one.process:  # closes the pipes, which somebody may still hold
            pass


SEEN = """
import json, os, random, sys
import multiprocessing.process
import numpy
print(json.dumps({
    "argv": sys.argv, "env": {k: v for k, v in os.environ.items() if k not in ("LC_CTYPE", "NAME")},
    "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "ours": os.getppid() == int(sys.argv[2]),
    "threads": len(os.listdir("/proc/self/task")), "umask": os.umask(0o22), "path": sys.path[0],
    "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) < 3),
    "count": len(os.listdir("/proc/self/fd")), "ahead": sys.modules["numpy"].__name__,
    "random": random.random(), "numpy": float(numpy.random.random()),
    "key": list(multiprocessing.process.current_process().authkey)}))
"""


@pytest.mark.deep
def test_its_last_words_are_heard(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """What ends the worker that it became stands on the launcher's last screen, too."""
    script = "from dlrover_hooks import config\nconfig.tell_launcher()\nraise ValueError('in a seat')\n"
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "einops.py").write_text("")
    code = """
        from dlrover_hooks.launcher.processes.worker_errors import FinalErrors
        standbys, words = warm(), FinalErrors()
        child = standbys.take("one", ["--", "script.py"], ENV | words.environment, error_pipe=words.pass_fds)
        words.started()
        code, said = child.wait(20), words.hear()
        say(code=code, error=said.error, where=os.path.basename(said.where))
        standbys.close()
        """
    started = launcher(code, "einops")
    assert started.line() == {"code": 1, "error": "ValueError: in a seat", "where": "script.py:3, <module>"}
    assert started.end()[0] == 0


def test_a_standby_in_a_seat_is_as_a_fresh_process(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Environment, arguments, folder, files, session, threads as cold; what a fresh process draws is its own."""
    (tmp_path / "script.py").write_text(SEEN)
    (tmp_path / "einops.py").write_text("import multiprocessing.process\n")
    code = """
        standbys = warm(2)
        command = ["python", "--", "script.py", "a", str(os.getpid())]
        for name in ("one", "two"):
            env = {key: value for key, value in ENV.items() if key != "SHELL"} | {"RANK": "3", "NAME": name}
            child = standbys.take(name, command, env)
            assert (child.name, child.wait(20), child.exit_code(), child.reap()) == (name, 0, 0, 0)
        assert standbys.take("three", command, ENV) is None, "none is ready"
        subprocess.run([sys.executable, "-u", *command[2:]], env=env, stdin=subprocess.DEVNULL,
                       start_new_session=True, check=True)
        standbys.close()
        assert psutil.Process().children() == []
    """
    code, output, errors = launcher(code, "numpy", "numpy.random", "einops", SHELL="x").end()
    assert code == 0, errors
    one, two, cold = (json.loads(line) for line in output.splitlines())
    for drawn in ("random", "numpy", "key"):
        assert len({str(seen.pop(drawn)) for seen in (one, two, cold)}) == 3, drawn
    assert one == two == cold
    assert (cold["leads"], cold["ours"], cold["env"]["RANK"], cold["threads"]) == (True, True, "3", 1)


def test_it_ends_as_a_fresh_process_ends(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Tracebacks, exit codes and signals, by the same calls as other children of the launcher."""
    for name, script in SCRIPTS.items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(textwrap.dedent(script))
    names = [name.replace(" ", "_") for name in SCRIPTS if name != "a hook that fails"]
    (tmp_path / "stays.py").write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "os.write(1, b'x')\nsignal.pause()\n"
    )
    code = f"""
        standbys = warm(3)
        for name in {names}:
            until(lambda: standbys.ready, standbys)
            with open(f"{{name}}.warm", "wb") as file:
                child = standbys.take(name, ["--", f"{{name}}.py"], ENV, stdout=file.fileno(), stderr=file.fileno())
            with open(f"{{name}}.cold", "wb") as file:
                cold = subprocess.run([sys.executable, "-u", f"{{name}}.py"], stdout=file, stderr=file)
            say(name=name, warm=child.wait(20), cold=cold.returncode)
            child.reap()
        for end, expected in ((lambda child: child.end(grace_s=20), 3), (lambda child: child.end(), -9)):
            until(lambda: standbys.ready, standbys)
            heard, said = os.pipe()
            child = standbys.take("stays", ["--", "stays.py"], ENV, stdout=said)
            assert os.read(heard, 1) == b"x"
            assert child.wait(0.01) is None
            assert not select.select([child], [], [], 0)[0]
            assert end(child) == expected
        standbys.close()
    """
    started = launcher(code)
    ends = [started.line() for _ in names]
    code, _, errors = started.end()
    assert code == 0, errors
    for end in ends:
        assert end["warm"] == end["cold"], end
        warm, cold = ((tmp_path / f"{end['name']}.{way}").read_text() for way in ("warm", "cold"))
        assert warm == cold
    assert {end["cold"] for end in ends} == {0, 1, 7, -2, -15}


def test_the_server_may_die_and_the_workers_run_on(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """kill -9 of the server: a worker with a seat or waiting for one lives on; a new server makes the next ones."""
    (tmp_path / "script.py").write_text("import sys; sys.stdin = open(sys.argv[1]); sys.stdin.read(); sys.exit(5)")
    code = """
        os.mkfifo("wait")
        standbys = warm(2)
        first = standbys.take("first", ["--", "script.py", "wait"], ENV)
        old = standbys._server
        os.kill(old.pid, signal.SIGKILL)
        select.select([old], [], [], 20)
        assert standbys.ready == 1
        second = standbys.take("second", ["--", "script.py", "wait"], ENV)
        until(lambda: standbys.ready == 2, standbys)
        assert first.exit_code() is None
        open("wait", "w").close()
        say(codes=[first.wait(20), second.wait(20)])
        standbys.close()
        first.reap(), second.reap()
        assert psutil.Process().children() == []
    """
    code, output, errors = launcher(code).end()
    assert code == 0, errors
    assert json.loads(output)["codes"] == [5, 5]
    assert "the standby server died (SIGKILL); restarting it" in errors


@pytest.mark.parametrize("when", ["ready", "starting"])
def test_nothing_outlives_a_killed_launcher(launcher: Callable[..., Launcher], tmp_path: Path, when: str) -> None:
    """kill -9 of the launcher: server, idle standbys and the one in a seat end with it, and so do half-made ones."""
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    code = """
        standbys = warm(2)
        child = standbys.take("worker", ["--", "script.py"], ENV)
        if sys.stdin.readline() == "ready\\n":
            until(lambda: standbys.ready == 2, standbys)
        else:
            for _ in range(20):
                standbys._line.send(b"fork")
        say(pids=[one.pid for one in psutil.Process().children(recursive=True)])
        signal.pause()
    """
    started = launcher(code)
    assert started.process.stdin is not None
    started.process.stdin.write(f"{when}\n")
    started.process.stdin.flush()
    pids = started.line()["pids"]
    assert len(pids) >= (4 if when == "ready" else 3)
    started.process.kill()
    started.process.wait()
    assert all_gone(pids)
    until(lambda: not of_folder(tmp_path), "the end of all processes of the folder")


def of_folder(folder: Path) -> list[list[str]]:
    """Command lines of processes that run for it."""
    lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(folder) in word for word in line)]


THREADS = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.deep
def test_a_package_that_cannot_be_forked_is_left_out_by_name(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """A thread that an import starts does not exist in a fork: that package is imported by the script instead."""
    (tmp_path / "timm.py").write_text(THREADS)
    (tmp_path / "einops.py").write_text("")
    (tmp_path / "peft.py").write_text("raise OSError('not on this machine')\n")
    (tmp_path / "script.py").write_text(
        "import sys, os; print([name in sys.modules for name in ('timm', 'einops', 'peft')]); import timm;"
        " print(len(os.listdir('/proc/self/task')))"
    )
    code = """
        standbys = warm()
        child = standbys.take("worker", ["--", "script.py"], ENV)
        say(code=child.wait(20))
        standbys.close()
    """
    code, output, errors = launcher(code, "timm", "peft", "einops").end()
    assert code == 0, errors
    assert output.splitlines()[:2] == ["[False, True, False]", "2"]
    assert "timm is left out of the standbys' imports: it starts a thread when it is imported" in errors


@pytest.mark.deep
def test_of_a_package_only_the_part_that_starts_a_thread_is_left_out(
    launcher: Callable[..., Launcher], tmp_path: Path
) -> None:
    """Else `torch._inductor` would take all of torch with it."""
    (tmp_path / "einops").mkdir()
    for name, text in {"__init__": "", "calm": "", "noisy": THREADS}.items():
        (tmp_path / "einops" / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text("import sys; print([f'einops.{x}' in sys.modules for x in ('noisy', 'calm')])")
    code = """
        standbys = warm()
        assert standbys.take("worker", ["--", "script.py"], ENV).wait(20) == 0
        standbys.close()
    """
    code, output, errors = launcher(code, "einops", "einops.noisy", "einops.calm").end()
    assert code == 0, errors
    assert output == "[False, True]\n"
    assert "einops.noisy is left out of the standbys' imports" in errors


@pytest.mark.deep
def test_orphans_of_a_killed_worker_are_buried(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """The process that keeps standbys is the parent of what workers leave behind: no zombie stays, none is stolen."""
    (tmp_path / "script.py").write_text(
        "import os, signal\nchild = os.fork()\nif child: os.write(1, b'%d' % child)\nsignal.pause()\n"
    )
    code = """
        standbys = warm()
        heard, said = os.pipe()
        child = standbys.take("worker", ["--", "script.py"], ENV, stdout=said)
        orphan = psutil.Process(int(os.read(heard, 20)))
        os.kill(child.pid, signal.SIGKILL)
        select.select([child], [], [], 20)
        assert orphan.ppid() == os.getpid()
        orphan.kill()
        ours = subprocess.Popen(["false"])
        until(lambda: not psutil.pid_exists(orphan.pid), standbys)
        assert (ours.wait(), child.reap()) == (1, -9)
        standbys.close()
    """
    code, _, errors = launcher(code).end()
    assert code == 0, errors


@pytest.mark.deep
def test_a_standby_that_dies_before_it_is_heard_is_replaced(launcher: Callable[..., Launcher]) -> None:
    """It has said its process id, died, and was buried as an orphan: that number is nobody's now, or another's."""
    code = """
        logging.disable(logging.INFO)  # the pool's cost is logged only if `refill` sees that it is complete
        standbys = Standbys(1, ENV["DLROVER_HOOKS_PRELOAD"], ENV)
        standbys.refill()
        while not standbys._coming:
            assert select.select([standbys._line], [], [], 60)[0]
            standbys._hear_server()
        line = standbys._coming[0]
        pid = int(line.recv(32, socket.MSG_PEEK))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED)
        until(lambda: standbys.ready == 1, standbys)
        say(another=standbys._ready[0][0].pid != pid)
        standbys.close()
        assert psutil.Process().children() == []
    """
    started = launcher("import socket\n" + textwrap.dedent(code))
    assert started.line() == {"another": True}
    code, _, errors = started.end()
    assert (code, errors) == (0, "")


def test_what_ends_first_when_memory_runs_out(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Server and idle standbys offer themselves to the kernel; one that has a seat has the score of any worker."""
    (tmp_path / "script.py").write_text("print(open('/proc/self/oom_score_adj').read(), flush=True)")
    code = """
        def score(pid):
            return int(open(f"/proc/{pid}/oom_score_adj").read())
        own = score("self")
        standbys = warm()
        say(idle=[score(child.pid) for child in psutil.Process().children()])
        assert standbys.take("worker", ["--", "script.py"], ENV).wait(20) == 0
        say(own=own)
        standbys.close()
    """
    code, output, errors = launcher(code).end()
    assert code == 0, errors
    idle, worker, own = (json.loads(line) for line in output.split("\n") if line)
    assert idle == {"idle": [1000, 1000]}
    assert own == {"own": worker}


@pytest.mark.deep
def test_standbys_are_given_up_while_memory_is_short(launcher: Callable[..., Launcher]) -> None:
    """Only those that nobody asked for; they come back once there is room, and it is said once."""
    code = """
        from dlrover_hooks.host import memory_limit as memory
        from dlrover_hooks.launcher.warm import standby_pool as module
        module._AGAIN_S = 0.0
        def left(mib):
            memory.free = lambda: memory.Free(mib << 20, "the machine")
        left(1000)
        standbys = Standbys(1, ENV["DLROVER_HOOKS_PRELOAD"], ENV, spare=True)
        standbys.refill()
        assert psutil.Process().children() == []
        left(1100)
        until(lambda: standbys.ready == 1, standbys)
        left(300)
        standbys.refill()
        assert standbys.ready == 1
        left(200)
        standbys.refill()
        assert (standbys.ready, psutil.Process().children()) == (0, [])
        left(1100)
        until(lambda: standbys.ready == 1, standbys)
        standbys.close()
        asked = Standbys(1, ENV["DLROVER_HOOKS_PRELOAD"], ENV)
        left(100)
        until(lambda: asked.ready == 1, asked)
        asked.close()
    """
    code, _, errors = launcher(code).end()
    assert code == 0, errors
    assert errors.count("no warm standbys: memory is short, 1000 MiB are left (the machine)") == 1
    assert errors.count("memory is short") == 1


@pytest.mark.deep
def test_a_fork_that_fails_costs_neither_server_nor_run(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Too many processes: the server lives on, and forks later."""
    (tmp_path / "einops.py").write_text(
        "import os\nfork = os.fork\ndef once():\n    os.fork = fork\n    raise BlockingIOError(11, 'not now')\n"
        "os.fork = once\n"
    )
    code = """
        from dlrover_hooks.launcher.warm import standby_pool as module
        module._AGAIN_S = 0.0
        standbys = warm()
        assert standbys._starts == 1
        standbys.close()
    """
    code, _, errors = launcher(code, "einops").end()
    assert code == 0, errors
    assert "died" not in errors


@pytest.mark.deep
def test_packages_are_imported_with_the_variables_that_the_script_sets(
    launcher: Callable[..., Launcher], tmp_path: Path
) -> None:
    """`os.environ["HF_HOME"] = ...` above the imports holds in a standby, too; what a package sets stays."""
    (tmp_path / "einops.py").write_text(
        "import os\nHOME = os.environ['HF_HOME']\nos.environ['EINOPS_WAS_HERE'] = os.environ['HF_HOME']\n"
    )
    (tmp_path / "script.py").write_text(
        "import json, os\nbefore = os.environ.get('HF_HOME')\nos.environ['HF_HOME'] = '/own'\nimport einops\n"
        "print(json.dumps([before, einops.HOME, os.environ['EINOPS_WAS_HERE']]))\n"
        "from dlrover_hooks.worker import preimport_list as preload\npreload.tell()\n"
    )
    code = """
        os.unlink(ENV["DLROVER_HOOKS_PRELOAD"])
        subprocess.run([sys.executable, "-u", "script.py"], env=ENV, check=True)
        standbys = warm()
        assert standbys.take("worker", ["--", "script.py"], ENV).wait(20) == 0
        standbys.close()
    """
    code, output, errors = launcher(code, "einops").end()
    assert code == 0, errors
    cold, warm = (json.loads(line) for line in output.splitlines())
    assert cold == warm == [None, "/own", "/own"]


@pytest.mark.deep
def test_a_script_that_tells_nothing_is_read_for_its_imports(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Nothing of it is run before a standby has its seat. Once a worker tells, other standbys are made."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "einops.py").write_text("")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "script.py").write_text(
        "import os\nopen('ran', 'a').write('x')\nimport torch\nimport helper\nfrom einops import nothing\n"
    )
    (tmp_path / "project" / "helper.py").write_text("open('helped', 'a').write('x')\n")
    code = """
        from dlrover_hooks.worker import preimport_list as preload
        from dlrover_hooks.launcher.warm import standby_pool as module
        told = ENV["DLROVER_HOOKS_PRELOAD"]
        os.rename(told, "aside")
        module._UNTOLD_S = 0.0
        standbys = Standbys(1, told, ENV, ["project/script.py"])
        assert standbys.take("worker", ["--", "project/script.py"], ENV) is None
        until(lambda: standbys.ready == 1, standbys)
        assert not os.path.exists("ran") and not os.path.exists("helped")
        first = standbys._ready[0][0].pid
        os.rename("aside", told)
        until(lambda: standbys.ready == 1 and standbys._ready[0][0].pid != first, standbys)
        assert not os.path.exists("ran") and not os.path.exists("helped")
        standbys.close()
        assert psutil.Process().children() == []
    """
    code, _, errors = launcher(code, "torch", "einops").end()
    assert code == 0, errors


def test_nothing_is_started_before_a_worker_has_told_its_imports(tmp_path: Path) -> None:
    code = """
        standbys = Standbys(2, "nowhere", ENV)
        standbys.refill()
        assert (standbys.ready, standbys.take("worker", ["--", "script.py"], ENV)) == (0, None)
        assert psutil.Process().children() == []
        standbys.close()
    """
    code, _, errors = Launcher(tmp_path, code, preimport_list.Imported({}, [])).end()
    assert code == 0, errors


TORCH = """
import json, os, sys
ahead = {"torch._dynamo", "lightning.fabric.utilities.rank_zero"} <= set(sys.modules)
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as lightnings
from torchmetrics.utilities.prints import rank_zero_only as torchmetrics
print(json.dumps({"ahead": ahead, "seed": torch.initial_seed(), "threads": torch.get_num_threads(),
                  "cuda": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(), "drawn": torch.rand(1).item(),
                  "sum": torch.ones(1000, 1000).sum().item(), "ranks": [lightnings.rank, torchmetrics.rank]}))
"""


LOADERS = """
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * index

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
"""


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_torch_in_a_standby_is_as_in_a_fresh_process(launcher: Callable[..., Launcher], tmp_path: Path) -> None:
    """Imported ahead, seeded apart, OMP_NUM_THREADS obeyed, no CUDA; DataLoader workers forked and spawned."""
    (tmp_path / "script.py").write_text(TORCH)
    (tmp_path / "loaders.py").write_text(LOADERS)
    code = """
        logging.disable(logging.INFO)  # the pool's cost is logged only if `refill` sees that it is complete
        standbys = warm(3)
        for threads in ("1", "2"):
            env = ENV | {"OMP_NUM_THREADS": threads, "RANK": "3", "LOCAL_RANK": "2"}
            child = standbys.take("worker", ["--", "script.py"], env)
            assert child.wait(30) == child.reap() == 0
        child = standbys.take("worker", ["--", "loaders.py"], ENV)
        assert child.wait(40) == child.reap() == 0
        standbys.close()
    """
    ahead = "numpy", "torch", "torch._dynamo", "lightning", "lightning.fabric.utilities.rank_zero"
    code, output, errors = launcher(code, *ahead, "torchmetrics", "torchmetrics.utilities.prints").end()
    assert (code, errors) == (0, "")
    first, second, batches = output.split("\n", 2)
    one, two = json.loads(first), json.loads(second)
    assert one.pop("seed") != two.pop("seed")
    assert one.pop("drawn") != two.pop("drawn")
    assert one == {"ahead": True, "threads": 1, "cuda": False, "sum": 1e6, "ranks": [3, 2]}
    assert two == one | {"threads": 2}
    assert batches == "[[0, 1, 4, 9], [16, 25, 36, 49]]\n" * 2
