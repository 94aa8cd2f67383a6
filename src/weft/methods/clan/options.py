"""The options of CLAN: keys of `[sync]`, and the bytes of a block in each codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from weft.describe.toml_table import Count, TomlTable
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

NAME = "clan"
Codec = Literal["scaled-sign", "top-k", "random-k", "linear-dithering", "natural-dithering", "fp16", "fp32"]
FP32_BYTES, SCALE_BYTES, INDEX_BYTES = 4, 4, 2
# Pieces of a stage under way at once: the first one is decoded before the fourth one is encoded.
IN_FLIGHT = 3
# Indices have 16 bits.
LARGEST_BLOCK = 1 << 16
# The first and the last step between two changes do not count.
LEAST_STEPS = 4


class PiecePlace(NamedTuple):
    """The number of a stage, and of a piece of its gradient."""

    stage: int
    part: int

    def __str__(self) -> str:
        return f"stage {self.stage}, piece {self.part}"


class ClanOptions(TomlTable):
    """The further keys of `[sync]` under `method = "clan"`."""

    codec: Codec = Field(
        default="linear-dithering", description="how gradients and their sums are encoded on the way"
    )
    bits: Annotated[int, Field(ge=2, le=8)] = Field(
        default=8, description="of a number, in both ditherings; no other codec reads it"
    )
    ratio: Annotated[float, Field(ge=1)] = Field(
        default=1000.0, description="gradients for each one that top-k or random-k sends"
    )
    value_bits: Literal[16, 32] = Field(
        default=32, description="of a number that top-k or random-k sends, in bf16 or fp32"
    )
    block: Annotated[int, Field(ge=32, le=LARGEST_BLOCK, multiple_of=32)] = Field(
        default=4096, description="gradients with one scale, or of which the same number is sent"
    )
    piece_bytes: Count = Field(
        default=4_096_000,
        description="of a piece of a gradient in fp32, which is one of a queue of exchanges",
    )
    minimum_bytes: Annotated[int, Field(ge=0)] = Field(
        default=65_536, description="of a parameter in fp32; gradients of smaller ones are sent whole"
    )
    errors: Literal["by codec", "kept", "dropped"] = Field(
        default="by codec",
        description="whether ranks add the part that a codec left out to the next gradient; `by codec`: if "
        "it is biased",
    )

    servers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="devices without accelerators, behind those of the stages, that add gradients up; 0: the "
        "replicas do it",
    )

    piece_codecs: str = Field(
        default="",
        description='pieces with another codec than the rest, by stage and number: "0.2 fp32, 1.0 fp16"',
    )

    change_codec_every: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="steps after which the piece whose codec delays steps most may get another; 0: never",
    )

    @field_validator("change_codec_every")
    @classmethod
    def _measured_steps(cls, given: int) -> int:
        if 0 < given < LEAST_STEPS:
            problem = f"{given} steps are too few to measure codecs in"
            raise InputError(Violation("", problem, str(LEAST_STEPS)))
        return given

    @field_validator("piece_codecs")
    @classmethod
    def _of_pieces(cls, given: str) -> str:
        _parsed(given)
        return given

    @model_validator(mode="after")
    def _sends_something(self) -> ClanOptions:
        if "ratio" in self._read and self.ratio > self.block:
            problem = f"of a block of {self.block} gradients, a ratio of {self.ratio:g} sends less than one"
            raise InputError(Violation("ratio", problem, str(float(self.block))))
        return self

    @model_validator(mode="after")
    def _pieces_hold_a_block(self) -> ClanOptions:
        # Each piece costs a plan and a step several instructions.
        least = FP32_BYTES * self.block
        if self.piece_bytes < least:
            problem = f"{self.piece_bytes} hold less than a block of {self.block} gradients"
            raise InputError(Violation("piece_bytes", problem, str(least)))
        return self

    @property
    def codec_of_piece(self) -> Mapping[PiecePlace, Codec]:
        """The codecs of the pieces that have one of their own."""
        return _parsed(self.piece_codecs)

    @property
    def codecs(self) -> frozenset[Codec]:
        """All codecs in use."""
        return frozenset((self.codec, *self.codec_of_piece.values()))

    @property
    def unread(self) -> list[str]:
        """The keys with another value than the default that no codec in use reads."""
        fields = type(self).model_fields
        some_codec_reads = dict.fromkeys(key for traits in CODECS.values() for key in traits.reads)
        given = [key for key in some_codec_reads if getattr(self, key) != fields[key].default]
        return [key for key in given if key not in self._read]

    @property
    def _read(self) -> frozenset[str]:
        """The keys that the codecs in use read, of those that not all codecs read."""
        return frozenset(key for codec in self.codecs for key in CODECS[codec].reads)

    @property
    def keeps_errors(self) -> bool:
        """True if ranks keep errors for the next step: those of all pieces, or none."""
        biased = any(CODECS[one].biased for one in self.codecs)
        return self.errors == "kept" or (self.errors == "by codec" and biased)

    def of_piece(self, stage: int, part: int) -> ClanOptions:
        """Return the options of one piece, as if all pieces had its codec."""
        return self.all_with(self.codec_of_piece.get(PiecePlace(stage, part), self.codec))

    def all_with(self, codec: Codec) -> ClanOptions:
        """Return the options with this codec for all pieces, and errors kept as before."""
        errors = "kept" if self.keeps_errors else "dropped"
        return self.model_copy(update={"codec": codec, "piece_codecs": "", "errors": errors})

    def with_piece(self, piece: PiecePlace, codec: Codec) -> dict[str, str]:
        """Return the keys that give one piece another codec, and keep errors if they are kept now."""
        each = {**self.codec_of_piece, piece: codec}
        words = [f"{one.stage}.{one.part} {each[one]}" for one in sorted(each) if each[one] != self.codec]
        keys = {"piece_codecs": ", ".join(words)}
        forgets = self.keeps_errors and not self.model_copy(update=keys).keeps_errors
        return keys | ({"errors": "kept"} if forgets else {})

    @property
    def times(self) -> PieceTimes:
        """The seconds of a piece, as multiples of those of weft's quantiser."""
        times = CODECS[self.codec].times
        packs = self.codec.endswith("dithering") and self.bits not in (4, 8)
        return PieceTimes(*(PACKED * one for one in times)) if packs else times

    @property
    def kept(self) -> int:
        """The numbers of a block that top-k or random-k sends, at least one."""
        return max(1, int(self.block / self.ratio))

    @property
    def block_bytes(self) -> int:
        """The bytes of a block on the way."""
        return CODECS[self.codec].block_bytes(self)

    def payload_bytes(self, blocks: int) -> int:
        """Return the bytes of so many blocks in one message, a multiple of 4."""
        return 4 * -(-blocks * self.block_bytes // 4)


class PieceTimes(NamedTuple):
    """Seconds of the three computations of a piece on a CPU, as multiples of those of weft's quantiser.

    `compress` is a multiple of its time to encode the piece; the others are multiples of its time to decode.
    They include the copies to and from the gradient. Source: `benchmarks/codec_queues.py`.
    """

    compress: float
    aggregate: float
    decompress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTraits:
    """The traits of a codec that plans and predictions need.

    Attributes:
        block_bytes: returns the bytes of a block.
        biased: decoded numbers differ from the encoded ones in the mean, too.
        times: those of 4 and 8 bits, where a codec has bits.
        reads: the keys of `ClanOptions` that not all codecs read.
    """

    block_bytes: Callable[[ClanOptions], int]
    biased: bool
    times: PieceTimes
    reads: tuple[str, ...] = ()


def _parsed(given: str) -> dict[PiecePlace, Codec]:
    """Return the codecs of single pieces.

    Raises:
        InputError: for words of another form, and for a piece that comes twice.
    """
    found: dict[PiecePlace, Codec] = {}
    for words in filter(None, map(str.strip, given.split(","))):
        place, _, codec = words.partition(" ")
        numbers = place.split(".")
        if len(numbers) != 2 or not all(one.isascii() and one.isdecimal() for one in numbers):
            raise InputError(Violation("", f"{shown(words)} is no STAGE.PIECE CODEC", "0.2 fp32"))
        named: Codec | None = next((one for one in CODECS if one == codec), None)
        if named is None:
            near = nearest(codec, CODECS) or "fp32"
            raise InputError(Violation("", f"{shown(words)} names no codec", f"{place} {near}"))
        piece = PiecePlace(*map(int, numbers))
        if piece in found:
            raise InputError(Violation("", f"{piece} has two codecs", f"{place} {found[piece]}"))
        found[piece] = named
    return found


# Codes of other bits than 4 and 8 take longer to pack.
PACKED = 3.0


def _codes_and_scale(options: ClanOptions) -> int:
    return options.block * options.bits // 8 + SCALE_BYTES


CODECS: Mapping[Codec, CodecTraits] = MappingProxyType(
    {
        "scaled-sign": CodecTraits(
            block_bytes=lambda options: options.block // 8 + SCALE_BYTES,
            biased=True,
            times=PieceTimes(3.3, 3.6, 3.3),
        ),
        "top-k": CodecTraits(
            block_bytes=lambda options: options.kept * (INDEX_BYTES + options.value_bits // 8),
            biased=True,
            times=PieceTimes(3.5, 8.8, 6.5),
            reads=("ratio", "value_bits"),
        ),
        "random-k": CodecTraits(
            block_bytes=lambda options: options.kept * options.value_bits // 8,
            biased=True,
            times=PieceTimes(5.1, 14.0, 11.0),
            reads=("ratio", "value_bits"),
        ),
        "linear-dithering": CodecTraits(
            block_bytes=_codes_and_scale,
            biased=False,
            times=PieceTimes(1.4, 3.2, 2.9),
            reads=("bits",),
        ),
        "natural-dithering": CodecTraits(
            block_bytes=_codes_and_scale,
            biased=False,
            times=PieceTimes(5.6, 19.0, 6.3),
            reads=("bits",),
        ),
        "fp16": CodecTraits(
            block_bytes=lambda options: 2 * options.block, biased=True, times=PieceTimes(1.5, 4.0, 8.6)
        ),
        "fp32": CodecTraits(
            block_bytes=lambda options: FP32_BYTES * options.block,
            biased=False,
            # From its ratios to the times of fp16 and linear-dithering in one short run.
            times=PieceTimes(0.9, 2.4, 2.9),
        ),
    }
)
