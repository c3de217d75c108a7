"""Attacks: searches for a small perturbation that changes the class, or moves the outputs far."""

from orthoconv.attacks.autoattack import apgd
from orthoconv.attacks.descent import L2Ball, pgd
from orthoconv.attacks.empirical import empirical_lipschitz
from orthoconv.attacks.examine import cross_examine

__all__ = ["L2Ball", "apgd", "cross_examine", "empirical_lipschitz", "pgd"]
