"""Rules about context ranks, which divide the tokens of a sample, in the files of each stack."""

from __future__ import annotations

from collections.abc import Iterator

from weft.doors.checks.base import Finding, nearest_multiple, number, on, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.explain.accelerate import plugin
from weft.doors.keys import ACCELERATE, IN_MEGATRON, IN_SIZES, TORCHTITAN


def tokens_are_divided(configuration: Configuration) -> Iterator[Finding]:
    """Check that torchtitan's tensor and context ranks divide the tokens of a sample."""
    tokens, unit = configuration.sequence, 2 * configuration.layout.width
    if tokens is not None and unit > 2 and tokens % unit:
        problem = f"{tokens} tokens are no multiple of tp x 2 cp = {unit}"
        yield wrong(TORCHTITAN.key("sequence"), problem, str(nearest_multiple(tokens, unit)))


def flash_attention_is_used(configuration: Configuration) -> Iterator[Finding]:
    """Check that Axolotl's context ranks have flash attention, named by either of its keys."""
    given = configuration.given
    flash = on(given, "flash_attention") or "flash" in str(given.get("attn_implementation") or "")
    if (configuration.layout.cp or 1) > 1 and not flash:
        near = "attn_implementation: flash_attention_2"
        yield wrong(configuration.key("cp"), "needs flash attention", near)


def replicas_of_groups_share(configuration: Configuration) -> Iterator[Finding]:
    """Find whole replicas of tensor or context groups, which Accelerate refuses."""
    keys = {name: ACCELERATE.key(name, IN_SIZES) for name in ("replicate", "shard", "tp", "cp")}
    sizes = {name: number(configuration.given, key, 1) or 1 for name, key in keys.items()}
    divided, replicas = sizes["tp"] > 1 or sizes["cp"] > 1, sizes["replicate"]
    if divided and replicas > 1 and sizes["shard"] == 1:
        problem = f"{replicas} with tp or cp and nothing shared out"
        yield wrong(keys["replicate"], problem, f"1, and {keys['shard']} {replicas}")


def ranks_by_default(configuration: Configuration) -> Iterator[Finding]:
    """Find two context ranks by default, in Megatron-LM's plugin since Accelerate 1.13."""
    key = ACCELERATE.key("cp", IN_MEGATRON)
    if plugin(configuration.given) == "MEGATRON_LM" and key not in configuration.given:
        yield slow(key, "not given; Accelerate 1.13 and later then take 2 context ranks", f"{key}: 1")
