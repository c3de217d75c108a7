"""Certificates: bounds of models, what rounding does to them, certified radii, and their verification."""

from orthoconv.certificates.bounds import growth, lipschitz_bound, rounding_bound
from orthoconv.certificates.certification import EPS, Certificates, certified_radius, certify
from orthoconv.certificates.constants import PairwiseConstants, pairwise_constants
from orthoconv.certificates.double import in_double
from orthoconv.certificates.heads import pairwise_radius
from orthoconv.certificates.rules import register_rule
from orthoconv.certificates.verification import LayerFacts, Verification, singular_values, verify

__all__ = [
    "EPS",
    "Certificates",
    "LayerFacts",
    "PairwiseConstants",
    "Verification",
    "certified_radius",
    "certify",
    "growth",
    "in_double",
    "lipschitz_bound",
    "pairwise_constants",
    "pairwise_radius",
    "register_rule",
    "rounding_bound",
    "singular_values",
    "verify",
]
