"""Fine-tune a Hugging Face folder on text of your own, and load the result with transformers.

    python fine_tune.py [FOLDER] [--data TEXT] [--steps N] [--out FOLDER]

Without a folder, a small GPT-2 with random weights stands in for one; without data, the sources of Python's
standard library are learned.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

RUN = """\
[model]
hf = "{folder}"
weights = true                  # start from the weights in the folder

[task]
kind = "causal-lm"
data = "{data}"
sequence = {sequence}

[train]
global_batch = 16
steps = {steps}

[optimizer]
name = "adamw"
learning_rate = 3e-4
warm_up_steps = {warm_up_steps}
schedule = "cosine"
final_learning_rate = 3e-5
"""


def stand_in(folder: Path) -> Path:
    """A small GPT-2 whose tokens are bytes, as a folder that transformers wrote."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def weft(*words: str) -> None:
    print("$ weft", *words, flush=True)
    subprocess.run([sys.executable, "-m", "weft", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--data", default="python-stdlib")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fine-tuned"), help="a folder that is not there"
    )
    given = parser.parse_args()

    given.out.mkdir(parents=True)
    folder = given.folder or stand_in(given.out / "model")
    run_file = given.out / "run.toml"
    data = Path(given.data).resolve() if Path(given.data).exists() else given.data
    run_file.write_text(
        RUN.format(
            folder=folder.resolve(),
            data=data,
            sequence=given.sequence,
            steps=given.steps,
            warm_up_steps=min(10, given.steps // 4),
        )
    )
    run, exported = given.out / "run", given.out / "exported"
    weft("train", str(run_file), "--directory", str(run))
    weft("export", str(run), str(exported))

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported)
    print(f"{exported}: {type(model).__name__} with {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
