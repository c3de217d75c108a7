"""`fit` takes splits, pairs of arrays, and DataLoaders, of bytes or floats."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from orthoconv.data import Split, load
from orthoconv.nn import CayleyLinear, MaxMin
from orthoconv.train import Recipe, fit
from orthoconv.train.distributed import World
from orthoconv.train.sources import Loader, source_of

CPU = torch.device("cpu")
RECIPE = Recipe(epochs=2, batch_size=32, augment=False)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), CayleyLinear(64, 32), MaxMin(), CayleyLinear(32, 10))


def digits_as_bytes(n: int = 160) -> tuple[Tensor, Tensor]:
    images, labels = load("digits")[0].first(n)
    return (images * 255).round().to(torch.uint8), labels


class Noisy(Dataset):
    """Digits with noise of torch's own generator, as transforms draw it."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        images, labels = load_once()
        return images[k] + 0.1 * torch.randn(images[k].shape), labels[k]


def load_once(memory: list[Split] = []) -> Split:  # noqa: B006
    memory.extend([load("digits")[0].first(160)] if not memory else [])
    return memory[0]


def trained(data: object, path: Path, recipe: Recipe = RECIPE, **options) -> dict[str, Tensor]:
    model = network()
    list(fit(model, data, recipe, path, **options))
    return model.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_bytes_and_floats_train_alike(tmp_path) -> None:
    x, y = digits_as_bytes()
    loaders = [DataLoader(TensorDataset(images, y), batch_size=32, shuffle=True) for images in (x, x / 255)]
    one, two = (trained(loader, tmp_path / str(k)) for k, loader in enumerate(loaders))
    assert same(one, two)
    pairs = [
        (x, y),
        (x.numpy(), y.numpy()),
        (x.permute(0, 2, 3, 1).numpy(), y.tolist()),
        Split(x, y),
        Split(x / 255, y),
    ]
    states = [trained(pair, tmp_path / f"pair{k}") for k, pair in enumerate(pairs)]
    assert all(same(states[0], state) for state in states[1:])
    assert not same(states[0], one), "another order: the negative control"


def test_a_loader_yields_what_it_has() -> None:
    x, y = digits_as_bytes(70)
    source = source_of(DataLoader(TensorDataset(x, y), batch_size=32), RECIPE, World(0, 1), CPU)
    assert (source.steps, source.shape) == (3, (1, 8, 8))
    found = list(source.epoch(0, 0))
    assert torch.equal(torch.cat([a for a, _ in found]), x / 255)
    assert torch.equal(torch.cat([b for _, b in found]), y)
    rest = list(source.epoch(0, 2))
    assert torch.equal(rest[0][0], found[2][0])
    assert len(rest) == 1


def test_the_random_numbers_of_a_loader_are_those_of_its_epoch() -> None:
    """They do not depend on what the caller draws, nor does the caller's generator depend on them."""
    source = Loader(DataLoader(Noisy(), batch_size=32, shuffle=True), RECIPE, World(0, 1))
    first = [x for x, _ in source.epoch(0, 0)]
    torch.manual_seed(5)
    state, second = torch.get_rng_state(), []
    for x, _ in source.epoch(0, 0):
        assert torch.equal(torch.get_rng_state(), state)
        second.append(x)
        torch.rand(3)
        state = torch.get_rng_state()
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], next(source.epoch(1, 0))[0])
    other = Loader(DataLoader(Noisy(), batch_size=32, shuffle=True), Recipe(seed=1, augment=False), World(0, 1))
    assert not torch.equal(first[0], next(other.epoch(0, 0))[0])


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_run_from_a_loader_is_resumed_bit_for_bit(tmp_path, stop: int) -> None:
    recipe = Recipe(epochs=2, batch_size=32, augment=True, shift=1, checkpoint_every=1)
    whole = trained(DataLoader(Noisy(), batch_size=32, shuffle=True), tmp_path / "whole", recipe)

    class StopError(Exception):
        pass

    def halt(figures: dict) -> None:
        if figures["step"] == stop:
            raise StopError

    with pytest.raises(StopError):
        trained(DataLoader(Noisy(), batch_size=32, shuffle=True), tmp_path / "c", recipe, on_step=halt)
    torch.manual_seed(99)
    assert same(trained(DataLoader(Noisy(), batch_size=32, shuffle=True), tmp_path / "c", recipe, resume=True), whole)


def test_losses_with_constants_take_a_loader(tmp_path) -> None:
    x, y = digits_as_bytes()
    recipe = Recipe(epochs=8, batch_size=32, augment=False, loss="emma", eps0=0.2)
    *_, last = fit(network(), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), recipe, tmp_path / "c")
    assert last["accuracy"] > 0.8


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (DataLoader(Endless()), ValueError, "the DataLoader must have a length"),
        (DataLoader(TensorDataset(torch.zeros(4, 1, 8, 8))), ValueError, "must yield pairs of tensors"),
        (DataLoader(TensorDataset(torch.zeros(4, 64), torch.zeros(4).long())), ValueError,
         r"must yield images \(b, c, h, w\) and integers \(b,\), got \(1, 64\) and \(1,\) of torch.int64"),
        (DataLoader(TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4))), ValueError, "of torch.float32"),
        (TensorDataset(torch.zeros(4)), TypeError, "a pair of images and labels, or a DataLoader, got TensorDataset"),
        (Split(torch.zeros(4, 1, 8, 8), torch.zeros(4).long()), ValueError, "batch_size must be at most 4"),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_refusals(data, error: type[Exception], message: str, tmp_path) -> None:
    with pytest.raises(error, match=message):
        list(fit(network(), data, RECIPE, tmp_path / "c"))
    with pytest.raises(ValueError, match="a DataLoader is for one process, got 2"):
        Loader(DataLoader(TensorDataset(torch.zeros(4))), RECIPE, World(0, 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where one core is in reach
def test_workers_follow_the_seed() -> None:
    """Batches of two worker processes are those of the same loader, asked again."""
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), batch_size=40, shuffle=True, num_workers=2)
    first, second = ([x for x, _ in islice(Loader(loader, RECIPE, World(0, 1)).epoch(3, 0), 2)] for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
