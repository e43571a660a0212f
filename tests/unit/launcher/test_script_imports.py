"""What a script imports, read from its source: the well-known packages, through its own modules, nothing run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlrover_hooks.launcher.warm import script_imports


def read(folder: Path, files: dict[str, str], *command: str) -> tuple[list[str], dict[str, str]]:
    """Names that were found, without those that come with torch; and the variables."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    found = script_imports.read(command or [str(folder / "train.py")])
    return [name for name in found.modules if name not in script_imports._WITH_TORCH], found.environment


def test_packages_wherever_in_the_file_they_are_imported(tmp_path: Path) -> None:
    text = "import sys, torch.nn as nn\nraise SystemExit\ndef main():\n    from numpy import linalg\n    import mylib\n"
    assert read(tmp_path, {"train.py": text})[0] == ["torch.nn", "numpy", "numpy.linalg"]


def test_the_scripts_own_modules_are_followed(tmp_path: Path) -> None:
    files = {
        "train.py": "import torch\nfrom model.net import Net\nimport scipy\n",
        "scipy.py": "import pandas\n",
        "model/__init__.py": "",
        "model/net.py": "from . import parts\nfrom ..outside import x\nimport torch.nn\n",
        "model/parts.py": "import numpy\nimport model.net\n",
    }
    found = read(tmp_path, files)[0]
    assert set(found) == {"torch", "torch.nn", "pandas", "numpy"}, "a module of its own is not the package"


@pytest.mark.parametrize("text", ["import numpy\n", "import torch, (\n", "", "\0"])
def test_nothing_without_torch_or_without_sense(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, {"train.py": text}) == ([], {})


def test_no_file_at_all() -> None:
    assert script_imports.read(["nowhere.py"]).modules == []
    assert script_imports.read(["-m", "nowhere.train"]).modules == []
    assert script_imports.read([]).modules == []


def test_modules_and_folders_are_run_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"app/train.py": "import torch\n", "app/__main__.py": "import torch.nn\nimport train\n"}
    assert read(tmp_path, files, "-m", "app.train")[0] == ["torch"]
    assert read(tmp_path, files, "-m", "app")[0] == ["torch.nn"]
    assert read(tmp_path, files, "app")[0] == ["torch.nn", "torch"]
    assert "app" not in sys.modules


def test_variables_that_are_set_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "before")
    text = (
        "import os\nimport torch\nos.environ['A'] = 'a'\nos.environ['B'] = str(1)\nos.environ.setdefault('C', 'c')\n"
        "os.environ.setdefault('SET', 'x')\n"
    )
    assert read(tmp_path, {"train.py": text})[1] == {"A": "a", "C": "c"}
