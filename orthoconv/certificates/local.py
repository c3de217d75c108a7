r"""Local certificates: how fast two logits can approach each other near one image.

A Lipschitz constant says how fast they can anywhere. Near an image it is less: a gradient loses norm in layers that add
channels, and in the mean of several networks (docs/maths.md, "Local certificates").

A pair of channels (a, b) of MaxMin has the coordinates (a + b) / sqrt 2, which stays, and t = (a - b) / sqrt 2, which
becomes \|t\|. With d = \|t\| at the image, and s the change of t in the direction of its sign,

.. math:: |d + s| - d = \theta s + e, \qquad 0 \le \theta \le 1

for any slope \theta that we choose, with an error e. If all e were 0, the network would be affine. Let m be the
difference of two logits, w the gradient of -m with these slopes, and g the derivative of -m by \|t\|. Then exactly

.. math:: m(x) - m(x + \delta) = w \cdot \delta + \sum g e, \qquad
          g e \le \lambda s^2 + \frac{g^2}{4 \lambda} (1 - \theta)^2, \qquad \theta = \min(1, 2 d \lambda / g)

for g > 0; for g <= 0 the slope 1 has g e <= 0. The sum of the s^2 of a layer is at most \|\delta\|^2 times the squared
Lipschitz bound up to there. So a decrease of m needs a perturbation along w, or one that changes the order of many
pairs, and one perturbation cannot be both.
"""

__all__ = ["holds", "levels_at", "levels_by", "proven_radius", "slopes"]

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orthoconv.certificates.branches import Branch
from orthoconv.linalg import row_norms
from orthoconv.nn.arguments import channel_axis

_THINNEST = 1 / 100  # of a radius: slabs of a ball that are thinner are given up
_BISECTIONS = 16  # of the logarithm of lambda; any lambda is sound
_PAIRS = 64  # of an image and a class, at once
_ROUNDING = 1e-9  # of all terms, for the gradients: float64 loses 1e-11 in sums of 1e5
_BEYOND = 1 + 1e-6  # times a radius that is proven, so that radius > eps holds in float32, too
_FARTHEST = 2.0  # times the radius by the Lipschitz bound: nothing more is tried


class _Tangent(NamedTuple):
    """Facts about m = logit_t - logit_j near images: m(x) - m(x + delta) <= w delta + quadratic |delta|^2 + constant.

    Attributes:
        margin: m at each image, (b,).
        slope: w, of the shape of the images.
        quadratic: Sum of the lambdas times the squared bounds, (b,).
        constant: Sum of g^2 (1 - theta)^2 / (4 lambda), (b,).
    """

    margin: Tensor
    slope: Tensor
    quadratic: Tensor
    constant: Tensor


def _tangent(branches: Sequence[Branch], x: Tensor, labels: Tensor, others: Tensor, rho: Tensor) -> _Tangent:
    """Return what is known of m near `x`; the lambdas are the best for perturbations of the norms `rho` (b,)."""
    parts = [_tangent_of(branch, x, labels, others, rho) for branch in branches]
    shares = [branch.share for branch in branches]
    return _Tangent(*(sum(s * v for s, v in zip(shares, values, strict=True)) for values in zip(*parts, strict=True)))


def _tangent_of(branch: Branch, x: Tensor, labels: Tensor, others: Tensor, rho: Tensor) -> _Tangent:
    inputs, outputs = branch.outputs(x)
    logits = outputs[-1].detach()
    margin = logits.gather(1, labels[:, None]) - logits.gather(1, others[:, None])
    ends = torch.zeros_like(logits).scatter_(1, others[:, None], 1.0)
    gradient = ends.scatter_(1, labels[:, None], -1.0)  # of -m by the logits
    quadratic = constant = torch.zeros_like(margin[:, 0])
    for k in reversed(range(len(branch.segments))):
        (gradient,) = torch.autograd.grad(outputs[k], inputs[k], gradient)
        if k:
            z, reach = outputs[k - 1].detach(), branch.bounds[k - 1]
            axis = channel_axis("MaxMin", z, branch.sorts[k - 1].dim)
            gradient, lam, cost = _through_maxmin(gradient, z, axis, reach * rho)
            quadratic, constant = quadratic + lam * reach**2, constant + cost
    return _Tangent(margin[:, 0], gradient, quadratic, constant)


def _through_maxmin(gradient: Tensor, z: Tensor, axis: int, rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pull a gradient back through MaxMin at `z` with slopes theta; return it, the lambdas (b,) and the costs (b,)."""
    (by_sum, g), (_, t) = _turned(gradient, axis), _turned(z, axis)
    theta, lam, cost = slopes(g, t.abs(), rho)
    by_difference = torch.where(t < 0, -theta, theta) * g
    return torch.cat(_turned(torch.cat((by_sum, by_difference), axis), axis), axis), lam, cost


def _turned(z: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return (a + b) / sqrt 2 and (a - b) / sqrt 2 for the pairs of channels; done twice, it gives a and b again."""
    a, b = z.chunk(2, axis)
    return (a + b) / math.sqrt(2), (a - b) / math.sqrt(2)


def slopes(g: Tensor, d: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Slopes theta in place of those of \|t\|, so that g e <= lambda s^2 + cost, summed over the units of an example.

    lambda minimises lambda rho^2 + cost, whose derivative is rho^2 - sum (g^2 / (4 lambda^2) - d^2)_+. Any other lambda
    is as sound.

    Arguments:
        g: Derivatives by \|t\|, (b, ...).
        d: Values of \|t\|, of the same shape.
        rho: Largest norm of the s of each example, (b,).

    Returns:
        theta, of the shape of g; lambda and the cost, (b,).
    """
    up = g.clamp_min(0).flatten(1)
    halves, gaps = (up / 2).square(), d.flatten(1).square()
    low, high = (torch.full_like(halves[:, 0], end) for end in (-20.0, 20.0))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        small = (halves * torch.exp(-2 * middle)[:, None] - gaps).clamp_min(0).sum(1) > rho**2
        low, high = torch.where(small, middle, low), torch.where(small, high, middle)
    lam = torch.exp(high)
    steep = 2 * d.flatten(1) * lam[:, None]
    theta = torch.where(up > steep, steep / up, 1.0)
    cost = (halves * (1 - theta).square()).sum(1) / lam
    return theta.view_as(g), lam, cost


def holds(
    branches: Sequence[Branch],
    x: Tensor,
    labels: Tensor,
    others: Tensor,
    radius: Tensor,
    error: Callable[[Tensor], Tensor],
) -> Tensor:
    """Whether no perturbation of at most that norm brings the logit of the other class to that of the label, (b,).

    The ball is cut into slabs across w, the gradient at the image. A perturbation in the slab from a to a' is first
    a w / |w|, and then another one, which goes on along w by b <= a' - a. The squared norm of that one is at most
    rho^2 - 2 a b, with rho^2 = radius^2 - a^2. So one perturbation cannot use its whole norm twice: along w, and to
    change the order of pairs. The first slab holds what goes back along w, too, where w does no harm. Each slab is as
    wide as the margin at its near side allows; if one would be too thin, nothing is proven.

    Arguments:
        branches: The model, as `branches_of` returns it.
        x: Images in float64, (b, ...).
        labels: Their classes, (b,).
        others: Another class for each, (b,).
        radius: Norm of the perturbations of each, (b,).
        error: Bound of the rounding error of the logits in float64, for images of such norms.
    """
    proven, near = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(x.flatten(1)[:, 0])
    axis, left = torch.zeros_like(x.flatten(1)), torch.arange(len(x), device=x.device)
    doubts = math.sqrt(2) * (1 + 2 * max(len(branch.sorts) for branch in branches))  # of the margin, and of each d
    while len(left):
        r = radius[left]
        centre, rho = x[left] + (near[left, None] * axis[left]).view_as(x[left]), _side(r, near[left])
        tangent = _tangent(branches, centre, labels[left], others[left], rho)
        slope = tangent.slope.flatten(1)
        axis[left] = torch.where(near[left, None] > 0, axis[left], _unit(slope))
        along = (slope * axis[left]).sum(1)
        across = row_norms(slope - along[:, None] * axis[left])
        fall = across * rho + tangent.quadratic * rho**2 + tangent.constant
        scale = tangent.margin.abs() + fall + row_norms(slope) * r.clamp_min(1)
        room = tangent.margin - fall - doubts * error(row_norms(centre) + r) - _ROUNDING * scale
        rate = along - 2 * near[left] * tangent.quadratic  # what goes on along w is missing from rho
        width = torch.where(rate > 0, (1 - _ROUNDING) * room / rate.where(rate > 0, 1.0), math.inf)
        near[left] += width
        proven[left] = (room > 0) & (near[left] >= r)
        left = left[(room > 0) & (near[left] < r) & (width > _THINNEST * r)]  # none that is not a number
    return proven


def _side(radius: Tensor, near: Tensor) -> Tensor:
    """Norms of the longest perturbations in balls that begin at a distance from the middle and do not go back."""
    return ((radius - near) * (radius + near)).clamp_min(0).sqrt() * (1 + _ROUNDING)


def _unit(w: Tensor) -> Tensor:
    """Rows (b, n) of norm 1: those of w, or the first axis where w is 0."""
    norms = row_norms(w)[:, None]
    first = torch.zeros_like(w)
    first[:, 0] = 1.0
    return torch.where(norms > 0, w / norms.where(norms > 0, 1.0), first)


def levels_at(eps: Sequence[float], radius: Tensor) -> Tensor:
    """Radii to try, (b, n): each eps and a little more, for all images.

    >>> levels_at([0.2, 0.1, 0.0], torch.zeros(1, dtype=torch.float64))
    tensor([[0.1000, 0.2000]], dtype=torch.float64)
    """
    given = sorted(e * _BEYOND for e in eps if 0 < e < math.inf)
    return radius.new_tensor(given).expand(len(radius), len(given))


def levels_by(step: float, radius: Tensor) -> Tensor:
    """Radii to try, (b, n): those of a Lipschitz bound, (b,), made larger by that share again and again.

    >>> levels_by(0.3, torch.ones(1, dtype=torch.float64))
    tensor([[1.3000, 1.6900]], dtype=torch.float64)
    """
    count = math.floor(math.log(_FARTHEST) / math.log1p(step))
    return radius[:, None] * radius.new_tensor([(1 + step) ** (k + 1) for k in range(count)])


def proven_radius(
    branches: Sequence[Branch],
    x: Tensor,
    labels: Tensor,
    reach: Tensor,
    levels: Tensor,
    error: Callable[[Tensor], Tensor],
) -> Tensor:
    """Largest of the levels within which no perturbation changes the class of an image, (b,); 0 where none is proven.

    An image is tried at the levels up to twice its radius, in ascending order, until one fails.

    Arguments:
        branches: The model, as `branches_of` returns it.
        x: Images in float64, (b, ...).
        labels: Their classes, (b,).
        reach: Distance within which no class is known to catch up, (b, classes), inf for the class itself.
        levels: Radii to try for each image, ascending, (b, n).
        error: As in `holds`.
    """
    best, radius = torch.zeros_like(reach[:, 0]), reach.amin(1)
    failed = torch.zeros_like(best, dtype=torch.bool)
    for level in levels.unbind(1):
        tried = (radius <= level) & (radius > level / _FARTHEST) & level.isfinite() & ~failed
        proven = tried.clone()
        rows, classes = ((reach <= level[:, None]) & tried[:, None]).nonzero(as_tuple=True)
        for i, j in zip(rows.split(_PAIRS), classes.split(_PAIRS), strict=True):
            still = proven[i]  # an image that failed for one class is not tried for another
            i, j = i[still], j[still]
            fails = i[~holds(branches, x[i], labels[i], j, level[i], error)]
            proven[fails] = False
        best, failed = torch.where(proven, level, best), failed | (tried & ~proven)
    return best
