"""Kubernetes: every manifest against the schemas of its version, which know all keys and their types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from answering import answer

VERSION = kubernetes_validate.latest_version()


def check(file: Path, case: Mapping[str, Any]) -> None:
    for manifest in yaml.safe_load_all(file.read_text()):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


if __name__ == "__main__":
    answer(f"schemas of {VERSION}", check)
