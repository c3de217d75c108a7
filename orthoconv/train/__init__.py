"""Lipschitz-margin training (Section 5.1)."""

from orthoconv.train.checkpoint import load_checkpoint, save_checkpoint
from orthoconv.train.loop import Recipe, TrainingError, fit
from orthoconv.train.losses import hinge_loss, offset_cross_entropy
from orthoconv.train.schedule import piecewise_triangular
from orthoconv.train.wasserstein import CriticRecipe, WassersteinEstimate, wasserstein_distance
from orthoconv.weights import CheckpointError, load_weights, save_weights

__all__ = ["CheckpointError", "CriticRecipe", "Recipe", "TrainingError", "WassersteinEstimate", "fit", "hinge_loss"]
__all__ += [
    "load_checkpoint",
    "load_weights",
    "offset_cross_entropy",
    "piecewise_triangular",
    "save_checkpoint",
    "save_weights",
]
__all__ += ["wasserstein_distance"]
