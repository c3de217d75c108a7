"""A ResNet as they are written everywhere, made 1-Lipschitz by one call.

python examples/convert_resnet.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import convert, lipschitz_bound


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.shortcut = nn.Sequential()
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    """Three blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(F.relu(self.stem(x))), 1)
        return self.head(x.view(x.size(0), -1))


def main() -> float:
    torch.manual_seed(0)
    model = convert(ResNet(), (3, 32, 32)).eval()
    print(model.code)
    bound = lipschitz_bound(model, (3, 32, 32))
    print(f"Lipschitz bound: {bound:.6f}")
    return bound


if __name__ == "__main__":
    main()
