"""Train a folder's model on bytes of a text with `transformers.Trainer`, and write a line of JSON per step.

Run by `torch.distributed.run`, once per rank. Every rank holds all samples and the Trainer shares them out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """A text cut into samples of `sequence` bytes, each shape (sequence,) in int64."""

    def __init__(self, whole: torch.Tensor, sequence: int) -> None:
        self._samples = whole[: len(whole) // sequence * sequence].view(-1, sequence)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        sample = self._samples[place].long()
        return {"input_ids": sample, "labels": sample}


class Times(TrainerCallback):  # type: ignore[misc]
    """Writes when each step ended; the loss of logged steps, too."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._write({"step": state.global_step - 1, "time_s": time.time()})

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "loss" in logs:
            self._write({"last_loss": float(logs["loss"])})

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._file, flush=True)


def options() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("model", type=Path)
    made.add_argument("text", type=Path)
    made.add_argument("out", type=Path)
    for name in ("sequence", "micro-batch-size", "micro-batches", "steps", "log-every", "held-out"):
        made.add_argument(f"--{name}", type=int, required=True)
    made.add_argument("--learning-rate", type=float, required=True)
    made.add_argument("--fsdp", action="store_true")
    return made


def main() -> None:
    asked = options().parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    sharded = {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    arguments = TrainingArguments(
        output_dir=str(asked.out / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=asked.micro_batch_size,
        per_device_eval_batch_size=asked.micro_batch_size,
        eval_on_start=True,
        prediction_loss_only=True,
        gradient_accumulation_steps=asked.micro_batches,
        max_steps=asked.steps,
        learning_rate=asked.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=asked.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"fsdp": "full_shard auto_wrap", "fsdp_config": sharded} if asked.fsdp else {}),
    )
    text = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8)
    held_out = asked.held_out * asked.sequence
    main_rank = arguments.process_index == 0
    Trainer(
        model=model,
        args=arguments,
        train_dataset=Bytes(text[:-held_out], asked.sequence),
        eval_dataset=Bytes(text[-held_out:], asked.sequence),
        callbacks=[Times(asked.out / "steps.jsonl")] if main_rank else [],
    ).train()
    dist.barrier()
    # gloo's threads abort a normal exit now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
