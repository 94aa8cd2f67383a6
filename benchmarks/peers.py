"""Other people's programs beside weft, on a question of your own; `peer_figures.py` takes figures of both.

    python benchmarks/peers.py gpt2 --on 16xa100-80gb --compare weft,uniform --calculon FOLDER --metis FOLDER

Clone https://github.com/calculon-ai/calculon and https://github.com/SamsungLabs/Metis. --help has all words.
"""

from __future__ import annotations

import sys

from peer_programs.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:] or ["--help"]))
