"""Whether the examples of a batch stay apart; a bound is found for one example, and holds for each only if they do."""

__all__ = ["require_apart", "require_input_kept", "rows"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_MIXED = 1e-2  # what mixes examples changes them by their own size, and rounding by far less


def require_apart(module: nn.Module, x: Tensor, path: str) -> Tensor:
    """Return ``module(x)`` for one input `x` (1, ...), or raise an error if the module mixes the examples of a batch.

    Two random examples must have the same values together as each by itself.
    """
    what, y = f"{path} ({type(module).__name__})", module(x.clone())
    if not isinstance(y, Tensor):
        raise TypeError(f"a module is bounded if it returns one tensor, but {what} returns a {type(y).__name__}")
    pair = torch.randn(2, *x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x)
    try:
        together: Tensor = module(pair.clone())
        alone = [module(one.clone()) for one in pair.split(1)]
    except (RuntimeError, ValueError, IndexError) as error:
        raise TypeError(f"{what} takes one input of shape {tuple(x.shape[1:])}, but not two: {error}") from error
    if y.shape[:1] != (1,) or together.shape != (2, *y.shape[1:]) or not _close(together, torch.cat(alone)):
        raise TypeError(f"{what} mixes the examples of a batch, for inputs of shape {tuple(x.shape[1:])}")
    return y


def require_input_kept(module: nn.Module, x: Tensor, path: str) -> None:
    """Raise an error if the module changes its input, of the shape of `x`; other parts of a model may need it."""
    one = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    pair = torch.cat((one, -one))
    given = pair.clone()
    module(given)
    if given._version or not torch.equal(given, pair):  # an edit of `given.data` does not count as a version
        raise TypeError(
            f"{path} ({type(module).__name__}) changes its input, which other parts may need; it is bounded only if "
            f"nothing inside works in place on what it is given: let it begin with a copy, x.clone()"
        )


def rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of that shape whose entries are the numbers of their examples.

    >>> rows((2, 3), torch.empty(0))
    tensor([[0., 0., 0.],
            [1., 1., 1.]])
    """
    numbers = torch.arange(shape[0], dtype=like.dtype, device=like.device)
    return numbers.view(-1, *[1] * (len(shape) - 1)).expand(tuple(shape)).contiguous()


def _close(y: Tensor, z: Tensor) -> bool:
    largest = y.abs().nan_to_num(0, 0, 0).max().item() if y.numel() else 0.0
    return torch.allclose(y, z, rtol=0, atol=_MIXED * largest, equal_nan=True)
