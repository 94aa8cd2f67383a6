"""What programs owe replicas that share something out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.describe.plan import Sharding
from weft.program.program import Owed


@dataclass(frozen=True, kw_only=True)
class SharesOut(Owed):
    """Replicas share something out, in so many islands."""

    level: Sharding
    islands: int = 1

    @property
    def facts(self) -> Mapping[str, str]:
        islands = {"islands": str(self.islands)} if self.islands > 1 else {}
        return {"sharding": self.level, **islands}
