"""A command line's durations: seconds, or a text such as `10m`."""

from __future__ import annotations

from typing import Any

import click

from dlrover_hooks.errors import UsageError


class Duration(click.ParamType):
    """Converts to seconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from dlrover_hooks.config.duration import seconds

        if isinstance(value, float):
            return value
        try:
            return seconds(value, name=param.opts[0] if param else "it")
        except UsageError as error:
            self.fail(str(error), param, ctx)
