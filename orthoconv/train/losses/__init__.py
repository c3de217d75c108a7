"""Losses for Lipschitz networks: pure functions of logits and labels.

Labels are class numbers, of any integer type. Their values are checked on a CPU. An accelerator would have to wait for
the check at each step, so it is left to torch there.
"""

from orthoconv.train.losses.margin import hinge_loss, logit_annealing, offset_cross_entropy, tau_cross_entropy
from orthoconv.train.losses.pairwise import (
    certificate_regularizer,
    emma_loss,
    gloro_loss,
    radius_cross_entropy,
    regularized_cross_entropy,
    vra_loss,
)
from orthoconv.train.losses.transport import hkr_loss, kr_loss, soft_hkr_loss

__all__ = ["certificate_regularizer", "emma_loss", "gloro_loss", "hinge_loss", "hkr_loss", "kr_loss"]
__all__ += ["logit_annealing", "offset_cross_entropy", "radius_cross_entropy", "regularized_cross_entropy"]
__all__ += ["soft_hkr_loss", "tau_cross_entropy", "vra_loss"]
