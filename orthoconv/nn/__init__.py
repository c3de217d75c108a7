"""Layers: modules of torch that are orthogonal or nonexpansive, and the plain ones to compare them with."""

from orthoconv.nn.activation import GroupSort, MaxMin
from orthoconv.nn.aol import AOLConv2d, AOLLinear
from orthoconv.nn.bcop import BCOPConv2d
from orthoconv.nn.bjorck import BjorckLinear
from orthoconv.nn.bro import BROConv2d, BROLinear
from orthoconv.nn.cayley import CayleyConv2d, CayleyConvTranspose2d, CayleyLinear
from orthoconv.nn.circular import CircularConv2d
from orthoconv.nn.convolution import BaseConv2d, TransposedConv2d
from orthoconv.nn.downsample import InvertibleDownsample
from orthoconv.nn.isometry import IsometryAverage
from orthoconv.nn.kernel import KernelConv2d, WeightConv2d
from orthoconv.nn.layer import Layer
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.lot import LOTConv2d, PolarLinear
from orthoconv.nn.methods import conv_methods, linear_methods, register_method
from orthoconv.nn.normalize import Normalize, Scale
from orthoconv.nn.normalized import NormalizedLinear
from orthoconv.nn.ossn import OSSNConv2d
from orthoconv.nn.pooling import ScaledAvgPool2d
from orthoconv.nn.residual import ConvexResidual, ConvexSum
from orthoconv.nn.rko import RKOConv2d
from orthoconv.nn.soc import ExpLinear, SOCConv2d
from orthoconv.nn.spectral import SpectralConv2d, UnscaledConv2d
from orthoconv.nn.svcm import SVCMConv2d

__all__ = [
    "AOLConv2d",
    "AOLLinear",
    "BCOPConv2d",
    "BROConv2d",
    "BROLinear",
    "BaseConv2d",
    "BaseLinear",
    "BjorckLinear",
    "CayleyConv2d",
    "CayleyConvTranspose2d",
    "CayleyLinear",
    "CircularConv2d",
    "ConvexResidual",
    "ConvexSum",
    "ExpLinear",
    "GroupSort",
    "InvertibleDownsample",
    "IsometryAverage",
    "KernelConv2d",
    "LOTConv2d",
    "Layer",
    "MaxMin",
    "Normalize",
    "NormalizedLinear",
    "OSSNConv2d",
    "PolarLinear",
    "RKOConv2d",
    "SOCConv2d",
    "SVCMConv2d",
    "Scale",
    "ScaledAvgPool2d",
    "SpectralConv2d",
    "TransposedConv2d",
    "UnscaledConv2d",
    "WeightConv2d",
    "conv_methods",
    "linear_methods",
    "register_method",
]
