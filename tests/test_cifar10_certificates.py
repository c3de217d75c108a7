"""Every certificate of the shipped networks on CIFAR-10's test images, attacked at nearly its radius."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certify, models
from orthoconv.attacks import L2Ball, cross_examine, pgd
from orthoconv.data import Split, batches, load
from orthoconv.files import cache_dir
from orthoconv.nn.reparametrized import frozen

Attack = Callable[..., Tensor]
SHARE, CHUNK = 0.999, 250
needs_cifar10 = pytest.mark.skipif(not (cache_dir() / "cifar10.bin").exists(), reason="needs CIFAR-10 in the cache")


def broken_by_pgd(model: nn.Module, x: Tensor, labels: Tensor, radius: Tensor, seed: int) -> Tensor:
    """Whether 20 steps of PGD from one random start change the class of each certified example."""
    source, certified = torch.Generator().manual_seed(seed), radius > 0
    found = pgd(model, x, labels, L2Ball(SHARE * radius), iterations=20, generator=source)
    with torch.no_grad():
        return certified & (model(found).argmax(1) != labels)


def count(model: nn.Module, part: Split, attack: Attack, factor: float = 1.0) -> tuple[int, int]:
    """Attack each certified image at so many times its radius; return how many there were, and how many broke."""
    radii = factor * certify(model, batches(part, CHUNK), local=True).radius
    model.requires_grad_(False)
    with frozen(model):
        chunks = zip(batches(part, CHUNK), radii.split(CHUNK), strict=True)
        broken = sum(int(attack(model, x, y, r, seed=k).sum()) for k, ((x, y), r) in enumerate(chunks))
    return int((radii > 0).sum()), broken


@pytest.mark.long
@needs_cifar10
@pytest.mark.parametrize("name", models.PRETRAINED)
@pytest.mark.parametrize(("attack", "images"), [(broken_by_pgd, 10_000), (cross_examine, 1000)])
def test_no_certificate_is_broken(attack: Attack, images: int, name: str) -> None:
    model, (_, test) = models.pretrained(name).eval(), load("cifar10")
    attacked, broken = count(model, test.first(images), attack)
    print(
        f"{name}, {attack.__name__}, {images} images: {attacked} certified ones attacked, {broken} broken", flush=True
    )
    assert attacked > 0.7 * images
    assert broken == 0


@pytest.mark.slow
@needs_cifar10
@pytest.mark.parametrize("name", models.PRETRAINED)
def test_the_attack_breaks_radii_that_are_too_large(name: str) -> None:
    model, (_, test) = models.pretrained(name).eval(), load("cifar10")
    attacked, broken = count(model, test.first(CHUNK), broken_by_pgd, factor=4.0)
    assert broken > 0.5 * attacked
