"""Rules for Axolotl's YAML."""

from __future__ import annotations

from collections.abc import Iterator

from weft.doors.checks.base import Finding, Rule, idle, number, on, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.keys import AXOLOTL


def one_precision(configuration: Configuration) -> Iterator[Finding]:
    """Check that bf16 and fp16 are not both on."""
    given = configuration.given
    if on(given, "bf16") and on(given, "fp16"):
        yield wrong("fp16", "true beside bf16: true; one is allowed", "false")


def one_way_to_shard(configuration: Configuration) -> Iterator[Finding]:
    """Check that DeepSpeed and FSDP are not both in use."""
    given = configuration.given
    if given.get("deepspeed") and (given.get("fsdp") or "fsdp_config" in given):
        yield wrong("deepspeed", "given beside fsdp; one is allowed", "leave one out")


def one_batch(configuration: Configuration) -> Iterator[Finding]:
    """Check that batch and accumulation are not both given: one follows from the other."""
    given = configuration.given
    key = AXOLOTL.key("micro_batches")
    if given.get("batch_size") and given.get(key):
        problem = f"given beside {key}, which it would decide"
        yield wrong("batch_size", problem, "leave it out")


def adapters_and_bits(configuration: Configuration) -> Iterator[Finding]:
    """Check bits: qlora trains on four, lora on at least eight, weights without adapter on neither."""
    given = configuration.given
    adapter, eight, four = given.get("adapter"), on(given, "load_in_8bit"), on(given, "load_in_4bit")
    if eight and four:
        yield wrong("load_in_8bit", "true beside load_in_4bit: true; one is allowed", "false")
    if adapter == "qlora" and not four:
        yield wrong("adapter", "qlora without load_in_4bit", "load_in_4bit: true")
    if adapter == "lora" and four:
        yield wrong("adapter", "lora with load_in_4bit", "qlora")
    if not adapter and (eight or four):
        key = "load_in_8bit" if eight else "load_in_4bit"
        yield wrong(key, "true without an adapter: weights of few bits cannot be trained", "false")
    if not adapter:
        for key in given:
            if key.startswith("lora_") and given[key] not in (None, False):
                yield idle(key, "read with an adapter only; none is given", "adapter: lora")


def packing_needs_masks(configuration: Configuration) -> Iterator[Finding]:
    """Check for attention that masks packed samples from each other.

    `attn_implementation` names the attention; older files have a key of its own for each.
    """
    given = configuration.given
    named = str(given.get("attn_implementation") or "")
    backends = ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention")
    masks = named not in ("", "eager") or any(on(given, key) for key in backends)
    if on(given, "sample_packing") and not masks:
        problem = "true without an attention that masks packed samples"
        yield wrong("sample_packing", problem, "attn_implementation: flash_attention_2")


def samples_are_filled(configuration: Configuration) -> Iterator[Finding]:
    """Find samples padded to the longest: they compute on padding."""
    given = configuration.given
    if on(given, "pad_to_sequence_len") and not on(given, "sample_packing"):
        problem = "true without sample_packing: every sample is padded to sequence_len"
        yield slow("pad_to_sequence_len", problem, "sample_packing: true")


def tensor_ranks_need_fsdp2(configuration: Configuration) -> Iterator[Finding]:
    """Check that further axes, which are torch's, go with FSDP2."""
    version = number(
        configuration.given, "fsdp_version", number(configuration.given, "fsdp_config.fsdp_version")
    )
    if (configuration.layout.tp or 1) > 1 and configuration.given.get("fsdp") and version != 2:
        yield wrong(AXOLOTL.key("tp"), "needs FSDP2", "fsdp_version: 2")


def flash_attention_is_used(configuration: Configuration) -> Iterator[Finding]:
    """Check that Axolotl's context ranks have flash attention, named by either of its keys."""
    given = configuration.given
    flash = on(given, "flash_attention") or "flash" in str(given.get("attn_implementation") or "")
    if (configuration.layout.cp or 1) > 1 and not flash:
        near = "attn_implementation: flash_attention_2"
        yield wrong(configuration.key("cp"), "needs flash attention", near)


RULES: tuple[Rule, ...] = (
    one_precision,
    one_way_to_shard,
    one_batch,
    adapters_and_bits,
    packing_needs_masks,
    flash_attention_is_used,
    samples_are_filled,
    tensor_ranks_need_fsdp2,
)
