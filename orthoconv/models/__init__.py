"""The networks of the paper, each with any of its layers."""

from orthoconv.models.build import NETWORKS, build
from orthoconv.models.trained import PRETRAINED, card, load, pretrained

__all__ = ["NETWORKS", "PRETRAINED", "build", "card", "load", "pretrained"]
