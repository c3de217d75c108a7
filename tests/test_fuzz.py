"""Random models keep every claim that is made about them; and the fuzzer sees claims that are false.

A failure prints the seed of its model: `python tests/fuzzing.py SEED SEED+1` examines it again.
"""

from collections.abc import Callable

import pytest
import torch
from fuzzing import Claims, Report, examine, fuzz
from grammar import CONVOLUTIONS, LINEARS, Sample, is_refusal, random_model
from torch import Tensor, fx, nn

from orthoconv import Certificates, certify, export, in_double, lipschitz_bound, register_rule
from orthoconv.nn import CayleyLinear

SIZES = [
    pytest.param(range(1, 31), id="quick"),
    pytest.param(range(1_000, 1_100), id="slow", marks=pytest.mark.slow),
    pytest.param(range(10_000, 15_000), id="long", marks=pytest.mark.long),
]


@pytest.mark.parametrize("seeds", SIZES)
def test_random_models_keep_every_claim(seeds: range) -> None:
    report = fuzz(seeds)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {report}")
    assert not report.broken, "\n\n".join(report.broken)
    assert not report.tracebacks, "\n\n".join(report.tracebacks)
    counts = report.counts
    assert counts["models"] + counts["unusable"] == len(seeds)
    assert counts["unusable"] <= 0.02 * len(seeds)
    assert counts["bound"] - counts["bound refused"] >= 0.5 * len(seeds), "otherwise this shows little"
    assert counts["attacked"] >= 0.5 * len(seeds)
    assert counts["dense"] >= 0.05 * len(seeds)
    assert 0 < counts["bound refused"] < counts["disguised"] + 0.2 * len(seeds)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_grammar_makes_every_layer_of_the_library() -> None:
    kinds = {type(module) for seed in range(2_000, 2_800) for module in random_model(seed).model.modules()}
    assert not {*CONVOLUTIONS, *LINEARS} - kinds
    assert any(issubclass(kind, fx.GraphModule) for kind in kinds)


def test_a_seed_is_always_the_same_model() -> None:
    for seed in (3, 5, 7):
        one, two = random_model(seed), random_model(seed)
        assert str(one.model) == str(two.model)
        for p, q in zip(one.model.parameters(), two.model.parameters(), strict=True):
            assert torch.equal(p, q)


# negative controls: claims that are false


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.0 * x


register_rule(Same, lipschitz=0.5, rounding=1.0)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), CayleyLinear(16, 2)).double().eval()


def judged(model: nn.Module, claims: Claims | None = None, *, affine: bool = False) -> Report:
    report = Report()
    examine(Sample(0, model, (1, 4, 4), 6, torch.float64, affine), "", report, claims or Claims())
    return report


def test_a_wrong_rule_is_reported() -> None:
    (text,) = judged(Same()).broken[:1]
    assert "bound 0.5, but two outputs are 1 times as far apart" in text
    assert judged(nn.Identity(), affine=True).broken == []


def test_a_bound_below_the_norm_of_the_dense_matrix_is_reported() -> None:
    """It is so little below that ascent, from random starts, does not see it."""
    claims = Claims(bound=lambda model, shape: (1 - 1e-9) * lipschitz_bound(model, shape))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16)).double()
    (text,) = judged(model, claims, affine=True).broken
    assert "the norm of the dense matrix is" in text


def test_a_certificate_that_is_too_large_is_reported() -> None:
    def boast(*args: object, factor: float) -> Certificates:
        found = certify(*args)
        return found._replace(radius=factor * found.radius)

    assert judged(classifier()).broken == []
    (text,) = judged(classifier(), Claims(certify=lambda *args: boast(*args, factor=1.01))).broken
    assert "radius" in text
    assert "the margin is -" in text


@pytest.mark.parametrize("name", ["export", "in_double"])
def test_a_copy_that_differs_is_reported(name: str) -> None:
    def altered(*args: object) -> nn.Module:
        return nn.Sequential(export(*args) if name == "export" else in_double(*args), nn.Hardtanh(-1e-3, 1e-3))

    (text,) = judged(classifier(), Claims(**{name: altered})).broken
    assert f"{name} is off by" in text


def raises(error: Exception) -> Callable[..., float]:
    def bound(*args: object) -> float:
        raise error

    return bound


@pytest.mark.parametrize("error", [IndexError("2"), AttributeError("_x"), RuntimeError("shape"), TypeError("no layer")])
def test_a_raw_error_is_a_traceback(error: Exception) -> None:
    (text,) = judged(classifier(), Claims(bound=raises(error))).tracebacks
    assert f"bound: {type(error).__name__}" in text


def test_refusals_are_errors_that_the_package_raises() -> None:
    with pytest.raises(TypeError) as refusal:
        lipschitz_bound(nn.Sequential(nn.GELU()), (3,))
    assert is_refusal(refusal.value)
    with pytest.raises(TypeError) as raw:
        lipschitz_bound(nn.Linear(3, 3))  # type: ignore[call-arg]
    assert not is_refusal(raw.value)


def test_halved_bounds_of_random_models_are_reported() -> None:
    report = fuzz(range(1, 20), Claims(bound=lambda model, shape: 0.5 * lipschitz_bound(model, shape)))
    assert len(report.broken) > 4
