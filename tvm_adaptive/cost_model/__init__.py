"""Learn from measurements."""

from __future__ import annotations

from tvm_adaptive.cost_model.family_model import RFEIFamilyCostModel
from tvm_adaptive.cost_model.model import RFEICostModel

__all__ = ["RFEICostModel", "RFEIFamilyCostModel"]
