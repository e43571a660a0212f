"""Examples are short, and what the README shows of them is what they are."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.control_groups import memory_group
from tests.e2e.etcd_process import free_ports

ROOT = Path(__file__).resolve().parent.parent
LINES = {"nanogpt": 120}
"""By folder; 80 elsewhere."""
CHANGED = {"lightning": 5, "accelerate": 5, "transformers": 2, "nanogpt": 12}
PAGES = (
    ("README.md", "lightning"),
    ("docs/lightning.md", "lightning"),
    ("docs/accelerate.md", "accelerate"),
    ("docs/transformers.md", "transformers"),
    ("docs/loops.md", "nanogpt"),
)
SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*.py") if "demo" not in path.relative_to(ROOT).parts)


def changes(before: Path, after: Path) -> list[str]:
    """The changed lines of the real diff, with their signs, without headers and context."""
    old, new = before.read_text().splitlines(), after.read_text().splitlines()
    lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


def shown(page: Path) -> list[list[str]]:
    """The changed lines of each diff block of a Markdown page."""
    blocks = re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.M | re.S)
    return [[line for line in block.splitlines() if line[:1] in {"+", "-"} and line[1:].strip()] for block in blocks]


def test_there_are_examples() -> None:
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_example_is_short_and_compiles(script: Path) -> None:
    text = script.read_text()
    compile(text, str(script), "exec")
    assert len(text.splitlines()) <= LINES.get(script.parent.name, 80)


def change(framework: str) -> list[str]:
    """From `plain.py` to `train.py` of that framework."""
    folder = ROOT / "examples" / framework
    return changes(folder / "plain.py", folder / "train.py")


@pytest.mark.parametrize("framework", CHANGED)
def test_becoming_elastic_is_a_small_change(framework: str) -> None:
    """Added and removed lines of the diff are both counted."""
    assert 0 < len(change(framework)) <= CHANGED[framework]


@pytest.mark.parametrize(("page", "framework"), PAGES)
def test_the_diff_shown_is_the_real_one(page: str, framework: str) -> None:
    """Spaces at the front aside: a page may show a line without its surrounding block."""
    real = [line[0] + line[1:].strip() for line in change(framework)]
    assert real in [[line[0] + line[1:].strip() for line in block] for block in shown(ROOT / page)]


@pytest.mark.deep
def test_the_accelerate_example_learns_and_resumes(tmp_path: Path) -> None:
    """Two epochs, then the same command with a third one: it goes on where it was."""
    losses: list[list[float]] = []
    for epochs in ("2", "3"):
        env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DLROVER_HOOKS_JOB": tmp_path.name}
        command = [sys.executable, str(ROOT / "examples/accelerate/train.py"), "--epochs", epochs, "--windows", "300"]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([float(one) for one in re.findall(r"validation loss (\S+)", done.stdout)])
    assert [len(one) for one in losses] == [2, 1]
    assert losses[1][0] < losses[0][0]


@pytest.mark.deep
@pytest.mark.slow
def test_leased_shards_survive_the_death_of_a_worker() -> None:
    """`examples/shards` kills a worker; the other one reads the rest, and the books are complete."""
    script = ROOT / "examples/shards/train.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(
        r"worker slow: killed.*of (\d+)\nread at least once: (\d+);.*each once: (\d+); left: 0", done.stdout, re.S
    )
    assert found is not None, done.stdout
    assert len(set(found.groups())) == 1, done.stdout


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["ddp", "lightning", "accelerate"])
def test_the_elastic_example_loses_a_worker_and_no_step(tmp_path: Path, framework: str) -> None:
    """Under the real launcher: the survivors' processes go on."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    options = ["--nproc-per-node", "1:3", "--fault-level", "shrink", "--standby", "0", "--job", tmp_path.name]
    script = [str(ROOT / "examples/elastic" / framework / "train.py"), "--windows", "480", "--lose-at", "5"]
    command = [sys.executable, "-m", "dlrover_hooks", "run", *options, *script]
    try:
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired as late:  # whose own text has the first and the last line of it
        raise AssertionError(f"it runs on after 100 s, and said: {late.stdout!r} {late.stderr!r}") from None
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("goes on at step 5") == 2, done.stdout
    assert "ends at step 20 with 2 workers" in done.stdout


def calm_and_struck(folder: Path, fault: str, workers: int, *script: str) -> list[str]:
    """What the script printed under the launcher, undisturbed and under `fault`, in folders of these names."""
    outputs = []
    for name, plan in (("calm", "# none"), ("struck", fault)):
        here = folder / name
        here.mkdir()
        (here / "faults").write_text(plan + "\n")
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
        env |= {"DLROVER_HOOKS_FAULTS": str(here / "faults"), "KERAS_BACKEND": "torch"}
        options = ["-n", str(workers), "--job", f"{folder.name}-{name}"]
        options += ["--standby", "0"] if name == "calm" else []
        options += [str(ROOT / "examples" / script[0])]
        command = [sys.executable, "-m", "dlrover_hooks", "run", *options, *script[1:]]
        done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("SIGKILL" in done.stderr) == (name == "struck"), done.stderr
        outputs.append(done.stdout)
    return outputs


@pytest.mark.deep  # tests/elastic/test_transformers_recovery.py loses a worker of this adapter
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("workers", "step"), [(1, 22), (2, 13)])
def test_the_transformers_example_ends_equal_after_a_kill(tmp_path: Path, workers: int, step: int) -> None:
    """A worker is killed in the second epoch and replaced: the same held-out losses of both epochs."""
    script = ("transformers/train.py", "--epochs", "2", "--windows", "300")
    outputs = calm_and_struck(tmp_path, f"step={step} rank={workers - 1} kill", workers, *script)
    losses = [re.findall(r"held-out loss after each epoch: (.*)", output) for output in outputs]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]


@pytest.mark.deep  # tests/integrations/test_keras.py kills a worker of this adapter
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_keras_example_ends_equal_after_a_kill(tmp_path: Path, workers: int) -> None:
    """Killed in the middle of the second epoch, restarted by its launcher: the same losses of all epochs."""
    script, fault = ("keras/train.py", "--epochs", "2", "--windows", "300"), f"step=13 rank={workers - 1} kill"
    outputs = calm_and_struck(tmp_path, fault, workers, *script)
    losses = [re.findall(r"held-out loss after each epoch: (.*)", output) for output in outputs]
    assert len(losses[0]) == workers
    assert len(set(losses[0])) == 1
    assert losses[0] == losses[1]


@pytest.mark.deep
@pytest.mark.timeout(200)
def test_a_gpt_that_makes_its_own_batches_ends_equal_after_a_kill(tmp_path: Path) -> None:
    """The nanoGPT example: held-out losses and the script's own checkpoint are bit-equal to the undisturbed run's."""
    script = ("nanogpt/train.py", "--steps", "12", "--evaluate-every", "4")
    outputs = calm_and_struck(tmp_path, "step=7 rank=1 kill", 2, *script)
    losses = [dict(re.findall(r"step (\d+): held-out loss (\S+)", output)) for output in outputs]
    assert list(losses[0]) == ["4", "8", "12"]
    assert losses[0] == losses[1]
    calm, struck = (torch.load(tmp_path / name / "best.pt") for name in ("calm", "struck"))
    torch.testing.assert_close(calm, struck, rtol=0, atol=0)


FAULTS = {
    "A hang": (
        0,
        ", in parse_headers; rank 0 in backward (train.py:",
        "worker 1 was lost (it made no steps for too long) at step 5; restarting 2 workers",
        "job hang: all 2 workers are done",
    ),
    "A straggler": (
        0,
        "WARNING dlrover_hooks.master: job slow: rank 1 (",
        " is slow: its compute takes ",
        "job slow: all 2 workers are done",
    ),
    "An error that comes back": (
        1,
        "ValueError: the label of record 212 is not a number: 'import'",
        "worker 1 died (exit code 1) at step ",
        ": not restarted, see its traceback above",
    ),
    "Out of memory": (
        1,
        "worker 1 died (SIGKILL: out of memory) at step ",
        ": not restarted, a higher memory limit, fewer DataLoader workers, or fewer workers on the node",
    ),
    "A bad node": (
        76,
        "job node: this node is bad; replace it: disk write on /",
        "job node: all 2 workers are done",
    ),
    "The master is killed": (0, "the master died (SIGKILL); restarting it", "job master: all 2 workers are done"),
    "The master moves": (
        0,
        "kill of=master strikes in step 10",
        "this master leads (epoch ",
        "job moved: all 2 workers are done",
    ),
}
"""By section of examples/faults/README.md: the exit code of its commands, and texts of its output. They depend on no
timing: a slow machine may resume from another step."""
SAME_WEIGHTS = ("A hang", "The master is killed", "The master moves")
FAULTS_README = (ROOT / "examples/faults/README.md").read_text()


def commands_of(text: str) -> str:
    """The commands of the console blocks."""
    return re.sub(r"^\$ ", "", "".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)), flags=re.M)


def in_shell(commands: str, folder: Path, **more: str) -> tuple[int, str]:
    """The exit code of the first command that fails, and what all of them wrote, in a folder with the script."""
    shutil.copy(ROOT / "examples/faults/train.py", folder)
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)} | more
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    script = f"set -e; trap 'code=$?; wait; exit $code' EXIT\n{commands}"
    with (folder / "output.log").open("ab") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script], env=env, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = shell.wait(120)
        finally:
            if shell.poll() is None:  # with the launchers, and so with all of their workers
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
    return code, "".join(log.read_text() for log in sorted(folder.glob("*.log")))


def checksum(said: str) -> str:
    """Of the weights at the end of the run."""
    return re.findall(r"the weights have the checksum (\w{8})$", said, re.M)[-1]


@pytest.fixture(scope="module")
def calm_checksum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run without a fault."""
    code, said = in_shell(commands_of(FAULTS_README.split("\n## ")[0]), tmp_path_factory.mktemp("calm"))
    assert code == 0, said
    return checksum(said)


@pytest.mark.deep
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "title",
    [
        "Out of memory",
        *(
            "The master moves",
            "A hang",
            "A straggler",
            "An error that comes back",
            "A bad node",
            "The master is killed",
        ),
    ],
)
def test_a_fault_has_the_consequences_that_the_readme_shows(
    tmp_path: Path, title: str, request: pytest.FixtureRequest
) -> None:
    """The commands of the README, on ports of their own."""
    section, (code, *texts) = FAULTS_README.split(f"\n## {title}\n")[1].split("\n## ")[0], FAULTS[title]
    commands, ports = commands_of(section), dict(zip(("8780", "8781", "2379", "2380"), free_ports(4), strict=True))
    for name, port in ports.items():
        commands = commands.replace(name, str(port))
    clients, peers = (f"http://127.0.0.1:{ports[name]}" for name in ("2379", "2380"))
    env = {"ETCD_LISTEN_CLIENT_URLS": clients, "ETCD_ADVERTISE_CLIENT_URLS": clients, "ETCD_LISTEN_PEER_URLS": peers}
    env |= {"ETCD_INITIAL_ADVERTISE_PEER_URLS": peers, "ETCD_INITIAL_CLUSTER": f"default={peers}"}
    with contextlib.ExitStack() as owned:
        if "$GROUP" in commands:
            env["GROUP"] = str(owned.enter_context(memory_group(2 << 30)) / "inner")
        ended, said = in_shell(commands, tmp_path, **env)
    assert ended == code, said
    for text in texts:
        assert text in said, said
        assert text in section, "the README shows something else"
    if title in SAME_WEIGHTS:
        assert checksum(said) == request.getfixturevalue("calm_checksum"), said
    if title == "The master moves":
        assert said.count("this master leads (epoch ") >= 2, said


@pytest.mark.parametrize(
    "page", ["examples/faults/README.md", "docs/operate/symptoms/hang.md", "docs/operate/symptoms/worker-dies.md"]
)
def test_the_stacks_that_the_pages_show_are_those_of_the_script(page: str) -> None:
    """Each line of code is where the page says."""
    code = (ROOT / "examples/faults/train.py").read_text().splitlines()
    text = (ROOT / page).read_text().replace("[rank1]: ", "")
    shown = re.findall(r'File "/tmp/faults/train.py", line (\d+), in .*\n +(.*)', text)
    assert shown
    assert [(int(line), source) for line, source in shown if code[int(line) - 1].strip() != source] == []


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_the_parameter_server_demo_scales_and_survives(tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 1 parameter servers, one killed, one worker killed: no step is missing, and the loss falls."""
    python, picture = ROOT / ".venv-keras/bin/python", tmp_path / "loss.png"
    assert python.exists(), "make test-deep builds the environment that has TensorFlow"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DLROVER_HOOKS_", "KERAS_"))}
    env |= {
        "PYTHONPATH": str(ROOT),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "-1",
        "MPLBACKEND": "agg",
    }
    script = [str(ROOT / "examples/tensorflow/demo.py"), "--python", str(python), "--out", str(picture)]
    done = subprocess.run([sys.executable, *script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ", 0 missing," in done.stdout
    assert picture.stat().st_size > 10_000


def job_of_roles(folder: Path, script: str, *options: str) -> str:
    """What an example of `examples/jobs` printed, started in `folder`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
    command = [sys.executable, str(ROOT / "examples/jobs" / script), *options]
    with tempfile.TemporaryDirectory() as short:  # sockets lie there, whose paths have 107 characters at most
        env |= {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": short}
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.mark.deep
def test_the_ppo_example_loses_six_workers_and_no_prompt(tmp_path: Path) -> None:
    """The script itself checks the prompts, the steps and the events. The weights are those of the undisturbed run."""
    calm = job_of_roles(tmp_path, "ppo/train.py", "--prompts", "960")
    struck = job_of_roles(tmp_path, "ppo/train.py", "--prompts", "960", "--kills")
    assert len(re.findall("kill -9 (?:rollout|trainer)", struck)) == 6
    assert "60 of 60 steps, 1920 answers, 6 kills" in struck
    assert checksum(calm) == checksum(struck), struck
    assert (tmp_path / "build/ppo.png").stat().st_size > 10_000


@pytest.mark.deep
@pytest.mark.requirement("DL-15", "DL-26")
def test_the_sft_example_learns(tmp_path: Path) -> None:
    said = job_of_roles(tmp_path, "sft/train.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert len(losses) == 2, said
    assert losses[1] < losses[0] - 0.3, said


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [("--kill",), ()])
def test_the_ray_train_example_loses_a_worker_and_no_sample(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The script itself checks that the model has each sample once per epoch."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")}
    command = [sys.executable, str(ROOT / "examples/ray_train/train.py"), *options]
    with tempfile.TemporaryDirectory() as short:  # for sockets, as above
        env |= {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": short, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = re.search(r"250 steps, (\d+) made again", done.stdout)
    assert found is not None, done.stdout
    assert (int(found[1]) > 0) == bool(options), done.stdout
