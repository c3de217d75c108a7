"""Parts that have no 1-Lipschitz form, and what to do instead."""

__all__ = ["NO_RULE"]

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from orthoconv.conversion.registry import Part, register_conversion

_ATTENTION = "products of two values of the network (attention) have no Lipschitz constant; use convolutions instead"
_REMEDIES: dict[tuple[Any, ...], str] = {
    (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
     F.scaled_dot_product_attention, torch.matmul, operator.matmul, "matmul", "__matmul__",
     torch.bmm, "bmm", torch.baddbmm, "baddbmm", torch.einsum): _ATTENTION,
    (nn.LogSoftmax, nn.Softmax2d, F.log_softmax, torch.log_softmax, "log_softmax"):
        "certificates speak of logits; leave the softmax out, and let the loss take it",
    (nn.ConvTranspose3d, F.conv_transpose3d):
        "there is no orthogonal transposed convolution of volumes; use nn.ConvTranspose2d on slices and nn.Conv3d",
    (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.Embedding):
        "recurrent and embedding layers have no rule; use layers of images or vectors",
    (nn.Bilinear, nn.GLU, F.glu):
        "products of two values have no Lipschitz constant; use nn.ReLU or orthoconv.nn.MaxMin",
    (F.normalize, torch.norm, "norm", torch.linalg.vector_norm):
        "a division by a norm has no Lipschitz constant near 0; leave it out",
    (nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, nn.FractionalMaxPool2d,
     nn.FractionalMaxPool3d, F.fractional_max_pool2d, F.fractional_max_pool3d):
        "use a mean (nn.AvgPool2d) or a maximum (nn.MaxPool2d)",
    (nn.Hardshrink, nn.Tanhshrink, nn.Softmin, F.hardshrink, F.tanhshrink, F.softmin, torch.where, "where",
     torch.masked_fill, "masked_fill", torch.sin, "sin", torch.cos, "cos", torch.erf, "erf"):
        "use an activation of torch such as nn.ReLU, nn.Softshrink or nn.Softmax",
    (torch.sort, "sort", torch.argsort, "argsort", torch.topk, "topk", torch.median, "median", torch.cumsum, "cumsum",
     torch.prod, "prod", torch.logsumexp, "logsumexp", torch.index_select, "index_select", torch.gather, "gather"):
        "select entries by slices such as x[:, :8], and reduce axes by mean or nn.AdaptiveMaxPool2d",
    (torch.addmm, "addmm", torch.addbmm, F.bilinear): "use nn.Linear",
    (nn.MaxUnpool2d, F.max_unpool2d): "it needs indices of a maximum; use nn.Upsample or nn.ConvTranspose2d",
    (F.grid_sample, nn.Fold, nn.Unfold, F.unfold, F.fold):
        "it repeats or moves pixels by values; use strides, nn.PixelShuffle or nn.PixelUnshuffle",
    (torch.pow, operator.pow, "pow", torch.exp, "exp", torch.log, "log", torch.sqrt, "sqrt", torch.rsqrt, "rsqrt",
     torch.square, "square", torch.reciprocal, "reciprocal", torch.var, "var", torch.std, "std", torch.var_mean):
        "its slope has no bound; if it belongs to a normalisation or an activation, use torch's module for that",
}  # fmt: skip
NO_RULE = "there is no rule for it; add one by orthoconv.register_conversion, or put a part in its place that has one"


def _refuse(text: str) -> Any:
    def make(part: Part) -> None:
        raise ValueError(f"there is no rule for it: {text}")

    return make


for _keys, _text in _REMEDIES.items():
    register_conversion(*_keys, make=_refuse(_text), proof="It is refused.")
