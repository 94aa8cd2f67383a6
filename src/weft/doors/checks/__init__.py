"""Faults of a configuration: one small function per rule, for its stack and for all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.doors.checks import accelerate, axolotl, common, deepspeed, megatron, torchtitan
from weft.doors.checks.base import Finding, Rule
from weft.doors.configuration import Configuration
from weft.doors.explain import accelerate as accelerate_files
from weft.doors.explain import axolotl as axolotl_files
from weft.doors.explain import deepspeed as deepspeed_files
from weft.doors.explain import megatron as megatron_files
from weft.doors.explain import torchtitan as torchtitan_files

RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        deepspeed_files.NAME: deepspeed.RULES,
        accelerate_files.NAME: accelerate.RULES,
        axolotl_files.NAME: axolotl.RULES,
        torchtitan_files.NAME: torchtitan.RULES,
        megatron_files.NAME: megatron.RULES,
    }
)


def findings(configuration: Configuration) -> list[Finding]:
    """Return all findings of the rules, in their order, each once."""
    rules = (*common.RULES, *RULES.get(configuration.stack, ()))
    return list(dict.fromkeys(found for rule in rules for found in rule(configuration)))
