"""`dlrover-hooks ckpt`: list, verify, prune and export the generations of a checkpoint tree."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from dlrover_hooks.errors import Corrupt, HooksError, UsageError

if TYPE_CHECKING:
    from dlrover_hooks.checkpoint.storage.catalog import Listed
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
    from dlrover_hooks.protocol import Manifest, Retention

_USAGE, _FAILED = 78, 1
FORMS = ("torch", "dcp", "hf", "lightning")


@click.group()
def ckpt() -> None:
    """List, verify, prune and export durable checkpoints.

    URL is the value of `save_to`: a folder, or an fsspec URL.
    Exit codes: 0 done, 1 something is damaged or storage failed, 78 wrong URL or options, 130 Ctrl-C.

    \b
    dlrover-hooks ckpt ls ckpt/
    dlrover-hooks ckpt export --to torch ckpt/ model.pt
    """


def _options(_: Any, __: Any, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter('an object is wanted, such as {"anon": true}')
    return found


def _tree(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that select a tree."""
    command = click.option("--storage-options", callback=_options, help="fsspec options of the URL, as JSON.")(command)
    return click.argument("url")(command)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Print a HooksError in a few lines, and exit with its code, without a traceback."""
    try:
        yield
    except HooksError as error:
        click.echo(f"dlrover-hooks ckpt: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, UsageError) else _FAILED)


@ckpt.command(short_help="List the generations: which are whole, and why not.")
@_tree
@click.option("--json", is_flag=True, help="One JSON object a line instead of a table.")
def ls(url: str, storage_options: dict[str, Any], json: bool) -> None:
    """List the generations at URL: which are complete, and what is wrong with the others."""
    from dlrover_hooks.checkpoint.storage import catalog
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder

    with _said():
        place = StorageFolder(url, storage_options)
        found = sorted(_rows(place), key=lambda one: (one.attempt, one.step))
        latest = catalog.load(place, catalog.LATEST, catalog.Latest)
        rows = [_row(one) | {"latest": latest is not None and latest.folder == one.folder} for one in found]
        (_print if json else _draw)(rows)


def _row(one: Listed) -> dict[str, Any]:
    manifest = one.manifest
    row: dict[str, Any] = {"step": one.step, "attempt": one.attempt, "folder": one.folder, "whole": one.fault is None}
    row |= {"state": _state(one), "fault": one.fault}
    if manifest is not None:
        row |= {"job": manifest.job, "run": manifest.generation.run, "world_size": manifest.world_size}
        row |= {"nbytes": sum(file.nbytes for file in manifest.files), "created_at": manifest.created_at}
    return row


def _state(one: Listed) -> str:
    if one.unread:
        return "unreadable"
    return "not committed" if not one.committed else "damaged" if one.fault else "whole"


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(json.dumps(row))


def _draw(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlrover_hooks.checkpoint.save.progress_log import readable

    table = Table("step", "attempt", "job", "run", "ranks", "size", "age", "state", box=None)
    for row in rows:
        known = "job" in row
        table.add_row(
            f"{row['step']}",
            f"{row['attempt']}",
            row["job"] if known else "",
            row["run"][:8] if known else "",
            f"{row['world_size']}" if known else "",
            readable(row["nbytes"]) if known else "",
            _age(time.time() - row["created_at"]) if known else "",
            f"{row['state']}, latest" if row["latest"] else row["state"],
        )
    Console(markup=False).print(table)  # a job's name may look like markup
    for row in rows:
        if not row["whole"]:
            click.echo(f"{row['folder']}: {row['fault']}")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@ckpt.command(short_help="Read everything and compare it with its hashes.")
@_tree
@click.option("--step", type=int, help="Only this step.")
def verify(url: str, storage_options: dict[str, Any], step: int | None) -> None:
    """Read every file of every generation at URL and compare each chunk with its hash.

    Without --step, the files beside the generations, such as latest.json, are checked, too. Exit code 1 if anything is
    damaged; damage is reported by file and chunk.
    """
    from rich.console import Console
    from rich.progress import Progress

    from dlrover_hooks.checkpoint.save.progress_log import readable
    from dlrover_hooks.checkpoint.storage.damage_scan import faults, tree_faults
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder

    with _said():
        place = StorageFolder(url, storage_options)
        rows = _rows(place)
        found = [one for one in rows if step in (None, one.step) and one.committed]
        if not found:
            raise _no_such(place, step, rows)
        total = sum(file.nbytes for one in found if one.manifest is not None for file in one.manifest.files)
        bad: list[str] = []
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("verifying", total=total)
            for one in found:
                bad += faults(place, one, lambda nbytes: bar.advance(task, nbytes))
            read = bar.tasks[0].completed
        beside = list(tree_faults(place, rows)) if step is None else []
        for line in (*bad, *beside):
            click.echo(line)
        whole = len(found) - len({line.split("/", 1)[0].split(":", 1)[0] for line in bad})
        click.echo(f"{whole} of {len(found)} generations are whole, {readable(read)} read")
        if bad or beside:
            sys.exit(_FAILED)


@ckpt.command(short_help="Remove what need not be kept.")
@_tree
@click.option("--keep", required=True, help='What stays: "2", or "last=2,every_steps=1000,every=1h".')
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(url: str, storage_options: dict[str, Any], keep: str, dry_run: bool) -> None:
    """Remove generations of the newest run at URL that --keep does not keep, and older uncommitted ones.

    Never removed: the newest complete generation, one that is being read, one that is a link, and uncommitted ones that
    are newer, because a keeper may still be writing them. Refused while a job saves there.
    """
    from dlrover_hooks import config
    from dlrover_hooks.checkpoint.storage import url_claim
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder

    with _said():
        rules = config.retention(keep, name="--keep")
        place = StorageFolder(url, storage_options)
        newest = _chosen(place, storage_options, None)
        claim = None if dry_run else url_claim.UrlClaim.take(url, storage_options, newest.job, "ckpt prune")
        try:
            if not _prune(place, newest, rules, dry_run):
                click.echo(f"nothing to remove at {place.url}: --keep {keep} keeps what is there")
        finally:
            if claim is not None:
                claim.release()


def _prune(place: StorageFolder, newest: Manifest, rules: int | Retention, dry_run: bool) -> int:
    """Print why each generation is removed, or why it stays although no rule keeps it. Returns the number removed."""
    from dlrover_hooks.checkpoint.storage import catalog, retention

    rows, gone = catalog.listing(place), 0
    for one in retention.condemned(rows, newest.job, newest.generation.run, rules):
        if place.is_link(one.folder):
            click.echo(f"{one.folder} is a link: it stays")
        elif retention.being_read(place, one, time.time()):
            click.echo(f"{one.folder} is being read: it stays")
        else:
            gone += 1
            click.echo(f"{'would remove' if dry_run else 'removed'} {one.folder}")
            if not dry_run:
                retention.remove(place, one.folder)
    for one in rows:
        if not one.committed and (one.attempt, one.step) > catalog.age(newest):
            click.echo(
                f"{one.folder} was never committed, but is newer than what is whole: it stays, since a keeper may "
                "still be writing it. If no process of that job runs, remove the folder by hand"
            )
    return gone


@ckpt.command(short_help="Write one in a form that other tools read.")
@_tree
@click.argument("dest", type=click.Path())
@click.option("--to", type=click.Choice(FORMS), required=True, help="The form to write.")
@click.option("--step", type=int, help="The step to export; the newest whole one if not given.")
def export(url: str, storage_options: dict[str, Any], dest: str, to: str, step: int | None) -> None:
    """Write a generation at URL to DEST in a format that other tools read without dlrover-hooks.

    \b
    torch      one file for torch.load: the state as it was saved
    dcp        a folder for torch.distributed.checkpoint.load
    hf         a Hugging Face folder: the model's weights as model.safetensors
    lightning  a .ckpt for Trainer.fit(ckpt_path=) and load_from_checkpoint
    """
    from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder

    with _said():
        try:
            from dlrover_hooks.pytorch import export as forms
        except ImportError as error:
            raise UsageError(f"export needs torch: {error}", hint="pip install dlrover-hooks[torch]") from None
        place = StorageFolder(url, storage_options)
        manifest = _chosen(place, storage_options, step)
        try:
            forms.export(url, storage_options, manifest, to, dest)
        except Corrupt as error:
            raise Corrupt(error.message, hint=_others(place, manifest.generation.step)) from error
        click.echo(f"step {manifest.generation.step} of job {manifest.job} is in {dest}")


def _rows(place: StorageFolder) -> list[Listed]:
    """The generations at `place`. If there are none, raises UsageError that reports what is there instead."""
    from dlrover_hooks.checkpoint.storage import catalog

    if rows := catalog.listing(place):
        return rows
    what, hint = catalog.instead(place)
    raise UsageError(f"{place.url} {what}", hint=hint or "URL is what `save_to` was")


def _chosen(place: StorageFolder, options: dict[str, Any], step: int | None) -> Manifest:
    """The newest complete generation of `step`, or of all steps, of the newest run. Prints the newer damaged ones.

    Raises UsageError that lists the existing ones.
    """
    from dlrover_hooks.checkpoint.storage import generations

    rows = _rows(place)
    scan = generations.scan(place.url, options, None)
    chosen = next((one for one in scan.manifests if step in (None, one.generation.step)), None)
    if chosen is None:
        raise _no_such(place, step, rows)
    for line in scan.damaged if step is None else ():
        click.echo(f"passed over: {line}", err=True)
    return chosen


def _no_such(place: StorageFolder, step: int | None, rows: list[Listed]) -> UsageError:
    if step is None:
        hint = f"`dlrover-hooks ckpt ls {place.url}` says why"
        return UsageError(f"none of the {len(rows)} generations at {place.url} is whole", hint=hint)
    faults = [one.fault for one in rows if one.step == step and one.fault is not None]
    what = f"step {step} at {place.url} is not whole: {faults[0]}" if faults else f"no step {step} is at {place.url}"
    return UsageError(what, hint=_others(place, step))


def _others(place: StorageFolder, step: int) -> str:
    """A hint that lists the complete generations of other steps."""
    from dlrover_hooks.checkpoint.storage import catalog

    steps = {one.step for one in catalog.listing(place) if one.fault is None} - {step}
    if not steps:
        return "no other generation there is whole"
    return f"the newest other whole one is --step {max(steps)}; there are steps {', '.join(map(str, sorted(steps)))}"
