"""What a newcomer imports before it joins: the modules of well-known packages that a worker of its node has imported.

The worker writes their names once it has trained a step, so that what torch and others import only when it is used
(`torch._dynamo` with the first optimizer: over a second) is among them. Packages that do something when they are
imported (MPI, trackers) are not well known here, nor is the user's own code.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator

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
    """`packages`: the file of each; another one of the same name elsewhere is not it. `modules`: in order of import.

    `environment`: variables that the script has set, which packages may read when they are imported.
    """

    packages: dict[str, str]
    modules: list[str]
    environment: dict[str, str] = {}


def tell() -> None:
    """A worker of a launcher that wants to know: write what this process has imported, unless it is known. Any thread.

    It takes some ms, once.
    """
    path = settings.preload_file()
    if path is None or os.path.exists(path):
        return
    with contextlib.suppress(OSError):  # then newcomers are slower
        draft = f"{path}.{os.getpid()}"
        with open(draft, "wb") as file:
            file.write(msgspec.json.encode(imported()))
        os.replace(draft, path)


def imported() -> Imported:
    """What this process has imported of well-known packages, from files."""
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


def told(path: str | None) -> Imported:
    """What a worker wrote; nothing if none did."""
    try:
        with open(path or "", "rb") as file:
            return msgspec.json.decode(file.read(), type=Imported)
    except (OSError, msgspec.DecodeError):
        return Imported({}, [])


def load(wanted: Imported, leave_out: Collection[str] = ()) -> Iterator[str]:
    """Import one by one, and yield the name of each. What cannot be imported is the script's own affair.

    Warnings were shown by the worker that imported them first.

    Args:
        wanted: what a worker had imported.
        leave_out: packages, and sub-packages such as `torch._inductor`.
    """
    usable = [name for name, file in wanted.packages.items() if name not in leave_out and origin(name) == file]
    shown, warnings.showwarning = warnings.showwarning, lambda *_, **__: None
    try:
        for name in wanted.modules:
            if name.partition(".")[0] in usable and part(name) not in leave_out and name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception as error:  # whatever an import may raise
                    log.debug("%s cannot be imported ahead: %s", name, error)
                yield name
    finally:
        warnings.showwarning = shown


def part(module: str) -> str:
    """The package or sub-package that is left out where `module` cannot be imported ahead."""
    return ".".join(module.split(".")[:2])


def origin(package: str) -> str | None:
    """The file that it would be imported from, None if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
