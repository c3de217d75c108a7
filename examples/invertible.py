"""A normalising flow of orthogonal convolutions: its inverse is exact, and its log-determinant costs nothing.

Orthogonal layers have the determinant 1 in absolute value, so only the activations change volumes.

    python examples/invertible.py
"""

import math

import torch
from torch import Tensor, nn

from orthoconv.data import load
from orthoconv.nn import CayleyConv2d, InvertibleDownsample


class Flow(nn.Module):
    """Images to noise, and back."""

    def __init__(self, depth: int = 6, slope: float = 0.5) -> None:
        super().__init__()
        self.down, self.slope = InvertibleDownsample(2), slope
        self.layers = nn.ModuleList(CayleyConv2d(4, 4, 3) for _ in range(depth))
        self.log_scale = nn.Parameter(torch.zeros(depth, 4, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Noise, and the log-determinant of the way there."""
        z, logdet = self.down(x), x.new_zeros(len(x))
        for layer, s in zip(self.layers, self.log_scale, strict=True):
            z = layer(z) * s.exp()
            logdet = logdet + s.sum() * z[0, 0].numel() + (z < 0).flatten(1).sum(1) * math.log(self.slope)
            z = torch.where(z < 0, self.slope * z, z)
        return z, logdet

    def inverse(self, z: Tensor) -> Tensor:
        """The images that this noise comes from."""
        for layer, s in zip(reversed(self.layers), reversed(self.log_scale), strict=True):
            z = torch.where(z < 0, z / self.slope, z)
            z = layer.inverse(z / s.exp())
        return self.down.inverse(z)


def main(steps: int = 300) -> tuple[float, float, float]:
    torch.manual_seed(0)
    images = load("digits")[0].images
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x = images[torch.randint(len(images), (128,))]
        x = x + torch.rand_like(x) / 17  # the digits have 17 grey levels
        z, logdet = flow(x)
        loss = (0.5 * z.square().flatten(1).sum(1) - logdet).mean() / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.3f} nats a pixel, up to a constant")
    flow.eval()
    with torch.no_grad():
        error = (flow.inverse(flow(images)[0]) - images).abs().max().item()
    print(f"largest error of flow.inverse(flow(x)), in float32: {error:.1e}")
    return losses[0], losses[-1], error


if __name__ == "__main__":
    main()
