"""How certificates and verifications show themselves: one line of text, and a small table in a notebook."""

__all__ = ["curve", "in_levels", "row", "table"]

import html
import math
from collections.abc import Iterable, Sequence

from torch import Tensor

_WIDTH, _HEIGHT = 260, 90
_CELL = 'style="text-align:left;padding:2px 10px"'


def in_levels(eps: float) -> str:
    """Write a norm as levels of 255 where it is a whole number of them.

    >>> in_levels(36 / 255), in_levels(0.25)
    ('36/255', '0.25')
    """
    levels = round(eps * 255) if math.isfinite(eps) else 0
    return f"{levels}/255" if abs(levels / 255 - eps) < 1e-12 and 0 < levels < 255 else f"{eps:.4g}"


def row(cells: Sequence[object], kind: str = "td") -> str:
    """Return a row of a table; whatever is in the cells, it is text.

    >>> row(["<b>"])
    '<tr><td style="text-align:left;padding:2px 10px">&lt;b&gt;</td></tr>'
    """
    return f"<tr>{''.join(f'<{kind} {_CELL}>{html.escape(str(c))}</{kind}>' for c in cells)}</tr>"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML, in the colours of the page it stands on."""
    body = "".join(map(row, rows))
    return f"<table><thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>"


def curve(radius: Tensor) -> str:
    """Return an SVG of the share of examples whose radius exceeds each distance.

    Arguments:
        radius: Certified radii (b,).
    """
    most = float(radius.max()) if len(radius) else 0.0
    if most <= 0:
        return ""
    steps = [k / 60 for k in range(61)]
    shares = [float((radius > s * most).double().mean()) for s in steps]
    points = " ".join(f"{s * _WIDTH:.1f},{(1 - y) * _HEIGHT:.1f}" for s, y in zip(steps, shares, strict=True))
    axes = f"M0,0V{_HEIGHT}H{_WIDTH}"
    return (
        f'<svg width="{_WIDTH + 60}" height="{_HEIGHT + 24}" viewBox="-30 -6 {_WIDTH + 60} {_HEIGHT + 24}" '
        'fill="none" stroke="currentColor" font-size="10"><title>certified accuracy by radius</title>'
        f'<path d="{axes}" stroke-opacity="0.4"></path>'
        f'<polyline points="{points}" stroke="#1f5fbf" stroke-width="2"></polyline>'
        f'<g fill="currentColor" stroke="none"><text x="-28" y="6">100%</text><text x="-10" y="{_HEIGHT + 13}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT + 13}">{most:.2f}</text></g></svg>'
    )
