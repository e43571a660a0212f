"""The command line: what it refuses, and with which exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dlrover_hooks import config
from dlrover_hooks.cli import main
from dlrover_hooks.errors import HooksError, LaunchError, MasterAway, UsageError
from dlrover_hooks.launcher import node_supervisor
from dlrover_hooks.launcher.options import Bounds, LaunchOptions
from dlrover_hooks.master.__main__ import command


def called(*words: str) -> Result:
    return CliRunner().invoke(main.main, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "trian.py"], "trian.py: no such file"),
        (["run", "python", "train.py"], "`python` is not needed"),
        (["run", "-m", "no_such_package.train"], "no_such_package.train: no such module"),
        (["run", "--nnodes", "2", __file__], "the nodes need one address to meet at"),
        (["run", "--nnodes", "4:2", __file__], "expected 1 <= MIN <= MAX"),
        (["run", "--nnodes", "two", __file__], "not a number"),
        (["run", "--rdzv-conf", "timeout=3", __file__], "its timeouts are --replace-timeout here"),
        (["run", "--logs_specs", "mine", __file__], "the workers write where the launcher does"),
        (["run", "--tee", "4", "--log_dir", "logs", __file__], "--tee 0:1,1:3"),
        (["run", "-r", "3", __file__], "add --log-dir DIR"),
        (["run", "--bogus", __file__], "No such option"),
        (["run", "--fault-level", "hot", "-n", "1:2", __file__], "leaves it open"),
        (["run", "--fault-level", "shrink", "-n", "2", __file__], "--nproc-per-node 1:2"),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "10.9.8.7", "--job", "j", __file__], "needs a token"),
        (["run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", __file__], "need one name for the job"),
        (["run", "--slurm", __file__], "srun has not started this process"),
        (["run", "--rdzv-endpoint", "ftp://x", __file__], "is no address of a master"),
        (["run", "--no-python", "no-such-program-at-all"], "no such program"),
        (["run"], "Missing argument"),
        (["run", "-n", "0", "train.py"], "expected 1 <= MIN <= MAX"),
        (["walk"], "No such command"),
        (["check", "--nnodes", "2"], "the nodes need a master to meet at"),
        (["check", "--master", "node-a"], "is no URL"),
        (["check", "--folder", "/no/such/folder"], "is not a folder of this machine"),
        (["check", "--master", "http://127.0.0.1:1", "--local-addr", "a:b"], "'a:b' is no address"),
        (["check", "--timeout", "soon"], "Invalid value for '--timeout'"),
        (["run", "--ps", "1", "--node-check", __file__], "--node-check does not work with --ps"),
    ],
)
def test_what_must_be_mended_exits_78(words: list[str], said: str) -> None:
    """Before anything is started, and a wrong script in one line."""
    done = called(*words)
    assert done.exit_code == 78
    assert said in done.output
    if said.startswith("trian"):
        assert len(done.output.splitlines()) == 1


def test_the_masters_command_line_exits_78() -> None:
    assert CliRunner().invoke(command, ["--bogus"]).exit_code == 78


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """What a launcher would have been asked for."""
    seen: list[LaunchOptions] = []

    class Recorder:
        def __init__(self, options: LaunchOptions) -> None:
            seen.append(options)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(node_supervisor, "Launcher", Recorder)
    return seen


@pytest.mark.requirement("ED-39", "ED-43")
def test_torchruns_spelling_is_understood(asked: list[LaunchOptions]) -> None:
    """Our options with underscores; whatever follows the script is the script's, as it stands."""
    words = ["run", "--nproc_per_node=3", "--max_restarts", "4", __file__, "--lr_rate", "1", "--job", "x"]
    assert called(*words).exit_code == 0
    (options,) = asked
    assert (options.workers, options.max_restarts, options.job) == (Bounds(3, 3), 4, "")
    assert options.command[2:] == (__file__, "--lr_rate", "1", "--job", "x")


def test_a_module_may_be_run(asked: list[LaunchOptions]) -> None:
    assert called("run", "-m", "json.tool").exit_code == 0
    assert asked[0].command[2:] == ("-m", "json.tool")


@pytest.mark.parametrize(("error", "code"), [(UsageError, 78), (LaunchError, 78), (MasterAway, 77), (HooksError, 77)])
def test_only_what_the_caller_can_mend_is_78(
    error: type[HooksError], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("no")

    monkeypatch.setattr(node_supervisor.Launcher, "run", fail)
    assert called("run", __file__).exit_code == code


def test_short_help_is_whole() -> None:
    """The list of commands is not cut off, and the table of exit codes is the manual's."""
    lines = called("--help").output.splitlines()
    commands = lines[lines.index("Commands:") + 1 :]
    assert len(commands) == 12
    assert all(line.endswith(".") and not line.endswith("..") for line in commands)
    page = (Path(__file__).parents[3] / "docs/operate.md").read_text()
    for code in (0, 1, 77, 78, 130, 143):
        assert f"\n| {code} |" in page
        assert f"{code} " in called("run", "--help").output


def options(command: click.Command, context: click.Context) -> Iterator[tuple[click.Option, click.Context]]:
    """Every option of `command` and its subcommands, with the context in which click reads it."""
    yield from ((param, context) for param in command.params if isinstance(param, click.Option))
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from options(below, click.Context(below, parent=context, info_name=name))


@pytest.mark.parametrize("command", sorted(set(main.main.commands) - {"master", "brain"}))  # which are other programs
def test_each_flag_is_read_from_a_variable_of_its_name(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decision 0018: DLROVER_HOOKS_, the command's name, the flag's. No worker takes it for a misspelt setting."""
    root = click.Context(main.main, info_name="dlrover-hooks", **main.main.context_settings)
    top = main.main.commands[command]
    found = list(options(top, click.Context(top, root, info_name=command)))
    assert found
    for option, context in found:
        flag = next((name for name in option.opts if name.startswith("--")), option.opts[0])
        words = [context.command_path.removeprefix("dlrover-hooks "), flag.lstrip("-")]
        variable = "_".join(["DLROVER_HOOKS", *words]).replace(" ", "_").replace("-", "_").upper()
        with monkeypatch.context() as env:
            env.setenv(variable, "it")
            assert option.resolve_envvar_value(context) == "it", f"{flag} of {command} is not read from {variable}"
        config.load({variable: "it"})
    assert caplog.messages == []
