"""What a training job does with the layers: autocast, compilation, processes, averaged weights, thousands of steps."""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from orthoconv.data import Split, load
from orthoconv.nn import BjorckLinear, CayleyConv2d, CayleyLinear, InvertibleDownsample, MaxMin
from orthoconv.nn.methods import conv_method, linear_method
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.testing import assert_orthogonal, dense_matrix, orthogonality_error
from orthoconv.train import Recipe, fit, hinge_loss
from orthoconv.train.distributed import World

METHODS = ["cayley", "bcop", "cayley_bcop", "rko", "crko", "ossn", "svcm"]
STATM = Path("/proc/self/statm")  # sizes of this process in pages; the second is what is resident


def some(*quick: str) -> pytest.MarkDecorator:
    """These methods in the quick suite, the others in the long one."""
    marks = {conv: () if conv in quick else pytest.mark.long for conv in METHODS}
    return pytest.mark.parametrize("conv", [pytest.param(conv, marks=marks[conv]) for conv in METHODS])


def network(conv: str, *, plain: bool = False) -> nn.Sequential:
    """A network for digits, always the same; with `plain`, between ordinary layers."""
    torch.manual_seed(0)
    make, linear = conv_method(conv), linear_method(None, conv)
    first, last = (nn.Conv2d(1, 4, 3, padding=1), nn.Linear(128, 16)) if plain else (make(1, 4, 3), linear(128, 16))
    layers = first, MaxMin(), make(4, 8, 4, stride=2), MaxMin(), nn.Flatten(), last, MaxMin(), linear(16, 10)
    return nn.Sequential(*layers)


@lru_cache
def digits(dtype: torch.dtype = torch.float32) -> Split:
    images, labels = load("digits")[0]
    return Split(images.to(dtype), labels)


def batch(k: int, size: int = 32, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    images, labels = digits(dtype)
    return images[k * size : (k + 1) * size], labels[k * size : (k + 1) * size]


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return hinge_loss(model(x), labels, 0.5)


def train(model: nn.Module, steps: int, *, autocast: bool = False) -> Tensor:
    """Losses of so many steps of Adam, the forward pass under autocast if asked."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for k in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, *batch(k % 40))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("steps", [12, pytest.param(60, marks=pytest.mark.long)])
@some("cayley", "crko", "svcm")
def test_autocast_trains_to_the_same_bits(conv: str, steps: int) -> None:
    """A network of these layers computes nothing in bfloat16, so that nothing at all may differ."""
    usual, lowered = network(conv), network(conv)
    losses = train(usual, steps)
    assert torch.equal(losses, train(lowered, steps, autocast=True))
    assert losses[-4:].mean() < 0.8 * losses[0], "it has learnt"
    for a, b in zip(usual.state_dict().values(), lowered.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [12, pytest.param(60, marks=pytest.mark.long)])
@some("cayley")
def test_autocast_between_plain_layers(conv: str, steps: int) -> None:
    """The plain layers do compute in bfloat16, of eight bits; the operators between them are what they were.

    The losses of the two runs may differ by 5 % of the first, six units of the last bit, since Adam makes whole steps
    of small differences. The most that was seen is 3.7 %, after 60 steps of CRKO.
    """
    usual, lowered = network(conv, plain=True), network(conv, plain=True)
    losses = train(usual, steps)
    apart = (losses - train(lowered, steps, autocast=True)).abs().max() / losses[0]
    print(f"{conv}: losses under autocast within {apart:.2%} of the first")
    assert 0 < apart < 0.05
    other = (losses - train(usual, steps, autocast=True)).abs().max() / losses[0]
    assert other > 0.05, "the negative control: a run from other weights"
    with torch.autocast("cpu", torch.bfloat16):
        Q = dense_matrix(lowered[2], (4, 8, 8))
    assert torch.equal(Q, dense_matrix(lowered[2], (4, 8, 8)))
    if lowered[2].guarantee == "orthogonal":
        assert orthogonality_error(Q) < 1e-5


def test_what_autocast_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of both tests above: layers that let autocast in."""
    model, x = network("rko"), batch(0)[0]
    usual, error = model(x), orthogonality_error(model[-1].cached_operator())
    for module in ("convolution", "linear", "reparametrized"):
        monkeypatch.setattr(f"orthoconv.nn.{module}.full_precision", lambda _: nullcontext())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.dist(model(x), usual) > 1e-3 * usual.norm()
        assert orthogonality_error(model[-1].cached_operator().float()) > 1e-3 > 100 * error


def compare(make: Callable[[], nn.Module], sizes: list[int], dtype: torch.dtype, **options: Any) -> tuple[float, float]:
    """Largest relative differences of loss and gradients between a compiled network and itself, as both train.

    What is compiled is the forward pass and the loss, and so the backward pass, which torch derives from the two.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = make().to(dtype), make().to(dtype)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    functions, apart = (loss_of, torch.compile(loss_of, **options)), [0.0, 0.0]
    for k, size in enumerate(sizes):
        x, labels = batch(k, 32, dtype)
        losses = [f(model, x[:size], labels[:size]) for f, model in zip(functions, models, strict=True)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        apart[0] = max(apart[0], abs((losses[1] / losses[0]).item() - 1))
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            apart[1] = max(apart[1], (torch.dist(a.grad, b.grad) / a.grad.norm()).item())
        for optimizer in optimizers:
            optimizer.step()
    assert not torch._dynamo.utils.counters["graph_break"]
    return apart[0], apart[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("conv", METHODS)
def test_compiled_steps(conv: str) -> None:
    """One graph, and the same numbers as far as float64 goes, the last and smaller batch included.

    The quick suite has one of them in test_transforms.py.
    """
    loss, gradient = compare(partial(network, conv), [32, 32, 20], torch.float64, backend="aot_eager")
    print(f"{conv}: compiled, in float64, losses differ by {loss:.1e}, gradients by {gradient:.1e}")
    assert loss < 1e-13
    assert gradient < 1e-12


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("conv", METHODS)
def test_compiled_steps_with_inductor(conv: str) -> None:
    """As above in float32, which is 1e9 times coarser.

    With one convolution only, and of several channels: inductor is slow to make one program of many iterations. For a
    BCOP of one input channel it was stopped after four minutes of work; with four it takes 22 seconds.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        conv2d = conv_method(conv)(4, 4, 2)
        return nn.Sequential(InvertibleDownsample(2), conv2d, MaxMin(), nn.Flatten(), CayleyLinear(64, 10))

    loss, gradient = compare(make, [32, 32, 32], torch.float32)
    print(f"{conv}: compiled with inductor, in float32, losses differ by {loss:.1e}, gradients by {gradient:.1e}")
    assert loss < 1e-5
    assert gradient < 1e-4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
def test_a_whole_step_compiled() -> None:
    """With backward and Adam inside, graphs break there and there only: both are breaks of torch's own.

    In float32: of parameters that are one number in float64, as g is, a compiled Adam loses the updates (torch 2.13).
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = network("cayley"), network("cayley")
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.005) for model in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
        loss = loss_of(model, x, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    compiled = torch.compile(step, backend="aot_eager")
    for k in range(5):
        step(models[0], optimizers[0], *batch(k))
        compiled(models[1], optimizers[1], *batch(k))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert all("zero_grad" in why or "backward()" in why or "User-inserted" in why for why in breaks), breaks
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # a 500th of the first step
    assert torch.dist(models[0][0].g, network("cayley")[0].g) > 0.005


def join(rank: int, work: Callable[[World, Path], Any], folder: Path) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(work(World(rank, 2), folder), folder / f"{rank}.pt")
    distributed.destroy_process_group()


def in_two_processes(work: Callable[[World, Path], Any], folder: Path) -> list[Any]:
    """What `work` returns in each of two processes, which reach each other by gloo.

    They are no copies of this one: a process in which an accelerator has computed gradients cannot be forked.
    """
    context = torch.multiprocessing.get_context("forkserver")
    processes = [context.Process(target=join, args=(rank, work, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def gradients_of_a_share(conv: str, world: World, folder: Path) -> list[Tensor]:
    x, labels = batch(0, 64, torch.float64)
    model = DistributedDataParallel(network(conv).double())
    loss_of(model, x[world.rank :: 2], labels[world.rank :: 2]).backward()
    return [p.grad for p in model.parameters()]


@some("cayley")
def test_gradients_of_two_processes(conv: str, tmp_path: Path) -> None:
    """The mean over two halves of a batch is that over the whole; each process has it."""
    x, labels = batch(0, 64, torch.float64)
    first, second = in_two_processes(partial(gradients_of_a_share, conv), tmp_path)
    model, half = network(conv).double(), network(conv).double()
    loss_of(model, x, labels).backward()
    loss_of(half, x[::2], labels[::2]).backward()
    apart = [(torch.dist(p.grad, g) / p.grad.norm()).item() for p, g in zip(model.parameters(), first, strict=True)]
    print(f"{conv}: gradients of two processes differ by {max(apart):.1e} from those of one")
    assert max(apart) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wrong = [(torch.dist(p.grad, g) / g.norm()).item() for p, g in zip(half.parameters(), first, strict=True)]
    assert min(wrong) > 1e-3, "the negative control: half of the batch"


def trained_weights(world: World, folder: Path) -> dict[str, Tensor]:
    recipe, data = Recipe(epochs=1, batch_size=128, augment=False), digits(torch.float64).first(640)
    model = network("cayley").double()
    list(fit(model, data, recipe, folder / "checkpoint", world=world))
    return model.state_dict()


def test_the_trainer_in_two_processes(tmp_path: Path) -> None:
    """`fit` with two processes ends with the weights of one, and so with the operators; the same bits on both."""
    first, second = in_two_processes(trained_weights, tmp_path)
    alone, before = trained_weights(World(0, 1), tmp_path), network("cayley").double().state_dict()
    apart = max(torch.dist(first[k], alone[k]).item() for k in alone)
    print(f"weights of two processes after {640 // 128} steps differ by {apart:.1e} from those of one")
    assert apart < 1e-10
    assert all(torch.equal(first[k], second[k]) and torch.dist(alone[k], before[k]) > 1e-4 for k in alone)


def memory(model: nn.Module) -> list[Tensor]:
    """Operators that the layers of `model` remember."""
    return [
        Q for layer in model.modules() if isinstance(layer, Reparametrized) for Q, _ in layer._memory.operators.values()
    ]


@pytest.mark.parametrize("conv", ["cayley", "bcop"])
def test_averaged_models(conv: str) -> None:
    """Parameters are averaged, not operators: the average of orthogonal layers is as orthogonal as each of them."""
    model, x = network(conv).double(), batch(0, 32, torch.float64)[0]
    averaged, twin = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), copy.deepcopy(model)
    optimizer, operators = torch.optim.Adam(model.parameters(), lr=0.05), []
    for k in range(5):
        optimizer.zero_grad()
        loss_of(model.train(), *batch(k, 32, torch.float64)).backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            for a, p in zip(twin.parameters(), model.parameters(), strict=True):
                a.copy_(p) if k == 0 else a.lerp_(p, 0.5)
        model.eval(), averaged.eval(), twin.eval(), model(x)
        torch.testing.assert_close(averaged(x), twin(x))
        torch.testing.assert_close(averaged(x), copy.deepcopy(twin).train()(x))  # from what is not remembered
        assert not {Q.data_ptr() for Q in memory(model)} & {Q.data_ptr() for Q in memory(averaged)}
        assert len(memory(model)) == len(memory(averaged)) == 4
        operators.append(dense_matrix(model[2], (4, 4, 4)))
    layer = averaged.module[2]
    assert_orthogonal(layer, (4, 4, 4))
    assert orthogonality_error(torch.stack(operators).mean(0)) > 1e-2, "the negative control: the mean of operators"
    assert torch.dist(layer.weight, model[2].weight) > 1e-3


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(STATM.read_text().split()[1]) * 4096


def long_run(
    folder: Path, epochs: int, each: int, leak: int = 0, methods: Sequence[str] = ("cayley", "svcm")
) -> tuple[list[int], list[int]]:
    """Live tensors, and resident bytes, after each epoch of training by `fit` and evaluation from memory.

    Arguments:
        folder: Where the checkpoint goes.
        epochs: Epochs, each with an evaluation after it.
        each: Steps of an epoch.
        leak: Numbers in a tensor that each step keeps for ever.
        methods: What the network has a convolution of.
    """
    torch.manual_seed(0)
    convs = [conv_method(conv)(4, 4, 2) for conv in methods]
    last = nn.Flatten(), CayleyLinear(256, 16), MaxMin(), BjorckLinear(16, 10)
    model = nn.Sequential(CayleyConv2d(1, 4, 3), MaxMin(), *convs, *last)
    data, recipe = digits().first(16 * each), Recipe(epochs=epochs, batch_size=16, augment=False)
    kept: list[Tensor] = []
    tensors, sizes = [], []
    for _ in fit(model, data, recipe, folder / "c", on_step=lambda _: kept.extend([torch.ones(leak)] * (leak > 0))):
        model.eval()
        model(data.images[:100]), model(data.images[:50])
        assert all(layer._memory.operators for layer in model.modules() if isinstance(layer, Reparametrized))
        tensors.append(live_tensors())
        sizes.append(resident() if STATM.exists() else 0)
    return tensors, sizes


@pytest.mark.slow
def test_no_tensor_stays_behind(tmp_path: Path) -> None:
    tensors, _ = long_run(tmp_path, epochs=5, each=10)
    assert len(set(tensors)) == 1, "50 steps"
    tensors, _ = long_run(tmp_path, epochs=2, each=10, leak=1)
    assert tensors[1] == tensors[0] + 10, "the negative control: one more for each step"


@pytest.mark.long
@pytest.mark.skipif(not STATM.exists(), reason="needs /proc")
def test_2000_steps_do_not_grow(tmp_path: Path) -> None:
    """8 MiB is 5 KiB for each step after the first 400; the allocator alone comes and goes with one or two."""
    tensors, sizes = long_run(tmp_path, epochs=100, each=20, methods=("cayley", "bcop", "rko", "ossn", "svcm"))
    print(f"live tensors after 400 and 2000 steps: {tensors[19]}, {tensors[-1]}")
    print(f"resident bytes: {sizes[19]}, {sizes[-1]}, growth {sizes[-1] - sizes[19]}")
    assert len(set(tensors)) == 1
    assert sizes[-1] - sizes[19] < 2**23
    tensors, sizes = long_run(tmp_path, epochs=12, each=20, leak=2**14)
    print(f"the negative control, 64 KiB a step for 200 steps: growth {sizes[-1] - sizes[1]}")
    assert tensors[-1] - tensors[1] == 200
    assert sizes[-1] - sizes[1] > 2**23
