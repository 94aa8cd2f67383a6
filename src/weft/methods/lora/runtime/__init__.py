"""Low-rank adaptation in the runtime: products in a stage, and exports of them."""

from __future__ import annotations

from weft.methods.lora.runtime.export import ADAPTER
from weft.methods.lora.runtime.factors import CHANGED_STAGE

PARTS = (CHANGED_STAGE, ADAPTER)
