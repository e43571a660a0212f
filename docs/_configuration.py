"""The tables of configuration.md, made from the code: the settings, and the flags of the commands.

`tables` returns them by the name under which `configuration.md` includes them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from dlrover_hooks.cli.main import main
from dlrover_hooks.config import PREFIX, Config
from dlrover_hooks.master.__main__ import command as master
from dlrover_hooks.master.brain.__main__ import command as brain
from dlrover_hooks.master.operator.__main__ import command as operator

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "dlrover_hooks/config/settings.py"
_CODE = re.compile(r"`[^`]+`|(?<![\w-])--[a-z][\w-]*")
"""Parts of a help text that are shown as code."""


_COMMANDS = ("run", "check", "vitals", "plans", "scale", "roles", "rehearse", "forget", "manifest")


def tables() -> dict[str, str]:
    """Every table of the page, in Markdown."""
    root = _context(main, "dlrover-hooks", None)
    ckpt = main.commands["ckpt"]
    assert isinstance(ckpt, click.Group)
    below = _context(ckpt, "ckpt", root)
    return {
        "settings_table": settings_table(),
        **{f"{name}_table": flag_table(main.commands[name], name, root) for name in _COMMANDS},
        "ckpt_table": _table(
            ("command", "flag", "variable", "default", "meaning"),
            ((f"`{name}`", *row) for name in ckpt.commands for row in flag_rows(ckpt.commands[name], name, below)),
        ),
        "master_table": flag_table(master, "python -m dlrover_hooks.master", None),
        "brain_table": _brain_table(),
        "operator_table": flag_table(operator, "python -m dlrover_hooks.master.operator", None),
    }


def _brain_table() -> str:
    context = _context(brain, "python -m dlrover_hooks.master.brain", None)
    rows = [("", *row) for row in flag_rows(brain, "python -m dlrover_hooks.master.brain", None)]
    rows += [(_code(name), *row) for name in brain.commands for row in flag_rows(brain.commands[name], name, context)]
    return _table(("command", "flag", "variable", "default", "meaning"), rows)


def settings_table() -> str:
    """One row for each keyword of `Config`. `named` is no keyword: `config.load` works it out."""
    defaults = msgspec.to_builtins(Config())
    rows = [
        (_code(name), _code(PREFIX + name.upper()), _code(kind), _code(repr(defaults[name]).replace("'", '"')), meaning)
        for name, kind, meaning in fields()
        if name != "named"
    ]
    return _table(("keyword", "variable", "type", "default", "meaning"), rows)


def flag_table(command: click.Command, name: str, parent: click.Context | None) -> str:
    """One row for each option of a command."""
    return _table(("flag", "variable", "default", "meaning"), flag_rows(command, name, parent))


def flag_rows(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, ...]]:
    """Flags, variables, default and help of each option of `command`."""
    context = _context(command, name, parent)
    for option in command.params:
        if isinstance(option, click.Option):
            flags = ", ".join(map(_code, (*option.opts, *option.secondary_opts)))
            names = ", ".join(map(_code, variables(option, context)))
            choices = f" One of {', '.join(option.type.choices)}." if isinstance(option.type, click.Choice) else ""
            yield flags, names, _default(option), _text((option.help or "") + choices)


def variables(option: click.Option, context: click.Context) -> list[str]:
    """The variables from which click reads `option`: those it was given, then the one made of the command's name."""
    given = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    if option.allow_from_autoenv and context.auto_envvar_prefix and option.name:
        given.append(f"{context.auto_envvar_prefix}_{option.name.upper()}")
    return list(dict.fromkeys(given))


def fields() -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each field of `Config`: the meaning is the string below it in the source."""
    module = ast.parse(SETTINGS.read_text())
    found = next(one for one in module.body if isinstance(one, ast.ClassDef) and one.name == "Config")
    for line, below in itertools.pairwise(found.body):
        if isinstance(line, ast.AnnAssign):
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise ValueError(f"{SETTINGS}:{line.lineno}: there must be a string below this field: what it means")
            yield ast.unparse(line.target), ast.unparse(line.annotation), _text(str(below.value.value))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, parent=parent, info_name=name, **command.context_settings)


def _default(option: click.Option) -> str:
    value = option.to_info_dict()["default"]
    if option.required:
        return "required"
    if option.is_flag and not value:
        return "off"
    return "" if value is None or value == "" else _code(str(value))


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _text(text: str) -> str:
    """A help text as one line of Markdown: flags as code, special characters escaped."""
    text, parts, at = " ".join(text.split()), [], 0
    for match in _CODE.finditer(text):
        parts += [re.sub(r"([\\*_<\[\]])", r"\\\1", text[at : match.start()]), _code(match[0].strip("`"))]
        at = match.end()
    return "".join([*parts, re.sub(r"([\\*_<\[\]])", r"\\\1", text[at:])])
