"""Command line: one function per subcommand, whose arguments are those of the function."""

__all__ = ["main"]

import sys
from typing import Any

from jsonargparse import auto_cli

from orthoconv import __version__
from orthoconv.allocator import keep_freed_memory
from orthoconv.data import DataError
from orthoconv.lab.commands import bench, records
from orthoconv.lab.commands.certify import certify
from orthoconv.lab.commands.completion import completion
from orthoconv.lab.commands.data import data
from orthoconv.lab.commands.demo import demo
from orthoconv.lab.commands.evaluate import evaluate
from orthoconv.lab.commands.export import export
from orthoconv.lab.commands.publish import publish
from orthoconv.lab.commands.rates import rates
from orthoconv.lab.commands.report import report
from orthoconv.lab.commands.reproduce import reproduce
from orthoconv.lab.commands.search import search
from orthoconv.lab.commands.serve import serve
from orthoconv.lab.commands.train import train
from orthoconv.lab.commands.verify import VerificationError, verify
from orthoconv.lab.commands.wasserstein import wasserstein
from orthoconv.lab.configs import list_methods_in_help, load_methods
from orthoconv.lab.evaluation import BrokenCertificateError
from orthoconv.lab.file_arguments import gather_files
from orthoconv.lab.parsing import CommandParser, flags_of, read_arguments, restrict_parsing
from orthoconv.lab.preset import expand_preset
from orthoconv.train import CheckpointError, TrainingError

COMMANDS: dict[str, Any] = {
    "demo": demo,
    "data": data,
    "train": train,
    "evaluate": evaluate,
    "certify": certify,
    "serve": serve,
    "verify": verify,
    "bench": {
        "_help": "Time every method against the plain one, in one run: networks, layers, layers by batch and size.",
        "networks": bench.networks,
        "layers": bench.layers,
        "regimes": bench.regimes,
    },
    "reproduce": reproduce,
    "records": {
        "_help": "Fill the tables in the background: run what has no record, say what is left, pause, resume.",
        "run": records.run,
        "left": records.left,
        "pause": records.pause,
        "resume": records.resume,
    },
    "rates": rates,
    "search": search,
    "wasserstein": wasserstein,
    "report": report,
    "publish": publish,
    "export": export,
    "completion": completion,
}
EXPECTED = (  # errors that a user can mend
    *(BrokenCertificateError, CheckpointError, DataError, TrainingError, VerificationError),
    *(ImportError, OSError, ValueError, TypeError),
)


def main(args: list[str] | None = None) -> None:
    """Run the subcommand named by `args`, or by the arguments of the process."""
    args = sys.argv[1:] if args is None else args
    if "bench" not in args[:1]:  # bench measures with and without
        keep_freed_memory()
    try:
        read = read_arguments(args, _flags(args))
    except ValueError as error:
        print(f"orthoconv: {error}", file=sys.stderr)
        sys.exit(2)  # as for any argument that cannot be read
    try:
        load_methods()
        list_methods_in_help()
        restrict_parsing()
        auto_cli(
            _needed(args),
            args=gather_files(expand_preset(read)),
            prog="orthoconv",
            version=__version__,
            allow_abbrev=False,
            parser_class=CommandParser,
            epilog="Each command has a --help of its own, with an example. A first one: orthoconv demo",
        )
    except EXPECTED as error:
        sys.exit(f"orthoconv: {error}")
    except KeyboardInterrupt:
        sys.exit("orthoconv: stopped")


def _needed(args: list[str]) -> dict[str, Any]:
    """Return the command that `args` begins with, or all: a parser for each of them takes longer than many a command.

    >>> list(_needed(["train", "--help"])), len(_needed(["--help"])) > 10
    (['train'], True)
    """
    return {args[0]: COMMANDS[args[0]]} if args and args[0] in COMMANDS else COMMANDS


def _flags(args: list[str]) -> set[str]:
    """Return the names of the options of the command in `args` that need no value."""
    command: Any = COMMANDS
    for name in args[:2]:
        command = command.get(name) if isinstance(command, dict) else command
    return flags_of(command) if callable(command) else set()
