"""`orthoconv demo`: what an orthogonal convolution is, on real images, in under a minute."""

__all__ = ["demo"]

from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import cbook
from matplotlib import image as mpl_image
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from orthoconv.data import Split
from orthoconv.data.digits import digits
from orthoconv.lab.plots import plot_demo
from orthoconv.nn import CayleyConv2d, CayleyLinear, CircularConv2d, MaxMin
from orthoconv.testing import norm_ratios


def demo(out: Path = Path("runs/demo"), steps: int = 150, seed: int = 0) -> None:
    """Train an orthogonal and a plain network on digits; compare their layers; invert a layer on a photograph.

    Args:
        out: Folder to write the picture to.
        steps: Training steps of each network.
        seed: Seed of the weights and of the order of the images.
    """
    if steps < 1:
        raise SystemExit(f"orthoconv demo: --steps must be at least 1, got {steps}")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    train, test = digits()
    networks = {"Cayley": _network(CayleyConv2d, CayleyLinear), "plain": _network(CircularConv2d, nn.Linear)}
    before = {name: _singular_values(net[2]) for name, net in networks.items()}
    accuracy = {name: _train(net, train, test, steps, name) for name, net in networks.items()}
    after = {name: _singular_values(net[2]) for name, net in networks.items()}
    with torch.no_grad():
        ratios = {name: norm_ratios(net[2], net[:2](test.images)) for name, net in networks.items()}

    print("\nconvolution 16 -> 16 inside the network")
    print(f"{'':8}{'singular values before':>26}{'after training':>22}{'|conv(x)|/|x|':>22}{'accuracy':>10}")
    for name in networks:
        row = "".join(f"{_range(v):>{n}}" for v, n in ((before[name], 26), (after[name], 22), (ratios[name], 22)))
        print(f"{name:8}{row}{accuracy[name]:>10.1%}")

    photo = _photograph()
    layer = CayleyConv2d(3, 3, 9, bias=False).requires_grad_(False)
    with torch.no_grad():
        layer.g.mul_(6)  # far from the identity
    image = layer(photo)
    back = layer.inverse(image)
    ratio = norm_ratios(layer, photo[None]).item()
    print(f"\nphotograph of {photo.shape[1]} x {photo.shape[2]}: |conv(x)|/|x| = {ratio:.7f},")
    print(f"largest error of layer.inverse(layer(x)) in float32: {(back - photo).abs().max():.1e}")

    path = plot_demo(out / "demo.png", before, after, ratios, [photo, image, back])
    print(f"\npicture: {path}")


def _network(conv: Callable[..., nn.Module], linear: Callable[..., nn.Module]) -> nn.Sequential:
    return nn.Sequential(conv(1, 16, 3), MaxMin(), conv(16, 16, 3), MaxMin(), nn.Flatten(), linear(1024, 10))


def _train(net: nn.Sequential, train: Split, test: Split, steps: int, name: str) -> float:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in trange(steps, desc=f"training {name:6}", unit="step"):
        batch = torch.randint(len(train.labels), (128,))
        loss = F.cross_entropy(8 * net(train.images[batch]), train.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((net.eval()(test.images).argmax(1) == test.labels).float().mean())


def _singular_values(layer: nn.Module) -> Tensor:
    assert isinstance(layer, CayleyConv2d | CircularConv2d)
    return layer.singular_values((8, 8)).flatten()


def _photograph() -> Tensor:
    """A photograph that comes with matplotlib (Grace Hopper, in the public domain): (3, h, w) in [0, 1]."""
    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    return torch.tensor(mpl_image.imread(path)).permute(2, 0, 1) / 255


def _range(values: Tensor) -> str:
    return f"{values.min():.6f} .. {values.max():.6f}"
