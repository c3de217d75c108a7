"""Gradients through 100 layers: orthogonal ones keep their norm, whatever the depth (dynamical isometry).

python examples/isometry.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from orthoconv.nn import CayleyConv2d, MaxMin


def gradient_norms(layers: list[nn.Module]) -> list[float]:
    """Norm of the gradient at the input of each layer, relative to that at the end."""
    x = torch.rand(4, 16, 16, 16)
    values = [x.requires_grad_()]
    for layer in layers:
        values.append(layer(values[-1]))
        values[-1].retain_grad()
    values[-1].backward(torch.randn_like(values[-1]))
    norms = [float(v.grad.norm()) for v in values]
    return [n / norms[-1] for n in norms]


def main(depth: int = 100, path: Path = Path("isometry.png")) -> dict[str, list[float]]:
    torch.manual_seed(0)

    def plain(gain: float) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for _ in range(depth):
            conv = nn.Conv2d(16, 16, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight)
            conv.weight.data *= gain
            layers += [nn.Sequential(conv, nn.ReLU())]
        return layers

    networks = {
        "orthogonal, MaxMin": [nn.Sequential(CayleyConv2d(16, 16, 3), MaxMin()) for _ in range(depth)],
        "plain, ReLU, He's initialisation": plain(1.0),
        "plain, ReLU, a tenth more": plain(1.1),
    }
    found = {name: gradient_norms(layers) for name, layers in networks.items()}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, norms in found.items():
        axis.plot(norms, label=name)
        print(f"{name:34} gradient at the input / at the output: {norms[0]:.3g}")
    axis.set(xlabel="layer", ylabel="norm of the gradient", yscale="log", title=f"{depth} layers, before training")
    axis.legend()
    figure.savefig(path, dpi=120)
    print(path)
    return found


if __name__ == "__main__":
    main()
