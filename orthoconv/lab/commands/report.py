"""`orthoconv report`: write a page that shows the results of a run."""

__all__ = ["report"]

from pathlib import Path

from orthoconv.lab.machine import use_device
from orthoconv.lab.reports import write_report


def report(run: Path, compare: list[Path] | None = None, device: str = "auto", data_dir: Path | None = None) -> None:
    """Write report.html into the folder of a run: curves, certificates, attacks, singular values, a gallery.

    Example: orthoconv report runs/digits

    Args:
        run: Folder of the run, evaluated.
        compare: Folders of other runs to put beside it, evaluated.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        data_dir: Folder of the data set, which only a run of version 0.1.0 is opened with; by default the one of the
            run.
    """
    print(f"report: {write_report(run, compare or [], use_device(device), data_dir)}")
