"""Layers: modules of torch that are orthogonal or not expansive, and the plain ones to compare them with."""

from orthoconv.nn.activation import GroupSort, MaxMin
from orthoconv.nn.bcop import BCOPConv2d
from orthoconv.nn.cayley import CayleyConv2d, CayleyConvTranspose2d
from orthoconv.nn.circular import CircularConv2d
from orthoconv.nn.downsample import InvertibleDownsample
from orthoconv.nn.linear import BjorckLinear, CayleyLinear
from orthoconv.nn.normalize import Normalize, Scale
from orthoconv.nn.ossn import OSSNConv2d
from orthoconv.nn.pooling import ScaledAvgPool2d
from orthoconv.nn.residual import ConvexResidual, ConvexSum
from orthoconv.nn.rko import RKOConv2d
from orthoconv.nn.svcm import SVCMConv2d

__all__ = [
    "BCOPConv2d",
    "BjorckLinear",
    "CayleyConv2d",
    "CayleyConvTranspose2d",
    "CayleyLinear",
    "CircularConv2d",
    "ConvexResidual",
    "ConvexSum",
    "GroupSort",
    "InvertibleDownsample",
    "MaxMin",
    "Normalize",
    "OSSNConv2d",
    "RKOConv2d",
    "SVCMConv2d",
    "Scale",
    "ScaledAvgPool2d",
]
