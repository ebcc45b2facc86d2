"""What several commands take on the command line."""

from pathlib import Path

import click

from kvspec.errors import KvspecError
from kvspec.gate import seconds


class Duration(click.ParamType[float]):
    """A time such as 60s, 2m or 1h, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds, or fail with a sentence."""
        try:
            return seconds(str(value))
        except KvspecError as error:
            self.fail(str(error), param, ctx)


known_option = click.option(
    "--known",
    "known_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Known issues of your own, beside those that come with kvspec.",
)
