"""The statements of Appendix A, each on a small size and with the paper's own definitions."""

import pytest
import torch
from oracles import conv_matrix
from torch import Tensor

from orthoconv import cayley, fourier

N, COUT, CIN = 4, 2, 3


def dft(n: int) -> Tensor:
    """Unitary DFT matrix F_n."""
    return torch.fft.fft(torch.eye(n, dtype=torch.complex128), norm="ortho")


def shuffle(a: int, b: int) -> Tensor:
    """Perfect shuffle S_{a,b}: rows 1:b:ab, then 2:b:ab, and so on, of the identity."""
    eye = torch.eye(a * b, dtype=torch.complex128)
    return torch.cat([eye[k::b] for k in range(b)])


def calF(c: int, n: int = N) -> Tensor:
    """F_c = S_{c, n^2} (I_c kron (F kron F))."""
    eye = torch.eye(c, dtype=torch.complex128)
    return shuffle(c, n * n) @ torch.kron(eye, torch.kron(dft(n), dft(n)))


def blocks(weight: Tensor) -> Tensor:
    """D = F_cout C F_cin*, as blocks (n^2, cout, cin), and what lies outside them."""
    o, i = weight.shape[:2]
    D = calF(o) @ conv_matrix(weight, (N, N)).to(torch.complex128) @ calF(i).mH
    return D.view(N * N, o, N * N, i)


def square_cayley(B: Tensor) -> Tensor:
    """(I - B + B*)(I + B - B*)^-1."""
    eye = torch.eye(len(B), dtype=B.dtype)
    return (eye - B + B.mH) @ torch.linalg.inv(eye + B - B.mH)


def kernel(o: int, i: int) -> Tensor:
    return torch.randn(o, i, 3, 3, dtype=torch.float64)


def test_theorem_a1_the_dft_diagonalises_one_channel() -> None:
    FF = torch.kron(dft(N), dft(N))
    D = FF @ conv_matrix(kernel(1, 1), (N, N)).to(torch.complex128) @ FF.mH
    torch.testing.assert_close(D, torch.diag(torch.diagonal(D)), atol=1e-13, rtol=0)


def test_corollary_the_shuffled_dft_block_diagonalises() -> None:
    weight = kernel(COUT, CIN)
    D = blocks(weight)
    off = D.clone()
    off[range(N * N), :, range(N * N), :] = 0
    assert off.abs().max() < 1e-13
    on = D[range(N * N), :, range(N * N), :].view(N, N, COUT, CIN)
    ours = fourier.spectrum(weight, (N, N))[0].view(N, N // 2 + 1, COUT, CIN)
    torch.testing.assert_close(on[:, : N // 2 + 1], ours, atol=1e-13, rtol=0)


def test_lemma_the_transform_passes_through_a_unitary_change_of_basis() -> None:
    J = torch.linalg.qr(torch.randn(5, 5, dtype=torch.complex128)).Q
    B = torch.randn(5, 5, dtype=torch.complex128)
    torch.testing.assert_close(square_cayley(J @ B @ J.mH), J @ square_cayley(B) @ J.mH)


def test_theorem_the_orthogonal_convolution_is_real() -> None:
    c = 3
    weight = kernel(c, c)
    D = blocks(weight)[range(N * N), :, range(N * N), :]
    Q = calF(c).mH @ torch.block_diag(*cayley(D)) @ calF(c)
    assert Q.imag.abs().max() < 1e-13
    torch.testing.assert_close(Q.real, square_cayley(conv_matrix(weight, (N, N))), atol=1e-13, rtol=0)
    torch.testing.assert_close(Q.real.mT @ Q.real, torch.eye(c * N * N, dtype=torch.float64))


def test_lemmas_padding_and_projecting_act_on_each_block() -> None:
    d, weight = 2, kernel(COUT, CIN)
    wide = torch.cat((weight, weight.new_zeros(COUT, d, 3, 3)), dim=1)
    D = blocks(weight)[range(N * N), :, range(N * N), :]
    D_wide = blocks(wide)[range(N * N), :, range(N * N), :]
    torch.testing.assert_close(D_wide[..., :CIN], D, atol=1e-13, rtol=0)
    assert D_wide[..., CIN:].abs().max() < 1e-13
    C, C_wide = conv_matrix(weight, (N, N)), conv_matrix(wide, (N, N))
    torch.testing.assert_close(C_wide[:, : CIN * N * N], C)


@pytest.mark.parametrize(("o", "i"), [(4, 2), (2, 4)])
def test_theorem_and_propositions_semi_orthogonal(o: int, i: int) -> None:
    """Pad, transform, project, on the whole matrix; the Schur complement on it; the same on each block."""
    weight, n = kernel(o, i), N * N
    C, s = conv_matrix(weight, (N, N)), max(o, i) * n
    square = torch.nn.functional.pad(C, (0, s - i * n, 0, s - o * n))
    expected = square_cayley(square)[: o * n, : i * n]
    torch.testing.assert_close(cayley(C), expected, atol=1e-12, rtol=0)
    D = blocks(weight)[range(n), :, range(n), :]
    Q = calF(o).mH @ torch.block_diag(*cayley(D)) @ calF(i)
    assert Q.imag.abs().max() < 1e-13
    torch.testing.assert_close(Q.real, expected, atol=1e-12, rtol=0)


def test_proposition_the_transform_of_the_transpose() -> None:
    C = torch.randn(3, 5, dtype=torch.float64)
    pad = torch.nn.functional.pad
    torch.testing.assert_close(square_cayley(pad(C.mT, (0, 2))).mT, square_cayley(pad(C, (0, 0, 0, 2))))
