"""The tables of docs/configuration.md name every setting and every flag, with the default that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import msgspec
import pytest

from dlrover_hooks.cli.main import main
from dlrover_hooks.config import PREFIX, Config
from dlrover_hooks.master.__main__ import command as master
from dlrover_hooks.master.brain.__main__ import command as brain
from tests.manual import DOCS, tables

KEYWORDS = [field for field in msgspec.structs.fields(Config) if field.name != "named"]  # that one is worked out
TOP = ("run", "check", "vitals", "plans", "scale", "roles", "rehearse", "forget", "manifest")


def rows(table: str) -> list[list[str]]:
    """The cells of each row, without the head."""
    lines = tables("_configuration")[table].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def flags(command: click.Command) -> set[str]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}


def shown(table: str, column: int = 0) -> set[str]:
    return {flag for row in rows(table) for flag in re.findall(r"`([^`]+)`", row[column])}


def commands() -> Iterator[tuple[str, click.Command]]:
    yield from ((f"{name}_table", main.commands[name]) for name in TOP)
    yield "master_table", master


def test_every_setting_has_a_row_with_its_variable_its_default_and_a_meaning() -> None:
    found = {row[0]: row for row in rows("settings_table")}
    assert list(found) == [f"`{field.name}`" for field in KEYWORDS]
    for field in KEYWORDS:
        _, variable, kind, default, meaning = found[f"`{field.name}`"]
        assert variable == f"`{PREFIX}{field.name.upper()}`"
        assert kind.strip("`")
        assert meaning
        if field.default is not msgspec.NODEFAULT:
            assert default == "`" + repr(field.default).replace("'", '"') + "`"


@pytest.mark.parametrize(("table", "command"), list(commands()), ids=lambda one: getattr(one, "name", None))
def test_every_flag_has_a_row(table: str, command: click.Command) -> None:
    assert shown(table) == flags(command)


def test_every_flag_of_every_ckpt_command_has_a_row() -> None:
    ckpt = main.commands["ckpt"]
    assert isinstance(ckpt, click.Group)
    wanted = {(f"`{name}`", flag) for name, command in ckpt.commands.items() for flag in flags(command)}
    assert {(row[0], flag) for row in rows("ckpt_table") for flag in re.findall(r"`([^`]+)`", row[1])} == wanted


def test_every_flag_of_the_brain_and_its_commands_has_a_row() -> None:
    wanted = {("", flag) for flag in flags(brain)}
    wanted |= {(f"`{name}`", flag) for name, command in brain.commands.items() for flag in flags(command)}
    assert {(row[0], flag) for row in rows("brain_table") for flag in re.findall(r"`([^`]+)`", row[1])} == wanted


def test_no_command_is_left_out() -> None:
    """`master` is `python -m dlrover_hooks.master`."""
    assert set(main.commands) == {*TOP, "brain", "ckpt", "master"}


def test_a_flag_is_shown_with_the_variables_that_set_it() -> None:
    found = {row[0]: row[1] for table in ("run_table", "master_table") for row in rows(table)}
    assert found["`--max-restarts`"] == "`DLROVER_HOOKS_RUN_MAX_RESTARTS`, `PET_MAX_RESTARTS`"
    assert found["`--lease`"] == ""
    assert "`DLROVER_HOOKS_TOKEN`" in found["`--token`"]


def test_the_page_includes_every_table() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert [name for name in tables("_configuration") if f"{{{{ {name} }}}}" not in page] == []
