"""The small parts: learned activations, pools, centring, shuffles, residuals. Jacobians, bounds, rounding, export."""

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certify, export, in_double, lipschitz_bound, rounding_bound, to_onnx, verify
from orthoconv.certificates import growth
from orthoconv.nn import (
    Abs,
    BatchCentering,
    CayleyConv2d,
    CayleyLinear,
    ChannelShuffle,
    ConcatResidual,
    ConvexResidual,
    ConvexSum,
    Ensemble,
    FullSort,
    GroupSort,
    HouseHolder,
    InvertibleDownsample,
    InvertibleUpsample,
    IsometryAverage,
    L2Pool2d,
    LayerCentering,
    LPReLU,
    MaxMin,
    Mirror,
    Move,
    NActivation,
    Normalize,
    PixelBias,
    PrescaledResidual,
    Scale,
    ScaledAdaptiveAvgPool2d,
    ScaledAvgPool2d,
    ScaledMean,
    SoftHuber,
    UnitCat,
)

SHAPE = (4, 4, 6)


def shuffled(layer: nn.Module) -> nn.Module:
    """The layer with parameters and buffers that training might have made, in eval mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for t in (*layer.parameters(), *layer.buffers()):
            t.copy_(torch.randn(t.shape, generator=generator))
    return layer.eval()


KEEPING = {  # the Jacobian is orthogonal
    "Abs": lambda: Abs(),
    "half of Abs": lambda: Abs(0.5),
    "FullSort": lambda: FullSort(),
    "HouseHolder": lambda: shuffled(HouseHolder(4)),
    "HouseHolder at the start": lambda: HouseHolder(4),
    "NActivation": lambda: shuffled(NActivation(4)),
    "NActivation at the start": lambda: NActivation(4),
    "PixelBias": lambda: shuffled(PixelBias(4, (4, 6))),
    "BatchCentering": lambda: shuffled(BatchCentering(4)),
    "BatchCentering without bias": lambda: shuffled(BatchCentering(4, bias=False)),
    "ChannelShuffle": lambda: ChannelShuffle(2),
    "InvertibleUpsample": lambda: InvertibleUpsample(2),
    "ConcatResidual": lambda: ConcatResidual(MaxMin()).eval(),
}
SHRINKING = {  # the norm of the Jacobian is at most 1
    "LPReLU": lambda: shuffled(LPReLU(4)),
    "LPReLU of one slope": lambda: shuffled(LPReLU()),
    "SoftHuber": lambda: SoftHuber(0.3),
    "L2Pool2d": lambda: L2Pool2d(2),
    "L2Pool2d, oblong": lambda: L2Pool2d((1, 3)),
    "L2Pool2d of all": lambda: L2Pool2d(),
    "ScaledAdaptiveAvgPool2d": lambda: ScaledAdaptiveAvgPool2d((2, 3)),
    "ScaledAdaptiveAvgPool2d to one": lambda: ScaledAdaptiveAvgPool2d(1),
    "LayerCentering": lambda: LayerCentering(),
    "LayerCentering of all": lambda: LayerCentering((-3, -2, -1)),
    "PrescaledResidual": lambda: shuffled(PrescaledResidual(Abs())),
    "ConcatResidual that shrinks": lambda: ConcatResidual(SoftHuber(1.0)).eval(),
}
PARTS: dict[str, Callable[[], nn.Module]] = {**KEEPING, **SHRINKING}
every_part = pytest.mark.parametrize("name", PARTS)
SMOOTH = sorted(PARTS.keys() - {"NActivation at the start"})  # whose corners coincide
every_class = pytest.mark.parametrize("name", {type(make()): name for name, make in PARTS.items()}.values())


def jacobians(layer: nn.Module, shape: tuple[int, ...] = SHAPE, count: int = 3) -> Tensor:
    """Jacobian at some random inputs, (count, outputs, inputs)."""
    x = torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return torch.stack([torch.autograd.functional.jacobian(lambda v: layer(v[None]).flatten(), v) for v in x]).flatten(
        2
    )


@every_part
def test_jacobians(name: str) -> None:
    values = torch.linalg.svdvals(jacobians(PARTS[name]().double()))
    assert values.max() <= 1 + 1e-12
    if name in KEEPING:
        assert values.min() >= 1 - 1e-12


def test_the_norm_is_reached_where_it_is_promised() -> None:
    """Pools and projections that shrink more than they must would lose accuracy."""
    for name in ("L2Pool2d", "L2Pool2d of all", "ScaledAdaptiveAvgPool2d", "ScaledAdaptiveAvgPool2d to one"):
        values = torch.linalg.svdvals(jacobians(PARTS[name]().double()))
        torch.testing.assert_close(values, torch.ones_like(values))
    for name in ("LayerCentering", "LayerCentering of all"):
        P = jacobians(PARTS[name]().double())[0]
        torch.testing.assert_close(P @ P, P)
        torch.testing.assert_close(P, P.mT)
        assert torch.linalg.matrix_rank(P) == (92 if name == "LayerCentering" else 95)


def test_the_jacobians_can_fail() -> None:
    class Steep(SoftHuber):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.delta

    assert torch.linalg.svdvals(jacobians(Steep(0.3))).max() > 1.5
    with pytest.raises(TypeError, match="no rule for"):
        lipschitz_bound(Steep(0.3), SHAPE)


@every_part
def test_distances_of_far_and_near_points(name: str) -> None:
    layer = PARTS[name]().double()
    x, y = torch.randn(2, 200, *SHAPE, dtype=torch.float64)
    y[100:] = x[100:] + 1e-3 * y[100:]
    ratios = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    assert ratios.max() <= lipschitz_bound(layer, SHAPE) + 1e-11


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name: str) -> None:
    layer = PARTS[name]().double()
    shape = (4, 4, 6) if isinstance(layer, PixelBias) else (4, 2, 6)
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))
    assert torch.autograd.gradgradcheck(call, (x, *parameters.values()), fast_mode=True)


@every_part
@torch.no_grad()
def test_rounding_and_the_twin(name: str) -> None:
    layer, x = PARTS[name](), torch.randn(200, *SHAPE)
    assert lipschitz_bound(layer, SHAPE) == pytest.approx(1, rel=1e-12)
    scales = 10.0 ** torch.linspace(-3, 3, 200).view(-1, 1, 1, 1)
    error = (layer(scales * x).double() - in_double(layer)((scales * x).double())).flatten(1).norm(dim=1)
    bound = growth(layer, SHAPE).error((scales * x).flatten(1).norm(dim=1).double())
    assert (error <= bound).all()
    assert bound[-1] < 1e-4 * (scales * x)[-1].norm(), "a bound that says something"


@every_part
@torch.no_grad()
def test_plain_form_and_state(name: str) -> None:
    layer, x = PARTS[name](), torch.randn(3, *SHAPE)
    y = layer(x)
    torch.testing.assert_close(export(layer, SHAPE)(x), y)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    fresh = PARTS[name]()
    for t in fresh.state_dict().values():
        t.zero_()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer.to("meta")(x.to("meta")).shape == y.shape


@pytest.mark.slow
@every_class
@torch.no_grad()
def test_torch_export(name: str) -> None:
    layer, x = PARTS[name](), torch.randn(3, *SHAPE)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    torch.testing.assert_close(program(x[:2]), layer(x[:2]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.*torch.jit.script. is deprecated")
@every_class
def test_compiled(name: str) -> None:
    layer, x = PARTS[name]().double(), torch.randn(3, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@every_class
def test_under_transforms(name: str) -> None:
    layer, x = PARTS[name]().double(), torch.randn(3, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(lambda image: layer(image[None])[0])(x), layer(x))
    forward, reverse = (jac(lambda v: layer(v[None]).sum(0))(x[0]) for jac in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, reverse)


def networks() -> dict[str, nn.Sequential]:
    """Two networks that have all the parts."""
    branch = nn.Sequential(CayleyConv2d(4, 4, 3), NActivation(4))
    one = [CayleyConv2d(1, 8, 3), PixelBias(8, 8), HouseHolder(8), BatchCentering(8), ChannelShuffle(2)]
    one += [ConcatResidual(branch), InvertibleDownsample(2), Abs(0.5), L2Pool2d(2), nn.Flatten(), CayleyLinear(128, 16)]
    one += [FullSort(), CayleyLinear(16, 5)]
    two = [CayleyConv2d(1, 8, 3), LPReLU(8), PrescaledResidual(nn.Sequential(CayleyConv2d(8, 8, 3), SoftHuber()))]
    two += [
        LayerCentering(),
        InvertibleUpsample(2),
        ScaledAdaptiveAvgPool2d(4),
        Abs(),
        nn.Flatten(),
        CayleyLinear(32, 5),
    ]
    return {"one": nn.Sequential(*one).eval(), "two": nn.Sequential(*two).eval()}


@pytest.mark.parametrize("name", ["one", "two"])
def test_certificates_of_networks(name: str) -> None:
    model, x = networks()[name], torch.rand(40, 1, 8, 8)
    for module in model.modules():
        if isinstance(module, PixelBias | HouseHolder | NActivation | LPReLU | BatchCentering):
            shuffled(module)
    assert lipschitz_bound(model, (1, 8, 8)) == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        labels = model(x).argmax(1)
        error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
        assert 0 < error.max() <= rounding_bound(model, (1, 8, 8), 8.0) < 0.1
        found, naive = (certify(model, [(x, labels)], rounding=on) for on in (True, False))
        assert (found.radius <= naive.radius).all()
        assert found.slack is not None
        assert found.slack.max() < 1e-4
        assert (found.radius > 0).all()
    assert verify(model, x[:8], claimed=1.0).faults == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "two"])
def test_onnx(name: str, tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = networks()[name], torch.rand(3, 1, 8, 8)
    to_onnx(model, x, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for n in (1, 3):
        (y,) = session.run(None, {"images": x[:n].numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x[:n]).detach(), rtol=0, atol=1e-5)


def test_large_constants_that_cancel() -> None:
    """A mean of 1e4 and a bias of 1e4 leave a value near 0 at zero; the bound must hold all the same."""
    layer = BatchCentering(4).eval()
    layer.running_mean.copy_(1e4 + torch.rand(4))
    layer.bias.data.fill_(1e4)
    x = torch.randn(100, 4)
    with torch.no_grad():
        error = (layer(x).double() - in_double(layer)(x.double())).norm(dim=1)
        assert (error <= growth(layer, (4,)).error(x.norm(dim=1).double())).all()


@torch.no_grad()
def test_large_constants_that_cancel_between_layers() -> None:
    bias, centring, corners = PixelBias(4, (4, 6)), BatchCentering(4).eval(), NActivation(4)
    bias.bias.copy_(1e4 * torch.rand(4, 4, 6))
    centring.running_mean.copy_(1e4 * torch.rand(4))
    corners.corners.copy_(1e4 * torch.randn(2, 4))
    back = PixelBias(4, (4, 6))
    model = nn.Sequential(bias, centring, corners, shuffled(HouseHolder(4)), back)
    back.bias.copy_(-model(torch.zeros(1, *SHAPE))[0])
    x = torch.randn(100, *SHAPE)
    assert model(0 * x).norm() == 0, "nothing can be seen from outside"
    error = (model(x).double() - in_double(model)(x.double())).flatten(1).norm(dim=1)
    bound = growth(model, SHAPE).error(x.flatten(1).norm(dim=1).double())
    assert (error <= bound).all()
    assert error.max() > 1e-4, "large constants round"


@pytest.mark.parametrize("name", ["HouseHolder", "NActivation", "LPReLU", "PixelBias", "BatchCentering"])
def test_weights_that_are_not_numbers(name: str) -> None:
    layer = PARTS[name]()
    next(layer.parameters()).data.view(-1)[0] = math.nan
    with pytest.raises(ValueError, match=rf"of {name} \({name}\) is nan; is its weight finite"):
        lipschitz_bound(layer, SHAPE)


def test_asking_for_a_bound_trains_nothing() -> None:
    norm = nn.BatchNorm2d(4)
    with pytest.raises(TypeError, match="eval mode only"):
        lipschitz_bound(nn.Sequential(norm), SHAPE)
    assert norm.num_batches_tracked == 0


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Abs(1.5), r"fraction must be in \[0, 1\], got 1.5"),
        (lambda: Abs(math.nan), "fraction must be"),
        (lambda: HouseHolder(3), "channels must be even, got 3"),
        (lambda: HouseHolder(0), "channels must be a positive int, got 0"),
        (lambda: NActivation(2, reach=-1.0), "reach must be at least 0 and finite, got -1.0"),
        (lambda: NActivation(2.0), "channels must be a positive int, got 2.0"),  # type: ignore[arg-type]
        (lambda: LPReLU(slope=2.0), r"slope must be in \[-1, 1\], got 2.0"),
        (lambda: SoftHuber(0.0), "delta must be positive and finite, got 0.0"),
        (lambda: L2Pool2d(0), "kernel_size must be a positive int or a pair"),
        (lambda: ScaledAdaptiveAvgPool2d(-1), "output_size must be"),
        (lambda: PixelBias(3, (4, 0)), r"size must be .*, got \(4, 0\)"),
        (lambda: BatchCentering(3, momentum=2), r"momentum must be in \[0, 1\], got 2"),
        (lambda: LayerCentering((0, 1)), r"negative ints, such as \(-2, -1\), got \(0, 1\)"),
        (lambda: LayerCentering(-1), "negative ints, such as .*, got -1"),  # type: ignore[arg-type]
        (lambda: LayerCentering((-1, -1)), "different negative ints"),
        (lambda: ChannelShuffle(0), "groups must be a positive int, got 0"),
        (lambda: InvertibleUpsample(1.5), "block must be a positive int, got 1.5"),  # type: ignore[arg-type]
        (lambda: ConcatResidual(nn.ReLU(inplace=True)), "ConcatResidual needs its input unchanged, but f is in place"),
        (lambda: PrescaledResidual(nn.ReLU(inplace=True)), "PrescaledResidual needs its input unchanged"),
    ],
)
def test_arguments_that_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", ["a", None, True, 1j, torch.ones(2), [0.5], 10**400], ids=lambda v: str(v)[:9])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: Abs(v), r"fraction must be in \[0, 1\]"),
        (lambda v: NActivation(4, v), "reach must be at least 0 and finite"),
        (lambda v: LPReLU(slope=v), r"slope must be in \[-1, 1\]"),
        (lambda v: SoftHuber(v), "delta must be positive and finite"),
        (lambda v: Scale(v), "factor must be a number that is finite"),
        (lambda v: Normalize([v]), "Normalize takes numbers: each mean must be finite"),
        (lambda v: Normalize([0.5], [v]), "Normalize takes numbers: each std must be positive and finite"),
        (lambda v: BatchCentering(4, momentum=v), r"momentum must be in \[0, 1\]"),
        (lambda v: ConvexSum(v), "weight must be between 0 and 1"),
        (lambda v: UnitCat(2, shares=[1.0, v]), "shares must be 2 positive numbers"),
    ],
    ids=["Abs", "NActivation", "LPReLU", "SoftHuber", "Scale", "mean", "std", "BatchCentering", "ConvexSum", "UnitCat"],
)
def test_what_is_no_number_is_refused(make: Callable[[object], nn.Module], message: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{message}, got {re.escape(repr(value))}$"):
        make(value)


def test_numbers_of_any_library_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (1, numpy.float32(1), torch.tensor(1.0), numpy.int64(1)):
        assert [Scale(value).factor, SoftHuber(value).delta, Abs(value).fraction] == [1.0] * 3
    assert FullSort(numpy.int64(-1)).dim == -1
    assert BatchCentering(2, bias=numpy.bool_(False)).bias is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnitCat(2, shares=3), "shares must be 2 positive numbers, got 3"),  # type: ignore[arg-type]
        (lambda: UnitCat(2, shares="ab"), "shares must be 2 positive numbers, got 'a'"),  # type: ignore[arg-type]
        (lambda: UnitCat(2, dim=None), "dim must be an int, got None"),  # type: ignore[arg-type]
        (lambda: ScaledMean("a"), "dim must be an int, got 'a'"),  # type: ignore[arg-type]
        (lambda: ScaledMean(None), "dim must be an int, got None"),  # type: ignore[arg-type]
        (lambda: ScaledMean((2, 1.5)), "each dim must be an int, got 1.5"),  # type: ignore[arg-type]
        (lambda: ScaledMean((2, 2)), r"dim must be different axes, none of them that of the batch, got \(2, 2\)"),
        (lambda: ScaledMean(2, keepdim="no"), "keepdim must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: BatchCentering(2, bias="no"), "bias must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Ensemble(nn.ReLU()), r"members must be a list of one model or more, got ReLU\(\)"),  # type: ignore[arg-type]
        (lambda: Ensemble(None), "members must be a list of one model or more, got None"),  # type: ignore[arg-type]
        (lambda: IsometryAverage(nn.ReLU(), Mirror()), "maps must be a list of one module or more, got Mirror"),  # type: ignore[arg-type]
        (lambda: ConvexResidual(None), "f of ConvexResidual must be a module, got None"),  # type: ignore[arg-type]
        (lambda: PrescaledResidual(nn.ReLU), "f of PrescaledResidual must be a module, got <class"),  # type: ignore[arg-type]
        (lambda: ConcatResidual(3), "f of ConcatResidual must be a module, got 3"),  # type: ignore[arg-type]
        (lambda: ConvexResidual(nn.ReLU(), "skip"), "skip of ConvexResidual must be a module, got 'skip'"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_no_list_no_axis_and_no_module_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


WITH_AXIS = {
    "Abs": lambda dim: Abs(0.5, dim=dim),
    "FullSort": lambda dim: FullSort(dim),
    "GroupSort": lambda dim: GroupSort(2, dim),
    "HouseHolder": lambda dim: HouseHolder(4, dim),
    "LPReLU": lambda dim: LPReLU(4, dim=dim),
    "MaxMin": lambda dim: MaxMin(dim),
    "NActivation": lambda dim: NActivation(4, dim=dim),
}


@pytest.mark.parametrize("name", WITH_AXIS)
def test_axes_that_an_input_does_not_have_are_refused(name: str) -> None:
    make = WITH_AXIS[name]
    for dim in (5, -5):
        with pytest.raises(ValueError, match=rf"{name} with dim={dim} takes .* this axis, got shape \(2, 4, 4, 4\)"):
            make(dim)(torch.rand(2, 4, 4, 4))
    for dim in ("c", 1.0, True):
        with pytest.raises(ValueError, match=f"dim must be an int, got {dim!r}"):
            make(dim)
    with pytest.raises(TypeError, match=f"{name} takes a tensor, got a list"):
        make(1)([[1.0, 2.0, 3.0, 4.0]])


PARAMETRIZED = {
    "HouseHolder": lambda **o: HouseHolder(4, **o),
    "NActivation": lambda **o: NActivation(4, **o),
    "LPReLU": lambda **o: LPReLU(4, **o),
    "PixelBias": lambda **o: PixelBias(4, (4, 4), **o),
    "BatchCentering": lambda **o: BatchCentering(4, **o),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parts_with_parameters_take_a_device_and_a_dtype(name: str) -> None:
    make = PARAMETRIZED[name]
    for dtype in (torch.float64, torch.bfloat16):
        layer = make(dtype=dtype)
        assert {t.dtype for t in layer.state_dict().values()} == {dtype}
        for key, t in make().state_dict().items():
            torch.testing.assert_close(layer.state_dict()[key], t.to(dtype), rtol=1e-7, atol=0)
        assert layer(torch.rand(2, 4, 4, 4, dtype=dtype)).dtype == dtype
    assert {t.device.type for t in make(device="meta").state_dict().values()} == {"meta"}
    for dtype in (torch.int64, torch.complex64, "float32"):
        with pytest.raises(TypeError, match=f"{name} takes the dtype of floating-point numbers, got {dtype!r}"):
            make(dtype=dtype)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (HouseHolder(4), (2, 6), r"HouseHolder\(4\) takes that number of channels, got shape \(2, 6\)"),
        (NActivation(4), (2, 1), r"NActivation\(4\) takes that number of channels, got shape \(2, 1\)"),
        (LPReLU(4), (2, 3, 1, 1), r"LPReLU\(4\) takes that number"),
        (Abs(0.5), (2, 3, 4), "Abs needs dim="),
        (FullSort(), (2, 3, 4), "FullSort needs dim="),
        (L2Pool2d(2), (1, 1, 5, 7), r"L2Pool2d takes images whose sides \(2, 2\) divide, got \(5, 7\)"),
        (L2Pool2d(), (1, 1, 0, 7), "L2Pool2d takes images"),
        (ScaledAdaptiveAvgPool2d(2), (1, 1, 5, 7), r"ScaledAdaptiveAvgPool2d takes .* got \(5, 7\)"),
        (PixelBias(2, 3), (1, 2, 3, 4), r"PixelBias takes images \(b, \*\(2, 3, 3\)\), got shape \(1, 2, 3, 4\)"),
        (BatchCentering(2), (4, 3), r"2 channels, got shape \(4, 3\)"),
        (LayerCentering(), (4, 3), r"with the axes \(-2, -1\), got shape \(4, 3\)"),
        (ChannelShuffle(2), (4, 3), r"that 2 divides, got shape \(4, 3\)"),
        (InvertibleUpsample(2), (1, 6, 2, 2), r"that 4 divides, got \(1, 6, 2, 2\)"),
        (ConcatResidual(nn.Identity()), (1, 3), r"an even c, got shape \(1, 3\)"),
        (PrescaledResidual(nn.Linear(3, 1)), (1, 3), r"branches of one shape, got \(1, 1\) and \(1, 3\)"),
        (ScaledAvgPool2d(2), (4,), r"ScaledAvgPool2d takes images \(\.\.\., h, w\), got shape \(4,\)"),
        (ScaledAdaptiveAvgPool2d(1), (4,), r"ScaledAdaptiveAvgPool2d takes images .* got shape \(4,\)"),
        (L2Pool2d(), (4,), r"L2Pool2d takes images .* got shape \(4,\)"),
        (Move(1, 1), (4,), r"Move takes images .* got shape \(4,\)"),
        (ScaledMean(7), (1, 2, 3), r"ScaledMean takes a batch with the axes \(7,\), got the shape \(2, 3\) of one"),
        (ScaledMean((2, -1)), (1, 2, 3), r"two of the axes \(2, -1\) of ScaledMean are one, .* \(2, 3\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_inputs_that_are_refused(layer: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(shape))


def test_inverses_refuse_what_is_no_image_of_the_layer() -> None:
    for y in (torch.zeros(1, 3, 6, 6), torch.zeros(4)):
        with pytest.raises(
            ValueError, match=rf"inverse of InvertibleDownsample\(2\) .* 4 divides, got \({y.shape[0]},"
        ):
            InvertibleDownsample(2).inverse(y)
    with pytest.raises(ValueError, match=r"inverse of InvertibleUpsample\(2\) .* 2 divides, got \(1, 4, 6, 5\)"):
        InvertibleUpsample(2).inverse(torch.zeros(1, 4, 6, 5))


def test_inputs_that_do_not_fit_side_by_side_are_refused() -> None:
    x = torch.zeros(2, 4, 6, 6)
    for other in (x[:, :, :3], x[0], x[:1]):
        with pytest.raises(
            ValueError, match=rf"along the axis 1 alone, got \(2, 4, 6, 6\), {re.escape(repr((*other.shape,)))}"
        ):
            UnitCat(2)(x, other)
    with pytest.raises(ValueError, match=r"along the axis 4 alone, got \(2, 4, 6, 6\), \(2, 4, 6, 6\)"):
        UnitCat(2, dim=4)(x, x)
    assert UnitCat(2, dim=-1)(x, x[..., :2]).shape == (2, 4, 6, 8)


@pytest.mark.parametrize("pool", [ScaledAvgPool2d((2, 3)), ScaledAdaptiveAvgPool2d((2, 2)), L2Pool2d((2, 3))])
def test_pools_take_images_with_any_axes_before(pool: nn.Module) -> None:
    x = torch.randn(2, 3, 4, 4, 6)
    y = pool(x)
    assert y.shape == (2, 3, 4, 2, 2)
    torch.testing.assert_close(pool(x.transpose(0, 1)), y.transpose(0, 1))
    torch.testing.assert_close(pool(x[0]), y[0])
    torch.testing.assert_close(pool(x[0, 0]), y[0, 0])
    torch.testing.assert_close(pool(x[0, 0, 0]), y[0, 0, 0])
    assert pool(x[:0]).shape == (0, 3, 4, 2, 2)


def test_channels_along_other_axes() -> None:
    x = torch.randn(3, 5, 4)
    for layer, along in ((HouseHolder(4), HouseHolder(4, dim=-1)), (Abs(0.5), Abs(0.5, dim=2))):
        torch.testing.assert_close(along(x), layer(x.flatten(0, 1)).view_as(x))
    for layer, along in ((shuffled(NActivation(4)), NActivation(4, dim=-1)), (shuffled(LPReLU(4)), LPReLU(4, dim=-1))):
        along.load_state_dict(layer.state_dict())
        torch.testing.assert_close(along(x), layer(x.flatten(0, 1)).view_as(x))
    for vector in (HouseHolder(4), NActivation(4), LPReLU(4), Abs(0.5), FullSort()):
        torch.testing.assert_close(vector(x[0, 0]), vector(x[0, :1])[0])


def test_a_batch_is_never_sorted_nor_its_mean_spoilt() -> None:
    for activation in (FullSort(dim=0), MaxMin(dim=0), Abs(0.5, dim=0)):
        with pytest.raises(ValueError, match=r"with dim=0 would mix the images of a batch of shape \(2, 4\)"):
            activation(torch.rand(2, 4))
    centre = BatchCentering(2)
    centre(torch.zeros(0, 2))
    assert (centre.running_mean == 0).all()


def test_a_refused_bound_leaves_the_model_as_it_is() -> None:
    for block in (ConvexResidual(nn.Sequential(BatchCentering(2))), ConcatResidual(BatchCentering(2))):
        before = copy.deepcopy(block.state_dict())
        with pytest.raises(TypeError, match="eval mode"):
            lipschitz_bound(block, (2, 3, 3) if isinstance(block, ConvexResidual) else (4, 3, 3))
        assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


def test_soft_huber_of_large_and_small_numbers() -> None:
    for delta, x in ((0.05, 2e18), (1e-20, 1.0), (1e-3, 1e-10)):
        value = SoftHuber(delta)(torch.tensor([x]))
        expected = SoftHuber(delta)(torch.tensor([x], dtype=torch.float64))
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
