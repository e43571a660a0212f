"""A worker that first imports, then joins, then runs the script.

    python -u -m dlrover_hooks.launcher.warm.worker_bootstrap -- script args
    python -u -m dlrover_hooks.launcher.warm.worker_bootstrap --exec -- program args

The other workers wait for a new one from its join on. Everything slow therefore comes before: importing the modules
that a worker of the node had imported (`worker.preimport_list`). Then the process joins, if its launcher has not done
so for it, and the script runs just as `python -u script args` would run it. A warm standby (`fork_server`) has already
imported. With `--exec` (`run --no-python`) nothing is imported, and the program takes the place of this process.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import logging
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import JobFinished, UsageError
from dlrover_hooks.worker import preimport_list
from dlrover_hooks.worker.round_join import join_request, seat_environment, take_seat

log = logging.getLogger("dlrover_hooks")


class Program(msgspec.Struct, frozen=True):
    """The program to run: `target args`, or `-m target args`."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False


def program(arguments: Sequence[str]) -> Program:
    """Parses `[-m] target args`, as they follow `python -u` or `--`. Raises UsageError if there is no target."""
    module = arguments[:1] == ["-m"] or arguments[:1] == ("-m",)
    rest = tuple(arguments[module:])
    if not rest:
        raise UsageError(
            "no script is named", hint="python -m dlrover_hooks.launcher.warm.worker_bootstrap -- train.py --lr 1e-3"
        )
    return Program(rest[0], rest[1:], module)


def main() -> None:
    """The cold start: this process was started for the script."""
    end_of_options = sys.argv.index("--") if "--" in sys.argv else 0
    arguments = sys.argv[end_of_options + 1 :]
    if "--exec" in sys.argv[1:end_of_options]:
        take_place()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by the program after exec
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(arguments[0], arguments)
    what = program(arguments)
    forget_cwd()
    enter(what)
    wanted = preimport_list.told(settings.preload_file())
    with settings.environment_of(wanted.environment):
        for _ in preimport_list.load(wanted):
            pass
    take_place()
    run(what)


def forget_cwd() -> None:
    """`python -m` has put the current folder first in the module path, where the script's folder belongs."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


def enter(what: Program) -> None:
    """Set `sys.argv` and `sys.path` as Python sets them for `what`."""
    sys.argv = ["-m" if what.module else what.target, *what.arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd() if what.module else _folder_of(what.target))


def _folder_of(script: str) -> str:
    return os.path.abspath(script) if _is_archive(script) else os.path.dirname(os.path.realpath(script))


def _is_archive(script: str) -> bool:
    """A folder or a zip file with a `__main__.py` in it."""
    return pkgutil.get_importer(script) is not None


def take_place() -> None:
    """Request the rank of this process from the master, unless the launcher has; update modules that read it too early.

    If the job is finished, the process ends with 0.
    """
    if settings.seats_itself():
        settings.tell_launcher()
        config, place = settings.load(), settings.place()
        if config.master is None or not place.incarnation:
            raise UsageError("DLROVER_HOOKS_JOIN=1 is the launcher's, with its master and an incarnation")
        client = MasterClient(config.master, config.token, incarnation=place.incarnation)
        try:
            join = join_request(config, place, place.incarnation)
            seated = take_seat(client, join, away_s=place.master_away_s, channel="boot")
        except JobFinished as over:
            log.warning("%s", over.message)
            sys.exit(0)
        finally:
            client.close()
        own = seat_environment(
            seated,
            incarnation=place.incarnation,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size or 1,
        )
        settings.change_environment(own | {"DLROVER_HOOKS_JOIN": ""})
    _correct_ranks()


def _correct_ranks() -> None:
    """These modules read the rank at import, before it was assigned."""
    place = settings.place()
    for name, rank in (
        ("lightning_utilities.core.rank_zero", place.rank),
        ("torchmetrics.utilities.prints", place.local_rank),
    ):
        if (module := sys.modules.get(name)) is not None and hasattr(module.rank_zero_only, "rank"):
            module.rank_zero_only.rank = rank


def run(what: Program) -> None:
    """Run it as `__main__`. Raises its exceptions, with the traceback already printed without this module's frames."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    try:
        if what.module or _is_archive(what.target):
            # the function that `python -m` itself calls
            runpy._run_module_as_main(what.target if what.module else "__main__", what.module)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            path = os.path.abspath(what.target)
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
            exec(_compiled(path), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _print(error)
        raise


def _compiled(path: str) -> CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _print(error: BaseException) -> None:
    """Prints the error as Python does; the exception still ends the process, but is not printed a second time."""
    error.__traceback__ = _from_script(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without the frames of this file and above."""
    ours = (run.__code__, _compiled.__code__)
    inner = trace
    while trace is not None:
        inner = trace.tb_next if trace.tb_frame.f_code in ours else inner
        trace = trace.tb_next
    return inner


if __name__ == "__main__":
    main()
