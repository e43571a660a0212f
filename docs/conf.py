"""Sphinx configuration. Tables of flags, settings and routes are made from the code, so they cannot drift."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import _compatibility  # noqa: E402
import _configuration  # noqa: E402
from sphinx.ext.napoleon import Config as NapoleonConfig, GoogleDocstring  # noqa: E402

import dlrover_hooks  # noqa: E402
import dlrover_hooks.protocol  # noqa: E402
from dlrover_hooks.launcher.failures.causes import CAUSES  # noqa: E402

project = "dlrover-hooks"
author = "The dlrover-hooks authors"
copyright = "2026, The dlrover-hooks authors"
version = release = dlrover_hooks.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"dlrover-hooks {version}"
html_static_path = ["_static"]

autodoc_mock_imports = ["tensorflow", "tf_keras"]  # installed in another environment
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # else the hooks of Lightning's Callback would be repeated here
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Count": "int"}
python_maximum_signature_line_length = 100
default_role = "literal"  # docstrings write code in single backticks, as Markdown does
smartquotes = False  # they would change the quotes of code, such as "auto", and the dashes of flags

myst_enable_extensions = ["substitution", "colon_fence", "deflist"]
myst_heading_anchors = 3


def help_of(*command: str) -> str:
    """The help page of a command, as it prints it, in a code block."""
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
        env={"COLUMNS": "100", "TERM": "dumb", "PATH": ""},
    )
    return f"```text\n{done.stdout.strip()}\n```"


def routes() -> str:
    """One line for each row of the table of routes."""
    rows = ["| | path | message | reply | |", "|---|---|---|---|---|"]
    for route in dlrover_hooks.protocol.ROUTES:
        kind = "event" if route.event else "long-poll" if route.waits else ""
        names = f"`{route.request.__name__}` | `{route.reply.__name__}`"
        rows.append(f"| {route.method} | `{route.path}` | {names} | {route.summary} {kind and f'*({kind})*'} |")
    return "\n".join(rows)


def causes() -> str:
    """The launcher's table of causes."""
    rows = [
        "| cause | seen as | what follows | where a restart is in vain | on the last screen |",
        "|---|---|---|---|---|",
    ]
    for row in CAUSES:
        in_vain = row.in_vain.value if row.in_vain is not None else ""
        rows.append(f"| {row.name} | {row.seen_as} | {row.action.value} | {in_vain} | {row.hint} |")
    return "\n".join(rows)


cli = ("-c", "from dlrover_hooks.cli.main import main; main(prog_name='dlrover-hooks')")
myst_substitutions = {
    "run_help": help_of(*cli, "run"),
    "rehearse_help": help_of(*cli, "rehearse"),
    "master_help": help_of("-m", "dlrover_hooks.master"),
    "routes": routes(),
    "causes": causes(),
    **_configuration.tables(),
    **_compatibility.tables(),
}


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring: sections `Args:` and `Raises:` as fields, an indented paragraph as code.

    Napoleon's own extension would take the words before a colon in an attribute's text for a type.
    """
    for at in range(len(lines) - 1, 1, -1):
        if lines[at].startswith("    ") and not lines[at - 1] and not lines[at - 2].startswith(" "):
            lines[at:at] = ["::", ""]
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, NapoleonConfig(), app, what, name, obj, options).lines()


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_rst)
