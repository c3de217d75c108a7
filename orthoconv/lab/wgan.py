"""A small WGAN-GP (Gulrajani et al., 2017). The distance between images and its samples is then estimated."""

__all__ = ["GeneratorSpec", "samples_of", "trained_generator"]

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from orthoconv.data.batching import generator
from orthoconv.devices import move
from orthoconv.lab.progress import quiet_bar
from orthoconv.train import load_weights, save_weights


@dataclass(frozen=True)
class GeneratorSpec:
    """A generator, and how to train it.

    Attributes:
        steps: Training steps of the generator.
        critic_steps: Steps of its critic for each of them.
        latent: Random numbers that an image is made from.
        channels: Channels of the last hidden layer.
        batch_size: Images in a step.
        lr: Learning rate of Adam.
        penalty: Weight of the gradient penalty.
        seed: Seed of the weights, the images and the noise.
    """

    steps: int = 1000
    critic_steps: int = 3
    latent: int = 64
    channels: int = 32
    batch_size: int = 64
    lr: float = 2e-4
    penalty: float = 10.0
    seed: int = 0

    def networks(self, image: torch.Size) -> tuple[nn.Sequential, nn.Sequential]:
        """Build the generator of images of this shape in [0, 1], and the critic that it is trained against."""
        colours, h, w = image
        if h % 8 or w % 8:
            raise ValueError(f"the generator makes images whose sides are multiples of 8, got {h} x {w}")
        a, b, c = self.channels, 2 * self.channels, 4 * self.channels
        up, down = nn.ConvTranspose2d, nn.Conv2d
        make = nn.Sequential(
            nn.Linear(self.latent, c * (h // 8) * (w // 8)), nn.ReLU(), nn.Unflatten(1, (c, h // 8, w // 8)),
            up(c, b, 4, 2, 1), nn.ReLU(), up(b, a, 4, 2, 1), nn.ReLU(), up(a, colours, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip
        critic = nn.Sequential(
            down(colours, a, 4, 2, 1), nn.LeakyReLU(0.2), down(a, b, 4, 2, 1), nn.LeakyReLU(0.2),
            down(b, c, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(c * (h // 8) * (w // 8), 1),
        )  # fmt: skip
        return make, critic


def trained_generator(
    spec: GeneratorSpec,
    images: Tensor,
    path: Path,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> nn.Sequential:
    """Return a generator trained on `images`: the one in the file `path`, or a new one that is written to it."""
    torch.manual_seed(spec.seed)
    make, critic = (network.to(device) for network in spec.networks(images.shape[1:]))
    if path.exists():
        load_weights(path, make)
        return make.eval()
    optimizers = [torch.optim.Adam(net.parameters(), lr=spec.lr, betas=(0.0, 0.9)) for net in (make, critic)]
    for step in quiet_bar("generator", range(spec.steps)):
        for k in range(spec.critic_steps):
            source = generator(spec.seed, step, k)
            real = images[torch.randint(len(images), (spec.batch_size,), generator=source)].to(device)
            fake = make(torch.randn(spec.batch_size, spec.latent, generator=source).to(device)).detach()
            loss = critic(fake).mean() - critic(real).mean() + spec.penalty * _penalty(critic, real, fake, source)
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
        noise = torch.randn(spec.batch_size, spec.latent, generator=generator(spec.seed, step, spec.critic_steps))
        optimizers[0].zero_grad()
        (-critic(make(noise.to(device))).mean()).backward()
        optimizers[0].step()
    save_weights(path, make, asdict(spec))
    return make.eval()


@torch.no_grad()
def samples_of(make: nn.Sequential, latent: int, n: int, seed: int) -> Tensor:
    """Return n images of a generator."""
    noise = torch.randn(n, latent, generator=torch.Generator().manual_seed(seed))
    return torch.cat([make(*move(make, part)).cpu() for part in noise.split(500)])


def _penalty(critic: nn.Module, real: Tensor, fake: Tensor, source: torch.Generator) -> Tensor:
    """Return how far the norm of the gradient is from 1, between real and generated images."""
    t = torch.rand(len(real), 1, 1, 1, generator=source).to(real.device)
    between = (t * real + (1 - t) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    deviation: Tensor = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return deviation
