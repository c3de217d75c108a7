"""Command line: one function per subcommand, its arguments those of the function."""

__all__ = ["main"]

import sys
from typing import Any

from jsonargparse import auto_cli

from orthoconv import __version__
from orthoconv.allocator import keep_freed_memory
from orthoconv.data import DataError
from orthoconv.lab import bench
from orthoconv.lab.configs import read_trees_only
from orthoconv.lab.datasets import data
from orthoconv.lab.demo import demo
from orthoconv.lab.evaluation import BrokenCertificateError, evaluate
from orthoconv.lab.exporting import export
from orthoconv.lab.publish import publish
from orthoconv.lab.rates import rates
from orthoconv.lab.report import report
from orthoconv.lab.reproduce import reproduce
from orthoconv.lab.training import train
from orthoconv.lab.verifying import VerificationError, verify
from orthoconv.lab.wasserstein import wasserstein
from orthoconv.train import CheckpointError, TrainingError

COMMANDS: dict[str, Any] = {
    "demo": demo,
    "data": data,
    "train": train,
    "evaluate": evaluate,
    "verify": verify,
    "bench": {
        "_help": "Time every method against the plain one, in one run: networks, or single layers.",
        "networks": bench.networks,
        "layers": bench.layers,
    },
    "reproduce": reproduce,
    "rates": rates,
    "wasserstein": wasserstein,
    "report": report,
    "publish": publish,
    "export": export,
}
EXPECTED = (
    BrokenCertificateError,
    CheckpointError,
    DataError,
    TrainingError,
    VerificationError,
    ImportError,
    OSError,
    ValueError,
    TypeError,
)  # what a user can mend


def main(args: list[str] | None = None) -> None:
    """Run the subcommand named by `args`, or by the process's own."""
    if "bench" not in (sys.argv[1:] if args is None else args)[:1]:  # which measures with and without
        keep_freed_memory()
    read_trees_only()
    try:
        auto_cli(COMMANDS, args=args, prog="orthoconv", version=__version__)
    except EXPECTED as error:
        sys.exit(f"orthoconv: {error}")
    except KeyboardInterrupt:
        sys.exit("orthoconv: stopped")
