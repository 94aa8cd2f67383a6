"""Time against cost of training over the number of devices: small batches are cheap, large ones fast.

With a batch of B samples, a target loss takes E(B) = E_min (1 + B / B_crit) samples. That is K(B) = E(B) / B
steps (McCandlish et al., arXiv 1812.06162). A cluster reaches the utilisation U(beta) with beta samples per
device (Lamy-Poirier, arXiv 2211.05953). N devices take a time proportional to
(1 + beta N / B_crit) / (N U(beta)). The cost is N times that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import InputError, Violation

# Kaplan et al. (arXiv 2001.08361): a model of n parameters reaches a loss of (PARAMETERS / n)^0.076 nats per
# token. There, the critical batch is TOKENS / loss^(1 / 0.21).
_KAPLAN_PARAMETERS, _KAPLAN_PARAMETERS_POWER = 8.8e13, 0.076
_KAPLAN_TOKENS, _KAPLAN_TOKENS_POWER = 2e8, 0.21


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The cheapest way to train on a number of devices.

    Attributes:
        devices: N.
        samples_per_device: beta, for the batch with the least cost.
        utilisation: U(beta), fraction of the devices' peak.
        cost: (1 + beta N / B_crit) / U(beta): device time over that of the least samples at full utilisation.
        samples: E(B) / E_min: samples over the least that reach the target.
    """

    devices: int
    samples_per_device: float
    utilisation: float
    cost: float
    samples: float

    @property
    def batch(self) -> float:
        """B, samples per step."""
        return self.devices * self.samples_per_device

    @property
    def time(self) -> float:
        """Time relative to one device at full utilisation with the least samples: cost / N."""
        return self.cost / self.devices


def samples_to_target(batch: float, critical_batch: float) -> float:
    """Return E(B) / E_min: samples to the target loss at `batch` samples per step, over the least.

    Raises:
        InputError: when a count is not positive.
    """
    _require_positive(batch=batch, critical_batch=critical_batch)
    return 1.0 + batch / critical_batch


def cheapest(utilisation: Mapping[float, float], devices: int, critical_batch: float) -> TradeOff:
    """Return the trade-off of least cost on `devices`; among equal costs, the fewest samples per device.

    Each cost is linear in N, with slope beta / U(beta) and intercept 1 / U(beta). So the best beta never
    grows with N.

    Args:
        utilisation: U(beta) in (0, 1] by beta, samples per device.
        devices: N.
        critical_batch: B_crit, samples.

    Raises:
        InputError: when `utilisation` is empty or out of range, or a number is not positive.
    """
    violations = [
        Violation(
            f"utilisation at {beta:g} samples per device", f"{value:g}; more than 0, at most 1 is allowed"
        )
        for beta, value in utilisation.items()
        if not 0.0 < value <= 1.0
    ]
    if not utilisation:
        violations.append(Violation("utilisation", "no samples per device to choose from"))
    if violations:
        raise InputError(violations)
    _require_positive(devices=devices)
    choices = [
        TradeOff(
            devices=devices,
            samples_per_device=beta,
            utilisation=utilisation[beta],
            cost=samples_to_target(beta * devices, critical_batch) / utilisation[beta],
            samples=samples_to_target(beta * devices, critical_batch),
        )
        for beta in sorted(utilisation)
    ]
    return min(choices, key=lambda choice: choice.cost)


def critical_batch_tokens(parameters: int) -> float:
    """Return an estimate of B_crit in tokens, at the loss to which a language model of this size converges.

    The source is Kaplan et al., arXiv 2001.08361, equations 1.1 and 1.4. Measured noise scales are better.

    Raises:
        InputError: when there are no parameters.
    """
    _require_positive(parameters=parameters)
    loss = (_KAPLAN_PARAMETERS / parameters) ** _KAPLAN_PARAMETERS_POWER
    return float(_KAPLAN_TOKENS / loss ** (1.0 / _KAPLAN_TOKENS_POWER))


def _require_positive(**numbers: float) -> None:
    violations = [
        Violation(name.replace("_", " "), f"{value:g}; more than 0 is needed")
        for name, value in numbers.items()
        if not value > 0
    ]
    if violations:
        raise InputError(violations)
