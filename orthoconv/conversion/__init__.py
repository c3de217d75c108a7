"""Existing networks made 1-Lipschitz, part by part, by rules that can be added to."""

import orthoconv.conversion.branches
import orthoconv.conversion.images
import orthoconv.conversion.layers
import orthoconv.conversion.other_axes
import orthoconv.conversion.refusals  # noqa: F401
from orthoconv.conversion.converting import ConversionError, convert
from orthoconv.conversion.registry import Joined, Part, conversion_rules, register_conversion

__all__ = ["ConversionError", "Joined", "Part", "conversion_rules", "convert", "register_conversion"]
