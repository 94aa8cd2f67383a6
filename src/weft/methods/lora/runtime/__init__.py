"""What low-rank adaptation adds to the runtime: products in a stage, and their export."""

from __future__ import annotations

from weft.methods.lora.runtime.export import ADAPTER
from weft.methods.lora.runtime.factors import CHANGED_STAGE

PARTS = (CHANGED_STAGE, ADAPTER)
