"""Files of other stacks, recognised by their contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from weft.doors.configuration import Configuration, broken
from weft.doors.explain import accelerate, axolotl, deepspeed, megatron, torchtitan
from weft.errors import InputError, Violation


class Reader(NamedTuple):
    """Functions that recognise and read one stack's files; both get the text and the file's name."""

    recognises: Callable[[str, str], bool]
    read: Callable[[str, str], Configuration]


# The first that recognises a text reads it.
READERS: Mapping[str, Reader] = MappingProxyType(
    {
        door.NAME: Reader(door.recognises, door.read)
        for door in (deepspeed, accelerate, axolotl, torchtitan, megatron)
    }
)
_READABLE = (
    "a DeepSpeed JSON, an Accelerate YAML, an Axolotl YAML, a torchtitan TOML or Python, a Megatron-LM "
    "command line, or a trace of torch.profiler (JSON or .json.gz)"
)


def read_configuration(text: str, name: str) -> Configuration:
    """Return the configuration in a text.

    Raises:
        InputError: when no stack's reader recognises it, with the list of readable files.
    """
    for reader in READERS.values():
        if reader.recognises(text, name):
            return reader.read(text, name)
    if (problem := broken(text, name)) is not None:
        raise InputError(Violation(name, problem))
    raise InputError(Violation(name, f"not recognised; can be read: {_READABLE}"))
