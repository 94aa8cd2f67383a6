"""Plans of small models whose layers tensor ranks divide."""

from __future__ import annotations

from typing import Any

from equality_table import Row

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan


def tensor_plan(config: ModelConfig, tp: int = 2, **layout: Any) -> Plan:
    """The plan of such a row of the equality table."""
    return Row(config, tp=tp, **layout).plan
