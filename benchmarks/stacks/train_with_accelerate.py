"""What `accelerate launch` starts: two steps of a model of one layer, with the batch of the launch line."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator

STEPS, WIDTH = 2, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int)
    arguments = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=arguments.gradient_accumulation_steps)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    each = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    samples = torch.randn(STEPS * each * accelerator.num_processes, WIDTH)
    loader = torch.utils.data.DataLoader(samples, batch_size=arguments.per_device_train_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    print(f"{accelerator.process_index} of {accelerator.num_processes} processes: {steps} steps", flush=True)


if __name__ == "__main__":
    main()
