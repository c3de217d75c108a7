"""Networks: those of the paper, with layers of any method, and trained ones."""

from orthoconv.models.describing import describe
from orthoconv.models.networks import NETWORKS, build, default_conv
from orthoconv.models.trained import PRETRAINED, card, load, pretrained

__all__ = ["NETWORKS", "PRETRAINED", "build", "card", "default_conv", "describe", "load", "pretrained"]
