"""Settings: keyword arguments over environment over defaults. This is the only reader of the environment.

Every shared keyword can be given as `DLROVER_HOOKS_<NAME>`. The launcher, torchrun, SLURM and Kubernetes are read here
too, so that identity (job, node, rank) has one source.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import msgspec

from dlrover_hooks.errors import KeeperAway, UsageError

PREFIX = "DLROVER_HOOKS_"
Duration = timedelta | str | int
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The shared keywords of every adapter, checked and in canonical units."""

    save_to: str | None = None
    storage_options: dict[str, Any] = {}
    save_every: int | str = "auto"
    persist_every: int | str = "600s"
    keep: int = 2
    resume: str = "auto"
    job: str = ""
    named: bool = False
    """False: `job` was made up for this start, so no later start can find it."""
    global_batch_size: int | None = None
    master: str | None = None
    token: str | None = None
    on_error: str = "raise"
    disable: bool = False
    fresh: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = ""
    incarnation: str = ""
    """Set by `dlrover-hooks run`, which has already joined for this seat; empty: this process joins for itself."""


def interval(value: Duration, *, name: str) -> int | str:
    """`value` as optimizer steps (int), `"auto"`, or canonical seconds (`"90s"`). Raises `UsageError` with examples."""
    if isinstance(value, bool) or value is None:
        raise _bad_interval(name, value)
    if isinstance(value, timedelta):
        return _seconds(value.total_seconds(), name, value)
    if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
        if int(value) < 1:
            raise _bad_interval(name, value)
        return int(value)
    text = str(value).strip().lower()
    if text == "auto":
        return text
    match = re.fullmatch(r"([0-9.]+)\s*(ms|s|m|h|d)", text)
    if match is None:
        raise _bad_interval(name, value)
    return _seconds(float(match[1]) * _UNITS[match[2]], name, value)


def _seconds(seconds: float, name: str, value: object) -> str:
    if seconds <= 0:
        raise _bad_interval(name, value)
    return f"{seconds:g}s"


def _bad_interval(name: str, value: object) -> UsageError:
    return UsageError(
        f"{name}={value!r} is neither a number of optimizer steps nor a duration",
        hint=f'use an int >= 1 for steps ({name}=50), "auto", or a duration such as "90s", "10m" or '
        "timedelta(minutes=10)",
    )


def load(environ: Mapping[str, str] | None = None, **given: Any) -> Config:
    """A `Config` from keyword arguments (None means not given), the environment, and defaults."""
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Config):
        if given.get(field.name) is not None:
            values[field.name] = given[field.name]
        elif (text := env.get(PREFIX + field.name.upper())) not in (None, ""):
            values[field.name] = _parsed(field.name, text, field.type)
    for name in ("save_every", "persist_every"):
        if name in values:
            values[name] = interval(values[name], name=name)
    job = values.get("job") or _job(env)
    values |= {"job": job or f"job-{uuid.uuid4().hex[:12]}", "named": job is not None}
    config = msgspec.convert(values, Config, strict=False)
    _check(config)
    return config


def _parsed(name: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text) if name == "storage_options" else msgspec.convert(text, kind, strict=False)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{PREFIX}{name.upper()}={text!r} cannot be read: {error}") from error


def _check(config: Config) -> None:
    if config.keep < 1:
        raise UsageError(f"keep={config.keep} would leave no checkpoint", hint="use keep=1 or more")
    if config.on_error not in ("raise", "warn"):
        raise UsageError(f"on_error={config.on_error!r} is unknown", hint='use "raise" or "warn"')
    if config.global_batch_size is not None and config.global_batch_size < 1:
        raise UsageError(f"global_batch_size={config.global_batch_size} must be at least 1")
    if config.resume not in ("auto", "never", "require") and "/" not in config.resume:
        raise UsageError(f"resume={config.resume!r} is unknown", hint='use "auto", "never", "require" or a URL')


def _job(env: Mapping[str, str]) -> str | None:
    """The job's name as a launcher gave it: ours, torchrun's (not its default "none"), SLURM's, Kubernetes'."""
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOB_NAME"):
        if (value := env.get(name)) and value != "none":
            return value
    return None


def place(environ: Mapping[str, str] | None = None, *, rank: int | None = None, world_size: int | None = None) -> Place:
    """This process's place; `rank` and `world_size` given by a framework win over the environment."""
    env = os.environ if environ is None else environ
    return Place(
        rank=int(env.get("RANK", 0)) if rank is None else rank,
        world_size=int(env.get("WORLD_SIZE", 1)) if world_size is None else world_size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        node=env.get(PREFIX + "NODE") or socket.gethostname(),
        incarnation=env.get(PREFIX + "INCARNATION", ""),
    )


def use_seat(environ: MutableMapping[str, str] | None = None) -> None:
    """Forget the launcher's seat: it serves one session; a second `fit` in the same process joins for itself."""
    (os.environ if environ is None else environ).pop(PREFIX + "INCARNATION", None)


def worker_environment(**values: str) -> dict[str, str]:
    """This process's environment for a child, with `values` set and one thread per worker unless the user chose."""
    return {"OMP_NUM_THREADS": "1"} | dict(os.environ) | values


def runtime_dir() -> str:
    """A folder of this user alone (mode 0700) for sockets and locks, made if need be.

    Raises:
        KeeperAway: somebody else owns that name.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid():
        path = os.path.join(base, "dlrover-hooks")
    else:
        path = os.path.join(tempfile.gettempdir(), f"dlrover-hooks-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise KeeperAway(
            f"{path} is not this user's own folder with mode 0700", hint="remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def global_seed() -> int:
    """Lightning's `seed_everything` leaves its seed here; 0 as Lightning itself does."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
