"""Command line: one function per subcommand, its arguments those of the function."""

__all__ = ["main"]

from jsonargparse import auto_cli

from orthoconv import __version__
from orthoconv.lab.demo import demo


def main(args: list[str] | None = None) -> None:
    """Run the subcommand named by `args`, or by the process's own."""
    auto_cli({"demo": demo}, args=args, prog="orthoconv", version=__version__)
