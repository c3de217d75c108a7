"""Random models from a grammar of torch's modules and ours: layers in a row, residual branches, graphs, heads."""

import inspect
import linecache
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from graph_grammar import random_graph
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import orthoconv
from orthoconv import nn as ours

Shape = tuple[int, ...]
Maker = Callable[[random.Random, Shape], nn.Module]
BATCHES = (2, 3, 6)
_PACKAGE = str(Path(orthoconv.__file__).parent)
_BASES = {"BaseConv2d", "TransposedConv2d", "KernelConv2d", "WeightConv2d", "SpectralConv2d", "UnscaledConv2d",
          "PotentialConv2d", "BaseLinear", "PotentialLinear"}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A random model in eval mode, the shape of one input, and how many inputs are sent through it at once."""

    seed: int
    model: nn.Module
    shape: Shape
    batch: int
    dtype: torch.dtype
    affine: bool


def is_refusal(error: BaseException) -> bool:
    """Whether an error was raised on purpose: a TypeError or ValueError by a `raise` of this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, TypeError | ValueError):
        return False
    path = trace.tb_frame.f_code.co_filename
    return path.startswith(_PACKAGE) and linecache.getline(path, trace.tb_lineno).strip().startswith("raise ")


def _layers(suffixes: tuple[str, ...]) -> list[type[nn.Module]]:
    names = [name for name in ours.__all__ if name.endswith(suffixes) and name not in _BASES]
    return [kind for name in names if not inspect.isabstract(kind := getattr(ours, name))]


CONVOLUTIONS = _layers(("Conv2d", "ConvTranspose2d"))
LINEARS = _layers(("Linear",))
NOT_AFFINE = {"SLLConv2d", "CPLConv2d", "SLLLinear", "CPLLinear"}


def _divisor(r: random.Random, *numbers: int) -> int:
    common = math.gcd(*numbers)
    return r.choice([n for n in range(1, common + 1) if common % n == 0])


def own_convolution(r: random.Random, shape: Shape) -> nn.Module:
    kind, o = r.choice(CONVOLUTIONS), r.choice([shape[0], shape[0], r.randint(1, 6)])
    options: dict[str, Any] = {"bias": r.random() < 0.7}
    if r.random() < 0.2:
        options["groups"] = _divisor(r, shape[0], o)
    if r.random() < 0.2:
        options["stride"] = _divisor(r, *shape[1:])
    if r.random() < 0.15:
        options["dilation"] = r.randint(1, 2)
    if r.random() < 0.15:
        options["padding_mode"] = "zeros"
    return kind(shape[0], o, r.choice([1, 2, 3, 3, 4]), **options)


def torch_convolution(r: random.Random, shape: Shape) -> nn.Module:
    o, k, d = r.randint(1, 6), r.randint(1, 3), r.randint(1, 2)
    mode = r.choice(["zeros", "zeros", "circular", "circular", "reflect"])
    padding: Any = "same" if r.random() < 0.3 else r.randint(0, 2)
    stride = 1 if padding == "same" else r.randint(1, 2)
    options: dict[str, Any] = {"groups": _divisor(r, shape[0], o), "bias": r.random() < 0.7}
    return nn.Conv2d(shape[0], o, k, stride, padding, d, padding_mode=mode, **options)


def pooling(r: random.Random, shape: Shape) -> nn.Module:
    k, s = r.randint(1, 3), r.randint(1, 3)
    p, ceil, side = r.randint(0, k // 2), r.random() < 0.3, _divisor(r, *shape[1:])
    return r.choice([
        lambda: nn.AvgPool2d(k, s, p, ceil, r.random() < 0.5, r.choice([None, None, 1, 3])),
        lambda: nn.MaxPool2d(k, s, p, r.randint(1, 2), ceil_mode=ceil),
        lambda: ours.ScaledAvgPool2d(side), lambda: ours.L2Pool2d(side), lambda: ours.ScaledAdaptiveAvgPool2d(1),
    ])()  # fmt: skip


def _activations(r: random.Random, c: int) -> list[Callable[[], nn.Module]]:
    return [
        nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Sigmoid, ours.SoftHuber, ours.FullSort,
        ours.MaxMin, lambda: nn.Softplus(r.choice([0.5, 1, 3]), r.choice([20, 40, 60])), ours.Abs, nn.Dropout,
        lambda: nn.LeakyReLU(r.choice([0.1, -0.5, 3.0])), lambda: ours.GroupSort(_divisor(r, c)),
        lambda: ours.Abs(r.random()), lambda: ours.HouseHolder(c), lambda: ours.NActivation(c),
        lambda: ours.LPReLU(r.choice([1, c]), r.uniform(-1, 1)), lambda: ours.Scale(r.choice([-3.0, 0.0, 0.5, 2.0])),
        lambda: nn.ReLU(inplace=True), lambda: nn.Hardtanh(-r.random(), r.random(), inplace=True), nn.Identity,
    ]  # fmt: skip


def activation(r: random.Random, shape: Shape) -> nn.Module:
    return r.choice(_activations(r, shape[0]))()


def movement(r: random.Random, shape: Shape) -> nn.Module:
    c, side = shape[0], _divisor(r, *shape[1:])
    mean, std = [r.random() for _ in range(c)], [r.choice([0.2, 1.0, 5.0]) for _ in range(c)]
    return r.choice([
        lambda: nn.PixelUnshuffle(side), lambda: ours.InvertibleDownsample(side), lambda: ours.InvertibleUpsample(2),
        lambda: nn.PixelShuffle(2) if c % 4 == 0 else nn.Identity(), lambda: nn.ChannelShuffle(_divisor(r, c)),
        lambda: ours.ChannelShuffle(_divisor(r, c)), lambda: ours.Normalize(mean, std), ours.LayerCentering,
        lambda: ours.PixelBias(c, shape[1:]), lambda: ours.BatchCentering(c), nn.Dropout2d, lambda: nn.BatchNorm2d(c),
        lambda: nn.BatchNorm2d(c, affine=False),
    ])()  # fmt: skip


def without_rule(r: random.Random, shape: Shape) -> nn.Module:
    return r.choice([
        nn.GELU, nn.SiLU, nn.ELU, nn.PReLU, nn.Softshrink, nn.Hardswish, lambda: nn.Softmax(1), nn.Mish,
        lambda: nn.LayerNorm(shape[-1:]), lambda: nn.GroupNorm(1, shape[0]), lambda: nn.ZeroPad2d(1),
        lambda: nn.Upsample(scale_factor=2), lambda: nn.ConvTranspose2d(shape[0], 2, 2),
        lambda: nn.AdaptiveAvgPool2d(2), lambda: nn.InstanceNorm2d(shape[0]), lambda: nn.LocalResponseNorm(2),
    ])()  # fmt: skip


def linear(r: random.Random, shape: Shape) -> nn.Module:
    n, o = shape[-1], r.choice([shape[-1], r.randint(2, 8), 3]) if shape[-1] <= 32 else r.randint(2, 8)
    if r.random() < 0.3:
        layer = nn.Linear(n, o, bias=r.random() < 0.7)
        wrap = r.choice([None, None, parametrizations.orthogonal, parametrizations.weight_norm])
        return layer if wrap is None else wrap(layer)
    kind = r.choice(LINEARS)
    return kind(n, n if "CPL" in kind.__name__ or "SLL" in kind.__name__ else o)


def branch(r: random.Random, shape: Shape) -> nn.Module:
    def some() -> nn.Module:
        return nn.Sequential(*(part(r, shape, 0) for _ in range(r.randint(1, 2))))

    half = (max(1, shape[0] // 2), *shape[1:])
    return r.choice([
        lambda: ours.ConvexResidual(some()), lambda: ours.ConvexResidual(some(), some()),
        lambda: ours.PrescaledResidual(some()), lambda: ours.ConcatResidual(part(r, half, 0)),
        lambda: ours.IsometryAverage(part(r, shape, 0)), some,
        lambda: ours.Ensemble([activation(r, shape), activation(r, shape)]), lambda: random_graph(r, shape, part, 2),
    ])()  # fmt: skip


IMAGE: dict[Maker, float] = {own_convolution: 6, torch_convolution: 3, activation: 5, movement: 3, pooling: 2}
VECTOR: dict[Maker, float] = {linear: 4, activation: 5}


def part(r: random.Random, shape: Shape, depth: int = 1) -> nn.Module:
    """Return a random layer for inputs of one shape; one that refuses its arguments or input is replaced by another."""
    makers = {**(IMAGE if len(shape) == 3 else VECTOR), without_rule: 0.2, branch: 2.5 * depth}
    while True:
        (make,) = r.choices(list(makers), list(makers.values()))
        try:
            layer = _spoil(r, make(r, shape)).eval()
            output = layer(torch.rand(2, *shape))
        except Exception as error:
            if _is_ours(error) and not is_refusal(error):
                raise
            continue
        if isinstance(output, Tensor) and len(output) == 2 and 0 < output[0].numel() <= 1024:
            return layer


def _is_ours(error: BaseException) -> bool:
    """Whether the innermost frame of an error is in this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)


@torch.no_grad()
def _spoil(r: random.Random, layer: nn.Module) -> nn.Module:
    """Give a layer statistics of its own, and now and then parameters of another size."""
    for name, buffer in layer.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.1, 3)
        elif name.endswith("running_mean"):
            buffer.normal_()
    if r.random() < 0.25:
        size = r.choice([0.0, 1e-30, 1e-3, 0.3, 3.0, 30.0, 1e4])
        for parameter in layer.parameters():
            parameter.mul_(size)
    return layer


def output_shape(model: nn.Module, shape: Shape, batch: int = 2) -> Shape:
    """Return the shape of one output of a model in eval mode, in a batch of so many."""
    with torch.no_grad():
        return tuple(model(torch.rand(batch, *shape)).shape[1:])


def random_row(r: random.Random, shape: Shape, length: int) -> nn.Sequential:
    """Return layers in a row; now and then one of them stands in two places."""
    row = nn.Sequential()
    for _ in range(length):
        before = output_shape(row, shape)
        layer = part(r, before)
        row.append(layer)
        if r.random() < 0.05 and output_shape(layer, before) == before:
            row.append(layer)
    return row


def random_head(r: random.Random, shape: Shape) -> list[nn.Module]:
    """Return layers that end in logits of two classes or more."""
    n, classes = math.prod(shape), r.randint(2, 5)
    kinds = [kind for kind in LINEARS if kind.__name__ not in NOT_AFFINE]

    def linear_head() -> nn.Module:
        return nn.Linear(n, classes) if r.random() < 0.3 else r.choice(kinds)(n, classes)

    last = ours.Ensemble([linear_head(), linear_head()]) if r.random() < 0.2 else linear_head()
    after = r.choice([[], [], [ours.Scale(r.choice([0.5, -2.0]))], [nn.Identity()], [nn.Tanh()]])
    return [*([nn.Flatten()] if len(shape) > 1 else []), last, *after]


def random_model(seed: int) -> Sample:
    """Return the model of a seed: one affine layer, or a row, or a graph, most of them with a head of classes."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    shape: Shape = (r.randint(1, 6), r.randint(4, 8), r.randint(4, 8)) if r.random() < 0.8 else (r.randint(2, 24),)
    kind, batch, dtype = r.random(), r.choice(BATCHES), r.choice([torch.float32, torch.float64])
    if kind < 0.2:
        model: nn.Module = _affine(r, shape)
    elif kind < 0.4:
        model = random_graph(r, shape, part, batch)
    else:
        model = random_row(r, shape, r.randint(1, 4))
    if kind >= 0.2 and r.random() < 0.8:
        model = nn.Sequential(model, *random_head(r, output_shape(model, shape, batch)))
    return Sample(seed, model.to(dtype).eval(), shape, batch, dtype, affine=kind < 0.2)


def _affine(r: random.Random, shape: Shape) -> nn.Module:
    """Return one affine layer, whose dense matrix has the norm that a bound must reach."""
    makers = [own_convolution, torch_convolution] if len(shape) == 3 else [linear]
    while True:
        try:
            layer = _spoil(r, r.choice(makers)(r, shape)).eval()
            if type(layer).__name__ not in NOT_AFFINE and layer(torch.rand(2, *shape)).numel():
                return layer
        except (RuntimeError, TypeError, ValueError) as error:
            if _is_ours(error) and not is_refusal(error):
                raise
