"""Residual connections that are not expansive (Section 5.1)."""

__all__ = ["ConvexResidual", "ConvexSum", "convex_weights"]

import torch
from torch import Tensor, nn


class ConvexResidual(nn.Module):
    """Convex combination s f(x) + (1 - s) skip(x), where s = sigmoid(alpha) is learned.

    It is 1-Lipschitz if `f` and `skip` are.

    Arguments:
        f: The residual branch.
        skip: The other branch; by default the identity.

    Shape:
        Any that both branches take, to the shape that both return.

    >>> ConvexResidual(nn.Tanh())(torch.zeros(3))
    tensor([0., 0., 0.], grad_fn=<AddBackward0>)
    """

    def __init__(self, f: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        for name, module in f.named_modules():
            if getattr(module, "inplace", False):
                raise ValueError(f"ConvexResidual needs its input unchanged, but {name or 'f'} is in place: {module}")
        self.f = f
        self.skip = nn.Identity() if skip is None else skip
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.f(x), self.skip(x)
        if y.shape != z.shape:
            raise ValueError(f"ConvexResidual needs branches of one shape, got {tuple(y.shape)} and {tuple(z.shape)}")
        return torch.add(torch.sigmoid(self.alpha) * y, torch.sigmoid(-self.alpha) * z)  # 1 - s would lose its digits


class ConvexSum(nn.Module):
    """Convex combination s x + (1 - s) y of two inputs, where s = sigmoid(alpha) is learned; in place of a sum.

    Shape:
        Two inputs of one shape, to the same.

    >>> ConvexSum()(torch.zeros(3), torch.ones(3))
    tensor([0.5000, 0.5000, 0.5000], grad_fn=<AddBackward0>)
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError(f"ConvexSum needs inputs of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
        return torch.add(torch.sigmoid(self.alpha) * x, torch.sigmoid(-self.alpha) * y)


def convex_weights(alpha: Tensor) -> tuple[float, float]:
    """Return sigmoid(alpha) and 1 minus it, each with all its digits."""
    return torch.sigmoid(alpha.double()).item(), torch.sigmoid(-alpha.double()).item()
