"""`convert` on sequences and volumes: each new part is 1-Lipschitz; dense matrices tell where it is linear."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import ConversionError, convert, lipschitz_bound, verify
from orthoconv.attacks import empirical_lipschitz
from orthoconv.nn import CayleyConv3d, CayleyConvTranspose2d, MaxMin
from orthoconv.testing import dense_matrix

SEQUENCES, VOLUMES = (4, 9), (2, 5, 4, 6)


class Calls(nn.Module):
    """A function of the input and of two parameters."""

    def __init__(self, f, *shape: int) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.weight)


LINEAR: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, bias=False), SEQUENCES),
    (nn.ConvTranspose1d(4, 3, 3, stride=2, bias=False), SEQUENCES),
    (nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, groups=2, bias=False), SEQUENCES),
    (nn.AvgPool1d(2), SEQUENCES),
    (nn.AvgPool1d(3, 1, padding=1), SEQUENCES),
    (nn.AdaptiveAvgPool1d(3), SEQUENCES),
    (nn.AdaptiveAvgPool1d(2), SEQUENCES),
    (Calls(lambda x, w: F.conv1d(x, w), 5, 4, 3), SEQUENCES),
    (Calls(lambda x, w: F.conv_transpose1d(x, w, stride=3), 4, 5, 3), SEQUENCES),
    (nn.Conv3d(2, 4, 3, padding=1, bias=False), VOLUMES),
    (nn.Conv3d(2, 4, 3, bias=False), VOLUMES),
    (nn.Conv3d(2, 6, (3, 2, 1), stride=(2, 1, 4), dilation=(1, 2, 1), groups=2, bias=False), VOLUMES),
    (nn.Conv3d(2, 2, 3, padding="same", padding_mode="circular", bias=False), VOLUMES),
    (Calls(lambda x, w: F.conv3d(x, w, stride=2), 3, 2, 2, 2, 2), VOLUMES),
    (nn.AvgPool3d(2), VOLUMES),
    (nn.AvgPool3d((3, 2, 2), (1, 2, 2)), VOLUMES),
    (nn.AdaptiveAvgPool3d(1), VOLUMES),
    (nn.AdaptiveAvgPool3d((2, None, 4)), VOLUMES),
]


@pytest.mark.parametrize(("old", "shape"), LINEAR, ids=[str(m) for m, _ in LINEAR])
def test_linear_parts_have_the_norm_1(old: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    old = old.double()
    new = convert(old, shape).eval()
    x = torch.rand(3, *shape).double()
    assert new(x).shape == old(x).shape
    norm = torch.linalg.matrix_norm(dense_matrix(new, shape, dtype=torch.float64), ord=2).item()
    assert norm <= lipschitz_bound(new, shape) * (1 + 1e-12) <= 1 + 1e-9
    assert norm > 0.4, "what is made 1-Lipschitz should not vanish"


MAXIMA: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.MaxPool1d(2), SEQUENCES),
    (nn.MaxPool1d(3, 2, 1), SEQUENCES),
    (nn.MaxPool1d(3, 1, 1), SEQUENCES),
    (nn.AdaptiveMaxPool1d(2), SEQUENCES),
    (Calls(lambda x, w: F.max_pool1d(x, 2, ceil_mode=True), 1), SEQUENCES),
    (nn.MaxPool3d(2), VOLUMES),
    (nn.MaxPool3d(3, 2, 1), VOLUMES),
    (nn.MaxPool3d((1, 3, 2), (1, 1, 2)), VOLUMES),
    (nn.AdaptiveMaxPool3d((2, 3, 1)), VOLUMES),
]


@pytest.mark.parametrize(("old", "shape"), MAXIMA, ids=[str(m) for m, _ in MAXIMA])
def test_maxima_do_not_expand(old: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    new = convert(old, shape).eval()
    x = torch.rand(3, *shape)
    assert new(x).shape == old(x).shape
    bound = lipschitz_bound(new, shape)
    assert bound <= 1 + 1e-6
    assert 0.3 < empirical_lipschitz(new, x, 0.1).max() <= bound * (1 + 1e-5)


def test_windows_that_do_not_overlap_are_those_of_torch() -> None:
    """So a rule that mixed up the axes would be seen."""
    x = torch.randn(2, 2, 6, 4, 8)
    for k in (2, (3, 1, 2), (1, 4, 2)):
        torch.testing.assert_close(convert(nn.MaxPool3d(k), (2, 6, 4, 8))(x), F.max_pool3d(x, k))
        n = torch.Size((k,) * 3 if isinstance(k, int) else k).numel()
        torch.testing.assert_close(convert(nn.AvgPool3d(k), (2, 6, 4, 8))(x), n**0.5 * F.avg_pool3d(x, k))
    x = x.flatten(2, 3)[:, :, 0]
    torch.testing.assert_close(convert(nn.MaxPool1d(2), (2, 8))(x), F.max_pool1d(x, 2))
    assert not torch.equal(convert(nn.MaxPool1d(2), (2, 8))(x), F.max_pool1d(-x, 2))


def nets() -> list[tuple[nn.Module, tuple[int, ...], type[nn.Module]]]:
    sequences = nn.Sequential(
        nn.Conv1d(4, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.ConvTranspose1d(8, 4, 2, 2),
        nn.InstanceNorm1d(4, affine=True), nn.GELU(), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    volumes = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 8, 3, 2, 1),
        nn.InstanceNorm3d(8, affine=True), nn.SiLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    return [(sequences, (4, 16), CayleyConvTranspose2d), (volumes, (1, 8, 8, 8), CayleyConv3d)]


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_networks_of_sequences_and_volumes_learn(k: int, keep: bool) -> None:
    torch.manual_seed(0)
    old, shape, kind = nets()[k]
    new = convert(old, shape, keep_weights=keep)
    assert keep or any(isinstance(m, kind) for m in new.modules())
    assert all(m.dim in (None, 1) for m in new.modules() if isinstance(m, MaxMin)), "pairs of channels, not of entries"
    x, labels = torch.rand(6, *shape), torch.arange(6) % 3
    optimizer = torch.optim.Adam(new.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(10 * new(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in new.parameters())
    assert losses[-1] < 0.8 * losses[0]
    assert lipschitz_bound(new.eval(), shape) <= 1 + 1e-5


PLAIN: list[tuple[nn.Module, float]] = [  # and how far the bound may be above the norm
    (nn.Conv1d(4, 5, 3, padding=1), 1.2),
    (nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), 2.0),
    (nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular"), 1 + 1e-9),
    (nn.ConvTranspose1d(4, 3, 3, stride=2), 2.0),
    (nn.AvgPool1d(2), 1 + 1e-9),
    (nn.AvgPool1d(3, 1, padding=1), 1.1),
    (nn.AdaptiveAvgPool1d(4), 1 + 1e-9),
]


@pytest.mark.parametrize(("layer", "most"), PLAIN, ids=[str(m) for m, _ in PLAIN])
def test_bounds_of_plain_layers_of_sequences(layer: nn.Module, most: float) -> None:
    torch.manual_seed(0)
    layer = layer.double().eval()
    norm = torch.linalg.matrix_norm(dense_matrix(layer, SEQUENCES, dtype=torch.float64), ord=2).item()
    assert norm * (1 - 1e-12) <= lipschitz_bound(layer, SEQUENCES) <= most * norm
    x = torch.rand(3, *SEQUENCES)
    assert verify(nn.Sequential(layer.float(), nn.Flatten()), x).faults == []


def test_maxima_of_sequences_are_bounded_by_how_many_windows_an_entry_stands_in() -> None:
    for pool, bound in ((nn.MaxPool1d(2), 1.0), (nn.MaxPool1d(3, 1), 3**0.5), (nn.AdaptiveMaxPool1d(2), 2**0.5)):
        assert lipschitz_bound(pool, SEQUENCES) == pytest.approx(bound)
        assert empirical_lipschitz(pool, torch.rand(4, *SEQUENCES), 0.1).max() <= bound * (1 + 1e-6)
    with pytest.raises(TypeError, match=r"bounded for sequences \(c, n\).* for the shape \(4, 4, 9\)"):
        lipschitz_bound(nn.MaxPool1d(2), (4, *SEQUENCES))


def test_an_error_ends_with_its_own_words() -> None:
    """What torch adds about the graph that is followed is no help."""
    with pytest.raises(TypeError) as caught:
        lipschitz_bound(Calls(lambda x, w: F.conv3d(x, w), 3, 2, 2, 2, 2).eval(), VOLUMES)
    assert "While executing" not in str(caught.value)
    assert "conv3d" in str(caught.value).lower()


def test_kept_weights_of_volumes_are_projected() -> None:
    """A kernel that is orthogonal already stays as it is."""
    torch.manual_seed(0)
    old = nn.Conv3d(3, 3, 1, padding_mode="circular").double()
    nn.init.orthogonal_(old.weight)
    new = convert(old, (3, 4, 2, 5), keep_weights=True).eval()
    x = torch.randn(2, 3, 4, 2, 5).double()
    torch.testing.assert_close(new(x), old(x))
    assert not torch.allclose(convert(old, (3, 4, 2, 5)).eval()(x), old(x))


def test_refusals_of_volumes_say_what_to_do() -> None:
    with pytest.raises(ConversionError, match=r"ConvTranspose3d\): .*use nn.ConvTranspose2d on slices"):
        convert(nn.Sequential(nn.ConvTranspose3d(2, 2, 2, 2)), VOLUMES)
    with pytest.raises(ConversionError, match=r"'bcop' has no convolution of volumes; 'bro', 'cayley'"):
        convert(nn.Sequential(nn.Conv3d(2, 2, 3, padding=1)), VOLUMES, conv="bcop")
    with pytest.raises(ConversionError, match="return_indices=True"):
        convert(First(nn.MaxPool1d(2, return_indices=True)), SEQUENCES)


class First(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]
