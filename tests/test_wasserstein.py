"""The Wasserstein distance, where it is known."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orthoconv import models
from orthoconv.data import load
from orthoconv.lab import distance
from orthoconv.lab.configs import digest
from orthoconv.lab.wgan import GeneratorSpec, samples_of, trained_generator
from orthoconv.nn import CayleyLinear
from orthoconv.train import CriticRecipe, TrainingError, WassersteinEstimate, wasserstein_distance

SHIFT = 5.0
DISTANCE = WassersteinEstimate(1.0, 1.0)


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """Digits of 16 x 16 and the same digits moved by a vector of norm `SHIFT`, which is their distance."""
    x = load("digits")[0].images[:200].repeat_interleave(2, 2).repeat_interleave(2, 3)
    v = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0))
    return x + SHIFT * v / v.norm(), x


class Unbounded(nn.Linear):
    """A layer that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


def critic(conv: str) -> nn.Sequential:
    torch.manual_seed(0)
    return models.build("critic", conv, width=0.125, kernel_size=4, in_channels=1, image_size=16, classes=1)


@pytest.mark.slow
def test_a_shift_is_found_and_not_exceeded(samples) -> None:
    p, q = samples
    seen = []
    recipe = CriticRecipe(steps=100, batch_size=32, lr=0.01)
    found = wasserstein_distance(critic("cayley"), p, q, recipe, on_step=lambda step, gain: seen.append(step))
    assert 0.95 * SHIFT <= found.distance <= SHIFT * (1 + 1e-6)
    assert found.lipschitz == pytest.approx(1, abs=1e-5)
    assert seen == list(range(1, 101))


@pytest.mark.parametrize(
    "conv",
    ["cayley", "rko", "plain", *(pytest.param(conv, marks=pytest.mark.slow) for conv in ("bcop", "ossn", "svcm"))],
)
def test_no_critic_exceeds_the_distance(samples, conv: str) -> None:
    """Nor one whose layers expand: its own bound is divided by."""
    p, q = samples
    network = critic(conv)
    if conv == "plain":
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(10)
    found = wasserstein_distance(network, p, q, CriticRecipe(steps=5, batch_size=16, lr=0.01))
    assert 0 < found.distance <= SHIFT * (1 + 1e-6)
    if conv == "plain":
        with torch.no_grad():
            assert network(p).mean() - network(q).mean() > SHIFT, "the negative control: without the bound it would"


def test_a_sample_has_no_distance_to_itself(samples) -> None:
    _, q = samples
    found = wasserstein_distance(critic("cayley"), q, q.flip(0), CriticRecipe(steps=5, batch_size=16))
    assert abs(found.distance) < 1e-6


def test_held_out_samples_are_what_is_reported(samples) -> None:
    p, q = samples
    recipe = CriticRecipe(steps=5, batch_size=16)
    found = wasserstein_distance(critic("cayley"), p, q, recipe, held_out=(q[:50], q[:50]))
    assert abs(found.distance) < 1e-6


def test_refusals(samples) -> None:
    p, q = samples
    with pytest.raises(ValueError, match=r"same shape, got \(1, 16, 16\) and \(1, 8, 8\)"):
        wasserstein_distance(critic("cayley"), p, q[..., :8, :8])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        CriticRecipe(steps=0)
    with pytest.raises(ValueError, match="decay must be positive and finite, got -1"):
        CriticRecipe(decay=-1)
    with pytest.raises(TrainingError, match="step 1: the difference is nan"):
        wasserstein_distance(critic("cayley"), p * float("nan"), q)
    with pytest.raises(ValueError, match="multiples of 8, got 8 x 12"):
        GeneratorSpec().networks(torch.Size([1, 8, 12]))
    with pytest.raises(TypeError, match="Unbounded"):
        wasserstein_distance(nn.Sequential(nn.Flatten(), Unbounded(256, 1)), p, q, CriticRecipe(1, 4))


@pytest.mark.slow
def test_the_generator_learns_and_is_kept(tmp_path) -> None:
    """After some steps its images are nearer to the digits than at first, and they are the same when read again."""
    images = load("digits")[0].images
    spec = GeneratorSpec(steps=60, channels=8, latent=8, batch_size=32, lr=2e-3)
    path = tmp_path / "generator.safetensors"
    make = trained_generator(spec, images, path)
    made = samples_of(make, spec.latent, 100, seed=1)
    assert made.shape == (100, 1, 8, 8)
    assert 0 <= made.min() <= made.max() <= 1
    torch.manual_seed(spec.seed)
    before = samples_of(spec.networks(images.shape[1:])[0], spec.latent, 100, seed=1)
    mean = images.mean(0)
    assert (made.mean(0) - mean).norm() < 0.5 * (before.mean(0) - mean).norm()
    torch.testing.assert_close(samples_of(trained_generator(spec, images, path), spec.latent, 100, seed=1), made)


def test_estimates_are_kept_for_the_images_that_they_are_of(tmp_path, monkeypatch) -> None:
    """Those of one folder of images were taken for those of another."""
    calls = []
    monkeypatch.setattr(distance, "wasserstein_distance", lambda *args, **_: calls.append(args[1]) or DISTANCE)
    for name in ("a", "b"):
        x = np.random.default_rng(ord(name)).integers(0, 256, (20, 16, 16), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(20) % 2)
    tiny = {"steps": 1, "critic_steps": 1, "channels": 2, "batch_size": 4}
    spec = distance.CriticSpec("npz", width=0.125, rates=[0.1], generator=tiny)
    for name in ("a", "b", "a"):
        distance.estimate_distance(spec, tmp_path / "runs", tmp_path / f"{name}.npz")
    by_path = replace(spec, data=str(tmp_path / "a.npz"))
    distance.estimate_distance(by_path, tmp_path / "runs", None)
    assert len(list((tmp_path / "runs" / "critics").iterdir())) == 3
    del calls[2:]
    assert len(calls) == 2
    assert not torch.equal(*calls)
    assert len(list((tmp_path / "runs" / "generators").iterdir())) == 2


def test_names_of_estimates_of_built_in_sets_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(distance, "wasserstein_distance", lambda *args, **_: DISTANCE)
    spec = distance.CriticSpec("digits32", "shift", width=0.125, rates=[0.1])
    distance.estimate_distance(spec, tmp_path, None)
    about = {k: v for k, v in asdict(spec).items() if k != "rates"}
    assert [path.name for path in (tmp_path / "critics").iterdir()] == [f"{digest(about)}.json"]


def test_a_critic_with_several_outputs_is_refused(samples) -> None:
    """The mean over ten outputs, times ten, would be no lower bound."""
    p, q = samples
    several = models.build("critic", width=0.125, in_channels=1, image_size=16)
    with pytest.raises(ValueError, match=r"one output for each image.*classes=1.*got one with 10 outputs"):
        wasserstein_distance(several, p, q, CriticRecipe(steps=1, batch_size=4))
    with pytest.raises(ValueError, match=r"same shape, got \(1, 16, 16\) and \(1, 8, 8\)"):
        wasserstein_distance(critic("cayley"), p, q, held_out=(p, q[..., :8, :8]))
    with pytest.raises(ValueError, match=r"an image at least, got one of shape \(0, 1, 16, 16\)"):
        wasserstein_distance(critic("cayley"), p, q[:0])


def test_rounding_is_allowed_for() -> None:
    """The bias is so large that outputs in float32 are multiples of 0.0078, while the distance is 0.004."""
    in_float32 = []
    for seed in range(8):
        x = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
        y = x.clone()
        y[..., 0, 0] += 0.004
        distance = float((y - x).double().norm())
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 1))
        nn.init.constant_(model[1].bias, 1e5 + 0.0078 * seed / 8)
        estimate = wasserstein_distance(model, y, x, CriticRecipe(steps=30, batch_size=1, lr=0.1))
        assert 0.5 * distance < estimate.distance <= distance
        in_float32.append(float((model(y) - model(x)).detach()))
    assert max(in_float32) > 1.5 * distance, "the negative control"
