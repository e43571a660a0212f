"""Modules that a new worker imports before it joins: those of well-known packages that a worker of its node imported.

The worker writes their names after its first step, so that the list includes what torch and others import on first use
(`torch._dynamo` with the first optimizer: over a second). Packages with side effects at import (MPI, trackers) are not
in the list of well-known ones, nor is the user's own code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence

import msgspec

from dlrover_hooks import config as settings

log = logging.getLogger("dlrover_hooks")

WELL_KNOWN = frozenset(
    (
        *("PIL", "accelerate", "datasets", "dlrover_hooks", "einops", "huggingface_hub", "jsonargparse", "lightning"),
        *("lightning_fabric", "lightning_utilities", "matplotlib", "numpy", "omegaconf", "pandas", "peft", "psutil"),
        *("pyarrow", "pytorch_lightning", "requests", "safetensors", "scipy", "sklearn", "sympy", "timm", "tokenizers"),
        *("torch", "torchaudio", "torchdata", "torchmetrics", "torchvision", "tqdm", "transformers", "triton", "yaml"),
    )
)


class Imported(msgspec.Struct, frozen=True):
    """`packages`: the file of each; a package of the same name elsewhere is ignored. `modules`: in order of import.

    `environment`: variables set by the script, which packages may read when they are imported.
    """

    packages: dict[str, str]
    modules: list[str]
    environment: dict[str, str] = {}


def tell() -> None:
    """Write the list of imported modules if the launcher requested it and it does not exist yet. Any thread.

    Takes a few ms, once.
    """
    path = settings.preload_file()
    if path is None or os.path.exists(path):
        return
    with contextlib.suppress(OSError):  # without the list, new workers only start more slowly
        draft = f"{path}.{os.getpid()}"
        with open(draft, "wb") as file:
            file.write(msgspec.json.encode(imported()))
        os.replace(draft, path)


def imported() -> Imported:
    """The modules of well-known packages that this process has imported from files."""
    packages, modules = dict[str, str](), list[str]()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        package = name.partition(".")[0]
        if package not in WELL_KNOWN or spec is None or spec.name != name or not spec.has_location:
            continue
        if name == package:
            packages[name] = spec.origin
        modules.append(name)
    modules = [name for name in modules if name.partition(".")[0] in packages]
    return Imported(packages, modules, settings.changed_environment())


def encoded(modules: Sequence[str]) -> bytes:
    """The content of a list of `modules`, for a launcher that knows them: those of packages that are installed."""
    packages = {name: file for name in modules if "." not in name and (file := origin(name)) is not None}
    own = {"dlrover_hooks": origin("dlrover_hooks") or ""}
    return msgspec.json.encode(Imported({**packages, **own}, list(modules)))


def told(path: str | None) -> Imported:
    """The list that a worker wrote; empty if there is none."""
    try:
        with open(path or "", "rb") as file:
            return msgspec.json.decode(file.read(), type=Imported)
    except (OSError, msgspec.DecodeError):
        return Imported({}, [])


def load(wanted: Imported, leave_out: Collection[str] = ()) -> Iterator[str]:
    """Import the modules one by one, and yield the name of each. Import errors are left to the script itself.

    Warnings are suppressed: the worker that imported the modules first has shown them.

    Args:
        wanted: the list that a worker wrote.
        leave_out: packages, and sub-packages such as `torch._inductor`.
    """
    usable = [name for name, file in wanted.packages.items() if name not in leave_out and origin(name) == file]
    shown, warnings.showwarning = warnings.showwarning, lambda *_, **__: None
    try:
        for name in wanted.modules:
            if name.partition(".")[0] in usable and part(name) not in leave_out and name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception as error:  # an import may raise anything
                    log.debug("%s cannot be imported ahead: %s", name, error)
                yield name
    finally:
        warnings.showwarning = shown


def part(module: str) -> str:
    """The package or sub-package to leave out if `module` cannot be imported ahead."""
    return ".".join(module.split(".")[:2])


def origin(package: str) -> str | None:
    """The file from which `package` would be imported; None if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
