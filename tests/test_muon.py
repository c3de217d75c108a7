"""Muon against the singular value decomposition, against Adam, and when a run is stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orthoconv.data import load
from orthoconv.models import build
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin, NormalizedLinear, PixelBias
from orthoconv.nn.methods import conv_method, conv_methods
from orthoconv.train import CheckpointError, Muon, Recipe, fit
from orthoconv.train.muon import polar_direction


def of_singular_values(m: int, n: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A random matrix (m, n) with these singular values, and its singular vectors."""
    U, V = (torch.linalg.qr(torch.randn(k, len(values), dtype=torch.float64)).Q for k in (m, n))
    return U @ values.diag() @ V.T, U, V


@pytest.mark.parametrize("shape", [(12, 12), (8, 30), (30, 8), (1, 5)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_direction_has_the_singular_vectors_of_the_matrix_and_values_about_1(shape, scale: float) -> None:
    torch.manual_seed(0)
    values = torch.logspace(-2, 0, min(shape), dtype=torch.float64)
    M, U, V = of_singular_values(*shape, values)
    D = U.T @ polar_direction(scale * M) @ V
    assert (D - D.diag().diag()).abs().max() < 1e-10
    assert D.diag().min() > 0.8
    assert D.diag().max() < 1.2
    single = polar_direction((scale * M).float()).double()
    assert (single - U @ D @ V.T).abs().max() < 1e-3


def test_direction_of_zero_is_zero() -> None:
    assert not polar_direction(torch.zeros(3, 4)).any()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = CayleyConv2d(1, 8, 3), PixelBias(8, 8), MaxMin(), nn.Flatten(), CayleyLinear(512, 8), MaxMin()
    return nn.Sequential(*body, NormalizedLinear(8, 10))


def moved(optimizer_of, steps: int = 2) -> dict[str, Tensor]:
    """The change of each parameter by a few steps of one optimizer, with the same gradients for all of them."""
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model)
    noise = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=noise)
            p.grad += 3 * p.grad.sum(0)  # one direction is far ahead of the others
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_weights_move_equally_far_in_all_directions_and_the_rest_as_in_adam() -> None:
    ours = moved(lambda model: Muon(model, 0.01))
    adam = moved(lambda model: torch.optim.Adam(model.parameters(), 0.01))
    weights = {"0.weight", "4.weight"}
    assert weights < ours.keys()
    for name, change in ours.items():
        assert torch.allclose(change, adam[name], rtol=1e-4, atol=1e-7) == (name not in weights), name

    once = moved(lambda model: Muon(model, 0.01), 1)
    for name in weights:
        values = torch.linalg.svdvals(once[name].flatten(1))
        assert values.max() < 1.4 * values.min()
        assert once[name].square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.2)
        values = torch.linalg.svdvals(adam[name].flatten(1))  # the control: Adam does not
        assert values.max() > 4 * values.min()


@pytest.mark.parametrize("method", conv_methods())
def test_kernels_and_matrices_are_chosen_and_other_layouts_are_not(method: str) -> None:
    """What moves along a polar factor is a matrix (o, i k), and not, say, the one row of a stack."""
    layers = conv_method(method)(4, 4, 3), nn.Flatten(), nn.Linear(4 * 64, 5), PixelBias(5, 1), nn.Linear(5, 2)
    optimizer = Muon(nn.Sequential(*layers), 0.1)
    (chosen,) = [group["params"] for group in optimizer.param_groups if "momentum" in group]
    assert any(p is layers[2].weight for p in chosen)
    assert not any(p is layers[4].weight or p is layers[3].bias for p in chosen)
    assert all(len(p) > 1 for p in chosen)


def test_a_closure_sees_all_gradients_and_may_fail() -> None:
    model = network()
    optimizer, x, norms = Muon(model, 0.0), torch.rand(2, 1, 8, 8), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        norms.append(model[0].weight.grad.norm().item())
        return loss

    assert optimizer.step(closure) == optimizer.step(closure)
    assert norms[0] == pytest.approx(norms[1])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert len(optimizer.param_groups) == 2


def test_hooks_are_called_once_a_step() -> None:
    model, calls = network(), []
    torch.optim.Adam(model.parameters())  # torch then wraps the step of Adam
    optimizer = Muon(model, 0.01)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


def test_a_weight_without_a_gradient_stays() -> None:
    model = network()
    before = model[0].weight.detach().clone()
    model[4].weight.grad = torch.ones_like(model[4].weight)
    Muon(model, 0.01).step()
    assert torch.equal(model[0].weight, before)


def test_a_run_that_is_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    data, recipe = load("digits")[0].first(256), Recipe(epochs=3, batch_size=64, optimizer="muon")

    def train(name: str, epochs: int, model: nn.Module) -> nn.Module:
        for figures in fit(model, data, recipe, tmp_path / name, resume=True):
            if figures["epoch"] == epochs:
                break
        return model

    whole = train("whole", 3, network())
    train("parts", 1, network())
    parts = train("parts", 3, network())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_learns_more_than_adam_in_an_epoch(tmp_path: Path) -> None:
    data = load("digits")[0].first(600)
    losses = {}
    for name in ("adam", "muon"):
        torch.manual_seed(0)
        model = build("kwlarge", "cayley", width=0.125, image_size=8, in_channels=1)
        recipe = Recipe(epochs=2, batch_size=100, lr=0.05, optimizer=name, augment=False)
        *_, last = fit(model, data, recipe, tmp_path / name)
        losses[name] = last["loss"]
    assert losses["muon"] < losses["adam"]


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"momentum must be at least 0 and below 1, got 2.0"):
        Muon(network(), 0.01, momentum=2.0)
    data, recipe = load("digits")[0].first(64), Recipe(epochs=1, batch_size=64)
    for first, second in (("adam", "muon"), ("muon", "adam")):
        next(iter(fit(network(), data, replace(recipe, optimizer=first), tmp_path / first)))
        model = network()
        before = model[0].weight.detach().clone()
        message = (
            f"is of a run with optimizer='{first}', not '{second}'; a run is resumed with the recipe it began with"
        )
        with pytest.raises(CheckpointError, match=message):
            next(iter(fit(model, data, replace(recipe, optimizer=second), tmp_path / first, resume=True)))
        assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="optimizer must be one of 'adam', 'muon', got 'sgd'"):
        Recipe(optimizer="sgd")  # type: ignore[arg-type]


def test_only_layers_move_along_their_polar_factor() -> None:
    """Not the matrix of a norm or an embedding, and not a head that has the weight of another layer."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm((3, 4)), first, nn.Conv2d(3, 3, 1), nn.Flatten(), last)
    moved = {id(p) for group in Muon(model, 0.1).param_groups if "momentum" in group for p in group["params"]}
    assert moved == {id(first.weight), id(model[3].weight)}
    last.weight = first.weight
    moved = {id(p) for group in Muon(model, 0.1).param_groups if "momentum" in group for p in group["params"]}
    assert moved == {id(model[3].weight)}
