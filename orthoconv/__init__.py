"""Orthogonal convolutions for PyTorch, with robustness certificates that can be trusted."""

from orthoconv import fourier, linalg, models, nn, testing
from orthoconv.certify import certified_radius, certify
from orthoconv.convert import ConversionError, convert
from orthoconv.export import export
from orthoconv.linalg import cayley
from orthoconv.lipschitz import empirical_lipschitz, lipschitz_bound, register_lipschitz_rule
from orthoconv.nn.memory import frozen
from orthoconv.rounding import in_double, rounding_bound
from orthoconv.verify import verify

__version__ = "0.1.0"
__all__ = [
    "ConversionError",
    "__version__",
    "cayley",
    "certified_radius",
    "certify",
    "convert",
    "empirical_lipschitz",
    "export",
    "fourier",
    "frozen",
    "in_double",
    "linalg",
    "lipschitz_bound",
    "models",
    "nn",
    "register_lipschitz_rule",
    "rounding_bound",
    "testing",
    "verify",
]
