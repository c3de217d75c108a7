"""Orthogonal convolutions for PyTorch, with robustness certificates that can be trusted."""

from orthoconv import fourier, linalg, nn, testing
from orthoconv.linalg import cayley
from orthoconv.nn.memory import frozen

__version__ = "0.1.0"
__all__ = ["__version__", "cayley", "fourier", "frozen", "linalg", "nn", "testing"]
