"""Conclusions of `weft explain` on public configurations, beside those that a person drew from the files.

    git clone https://github.com/OWNER/NAME FOLDER/OWNER/NAME      # each repository of the list below
    python benchmarks/public_configurations.py FOLDER

A clone may be bare. Files are read at the listed commits; repositories that are absent are skipped. A person
read each file for four facts: the sharding, the recomputation, the adapter, and whether weft models all of
the job.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import Report, file_at, parser

from weft.doors.explain import read_configuration


@dataclass(frozen=True, slots=True)
class Read:
    """What a person read in a file; None where the program decides.

    `adapter`: the rank of its low-rank products, and the type of the frozen weights if it is another one.
    """

    sharding: str | None
    recompute: str | tuple[str, ...] | None
    modelled: bool = True
    adapter: tuple[int, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one repository at one commit, and others that these name."""

    commit: str
    files: Mapping[str, Read]
    named: tuple[str, ...] = ()


SOURCES: Mapping[str, Source] = {
    "axolotl-ai-cloud/axolotl": Source(
        "067b021c8b87a9e5e380b9173c704cf7340e30f5",
        {
            "deepspeed_configs/zero1.json": Read("zero-1", None),
            "deepspeed_configs/zero2.json": Read("zero-2", None, modelled=False),
            "deepspeed_configs/zero3_bf16.json": Read("zero-3", None),
            "deepspeed_configs/zero3_bf16_cpuoffload_all.json": Read("zero-3", None, modelled=False),
            "examples/archived/cerebras/btlm-ft.yml": Read("zero-3", "none"),
            "examples/distributed-parallel/llama-3_1-8b-hsdp-tp.yaml": Read("zero-3", "none"),
            "examples/distributed-parallel/qwen3-8b-fsdp-tp-cp.yaml": Read("zero-3", "none"),
            "examples/falcon-e/falcon-e-3b-ft.yaml": Read("zero-3", "full", modelled=False),
            "examples/llama-3/3b-fp8-fsdp2.yaml": Read("zero-3", "none"),
            "examples/llama-3/3b-qat-fsdp2.yaml": Read("zero-3", "none", modelled=False),
            "examples/llama-3/fft-8b.yaml": Read("zero-0", "full"),
            "examples/llama-3/instruct-dpo-lora-8b.yml": Read(
                "zero-0", "full", modelled=False, adapter=(32, "int8")
            ),
            "examples/llama-2/gptq-lora.yml": Read("zero-0", "full", modelled=False),
            "examples/llama-3/lora-1b.yml": Read("zero-0", "full", adapter=(16, None)),
            "examples/llama-3/qlora-1b.yml": Read("zero-0", "full", adapter=(32, "nf4")),
            "examples/mistral/qlora.yml": Read("zero-0", "full", adapter=(32, "nf4")),
            "examples/llama-3/qlora-fsdp-70b.yaml": Read("zero-3", "full", modelled=False),
            "examples/orpheus/finetune.yml": Read("zero-0", "full"),
            "examples/phi/phi-ft.yml": Read("zero-0", "full"),
            "examples/qat_nvfp4/Qwen2.5-72B_baseline.yml": Read("zero-3", "full"),
            "examples/qwen2/adamw-pretrain-fsdp2.yaml": Read("zero-3", "none"),
            "examples/qwen2/prm.yaml": Read("zero-0", "full", modelled=False),
            "examples/streaming/pretrain.yaml": Read("zero-0", "none"),
        },
        named=("deepspeed_configs/zero3_bf16.json",),
    ),
    "huggingface/accelerate": Source(
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        {
            "examples/config_yaml_templates/deepspeed.yaml": Read("zero-1", None),
            "examples/config_yaml_templates/fsdp.yaml": Read("zero-3", "none"),
            "examples/torch_native_parallelism/configs/cp.yaml": Read("zero-3", "full"),
            "examples/torch_native_parallelism/configs/tp_hsdp.yaml": Read("zero-3", "none"),
        },
        named=("examples/deepspeed_config_templates/zero_stage1_config.json",),
    ),
    "deepspeedai/DeepSpeedExamples": Source(
        "45b4b7156c8794a3452a5a7d03dbd8d797068569",
        {
            "training/BingBertSquad/deepspeed_bsz24_config.json": Read("zero-0", None),
            "training/BingBertSquad/1-bit_adam/nccl/deepspeed_onebitadam_bsz96_config.json": Read(
                "zero-0", None, modelled=False
            ),
            "compression/gpt2/config/ds_config_W8A8_Qgroup64_fp16.json": Read("zero-0", None, modelled=False),
        },
    ),
    "NVIDIA/Megatron-LM": Source(
        "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        {
            "examples/gpt3/train_gpt3_175b_distributed.sh": Read("zero-0", "none"),
            "examples/llama/train_llama3_8b_h100_fp8.sh": Read("zero-1", "none"),
            "examples/mamba/train.sh": Read("zero-1", "none", modelled=False),
            "examples/mixtral/train_mixtral_8x7b_distributed.sh": Read("zero-1", "none", modelled=False),
            "examples/multimodal/pretrain_mistral_clip.sh": Read("zero-1", "none", modelled=False),
            "examples/post_training/modelopt/conf/Qwen/Qwen3-8B.sh": Read("zero-0", "none"),
            "examples/t5/train_t5_220m_distributed.sh": Read("zero-0", "none", modelled=False),
        },
    ),
}


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("clones", nargs="?", type=Path, help="a folder with OWNER/NAME of each repository")
    return made


def main() -> int:
    asked = options().parse_args()
    report, cases, failed = Report("public_configurations", asked), 0, 0
    report.print_machine()
    for repository, source in SOURCES.items():
        clone = None if asked.clones is None else asked.clones / repository
        if clone is None or not clone.exists():
            report.say(f"{repository}: skipped: no clone in {clone or 'a folder: give one'}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for path in (*source.files, *source.named):
                target = Path(folder) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file_at(clone, source.commit, path))
            for path, expected in source.files.items():
                found = conclusion(Path(folder) / path)
                cases += 1
                failed += found != expected
                verdict = "as read by a person" if found == expected else f"a person read {expected}"
                report.say(f"{repository}@{source.commit[:7]}:{path}: {words(found)}; {verdict}")
    if cases:
        report.add_outcome("public configurations", cases, failed)
    return 1 if failed else 0


def conclusion(path: Path) -> Read:
    found = read_configuration(path.read_text(encoding="utf-8"), str(path))
    table = found.tables.get("lora")
    adapter = None if table is None else (table["rank"], table.get("base"))
    return Read(found.layout.sharding, found.layout.recompute, not found.incomparable, adapter)


def words(found: Read) -> str:
    modelled = "comparable" if found.modelled else "not comparable"
    rank, base = found.adapter or (None, None)
    adapter = "" if rank is None else f"adapter of rank {rank} beside {base or 'whole'} weights, "
    return f"sharding {found.sharding}, recompute {found.recompute}, {adapter}{modelled}"


if __name__ == "__main__":
    sys.exit(main())
