"""Lipschitz-margin training (Section 5.1)."""

from orthoconv.train.checkpoint import load_checkpoint, save_checkpoint
from orthoconv.train.loop import Recipe, TrainingError, fit
from orthoconv.train.losses import (
    certificate_regularizer,
    emma_loss,
    gloro_loss,
    hinge_loss,
    hkr_loss,
    kr_loss,
    logit_annealing,
    offset_cross_entropy,
    radius_cross_entropy,
    regularized_cross_entropy,
    soft_hkr_loss,
    tau_cross_entropy,
    vra_loss,
)
from orthoconv.train.muon import Muon
from orthoconv.train.objectives import OBJECTIVES
from orthoconv.train.schedule import linear, piecewise_triangular
from orthoconv.train.wasserstein import CriticRecipe, WassersteinEstimate, wasserstein_distance
from orthoconv.weights import CheckpointError, load_weights, save_weights

__all__ = ["CheckpointError", "CriticRecipe", "Recipe", "TrainingError", "WassersteinEstimate", "fit", "hinge_loss"]
__all__ += [
    "linear",
    "load_checkpoint",
    "load_weights",
    "offset_cross_entropy",
    "piecewise_triangular",
    "save_checkpoint",
    "save_weights",
]
__all__ += ["Muon", "wasserstein_distance"]
__all__ += ["OBJECTIVES", "certificate_regularizer", "emma_loss", "gloro_loss", "hkr_loss", "kr_loss"]
__all__ += ["logit_annealing", "radius_cross_entropy", "regularized_cross_entropy", "soft_hkr_loss"]
__all__ += ["tau_cross_entropy", "vra_loss"]
