"""A booted script cannot tell that it was booted: the same output, traceback and end as `python -u` gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.worker import preimport_list
from tests.e2e.launched import REPOSITORY
from tests.e2e.master_process import LiveMaster

BOOT = ("-m", "dlrover_hooks.launcher.warm.worker_bootstrap", "--")


def ended(folder: Path, command: Sequence[str], **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `python -u command` in `folder`."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run(
        [sys.executable, "-u", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=50
    )
    return done.returncode, done.stdout, done.stderr


def write(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(script))


SEES = """
    import inspect, json, sys
    here = sys.modules["__main__"]
    def function(): ...
    def shown(value):
        return getattr(value, "__name__", None) or type(value).__name__ if not isinstance(value, str) else value
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path, "package": __package__,
        "spec": shown(__spec__), "cached": shown(__cached__), "loader": shown(__loader__), "doc": __doc__,
        "builtins": shown(__builtins__), "source": inspect.getsource(function), "main": here.__dict__ is globals(),
        "names": sorted(dir())}))
"""
SCRIPTS = {
    "what it sees": SEES,
    "an error": "def fail():\n    raise ValueError('wrong') from OSError('because')\nfail()\n",
    "a syntax error": "a = 1\nb = = 2\n",
    "an exit code": "import sys; sys.exit(7)\n",
    "a last word": "import sys; sys.exit('nothing to do')\n",
    "an interrupt": "print('soon'); raise KeyboardInterrupt\n",
    "a hook of its own": "import sys\nsys.excepthook = lambda kind, error, trace: print('caught', error)\n1 / 0\n",
    "a hook that fails": "import sys\ndef hook(*_): raise OSError('no')\nsys.excepthook = hook\n1 / 0\n",
    "its last acts": """
        import atexit, threading, sys
        LATE = "late"
        def later():
            threading.main_thread().join()
            print(LATE, "thread", sys.modules["__main__"].LATE)
        atexit.register(lambda: print(LATE, "atexit"))
        threading.Thread(target=later).start()
        raise ValueError(LATE)
    """,
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_it_is_as_if_python_had_run_the_script(tmp_path: Path, what: str) -> None:
    write(tmp_path / "folder" / "script.py", SCRIPTS[what])
    script = ["folder/script.py", "--lr", "1", "-m", "--", "x"]
    code, output, errors = ended(tmp_path, script)
    booted = ended(tmp_path, [*BOOT, *script])
    if what == "a hook that fails":  # Python's own words about it, and frames of ours
        assert (code, output) == booted[:2]
        assert "Error in sys.excepthook" in booted[2]
        assert "ZeroDivisionError" in booted[2]
        return
    assert booted == (code, output, errors)
    assert output or errors or code, "it shows something"


@pytest.mark.parametrize("way", ["module", "package", "folder", "zip"])
def test_modules_and_archives_run_as_well(tmp_path: Path, way: str) -> None:
    command = {
        "module": ["-m", "package.within"],
        "package": ["-m", "package"],
        "folder": ["package"],
        "zip": ["archive.zip"],
    }[way]
    script = "import sys; print(__name__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0])\n1 / 0\n"
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "__main__.py", script)
    write(tmp_path / "package" / "within.py", script)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", script)
    code, output, errors = ended(tmp_path, [*command, "a"])
    assert code == 1
    assert "ZeroDivisionError" in errors
    assert ended(tmp_path, [*BOOT, *command, "a"]) == (code, output, errors)


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    code, _, errors = ended(tmp_path, [*BOOT, "nowhere.py"])
    assert code == 1
    assert "No such file or directory: " in errors
    assert "nowhere.py" in errors


def test_its_children_find_what_the_script_defines(tmp_path: Path) -> None:
    """multiprocessing names things of `__main__`: spawned children import the script again, forked ones have it."""
    write(
        tmp_path / "script.py",
        """
        import multiprocessing

        def double(value):
            return 2 * value

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(double, [1, 2]))
        """,
    )
    assert ended(tmp_path, [*BOOT, "script.py"]) == (0, "[2, 4]\n" * 3, "")


def test_what_a_worker_had_imported_is_imported_ahead(tmp_path: Path) -> None:
    """Modules of well-known packages, from the same files; a folder of the user's called alike is not mistaken."""
    file = tmp_path / "preload"
    write(tmp_path / "datasets" / "__init__.py", "print('mine')\n")
    tells = (
        "import numpy.linalg, datasets; from dlrover_hooks.worker import preimport_list as preload; preload.tell()\n"
    )
    write(tmp_path / "first.py", tells)
    assert ended(tmp_path, ["first.py"], DLROVER_HOOKS_PRELOAD=str(file)) == (0, "mine\n", "")
    told = preimport_list.told(str(file))
    assert "numpy.linalg" in told.modules
    assert set(told.packages) == {"numpy", "dlrover_hooks", "datasets"}
    write(
        tmp_path / "elsewhere" / "later.py",
        "import sys; print([m in sys.modules for m in ('numpy.linalg', 'datasets')])",
    )
    write(tmp_path / "elsewhere" / "datasets.py", "print('another one')\n")
    later = [*BOOT, str(tmp_path / "elsewhere" / "later.py")]
    assert ended(tmp_path, later, DLROVER_HOOKS_PRELOAD=str(file)) == (0, "[True, False]\n", "")
    assert ended(tmp_path, later)[1] == "[False, False]\n"


JOINS = """
    import json, os
    from dlrover_hooks import config
    from dlrover_hooks.client import MasterClient
    from dlrover_hooks import protocol as p
    place, conf = config.place(), config.load()
    client = MasterClient(conf.master, conf.token, incarnation=place.incarnation)
    client.call(p.Attach(conf.job, place.incarnation, place.node, os.getpid()))
    client.call(p.Leave(conf.job, place.incarnation, p.Departure.DONE, 3))
    print(json.dumps([os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DLROVER_HOOKS_JOIN")]))
"""


def test_a_newcomer_joins_for_itself_and_a_late_one_ends_with_zero(tmp_path: Path, live_master: LiveMaster) -> None:
    """It has its seat before its script runs; what follows speaks as the same incarnation."""
    write(tmp_path / "script.py", JOINS)
    env = {
        "DLROVER_HOOKS_JOB": "job",
        "DLROVER_HOOKS_MASTER": live_master.url,
        "DLROVER_HOOKS_TOKEN": live_master.token or "",
        "DLROVER_HOOKS_NODE": "n",
        "DLROVER_HOOKS_JOIN": "1",
        "DLROVER_HOOKS_LAUNCHER": "agent",
        "DLROVER_HOOKS_MIN_WORKERS": "1",
        "DLROVER_HOOKS_MAX_WORKERS": "1",
        "LOCAL_RANK": "2",
    }
    code, output, errors = ended(tmp_path, [*BOOT, "script.py"], **env, DLROVER_HOOKS_INCARNATION="w0")
    assert (code, errors) == (0, "")
    assert json.loads(output) == ["0", "1", "2", ""]
    assert live_master.client("x").call(p.ShowJob("job")).finished
    code, output, errors = ended(tmp_path, [*BOOT, "script.py"], **env, DLROVER_HOOKS_INCARNATION="w1")
    assert (code, output) == (0, "")
    assert "job job was finished at step 3: nothing is left to train" in errors
