import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orthoconv import cayley

EPS = torch.finfo(torch.float64).eps

matrices = st.builds(
    lambda batch, m, n, scale, complex_, seed: (
        scale
        * torch.randn(
            *batch,
            m,
            n,
            dtype=torch.complex128 if complex_ else torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
    ),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 30.0, 1e3]),
    st.booleans(),
    st.integers(0, 2**31),
)


def gram_error(Q: Tensor) -> float:
    Q = Q.mH if Q.shape[-2] < Q.shape[-1] else Q
    return float((Q.mH @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).abs().max())


def padded(W: Tensor) -> Tensor:
    """The definition: pad to square with zeros, transform the skew-Hermitian part, project (Appendix A.1)."""
    m, n = W.shape[-2:]
    s = max(m, n)
    B = torch.nn.functional.pad(W, (0, s - n, 0, s - m))
    eye, A = torch.eye(s, dtype=W.dtype), B - B.mH
    return ((eye - A) @ torch.linalg.inv(eye + A))[..., :m, :n]


@settings(deadline=None, max_examples=150)
@given(matrices)
def test_cayley_is_semi_orthogonal(W: Tensor) -> None:
    Q = cayley(W)
    assert Q.shape == W.shape
    assert Q.dtype == W.dtype
    size = 1 + W.abs().max().item()
    assert gram_error(Q) <= 100 * EPS * size**2


@settings(deadline=None, max_examples=150)
@given(matrices)
def test_cayley_is_the_projection_of_the_padded_transform(W: Tensor) -> None:
    size = 1 + W.abs().max().item()
    assert (cayley(W) - padded(W)).abs().max() <= 200 * EPS * size**2


@settings(deadline=None, max_examples=50)
@given(matrices)
def test_cayley_commutes_with_transposing_and_conjugating(W: Tensor) -> None:
    size = 1 + W.abs().max().item()
    assert (cayley(W.mT) - cayley(W).mT).abs().max() <= 200 * EPS * size**2
    assert (cayley(W.conj()) - cayley(W).conj()).abs().max() <= 200 * EPS * size**2


@settings(deadline=None, max_examples=50)
@given(matrices)
def test_square_transform_has_no_eigenvalue_minus_one(W: Tensor) -> None:
    n = min(W.shape[-2:])
    W = W[..., :n, :n] / (1 + W.abs().max())
    assert (torch.linalg.eigvals(cayley(W)) + 1).abs().min() > 1e-3


def test_zero_gives_the_identity() -> None:
    assert torch.equal(cayley(torch.zeros(3, 5, 2)), torch.eye(5, 2).expand(3, -1, -1))


def test_the_inverse_of_the_transform_is_the_transform_of_minus() -> None:
    W = torch.randn(6, 6, dtype=torch.float64)
    torch.testing.assert_close(cayley(W) @ cayley(-W), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("norm", [1.0, 63.0, 65.0, 1e3, 1e5])
def test_square_matrices_of_any_norm_stay_orthogonal_in_float32(norm: float) -> None:
    """Entries of a matrix of order 64 and norm 1e3 are around 16, so the norm decides, and not the entries."""
    for W in torch.randn(60, 64, 64):  # one by one: a large entry of one would decide for all
        Q = cayley(norm * W / W.norm())
        assert (torch.linalg.svdvals(Q.double()) - 1).abs().max() <= 2e-6 * math.sqrt(64)


@pytest.mark.parametrize(("norm", "atol"), [(1, 2e-6), (1e2, 2e-5), (1e3, 1e-4), (1e4, 2e-3)])
@pytest.mark.parametrize("shape", [(80, 64), (64, 80), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_large_weights_stay_orthogonal_in_float32(norm: float, atol: float, shape: tuple[int, int], dtype) -> None:
    W = torch.randn(8, *shape, dtype=dtype)
    W = norm * W / torch.linalg.matrix_norm(W, ord=2)[:, None, None]
    assert gram_error(cayley(W)) <= atol


def test_the_quotient_of_the_paper_fails_where_ours_holds() -> None:
    """The negative control of the test above: (I + A)^-1 (I - A), as the paper's listing has it, at norm 1e4."""
    W = torch.randn(80, 64, dtype=torch.complex64)
    W = 1e4 * W / torch.linalg.matrix_norm(W, ord=2)
    U, V, eye = W[:64], W[64:], torch.eye(64)
    A = U - U.mH + V.mH @ V
    inverse = torch.linalg.inv(eye + A)
    assert gram_error(torch.cat((inverse @ (eye - A), -2 * V @ inverse))) > 2e-3
    assert gram_error(cayley(W)) <= 2e-3


@pytest.mark.parametrize("W", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.tensor(1.0)])
def test_what_is_no_matrix_is_refused(W: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., m, n\), got"):
        cayley(W)


@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (2, 5)])
def test_gradients(shape: tuple[int, int]) -> None:
    for dtype in (torch.float64, torch.complex128):
        W = torch.randn(2, *shape, dtype=dtype, requires_grad=True)
        torch.autograd.gradcheck(cayley, W)
        torch.autograd.gradgradcheck(cayley, W)


@pytest.mark.parametrize(("norm", "atol"), [(1e3, 1e-4), (1e4, 2e-3), (1e20, 1e-4)])
def test_tall_weights_of_low_rank_stay_orthogonal_in_float32(norm: float, atol: float) -> None:
    """Where V*V is singular, its rounding decides; a tall W is therefore transformed in float64."""
    W = torch.randn(128, 64)
    W[64:] = torch.randn(64, 2) @ torch.randn(2, 64) * 50
    assert gram_error(cayley(W * (norm / torch.linalg.matrix_norm(W, ord=2)))) <= atol
