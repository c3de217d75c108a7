"""Each rule of `convert` makes something 1-Lipschitz of the same shape; dense matrices tell where it is linear."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from orthoconv import ConversionError, convert, lipschitz_bound
from orthoconv.attacks import empirical_lipschitz
from orthoconv.conversion import conversion_rules
from orthoconv.nn import CayleyConv2d, ConvexSum, Gain, MaxMin, Shift, UnitCat
from orthoconv.testing import dense_matrix

SHAPE = (4, 7, 6)


class Own(nn.Module):
    def __init__(self, f: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.f = nn.ModuleList(parts), f
        self.gamma = nn.Parameter(torch.full((4, 1, 1), 1e-6))
        self.register_buffer("std", torch.tensor([0.5, 2.0, 1.0, 3.0])[None, :, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


class SqueezeAndExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1)
        scale = torch.sigmoid(self.up(F.silu(self.down(scale))))
        return x * scale.view(x.size(0), -1, 1, 1)


class ConvSame(nn.Conv2d):
    """As timm pads."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        x = F.pad(x, (0, -w % 2 + 1, 0, -h % 2 + 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class NormAct(nn.BatchNorm2d):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(x)


class EvoNorm2dS0(nn.Module):
    """A class that is known by its name, as timm has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.v = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, v = (p[:, None, None] for p in (self.weight, self.bias, self.v))
        return x * (x * v).sigmoid() / x.std((1, 2, 3), keepdim=True) * weight + bias


class MyConv(nn.Conv2d):
    pass


def cut(self: Own, x: Tensor) -> Tensor:
    one, two = torch.split(x, [1, 3], dim=1)
    return torch.cat((two, self.parts[0](one)), 1)


LINEAR: dict[str, nn.Module] = {
    "stride that does not divide": nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
    "no padding": nn.Conv2d(4, 6, 3, bias=False),
    "large stride": nn.Conv2d(4, 6, 5, stride=4, padding=2, bias=False),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    "dilated": nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False),
    "transposed": nn.ConvTranspose2d(4, 3, 3, stride=2, bias=False),
    "subclass": MyConv(4, 5, 1, bias=False),
    "same": ConvSame(4, 4, 3, stride=2, bias=False),
    "overlapping average": nn.AvgPool2d(3, 2, padding=1),
    "whole image": nn.AvgPool2d((7, 6), stride=1),
    "stride one": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "adaptive": nn.AdaptiveAvgPool2d((3, 5)),
    "upsample": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(size=(11, 9), mode="bilinear", align_corners=True),
    "reflection": nn.ReflectionPad2d((1, 2, 3, 0)),
    "mean": Own(lambda self, x: x.mean([2, 3])),
    "sum": Own(lambda self, x: x.sum(1, keepdim=True)),
    "gain": Own(lambda self, x: x * self.gamma),
    "deviation": Own(lambda self, x: x / self.std),
    "channels": Own(lambda self, x: F.pad(x, (0, 0, 0, 0, 0, 3))),
    "cat": Own(lambda self, x: torch.cat((x, x[:, :1], -x), dim=1)),
    "cat of nothing": Own(lambda self, x: torch.cat((-x, x[:, 4:]), dim=1)),
    "pieces": Own(cut, nn.Conv2d(1, 3, 1, bias=False)),
    "stack": Own(lambda self, x: torch.stack([x, x.flip(-1)], 1).mean(1)),
    "difference": Own(lambda self, x: x - 2 * self.parts[0](x), nn.Conv2d(4, 4, 1, bias=False)),
    "difference of layers": Own(
        lambda self, x: self.parts[0](x) - self.parts[1](x), *(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in "ab")
    ),
    "expand": Own(lambda self, x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_parts_have_the_norm_1(name: str) -> None:
    torch.manual_seed(0)
    old = LINEAR[name].double()
    new = convert(old, SHAPE).eval()
    assert new(torch.rand(3, *SHAPE).double()).shape == old.eval()(torch.rand(3, *SHAPE).double()).shape
    norm = torch.linalg.matrix_norm(dense_matrix(new, SHAPE, dtype=torch.float64), ord=2).item()
    assert norm <= lipschitz_bound(new, SHAPE) * (1 + 1e-12) <= 1 + 1e-9
    assert norm > 0.4, "what is made 1-Lipschitz should not vanish"


OTHERS: dict[str, nn.Module] = {
    "silu": nn.Sequential(nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.Mish()),
    "by hand": Own(lambda self, x: x * F.relu6(x + 3) / 6),
    "gate": SqueezeAndExcite(),
    "norms": nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm([4, 7, 6]), nn.BatchNorm2d(4)),
    "norm and activation": NormAct(4),
    "maximum": nn.MaxPool2d(3, 2, 1),
    "overlapping maximum": nn.MaxPool2d(3, 1, 1),
    "adaptive maximum": nn.AdaptiveMaxPool2d((3, 4)),
    "subsampling": nn.MaxPool2d(1, 2),
    "maxout": Own(lambda self, x: torch.max(x[:, :2], x[:, 2:])),
    "maximum of branches": Own(lambda self, x: torch.maximum(x, self.parts[0](x)), nn.Conv2d(4, 4, 1)),
    "constant": Own(lambda self, x: x - torch.tensor(0.5) + self.gamma),
    "training branch": Own(lambda self, x: 5 * x if self.training else F.dropout(x, 0.5, self.training)),
    "softmax": Own(lambda self, x: torch.softmax(x.flatten(1), 1)),
    "dropout": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()),
    "sum of a stack": Own(
        lambda self, x: torch.stack([part(x) for part in self.parts]).sum(dim=0), *(nn.Conv2d(4, 6, 1) for _ in "abc")
    ),
    "mean of a stack": Own(
        lambda self, x: torch.mean(torch.stack([x, self.parts[0](x)], dim=4), dim=-1), nn.Conv2d(4, 4, 3, padding=1)
    ),
    "casts": Own(lambda self, x: torch.as_tensor(self.parts[0](x.float())).to(x.dtype).type_as(x), nn.Conv2d(4, 4, 1)),
    "padded by a number": nn.Sequential(nn.ConstantPad2d((1, -2, 3, 0), 5.0), nn.ZeroPad2d(1)),
    "padded channels": Own(lambda self, x: F.pad(x, (0, 0, 0, 0, 1, 2, 0, 0)) + F.pad(x, [0, 0, 0, 0, 3, 0])),
    "padded before a maximum": Own(lambda self, x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-math.inf), 2, 2)),
    "state that starts at zero": Own(
        lambda self, x: torch.sigmoid(self.parts[0](x)) * (self.parts[1](torch.zeros_like(x)) + x),
        nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1),
    ),
    "norm and activation in one": EvoNorm2dS0(),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_parts_are_1_lipschitz(name: str) -> None:
    torch.manual_seed(0)
    old = OTHERS[name].train()
    before = set(vars(old)), list(old.state_dict()), [m.training for m in old.modules()]
    new = convert(old, SHAPE)
    assert (set(vars(old)), list(old.state_dict()), [m.training for m in old.modules()]) == before
    x = torch.rand(3, *SHAPE)
    y = new(x)
    assert y.shape == old.eval()(x.clone()).shape
    (y * torch.randn_like(y)).sum().backward() if list(new.parameters()) else None
    assert all(p.grad is not None for p in new.parameters())
    bound = lipschitz_bound(new.eval(), SHAPE)
    assert bound <= 1 + 1e-6
    assert 0 < empirical_lipschitz(new, x, 0.5).max() <= bound * (1 + 1e-5)


def test_every_rule_has_a_proof() -> None:
    rules = conversion_rules()
    assert len(rules) > 100
    assert all(rule.proof.endswith(".") for rule in rules.values())


def test_what_takes_the_place_of_scales_and_norms() -> None:
    new = convert(Own(lambda self, x: self.parts[0](x) * self.gamma + x, nn.BatchNorm2d(4)), SHAPE)
    assert {Shift, Gain, ConvexSum} <= {type(m) for m in new.modules()}
    (cat,) = (m for m in convert(Own(lambda self, x: torch.cat((x, x), 1)), SHAPE).modules() if isinstance(m, UnitCat))
    assert cat.dim == 1


def test_sizes_do_not_shorten_a_branch() -> None:
    """The view of a gate may name a size of the first input; the way of the gate is long all the same."""

    def gated(self: Own, x: Tensor) -> Tensor:
        y = self.parts[0](x)
        gate = self.parts[1](F.adaptive_avg_pool2d(y, 1).flatten(1))
        return y * torch.sigmoid(gate).view(x.shape[0], x.shape[1], 1, 1) + x

    new = convert(Own(gated, nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), SHAPE)
    (product,) = (m for name, m in new.named_modules() if isinstance(m, ConvexSum) and "mul" in name)
    assert torch.sigmoid(product.alpha).item() == pytest.approx(0.75)


def test_wrapped_models_are_converted() -> None:
    for wrapped in (AveragedModel(OTHERS["gate"]), nn.DataParallel(OTHERS["gate"])):
        assert lipschitz_bound(convert(wrapped, SHAPE).eval(), SHAPE) <= 1 + 1e-6


def test_training_or_eval_mode_makes_no_difference() -> None:
    for old in (OTHERS["training branch"], NormAct(4)):
        one, two = (convert(old.train(mode), SHAPE) for mode in (True, False))
        assert one.code == two.code
        assert (one.training, two.training) == (True, False)


class Bottleneck(nn.Module):
    def __init__(self, i: int, m: int, stride: int) -> None:
        super().__init__()
        o = 4 * m
        self.branch = nn.Sequential(
            nn.Conv2d(i, m, 1), nn.BatchNorm2d(m), nn.ReLU(),
            nn.Conv2d(m, m, 3, stride, 1), nn.BatchNorm2d(m), nn.ReLU(), nn.Conv2d(m, o, 1), nn.BatchNorm2d(o),
        )  # fmt: skip
        self.skip = nn.Identity() if i == o and stride == 1 else nn.Conv2d(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.skip(x))


@pytest.mark.slow
def test_a_deep_network_keeps_the_signal() -> None:
    """16 blocks as those of resnet50; with kernels of the usual scale and equal sums a change arrives 1e-6 as large."""
    torch.manual_seed(0)
    blocks, i = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()], 8
    for stage, n in enumerate((3, 4, 6, 3)):
        for k in range(n):
            blocks.append(Bottleneck(i, 4 * 2**stage, 2 if k == 0 and stage else 1))
            i = 16 * 2**stage
    new = convert(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10)), (3, 16, 16)).eval()
    x, d = torch.rand(4, 3, 16, 16), 1e-2 * torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        ratio = ((new(x + d) - new(x)).norm(dim=1) / d.flatten(1).norm(dim=1)).mean().item()
        assert 0.04 < ratio < 1
        for m in new.modules():
            if isinstance(m, ConvexSum):
                m.alpha.zero_()
            elif isinstance(m, CayleyConv2d):
                m.g.mul_(10)
        lost = ((new(x + d) - new(x)).norm(dim=1) / d.flatten(1).norm(dim=1)).mean().item()
    assert lost < ratio / 1000 < math.inf


class Inverted(nn.Module):
    """An inverted bottleneck with squeeze-and-excitation left out, as in the mobile networks."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(i, 6 * i, 1, bias=False), nn.BatchNorm2d(6 * i), nn.ReLU6(),
            nn.Conv2d(6 * i, 6 * i, 3, stride, 1, groups=6 * i, bias=False), nn.BatchNorm2d(6 * i), nn.ReLU6(),
            nn.Conv2d(6 * i, o, 1, bias=False), nn.BatchNorm2d(o),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x)


def test_inverted_bottlenecks_keep_the_signal() -> None:
    """Eight of them, one after the other; at the usual scale of a kernel, a change arrives 1e-4 as large."""
    torch.manual_seed(0)
    blocks = [Inverted(8, 8, 2 if k in (2, 5) else 1) for k in range(8)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    new = convert(model, (3, 16, 16)).eval()
    x, d = torch.rand(4, 3, 16, 16), 1e-2 * torch.randn(4, 3, 16, 16)

    def ratio() -> float:
        with torch.no_grad():
            return ((new(x + d) - new(x)).norm(dim=1) / d.flatten(1).norm(dim=1)).mean().item()

    best = (8 / (3 * 16 * 16)) ** 0.5
    assert best / 5 < ratio() < 2 * best
    for m in new.modules():
        if isinstance(m, CayleyConv2d):
            m.g.data.mul_(10)
    assert ratio() < best / 50


def nearest(W: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    return U @ Vh


def test_weights_are_projected_on_the_orthogonal_ones() -> None:
    torch.manual_seed(0)
    old = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular").double()
    new = convert(old, (3, 5, 6), keep_weights=True).eval()
    W = dense_matrix(old, (3, 5, 6), dtype=torch.float64)
    torch.testing.assert_close(dense_matrix(new, (3, 5, 6), dtype=torch.float64), nearest(W), rtol=0, atol=1e-9)
    zero = torch.zeros(1, 3, 5, 6).double()
    torch.testing.assert_close(new(zero), old(zero))
    linear = nn.Linear(7, 3).double()
    matrix = dense_matrix(convert(linear, (7,), keep_weights=True).eval(), (7,), dtype=torch.float64)
    torch.testing.assert_close(matrix, nearest(linear.weight.detach()), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("k", "p"), [(1, 0), (2, 0), (4, 1)])
def test_strided_weights_that_fit_blocks_of_pixels_are_projected(k: int, p: int) -> None:
    """A kernel of 1 fills a quarter of a block, and one of 4 with padding 1 a part of two blocks; the rest is noise."""
    torch.manual_seed(0)
    old = nn.Conv2d(2, 9, k, stride=2, padding=p, bias=False).double()
    new = convert(old, (2, 6, 8), keep_weights=True).eval()
    A, W = (dense_matrix(m, (2, 6, 8), dtype=torch.float64) for m in (new, old))
    norms = torch.linalg.svdvals(A)
    assert norms.max() <= 1 + 1e-9
    cosine = (A * W).sum() / (A.norm() * W.norm())
    assert cosine > {1: 0.4, 2: 0.8, 4: 0.6}[k]
    if k == 2:  # the blocks themselves
        torch.testing.assert_close(A, nearest(W), rtol=0, atol=1e-9)
    new.train()(torch.rand(2, 2, 6, 8).double()).pow(3).sum().backward()
    assert all(p.grad.isfinite().all() for p in new.parameters())


def test_weights_are_kept_by_methods_that_project_alone() -> None:
    with pytest.raises(ValueError, match=r'keep_weights=True needs conv="lot" .* got \'cayley\' and None'):
        convert(nn.Linear(3, 3), (3,), conv="cayley", keep_weights=True)


def test_a_learned_scale_of_one_number_has_a_gradient() -> None:
    """d/dg sum(g x) = sum(x) at the first g = 1, where the scale may still fall."""
    x = torch.rand(2, 3, 4, 4)
    gain = Gain((1,))
    gain(x).sum().backward()
    torch.testing.assert_close(gain.weight.grad, x.sum()[None])
    gain.weight.data.fill_(-3.0)
    assert torch.equal(gain(x), -x)
    assert lipschitz_bound(gain, (3, 4, 4)) < 1 + 1e-6


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.repeat(1, 3, 1, 1),
        lambda x: x.mean(3, keepdim=True).repeat((1, 2, 1, 6)),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.repeat_interleave(x, repeats=3, dim=1),
    ],
)
def test_repeated_channels_are_scaled_copies(f) -> None:
    """The same entries at the same places, times one number, and the norm 1."""
    new, x = convert(Own(lambda self, x: f(x)), SHAPE), torch.randn(2, *SHAPE)
    ratio = new(x) / f(x)
    torch.testing.assert_close(ratio, ratio[:1, :1, :1, :1].expand_as(ratio))
    assert lipschitz_bound(new, SHAPE) == pytest.approx(1, abs=1e-6)


def test_examples_and_rows_are_not_repeated() -> None:
    for f in (lambda x: x.repeat(2, 1, 1, 1), lambda x: x.repeat(1, 1, 2, 1), lambda x: x.repeat_interleave(2, 3)):
        with pytest.raises(ConversionError, match=r"repeat.*(only channels can be repeated|dim=1, got)"):
            convert(Own(lambda self, x, f=f: f(x)), SHAPE)


@pytest.mark.parametrize("last", [nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(8)])
def test_an_activation_after_the_last_layer_sorts_no_scores(last: nn.Module) -> None:
    """As in Network in Network: MaxMin would put the larger of two scores on every other class."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), last, nn.Flatten())
    new = convert(model, (3, 8, 8))
    kinds = [type(m) for m in new.modules() if isinstance(m, nn.ReLU | MaxMin)]
    assert kinds == [MaxMin, nn.ReLU]
    first, second, *_ = new(torch.randn(500, 3, 8, 8)).T
    assert (first > second).any()
    assert (first < second).any()
    images = convert(model[:4], (3, 8, 8))  # features of images, which other layers may follow
    assert not any(isinstance(m, nn.ReLU) for m in images.modules())


def test_deep_networks_start_near_the_identity_and_shallow_ones_do_not() -> None:
    def scales(depth: int) -> list[float]:
        new = convert(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth))), (4, 8, 8))
        return [m.g.item() for m in new.modules() if isinstance(m, CayleyConv2d)]

    shallow, deep = scales(20), scales(21)
    assert max(deep) < 0.3 * min(shallow)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Upsample(scale_factor=2, mode="linear"), (2, 5)),
        (nn.Upsample(7), (2, 5)),
        (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 2)),
        (nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True), (1, 2, 3, 2)),
        (nn.Upsample((3, 4, 5)), (1, 2, 3, 4)),
        (Own(lambda m, x: F.interpolate(x, size=(4, 3), mode="area")), (2, 6, 7)),
        (Own(lambda m, x: F.interpolate(x, size=4, mode="area")), (2, 6)),
        (Own(lambda m, x: F.interpolate(x, size=(2, 2, 3), mode="area")), (1, 3, 4, 5)),
    ],
)
def test_resizing_of_all_ranks_is_the_same_map_divided_by_its_norm(module: nn.Module, shape: tuple[int, ...]) -> None:
    old = dense_matrix(module, shape)
    new = dense_matrix(convert(module.double(), shape), shape)
    norm = float(torch.linalg.matrix_norm(old, 2))
    torch.testing.assert_close(new, old / norm, rtol=0, atol=1e-6)
    assert lipschitz_bound(convert(module, shape), shape) <= 1 + 1e-5


@pytest.mark.parametrize(
    "move", [lambda x: torch.roll(x, 2, 2), lambda x: x.roll((1, 3), (2, 3)), lambda x: torch.rot90(x, 1, (2, 3)),
             lambda x: x.moveaxis(1, 3)],
)  # fmt: skip
def test_moves_of_entries_are_permutations(move: Callable[[Tensor], Tensor]) -> None:
    new, x = convert(Own(lambda m, x: move(x)), SHAPE), torch.rand(3, *SHAPE)
    assert torch.equal(new(x), move(x))
    assert lipschitz_bound(new, SHAPE) == 1


@pytest.mark.parametrize(
    "mix", [lambda x: torch.roll(x, 1, 0), lambda x: torch.roll(x, 1), lambda x: torch.rot90(x, 2, (0, 2))]
)
def test_moves_between_the_examples_of_a_batch_are_refused(mix: Callable[[Tensor], Tensor]) -> None:
    model = Own(lambda m, x: mix(x))
    with pytest.raises(ConversionError, match="keep the examples of a batch apart"):
        convert(model, SHAPE)
    with pytest.raises(TypeError, match="examples of a batch"):
        lipschitz_bound(model, SHAPE)


def test_rms_norm_becomes_a_shift() -> None:
    new = convert(nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.GELU(), nn.Linear(8, 2)), (6,))
    assert [type(m) for m in new.children()][1:3] == [Shift, MaxMin]
    assert next(iter(new.children())).out_features == new.get_submodule("1").bias.numel()


def test_models_that_cannot_be_copied_are_refused() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(ConversionError, match=r"Conv2d cannot be copied; use torch\.nn\.utils\.parametrizations"):
        convert(layer, SHAPE)


def test_parts_without_a_bound_have_a_remedy() -> None:
    with pytest.raises(ConversionError, match=r"(?s)part without a bound.*slices such as x\[:, :8\]"):
        convert(Own(lambda m, x: x[:, [0, 0]]), SHAPE)
