"""Progress bars."""

__all__ = ["download_bar", "quiet_bar"]

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def quiet_bar(name: str, steps: Any) -> Any:
    """Return a bar for a number of steps, or for a sequence to iterate over; it is shown on a terminal alone."""
    options = {"total": steps} if isinstance(steps, int) else {"iterable": steps}
    return tqdm(**options, desc=name, leave=False, disable=not sys.stderr.isatty())


def download_bar() -> Callable[[int, int], None]:
    """Return a function of the bytes so far and in all. It shows a bar, which appears with the first bytes."""
    bars: list[Any] = []

    def update(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total or None, unit="B", unit_scale=True, desc="download"))
        bars[0].update(done - bars[0].n)
        if done == total:
            bars[0].close()

    return update
