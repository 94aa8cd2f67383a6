"""What the runtime executes of what a plan can say; without torch, so that a launcher can ask first."""

from __future__ import annotations

from weft.describe.plan import Plan
from weft.errors import Violation


def unsupported(plan: Plan) -> list[Violation]:
    """One line for every decision of a plan that is predicted but not executed yet; empty when it can run."""
    falling = any(list(copy.ranks) != sorted(copy.ranks) for stage in plan.stages for copy in stage.replicas)
    missing = (
        (falling, "a replica whose ranks do not rise", "rising ranks"),
        (plan.precision == "fp16", "precision 'fp16', of which losses must be scaled,", "bf16"),
        (plan.stack != "weft", f"a plan of {plan.stack}", "weft"),
        (bool(plan.blocking), f"blocking {' and '.join(plan.blocking)}", "overlapped"),
    )
    return [
        Violation("plan", f"{text} is not supported by this runtime yet", near)
        for given, text, near in missing
        if given
    ]
