"""Layers: modules of torch whose operators are orthogonal by construction."""

from orthoconv.nn.cayley import CayleyConv2d, CayleyConvTranspose2d, CayleyLinear

__all__ = ["CayleyConv2d", "CayleyConvTranspose2d", "CayleyLinear"]
