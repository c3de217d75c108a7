"""Progress bars."""

__all__ = ["download_bar"]

from collections.abc import Callable
from typing import Any

from tqdm import tqdm


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
