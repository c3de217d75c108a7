import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from orthoconv import budget, elimination
from orthoconv.elimination import accretive_inverse, inverse, logabsdet, lu_factor

DTYPES = (torch.float64, torch.complex128)

THREADS = Path(__file__).with_name("batched_lu.py")


def definite(n: int, dtype: torch.dtype, norm: float = 1.0) -> torch.Tensor:
    """Two matrices (I + A) / 2 with A = U - U* + V* V, |A| of about `norm`."""
    U, V = torch.randn(2, 2, n, n, dtype=dtype) * norm / (4 * n) ** 0.5
    return (torch.eye(n, dtype=dtype) + U - U.mH + V.mH @ V) / 2


def one_by_one(function, M):
    return torch.stack([function(m) for m in M])


@pytest.fixture
def small(monkeypatch):
    """Matrices of order 3 and more count as large."""
    monkeypatch.setattr(elimination, "_ORDER", 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 130, 160, 257])
def test_as_each_matrix_alone(n, dtype):
    M, B = definite(n, dtype), torch.randn(2, n, 3, dtype=dtype)
    torch.testing.assert_close(inverse(M), one_by_one(torch.linalg.inv, M))
    torch.testing.assert_close(logabsdet(M), torch.stack([torch.linalg.slogdet(m).logabsdet for m in M]))
    factors = lu_factor(M)
    torch.testing.assert_close(M @ torch.linalg.lu_solve(*factors, B), B)
    torch.testing.assert_close(M.mH @ torch.linalg.lu_solve(*factors, B, adjoint=True), B)


@pytest.mark.parametrize("n", [3, 130])
def test_factors_take_the_place_of_a_matrix_only_where_they_may(n):
    M = definite(n, torch.complex64)
    expected = lu_factor(M)

    def factored(M, **options):
        before = M.clone()
        LU, pivots = lu_factor(M, **options)
        torch.testing.assert_close((LU, pivots), expected)
        if LU.data_ptr() == M.data_ptr():
            return True
        assert torch.equal(M, before)
        return False

    columns = M.mT.contiguous().mT
    assert not factored(columns)
    assert not factored(columns, overwrite=True)  # gradients are recorded
    with torch.no_grad():
        assert not factored(M, overwrite=True)  # rows are contiguous
        assert factored(columns, overwrite=True)


@pytest.mark.parametrize("shape", [(0, 130, 130), (130, 130), (1, 130, 130), (2, 1, 3, 130, 130)], ids=str)
def test_keeps_the_shape_of_the_batch(shape):
    M = torch.randn(shape, dtype=torch.float64) + 50 * torch.eye(130)
    torch.testing.assert_close(inverse(M) @ M, torch.eye(130, dtype=M.dtype).expand(shape))
    assert logabsdet(M).shape == shape[:-2]
    LU, pivots = lu_factor(M)
    assert (LU.shape, pivots.shape) == (shape, shape[:-1])


@pytest.mark.parametrize("norm", [1, 30, 1000])
def test_is_as_accurate_as_lapack_in_float32(norm):
    M = definite(160, torch.complex64, norm)
    eye = torch.eye(160, dtype=torch.complex128)

    def error(R):
        return (M.to(eye.dtype) @ R.to(eye.dtype) - eye).abs().max()

    lapack = error(one_by_one(torch.linalg.inv, M))
    traced = torch.func.vmap(inverse)(M[:, None].expand(-1, 2, -1, -1))[:, 0]
    assert error(inverse(M)) <= 3 * lapack
    assert error(traced) <= 3 * lapack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 8, 9, 20, 64, 65, 100, 257])
def test_blocks_without_pivots_give_the_inverse(n, dtype):
    M = definite(n, dtype)
    with torch.no_grad():
        torch.testing.assert_close(accretive_inverse(M.clone()), torch.linalg.inv(M))
    given = M.clone().requires_grad_()
    torch.testing.assert_close(accretive_inverse(given), torch.linalg.inv(M))
    assert torch.equal(given, M)  # where gradients are recorded nothing is overwritten
    assert accretive_inverse(M[:0]).shape == (0, n, n)


def test_blocks_are_left_to_lapack_where_they_would_be_inaccurate(monkeypatch):
    def error(norm):
        W = torch.randn(2, 64, 64, dtype=torch.complex64)
        A = W - W.mH
        M = (torch.eye(64) + norm * A / torch.linalg.matrix_norm(A, 2).max()) / 2
        with torch.no_grad():
            Q = (accretive_inverse(M.clone()) - torch.eye(64)).to(torch.complex128)
        return torch.linalg.matrix_norm(Q.mH @ Q - torch.eye(64), 2).max()

    allowed = 2e-6 * 64**0.5
    assert max(error(norm) for norm in (0.1, 1, 4, 16, 60)) < allowed
    monkeypatch.setattr(budget, "UNPIVOTED_NORM", float("inf"))
    assert error(1) < allowed < error(1000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [inverse, logabsdet, lambda M: torch.linalg.lu_solve(*lu_factor(M), M.mH)])
def test_derivatives(function, dtype):
    M = definite(3, dtype).requires_grad_()
    assert gradcheck(function, M)
    assert gradgradcheck(function, M)


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # which torch.func.jvp calls itself
@pytest.mark.parametrize("function", [inverse, logabsdet])
def test_transforms(function):
    M = definite(4, torch.float64)
    expected = torch.autograd.functional.jacobian(function, M)
    torch.testing.assert_close(torch.func.jacrev(function)(M), expected)
    torch.testing.assert_close(torch.func.jacfwd(function)(M), expected)
    torch.testing.assert_close(torch.func.vmap(function)(M[None]), function(M)[None])
    second = torch.func.hessian(lambda M: function(M).square().sum())(M)
    torch.testing.assert_close(second, torch.autograd.functional.hessian(lambda M: function(M).square().sum(), M))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which torch.compile does itself
def test_compiles_without_a_break():
    M = definite(4, torch.float64).requires_grad_()
    compiled = torch.compile(
        lambda M: inverse(M).square().sum() + logabsdet(M).sum(), backend="aot_eager", fullgraph=True
    )
    loss = inverse(M).square().sum() + logabsdet(M).sum()
    torch.testing.assert_close(compiled(M), loss)
    torch.testing.assert_close(torch.autograd.grad(compiled(M), M), torch.autograd.grad(loss, M))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("threads", [1, 2])
def test_with_several_threads_torch_factors_no_batch(threads, monkeypatch):
    """Not even to try: on some machines the LU of a batch never returns."""
    axes = []
    for name in ("inv", "inv_ex", "lu_factor", "lu_factor_ex", "slogdet"):
        function = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda M, *a, f=function, **k: (axes.append(M.ndim), f(M, *a, **k))[1])
    M = definite(5, torch.float64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    results = inverse(M), logabsdet(M), torch.linalg.lu_solve(*lu_factor(M), M)
    with torch.no_grad():
        lu_factor(M.mT.contiguous().mT, overwrite=True)
    assert set(axes) == ({3} if threads == 1 else {2})
    for result, expected in zip(results, (torch.linalg.inv(M), torch.logdet(M), torch.eye(5).to(M)), strict=True):
        torch.testing.assert_close(result, expected.expand(result.shape))
    assert results[0].stride() == torch.linalg.inv(M).stride()


def test_singular_matrices():
    M = torch.zeros(2, 130, 130)
    assert logabsdet(M).tolist() == [-float("inf")] * 2
    with pytest.raises(torch.linalg.LinAlgError):
        inverse(M)


@pytest.mark.slow
def test_is_right_after_set_num_threads():
    """Note [Batched LU]: with torch's own batched LU this fails on some machines, or never ends."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
    command = [sys.executable, THREADS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
