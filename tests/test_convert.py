"""Existing networks made 1-Lipschitz."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from orthoconv import ConversionError, convert, empirical_lipschitz, export, lipschitz_bound, register_conversion
from orthoconv.nn import (
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    ChannelShuffle,
    ConvexSum,
    MaxMin,
    Scale,
    ScaledAdaptiveAvgPool2d,
)


class BasicBlock(nn.Module):
    """As they are written everywhere."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or i != o:
            self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(self.dropout(torch.flatten(x, 1)))


def test_a_resnet() -> None:
    old = ResNet()
    new = convert(old, (3, 16, 16))
    kinds = {type(m) for m in new.modules()}
    assert {CayleyConv2d, CayleyLinear, MaxMin, ScaledAdaptiveAvgPool2d, ConvexSum} <= kinds
    assert not {nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.AdaptiveAvgPool2d} & kinds
    assert new.training
    assert old.conv1.weight.shape == (8, 3, 3, 3)
    assert isinstance(old.layer1[0].relu, nn.ReLU), "the old one is left alone"

    new.eval()
    bound = lipschitz_bound(new, (3, 16, 16))
    assert bound <= 1 + 1e-5
    x = torch.rand(4, 3, 16, 16)
    assert (empirical_lipschitz(new, x, 0.5) <= bound).all()
    torch.testing.assert_close(export(new, (3, 16, 16))(x), new(x), rtol=0, atol=1e-5)

    optimizer = torch.optim.Adam(new.train().parameters(), lr=0.01)
    labels = torch.arange(4)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(10 * new(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None for p in new.parameters())
    assert lipschitz_bound(new.eval(), (3, 16, 16)) <= 1 + 1e-5


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular")
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.conv(x).relu(), 2)
        y = torch.add(F.avg_pool2d(self.up(y), 2), F.adaptive_avg_pool2d(x, 4))
        return F.dropout(y.view(y.size(0), -1), 0.5)


def test_functions_and_methods() -> None:
    new = convert(Functional(), (2, 8, 8)).eval()
    assert sum(type(m) is CayleyConvTranspose2d for m in new.modules()) == 1
    assert any(type(m) is nn.ReLU for m in new.modules()), "three channels cannot be paired"
    assert lipschitz_bound(new, (2, 8, 8)) <= 1 + 1e-5
    assert new(torch.rand(3, 2, 8, 8)).shape == (3, 32)


class Hopeless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention = nn.ConvTranspose3d(2, 2, 3, padding=2), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ x.transpose(2, 3)
        z = F.normalize(x, dim=1) / x.exp()
        return torch.log_softmax(
            self.conv(x[:, :, None].expand(-1, -1, 3, -1, -1)).mean(2) + (y * y + z)[:, :, 1:7, 1:7], 1
        )


def test_everything_that_cannot_be_converted_is_listed() -> None:
    with pytest.raises(ConversionError) as caught:
        convert(Hopeless(), (2, 8, 8))
    message = str(caught.value)
    for part in ("matmul (matmul): there is no rule for it: products of two values",
                 "exp (exp): there is no rule for it: its slope", "truediv (truediv): it divides by",
                 "normalize (normalize): there is no rule for it: a division by a norm",
                 "mul (mul): it multiplies a value by itself", "conv (ConvTranspose3d): there is no rule for it",
                 "log_softmax (log_softmax): there is no rule for it: certificates speak of logits"):  # fmt: skip
        assert part in message, message
    with pytest.raises(ConversionError, match=r"cannot be traced for inputs of \(2, 8, 8\)"):
        convert(Branching(), (2, 8, 8))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_is_kept_must_not_expand_and_shapes_must_stay() -> None:
    with pytest.raises(ConversionError, match=r"the bound is 10: layers of orthoconv.nn are kept"):
        convert(nn.Sequential(Scale(10.0)), (4,))
    register_conversion(Doubling, make=lambda part: nn.MaxPool2d(2), proof="It is wrong about the shape.")
    with pytest.raises(ConversionError, match=r"_0: \(2, 2, 8, 8\), now \(2, 2, 4, 4\)"):
        convert(nn.Sequential(Doubling()), (2, 8, 8))
    register_conversion(Doubling, make=lambda part: None, proof="It is wrong about the bound.")
    with pytest.raises(ConversionError, match=r"without a bound: there is no rule for .*Doubling.*register_rule"):
        convert(nn.Sequential(Doubling()), (2, 8, 8))


class Doubling(nn.Sigmoid):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_hooks_of_a_sum_are_seen() -> None:
    new = convert(ResNet(), (3, 16, 16)).eval()
    next(m for m in new.modules() if isinstance(m, ConvexSum)).register_forward_hook(lambda m, i, o: 100 * o)
    with pytest.raises(TypeError, match="forward hooks"):
        lipschitz_bound(new, (3, 16, 16))


def test_shared_activations_and_dropout_in_place() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 3), relu, nn.Dropout(0.5, inplace=True))
    new = convert(model, (4,))
    assert [type(m).__name__ for m in new.modules() if isinstance(m, MaxMin | nn.ReLU)] in (
        ["MaxMin", "ReLU"],
        ["ReLU", "MaxMin"],
    )
    assert lipschitz_bound(new.eval(), (4,)) <= 1 + 1e-5


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(4, 4)
    new = convert(nn.Sequential(layer, nn.ReLU(), layer), (4,))
    assert len([m for m in new.modules() if isinstance(m, CayleyLinear)]) == 1
    assert lipschitz_bound(new.eval(), (4,)) <= 1 + 1e-5


# The bound of graphs


def traced(forward, shape=(2, 4, 4)) -> float:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.eye.weight)
            self.activation = nn.ReLU(inplace=True)

    Model.forward = forward
    return lipschitz_bound(fx.symbolic_trace(Model()), shape)


def test_bounds_of_graphs() -> None:
    assert traced(lambda self, x: x + x) == 2
    assert traced(lambda self, x: x + 1.0) == 1
    assert traced(lambda self, x: self.eye(x) + x.relu()) == pytest.approx(2)
    assert traced(lambda self, x: torch.cat((x, self.eye(x)), 1)) == pytest.approx(2**0.5)
    assert traced(lambda self, x: x.flatten(1).view(-1, 8, 4)) == 1


def test_a_graph_that_was_changed_but_not_recompiled() -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    (node,) = (n for n in model.graph.nodes if n.op == "output")
    with model.graph.inserting_before(node):
        node.args = (model.graph.call_function(torch.add, (node.args[0], node.args[0])),)
    with pytest.raises(TypeError, match="as it runs"):
        lipschitz_bound(model, (3,))
    model.recompile()
    assert lipschitz_bound(model, (3,)) == 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x + x[:, :1],  # which is repeated
        lambda self, x: x * x,
        lambda self, x: x.add_(x),
        lambda self, x: self.activation(x),
        lambda self, x: torch.add(x, x, alpha=3),
        lambda self, x: (x, x),
        lambda self, x: x + 100 * x.tolist()[0][0][0][0],
        lambda self, x: x * x.sum().item(),
    ],
)
def test_what_a_graph_must_not_have(forward) -> None:
    with pytest.raises(TypeError, match=r"a graph|no rule"):
        traced(forward)


def test_a_channel_shuffle_stays_one() -> None:
    old = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ChannelShuffle(3), nn.AdaptiveAvgPool2d((2, 1)))
    new = convert(old, (3, 8, 8))
    assert any(isinstance(m, ChannelShuffle) for m in new.modules())
    assert new(torch.rand(2, 3, 8, 8)).shape == (2, 6, 2, 1)
    x = torch.randn(2, 6, 4, 4)
    assert torch.equal(ChannelShuffle(3)(x), nn.ChannelShuffle(3)(x))
    assert lipschitz_bound(nn.ChannelShuffle(3), (6, 4, 4)) == 1


class Calls(nn.Module):
    """A linear layer, and then whatever a function makes of it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


REFUSED = [
    (Calls(lambda y: nn.ReLU()(y)), (3,), "cannot be traced .* must be made in __init__"),
    (
        Calls(lambda y: y + torch.ones(1, 4).expand(y.shape[0], -1)),
        (3,),
        "cannot be traced .* the size of the batch, as",
    ),
    (Calls(lambda y: (y, y)), (3,), "Calls must return one tensor, got tuple"),
    (Calls(lambda y: {"y": y}), (3,), "Calls must return one tensor, got dict"),
    (Calls(lambda y: y), (5,), r"Calls does not take inputs of shape \(5,\): mat1 and mat2"),
    (nn.Sequential(nn.MaxPool2d(2, return_indices=True)), (3, 4, 4), "must return one tensor, got tuple"),
]


@pytest.mark.parametrize(("model", "shape", "message"), REFUSED, ids=[m[:25] for _, _, m in REFUSED])
def test_what_cannot_be_traced_is_refused_in_words(model, shape, message, capsys) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(model, shape)
    assert "Traceback" not in capsys.readouterr().err


def test_a_part_that_cannot_be_traced_is_named_with_a_remedy() -> None:
    """The innermost one; also after an error of another part that the model itself has dealt with."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Branching(), nn.Sequential(nn.ReLU(), nn.Sequential(Branching()))

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.first(x)
            except torch.fx.proxy.TraceError:
                x = -x
            return self.second(x)

    expected = r"at second\.1\.0 \(Branching\): .*\n.*give its class a rule by orthoconv\.register_conversion"
    with pytest.raises(ConversionError, match=expected):
        convert(Careful(), (2, 8, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    for model, name in ((scripted, "RecursiveScriptModule"), (nn.Sequential(scripted), "0")):
        with pytest.raises(ConversionError, match=f"{name} is a scripted module"):
            convert(model, (3,))


def test_bad_arguments_are_refused() -> None:
    for shape in (5, (-3,), (3.0,), "ab"):
        with pytest.raises(ValueError, match="input_shape must be the shape of one input"):
            convert(nn.Linear(3, 3), shape)
    with pytest.raises(ValueError, match=r"got a tensor of shape \(2, 3\)$"):
        convert(nn.Linear(3, 3), torch.rand(2, 3))
    with pytest.raises(TypeError, match=r"a model must be a module \(torch\.nn\.Module\), got 'x'"):
        convert("x", (3,))


def test_indices_of_a_maximum_are_refused() -> None:
    class First(nn.Sequential):
        def forward(self, x):
            return super().forward(x)[0]

    with pytest.raises(ConversionError, match="return_indices=True"):
        convert(First(nn.MaxPool2d(2, return_indices=True)), (3, 4, 4))
