"""The mean of a model over an image and its mirror image: what it computes, and what is certified for it."""

import pytest
import torch
from torch import Tensor, nn

from orthoconv import (
    certified_radius,
    certify,
    export,
    in_double,
    lipschitz_bound,
    models,
    rounding_bound,
    to_onnx,
    verify,
)
from orthoconv.attacks import cross_examine
from orthoconv.certificates.heads import split_head
from orthoconv.data import load
from orthoconv.nn import CayleyConv2d, IsometryAverage, MaxMin, Mirror, Move, NormalizedLinear, Scale
from orthoconv.testing import assert_orthogonal, dense_matrix
from orthoconv.train import Recipe, fit


def network() -> IsometryAverage:
    model = models.build("kwlarge", width=0.125, in_channels=1, image_size=8, head="normalized", mean=[0.3])
    return IsometryAverage(model)


@pytest.mark.parametrize("training", [True, False])
def test_it_is_the_mean(training: bool) -> None:
    model, x = network().double().train(training), torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), (model.f(x) + model.f(x.flip(-1))) / 2)
    torch.testing.assert_close(model(x), model(x.flip(-1)))
    kept = x.clone()
    in_place = IsometryAverage(nn.Sequential(nn.ReLU(inplace=True)))
    torch.testing.assert_close(in_place(x - 0.5), ((x - 0.5).relu() + (x - 0.5).relu().flip(-1)) / 2)
    assert torch.equal(x, kept)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images \(b, c, h, w\), got shape \(3, 4\)"):
        IsometryAverage(nn.Identity())(torch.rand(3, 4))
    with pytest.raises(ValueError, match="f must be a module, got None"):
        IsometryAverage(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="maps must be one module or more, got none"):
        IsometryAverage(nn.Identity(), [])
    with pytest.raises(ValueError, match=r"maps must be modules, got -1"):
        IsometryAverage(nn.Identity(), [-1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"maps must keep the shape of images, \(2, 1, 4, 4\); .* \(2, 1, 2, 2\)"):
        IsometryAverage(nn.Identity(), [nn.AvgPool2d(2)])(torch.rand(2, 1, 4, 4))
    with pytest.raises(ValueError, match="dim must be -1 or -2, got 1"):
        Mirror(1)
    with pytest.raises(ValueError, match=r"columns must be an int, got 0\.5"):
        Move(1, 0.5)  # type: ignore[arg-type]


def test_maps() -> None:
    assert_orthogonal(Mirror(), (2, 3, 4))
    assert_orthogonal(Mirror(-2), (2, 3, 4))
    x = torch.rand(2, 1, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(Mirror(-2)(Mirror(-1)(x)), x.rot90(2, (-2, -1)))
    torch.testing.assert_close(Move(2, -1)(x), Move(0, -1)(Move(2, 0)(x)))
    torch.testing.assert_close(Move(1, 1)(x)[..., 1:, 1:], x[..., :-1, :-1])
    assert float(Move(1, 1)(x)[..., 0, :].abs().max()) == 0
    values = torch.linalg.svdvals(dense_matrix(Move(1, -2), (1, 5, 4), dtype=torch.float64))
    assert values.round(decimals=12).unique().tolist() == [0, 1]
    assert Move(9, 0)(x[..., :2, :]).shape == (2, 1, 2, 4)


MAPS = [Mirror(), Mirror(-2), Move(0, 1), Move(-1, 0)]


@torch.no_grad()
def test_other_maps_than_the_mirror_image() -> None:
    model = IsometryAverage(network().f, MAPS).double().eval()
    x = torch.rand(20, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), sum(model.f(m(x)) for m in [nn.Identity(), *MAPS]) / 5)
    assert lipschitz_bound(model, (1, 8, 8)) == pytest.approx(lipschitz_bound(model.f, (1, 8, 8)), rel=1e-12)
    doubling = IsometryAverage(model.f, [*MAPS[:2], Scale(2.0)])
    assert lipschitz_bound(doubling, (1, 8, 8)) == pytest.approx(5 / 4 * lipschitz_bound(model.f, (1, 8, 8)))
    with pytest.raises(TypeError, match=r"no rule for .*Expanding, at IsometryAverage\.maps\.0"):
        lipschitz_bound(IsometryAverage(nn.Identity(), [Expanding(1.0)]), (1, 4, 4))
    assert model.of(nn.ReLU()).maps[3] is MAPS[3]


@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_certificates_of_several_maps_hold() -> None:
    """Pair by pair of classes, and locally: no attack changes a class within the radius."""
    pytest.importorskip("pyautoattack")
    torch.manual_seed(1)
    layers = [CayleyConv2d(1, 8, 3), MaxMin(), nn.Flatten(), NormalizedLinear(288, 4)]
    model = IsometryAverage(nn.Sequential(*layers), MAPS).eval().requires_grad_(False)
    x = torch.rand(30, 1, 6, 6)
    labels = model(x).argmax(1)
    found, near = certify(model, [(x, labels)]), certify(model, [(x, labels)], local=0.05)
    assert found.head == "pairwise"
    assert bool((near.radius >= found.radius).all())
    assert float(near.radius.mean()) > 1.1 * float(found.radius.mean())
    assert not cross_examine(model, x, labels, near.radius, iterations=20, restarts=1).any()
    assert cross_examine(model, x, labels, 4 * near.radius, iterations=20, restarts=1).any()
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    assert (error <= rounding_bound(model, (1, 6, 6), 6.0)).all()
    torch.testing.assert_close(export(model, (1, 6, 6))(x), model(x), rtol=0, atol=1e-5)
    assert verify(model, x[:8]).faults == []


@torch.no_grad()
def test_bounds_are_those_of_the_model() -> None:
    model, x = network().eval(), torch.rand(40, 1, 8, 8)
    assert lipschitz_bound(model, (1, 8, 8)) == lipschitz_bound(model.f, (1, 8, 8))
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    assert (error <= rounding_bound(model, (1, 8, 8), 8.0)).all()
    assert float(error.max()) > 0
    shifted = nn.Sequential(Shift(), IsometryAverage(CayleyConv2d(1, 1, 3)), nn.Flatten())
    assert lipschitz_bound(shifted, (1, 4, 4)) == pytest.approx(1, abs=1e-5)
    assert verify(model, x[:8]).faults == []
    broken = IsometryAverage(Expanding(1.0))
    with pytest.raises(TypeError, match=r"no rule for .*Expanding, at IsometryAverage\.f"):
        lipschitz_bound(broken, (1, 4, 4))


class Expanding(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Shift(CayleyConv2d):
    """A convolution whose bias is large, so that the value at zero is not."""

    def __init__(self) -> None:
        super().__init__(1, 1, 3)
        nn.init.constant_(self.bias, 7.0)


@torch.no_grad()
def test_the_head_of_an_average_is_that_of_the_model() -> None:
    model, x = nn.Sequential(nn.Identity(), network(), Scale(0.5)).eval(), torch.rand(5, 1, 8, 8)
    head = split_head(model)
    assert head is not None
    bias = 0.5 * model[1].f[-1].bias
    torch.testing.assert_close(model(x), head.factor * head.body(x) @ head.matrix.mT + bias)
    assert split_head(IsometryAverage(nn.Flatten())) is None
    found = certify(model, [(x, model(x).argmax(1))])
    assert found.head == "pairwise"
    assert (found.radius >= certified_radius(found.logits, found.labels, found.lipschitz) * (1 - 1e-4) - 1e-5).all()


@torch.no_grad()
def test_radii_of_a_linear_model_stay_within_the_distance_to_the_boundary() -> None:
    model = IsometryAverage(nn.Sequential(nn.Flatten(), NormalizedLinear(9, 4, dtype=torch.float64))).eval()
    x = torch.randn(50, 1, 3, 3, dtype=torch.float64)
    labels, b = model(x).argmax(1), model.f[1].bias
    W = model(torch.eye(9, dtype=torch.float64).view(9, 1, 3, 3)).mT - b[:, None]  # (classes, 9)
    difference = (W[labels][:, None] - W).norm(dim=2)  # (b, classes)
    y = model(x)
    exact = ((y.gather(1, labels[:, None]) - y) / difference).nan_to_num(torch.inf).amin(1)
    found = certify(model, [(x, labels)])
    assert (found.radius <= exact).all()
    assert (found.radius > 0).all()


def test_export() -> None:
    model, x = network().eval(), torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(export(model, (1, 8, 8))(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx(tmp_path) -> None:
    x = torch.rand(3, 1, 8, 8)
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layers = nn.Sequential(CayleyConv2d(1, 2, 1), nn.Flatten(), NormalizedLinear(128, 4))
    model = IsometryAverage(layers, [Mirror(), Move(1, -1)]).eval()
    to_onnx(model, x, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for n in (1, 3):
        (y,) = session.run(None, {"images": x[:n].numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x[:n]).detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_nothing_is_broken_on_digits(tmp_path) -> None:
    pytest.importorskip("pyautoattack")
    (training, test), model = load("digits"), network()
    recipe = Recipe(epochs=3, batch_size=64, loss="offset_cross_entropy", augment=False)
    assert len(list(fit(model.f, training, recipe, tmp_path / "checkpoint"))) == 3
    model.eval().requires_grad_(False)
    x, labels = test.images[:100], test.labels[:100]
    found = certify(model, [(x, labels)])
    assert (found.radius > 0.05).float().mean() > 0.3
    assert not cross_examine(model, x, labels, found.radius, iterations=10, restarts=1).any()
