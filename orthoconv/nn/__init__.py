"""Layers: modules of torch that are orthogonal or nonexpansive, and the plain ones to compare them with."""

from orthoconv.nn.activation import FullSort, GroupSort, MaxMin
from orthoconv.nn.affine import Gain, Shift
from orthoconv.nn.aoc import AOCConv2d, AOCConvTranspose2d
from orthoconv.nn.aol import AOLConv2d, AOLConvTranspose2d, AOLLinear
from orthoconv.nn.bcop import BCOPConv2d, BCOPConvTranspose2d
from orthoconv.nn.bjorck import BjorckLinear
from orthoconv.nn.bro import BROConv1d, BROConv2d, BROConv3d, BROConvTranspose2d, BROLinear
from orthoconv.nn.cayley import CayleyConv1d, CayleyConv2d, CayleyConv3d, CayleyConvTranspose2d, CayleyLinear
from orthoconv.nn.centering import BatchCentering, LayerCentering, PixelBias
from orthoconv.nn.cholesky import CholeskyLinear
from orthoconv.nn.circular import CircularConv2d
from orthoconv.nn.convolution import BaseConv2d, TransposedConv2d
from orthoconv.nn.cpl import CPLConv2d, CPLLinear
from orthoconv.nn.downsample import InvertibleDownsample, InvertibleUpsample
from orthoconv.nn.ensemble import Ensemble
from orthoconv.nn.fitting import Fit, Spread
from orthoconv.nn.frobenius import FrobeniusConv2d, FrobeniusLinear
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.nn.isometry import IsometryAverage, Mirror, Move
from orthoconv.nn.kernel import KernelConv2d, WeightConv2d
from orthoconv.nn.layer import Combination, Layer
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.lires import LiResConv2d, LiResConvTranspose2d
from orthoconv.nn.lot import LOTConv1d, LOTConv2d, LOTConv3d, LOTConvTranspose2d, PolarLinear
from orthoconv.nn.methods import conv_methods, linear_methods, register_method
from orthoconv.nn.normalize import Normalize, Scale
from orthoconv.nn.normalized import NormalizedLinear
from orthoconv.nn.origins import orthogonal
from orthoconv.nn.ossn import OSSNConv2d
from orthoconv.nn.pooling import L2Pool2d, ScaledAdaptiveAvgPool2d, ScaledAvgPool2d, ScaledMean
from orthoconv.nn.potential import PotentialConv2d
from orthoconv.nn.potential_linear import PotentialLinear
from orthoconv.nn.qr import QRLinear
from orthoconv.nn.reflection import Abs, HouseHolder, LPReLU, NActivation, SoftHuber
from orthoconv.nn.residual import ConcatResidual, ConvexResidual, ConvexSum, PrescaledResidual, UnitCat
from orthoconv.nn.rko import RKOConv2d, RKOConvTranspose2d
from orthoconv.nn.sequences import SequenceConv1d
from orthoconv.nn.shift import ShiftConv2d, ShiftConvTranspose2d
from orthoconv.nn.shuffle import ChannelShuffle
from orthoconv.nn.sll import SLLConv2d, SLLLinear
from orthoconv.nn.soc import (
    ExpLinear,
    SOCConv1d,
    SOCConv2d,
    SOCConv3d,
    SOCConvTranspose2d,
    TaylorSOCConv2d,
    TaylorSOCConvTranspose2d,
)
from orthoconv.nn.spectral import SpectralConv2d, UnscaledConv2d
from orthoconv.nn.svcm import SVCMConv2d
from orthoconv.nn.volumes import VolumeConv3d

__all__ = [
    "AOCConv2d",
    "AOCConvTranspose2d",
    "AOLConv2d",
    "AOLConvTranspose2d",
    "AOLLinear",
    "Abs",
    "BCOPConv2d",
    "BCOPConvTranspose2d",
    "BROConv1d",
    "BROConv2d",
    "BROConv3d",
    "BROConvTranspose2d",
    "BROLinear",
    "BaseConv2d",
    "BaseLinear",
    "BatchCentering",
    "BjorckLinear",
    "CPLConv2d",
    "CPLLinear",
    "CayleyConv1d",
    "CayleyConv2d",
    "CayleyConv3d",
    "CayleyConvTranspose2d",
    "CayleyLinear",
    "ChannelShuffle",
    "CholeskyLinear",
    "CircularConv2d",
    "Combination",
    "ConcatResidual",
    "ConvexResidual",
    "ConvexSum",
    "Ensemble",
    "ExpLinear",
    "Fit",
    "FrobeniusConv2d",
    "FrobeniusLinear",
    "FullSort",
    "Gain",
    "GroupSort",
    "HouseHolder",
    "ImageLayer",
    "InvertibleDownsample",
    "InvertibleUpsample",
    "IsometryAverage",
    "KernelConv2d",
    "L2Pool2d",
    "LOTConv1d",
    "LOTConv2d",
    "LOTConv3d",
    "LOTConvTranspose2d",
    "LPReLU",
    "Layer",
    "LayerCentering",
    "LiResConv2d",
    "LiResConvTranspose2d",
    "MaxMin",
    "Mirror",
    "Move",
    "NActivation",
    "Normalize",
    "NormalizedLinear",
    "OSSNConv2d",
    "PixelBias",
    "PolarLinear",
    "PotentialConv2d",
    "PotentialLinear",
    "PrescaledResidual",
    "QRLinear",
    "RKOConv2d",
    "RKOConvTranspose2d",
    "SLLConv2d",
    "SLLLinear",
    "SOCConv1d",
    "SOCConv2d",
    "SOCConv3d",
    "SOCConvTranspose2d",
    "SVCMConv2d",
    "Scale",
    "ScaledAdaptiveAvgPool2d",
    "ScaledAvgPool2d",
    "ScaledMean",
    "SequenceConv1d",
    "Shift",
    "ShiftConv2d",
    "ShiftConvTranspose2d",
    "SoftHuber",
    "SpectralConv2d",
    "Spread",
    "TaylorSOCConv2d",
    "TaylorSOCConvTranspose2d",
    "TransposedConv2d",
    "UnitCat",
    "UnscaledConv2d",
    "VolumeConv3d",
    "WeightConv2d",
    "conv_methods",
    "linear_methods",
    "orthogonal",
    "register_method",
]
