"""Change the layers of a CNN, and get certificates.

python examples/one_line.py
"""

import torch
from torch import nn

from orthoconv import certify
from orthoconv.data import Split, batches, load
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin
from orthoconv.train import hinge_loss

before = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding="same", padding_mode="circular"), nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1, padding_mode="circular"), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip

after = nn.Sequential(
    CayleyConv2d(1, 16, 3), MaxMin(),
    CayleyConv2d(16, 32, 3, stride=2), MaxMin(),
    nn.Flatten(), CayleyLinear(512, 10),
)  # fmt: skip


def train(model: nn.Module, data: Split, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(epoch))
        for k in order.split(64):
            loss = hinge_loss(model(data.images[k]), data.labels[k], margin=0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(epochs: int = 10) -> dict[str, float]:
    torch.manual_seed(0)
    training, test = load("digits")
    figures = {}
    for name, model in (("plain", before), ("orthogonal", after)):
        train(model, training, epochs)
        found = certify(model.eval(), batches(test, 100))
        figures[name] = found.certified_accuracy[36 / 255]
        print(f"{name:10}  clean {found.clean_accuracy:.1%}   Lipschitz bound {found.lipschitz:10.4f}   ", end="")
        print(f"certified for 36/255: {figures[name]:.1%}")
    return figures


if __name__ == "__main__":
    main()
