"""The command `orthoconv`, which needs the `lab` extra."""

__all__ = ["main"]

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from orthoconv.lab.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orthoconv"):
            raise
        sys.exit(f'orthoconv: the command line needs {error.name}; install it with: pip install "orthoconv[lab]"')
    run()


if __name__ == "__main__":
    main()
