"""What an import costs: hooks must not make a script slower that never uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "lightning", "pytorch_lightning", "accelerate", "transformers", "jax"}
SERVER = {"requests", "urllib3", "starlette", "uvicorn", "uvloop", "prometheus_client", "fsspec", "click", "rich"}
HEAVY = FRAMEWORKS | SERVER | {"numpy", "psutil", "pynvml", "asyncio", "sqlite3"}


def loaded(code: str, *args: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    report = "import atexit, json, sys; atexit.register(lambda: print('LOADED', json.dumps(sorted(sys.modules))))\n"
    done = subprocess.run(
        [sys.executable, "-c", report + code, *args], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("LOADED ")), None)
    assert line is not None, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return {name.split(".")[0] for name in json.loads(line.removeprefix("LOADED "))}


def test_the_package_loads_no_framework_and_no_server() -> None:
    assert loaded("import dlrover_hooks") & HEAVY == set()


def test_the_master_loads_no_framework() -> None:
    code = "import runpy; runpy.run_module('dlrover_hooks.master', run_name='__main__', alter_sys=True)"
    assert loaded(code, "--help") & FRAMEWORKS == set()


@pytest.mark.parametrize(
    "module",
    [
        *("dlrover_hooks.checkpoint.keeper", "dlrover_hooks.cli.main", "dlrover_hooks.client"),
        *("dlrover_hooks.launcher.node_supervisor", "dlrover_hooks.launcher.warm.standby_pool"),
    ],
)
def test_processes_beside_the_trainer_load_no_framework(module: str) -> None:
    """The keeper outlives trainers and there is one per node: it must not cost torch's memory."""
    assert loaded(f"import {module}") & FRAMEWORKS == set()


def test_the_masters_of_a_job_of_roles_load_no_framework_and_no_numpy() -> None:
    """Recovery of a PrimeMaster or a SubMaster includes this."""
    code = "import dlrover_hooks.job.local.prime, dlrover_hooks.job.local.sub_master"
    assert loaded(code) & (FRAMEWORKS | {"numpy"}) == set()


def test_shards_are_leased_without_a_framework() -> None:
    """Keras has other backends than torch. The master of a single worker runs in its process."""
    code = "from dlrover_hooks import ShardDataset; import dlrover_hooks.data.leased.loader_feed as feed"
    code += "; import dlrover_hooks.data.leased.ledger_connection, dlrover_hooks.data.leased.sources"
    assert loaded(f"{code}; ShardDataset(range(9)), feed.LoaderFeed") & FRAMEWORKS == set()


def test_the_command_line_loads_no_server() -> None:
    heavy = {"starlette", "uvicorn", "fsspec", "numpy", "rich", "requests"}
    assert loaded("import dlrover_hooks.cli.main") & heavy == set()


@pytest.mark.parametrize("name", ["AsyncCheckpointer", "ElasticSampler", "Retention", "Session", "elastic_loader"])
def test_lazy_names_resolve(name: str) -> None:
    import dlrover_hooks

    assert getattr(dlrover_hooks, name).__name__ == name
    assert name in dir(dlrover_hooks)


def test_the_lazy_table_lists_what_type_checkers_see() -> None:
    """The TYPE_CHECKING imports and the table in `dlrover_hooks/__init__.py` name the same things."""
    import ast

    import dlrover_hooks

    tree = ast.parse((ROOT / "dlrover_hooks/__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dlrover_hooks.")
        for alias in node.names
    }
    assert seen == dlrover_hooks._PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    import dlrover_hooks

    with pytest.raises(AttributeError, match="no attribute 'elastic_lodaer'"):
        _ = dlrover_hooks.elastic_lodaer
