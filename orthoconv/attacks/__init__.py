"""Attacks: searches for a small perturbation that changes the class."""

from orthoconv.attacks.autoattack import apgd
from orthoconv.attacks.examine import cross_examine
from orthoconv.attacks.pgd import L2Ball, pgd

__all__ = ["L2Ball", "apgd", "cross_examine", "pgd"]
