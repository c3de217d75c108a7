"""Orthogonal convolutions for PyTorch, with robustness certificates that can be trusted."""

from orthoconv import attacks, certificates, data, fourier, linalg, models, nn, testing, train
from orthoconv.attacks import empirical_lipschitz
from orthoconv.certificates import (
    Certificates,
    Verification,
    certified_radius,
    certify,
    in_double,
    lipschitz_bound,
    register_rule,
    rounding_bound,
    verify,
)
from orthoconv.conversion import ConversionError, convert, register_conversion
from orthoconv.exporting import export
from orthoconv.linalg import cayley
from orthoconv.nn import orthogonal, register_method
from orthoconv.nn.reparametrized import frozen
from orthoconv.onnx_files import to_onnx
from orthoconv.predicting import Prediction, Predictions, predict

__version__ = "0.1.0"
"""Version of the package, by semantic versioning.

>>> __version__.count(".")
2
"""
__all__ = [
    "Certificates",
    "ConversionError",
    "Prediction",
    "Predictions",
    "Verification",
    "__version__",
    "attacks",
    "cayley",
    "certificates",
    "certified_radius",
    "certify",
    "convert",
    "data",
    "empirical_lipschitz",
    "export",
    "fourier",
    "frozen",
    "in_double",
    "linalg",
    "lipschitz_bound",
    "models",
    "nn",
    "orthogonal",
    "predict",
    "register_conversion",
    "register_method",
    "register_rule",
    "rounding_bound",
    "testing",
    "to_onnx",
    "train",
    "verify",
]
