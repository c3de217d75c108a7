"""Whether verification tells a sound model from a broken one, and attacks a true certificate from a false one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certify, models, verify
from orthoconv.attacks import L2Ball, cross_examine, pgd
from orthoconv.data import load
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin
from orthoconv.testing import dense_matrix
from orthoconv.train import Recipe, fit


@pytest.mark.parametrize("conv", ["cayley", "bcop", "cayley_bcop", "rko", "crko", "plain"])
def test_networks_are_what_they_say(conv: str) -> None:
    model = models.build("kwlarge", conv, width=0.125, in_channels=1, image_size=8)
    found = verify(model, torch.rand(4, 1, 8, 8), None if conv == "plain" else 1.0)
    assert found.faults == []
    assert len(found.layers) == 7
    assert [layer.shape for layer in found.layers[:3]] == [(1, 8, 8), (4, 8, 8), (4, 4, 4)]
    if conv != "plain":
        assert all(layer.largest <= 1 + 1e-5 for layer in found.layers)
    assert 0 < found.slack < 1e-4 < found.worst
    assert model.training


class TooLarge(CayleyConv2d):
    """An operator of norm 1.001."""

    def operator(self, size: tuple[int, int], *sources: Tensor) -> Tensor:
        return 1.001 * super().operator(size, *sources)


class Shrinking(CayleyLinear):
    def operator(self, size: tuple[int, int], *sources: Tensor) -> Tensor:
        return 0.9 * super().operator(size, *sources)


def network(conv: type[CayleyConv2d] = CayleyConv2d, linear: type[CayleyLinear] = CayleyLinear) -> nn.Sequential:
    return nn.Sequential(conv(1, 4, 3), MaxMin(), nn.Flatten(), linear(64, 10))


def test_broken_layers_are_caught(monkeypatch) -> None:
    x = torch.rand(2, 1, 4, 4)
    assert verify(network(), x, 1.0).faults == []
    layer, whole = verify(network(TooLarge), x, 1.0).faults
    assert layer.startswith("0 (TooLarge) promises to be orthogonal, but its norm is 1.00100")
    assert whole.startswith("the Lipschitz bound is 1.00100")
    (fault,) = verify(network(linear=Shrinking), x, 1.0).faults
    assert fault.startswith("3 (Shrinking) promises to be orthogonal, but has a singular value 0.89999")
    monkeypatch.setattr(
        CayleyLinear, "apply_matrix", lambda self, x: 1.0001 * x @ self.cached_operator().mT + self.bias
    )
    fault = verify(network(), x, 1.0).faults[0]
    assert "3 (CayleyLinear) does not compute its operator: the outputs differ by" in fault


def test_hooks_and_own_forwards_are_refused() -> None:
    model = network()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(TypeError, match="forward hooks"):
        verify(model, torch.rand(2, 1, 4, 4))


def test_a_claim_that_is_too_low_is_a_fault() -> None:
    (fault,) = verify(network(), torch.rand(2, 1, 4, 4), 0.5).faults
    assert "but the model claims 0.5" in fault


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network trained on digits, and test images for it."""
    training, test = load("digits")
    torch.manual_seed(0)
    model = models.build("kwlarge", width=0.125, in_channels=1, image_size=8)
    recipe, checkpoint = Recipe(epochs=3, batch_size=64, augment=False), tmp_path_factory.mktemp("run") / "checkpoint"
    assert len(list(fit(model, training, recipe, checkpoint))) == 3
    return model.eval().requires_grad_(False), test.images[:200], test.labels[:200]


@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_certificates_stand_cross_examination_and_false_ones_do_not(trained) -> None:
    pytest.importorskip("pyautoattack")
    model, x, y = trained[0], trained[1][:80], trained[2][:80]
    radius = certify(model, [(x, y)]).radius
    assert (radius > 0).float().mean() > 0.5
    assert not cross_examine(model, x, y, radius, iterations=20, restarts=2).any()
    false = certify(model, [(x, y)], lipschitz=0.3).radius
    broken = cross_examine(model, x, y, false, iterations=20, restarts=1)
    assert broken.float().mean() > 0.3
    assert not broken[false == 0].any(), "what is not certified is not attacked"


def test_each_example_has_its_own_ball() -> None:
    x, y = torch.full((2, 2), 0.5), torch.tensor([0, 0])
    x[:, 0] += torch.tensor([0.1, 0.3])
    radius = torch.tensor([0.1, 0.3]) / 2**0.5
    model = nn.Identity()
    assert model(pgd(model, x, y, L2Ball(1.05 * radius))).argmax(1).tolist() == [1, 1]
    assert model(pgd(model, x, y, L2Ball(0.95 * radius))).argmax(1).tolist() == [0, 0]
    assert model(pgd(model, x, y, L2Ball(radius * torch.tensor([1.05, 0.95])))).argmax(1).tolist() == [1, 0]
    d = pgd(model, x, y, L2Ball(0.5 * radius)) - x
    torch.testing.assert_close(d.norm(dim=1), 0.5 * radius, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="share must be in"):
        cross_examine(model, x, y, radius, share=1.5)


def test_a_broken_activation_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(MaxMin, "forward", lambda self, x: 3 * x)
    (fault,) = verify(network(), torch.rand(8, 1, 4, 4), 1.0).faults
    assert fault.startswith("logits move ")


def test_large_constants_and_gains_are_no_faults() -> None:
    model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 16), nn.Linear(16, 512), nn.Linear(512, 10))
    nn.init.constant_(model[1].bias, 1000)
    nn.init.normal_(model[3].weight)
    found = verify(model, torch.rand(4, 1, 4, 4))
    assert found.faults == []
    spectral = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3)))
    assert [layer.kind for layer in verify(spectral, torch.rand(4, 1, 4, 4)).layers] == ["ParametrizedLinear"]
    assert verify(nn.Sequential(nn.Flatten()), torch.rand(4, 1, 2, 2)).faults == []


def test_cross_examination_of_two_classes_in_float64() -> None:
    pytest.importorskip("pyautoattack")
    model = nn.Sequential(nn.Flatten(), CayleyLinear(4, 2)).double().eval()
    x = torch.rand(10, 1, 2, 2, dtype=torch.float64)
    y = model(x).argmax(1)
    radius = certify(model, [(x, y)]).radius
    assert not cross_examine(model, x, y, radius, iterations=5, restarts=1).any()
    assert cross_examine(model, x, y, 4 * radius, iterations=5, restarts=1).any()
    with torch.no_grad(), pytest.raises(RuntimeError, match="PGD needs gradients"):
        pgd(model, x, y, L2Ball(0.1))


def test_rounding_is_no_fault_and_growth_still_is(monkeypatch) -> None:
    """Constants of 1e6 inside, which cancel: float32 moves the logits much farther than the inputs moved."""
    model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 16), MaxMin(), CayleyLinear(16, 16), nn.Linear(16, 10))
    nn.init.constant_(model[1].bias, 1e6)
    x = torch.rand(8, 1, 4, 4)
    with torch.no_grad():
        model[3].bias.copy_(-model[3](model[2](model[1].bias[None]))[0])
    checked = verify(model, x)
    assert checked.faults == []
    assert checked.empirical <= checked.lipschitz
    monkeypatch.setattr(MaxMin, "forward", lambda self, x: 1.01 * x)
    model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 16), MaxMin(), CayleyLinear(16, 16))
    assert verify(model, x, 1.0).faults[0].startswith("logits move 1.01")


@pytest.mark.parametrize("rank_one", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (CayleyConv2d(6, 6, 3, bias=False), (6, 6, 6)),
        (CayleyConv2d(6, 6, 1, bias=False), (6, 6, 6)),
        (CayleyConv2d(6, 3, 3, bias=False), (6, 6, 6)),
        (CayleyConv2d(3, 6, 3, bias=False), (3, 6, 6)),
        (CayleyLinear(30, 30, bias=False), (30,)),
        (CayleyLinear(30, 10, bias=False), (30,)),
    ],
    ids=str,
)
def test_orthogonal_in_float32_up_to_weights_of_1e5(layer, shape, rank_one: bool) -> None:
    """Beyond a norm the transform is found in float64, in training as in eval mode."""
    layer = copy.deepcopy(layer)
    layer.reset_parameters()  # by the seed of the test, not by what was imported before it
    with torch.no_grad():
        if rank_one:
            W = layer.weight.flatten(1)
            layer.weight.copy_((W[:, :1] @ W[:1]).view_as(layer.weight))
        for g in (65.0, 1e3, 1e5):
            layer.g.fill_(g)
            for mode in (True, False):
                values = torch.linalg.svdvals(dense_matrix(layer.train(mode), shape).double())
                torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)


def test_a_scale_too_large_for_float64_is_reported_and_bounded() -> None:
    """docs/maths.md says how far the transform of large weights misses; the bound is that of the operator as it is."""
    layer = CayleyConv2d(6, 3, 3)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:1, :1].clone())
        layer.g.fill_(1e8)
    checked = verify(nn.Sequential(layer), torch.rand(2, 6, 8, 8), 1.0)
    assert any("promises to be orthogonal" in fault for fault in checked.faults)
    assert not any("does not compute its operator" in fault for fault in checked.faults)
    assert checked.lipschitz >= layer.eval().singular_values((8, 8)).max()


def test_a_shape_in_place_of_inputs_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Flatten(), CayleyLinear(192, 4))
    for given, said in (
        ((3, 8, 8), r"got \(3, 8, 8\); for a shape alone give torch.rand\(8, \*shape\)"),
        (torch.zeros(0, 3, 8, 8), r"got a tensor of torch.float32 and shape \(0, 3, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "got a tensor of torch.uint8"),
    ):
        with pytest.raises(TypeError, match=said):
            verify(model, given)
    assert verify(model, torch.rand(8, *(3, 8, 8)), 1.0).faults == []
