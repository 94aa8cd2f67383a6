"""The options of CLAN: keys of `[sync]`, and the bytes of a block in each codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from weft.describe.toml_table import Count, TomlTable

NAME = "clan"
Codec = Literal["scaled-sign", "top-k", "random-k", "linear-dithering", "natural-dithering", "fp16"]
FP32_BYTES, SCALE_BYTES, INDEX_BYTES = 4, 4, 2
# Indices have 16 bits.
LARGEST_BLOCK = 1 << 16


class ClanOptions(TomlTable):
    """The further keys of `[sync]` under `method = "clan"`."""

    codec: Codec = Field(
        default="linear-dithering", description="how gradients and their sums are encoded on the way"
    )
    bits: Annotated[int, Field(ge=2, le=8)] = Field(default=8, description="of a number, in both ditherings")
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

    @property
    def keeps_errors(self) -> bool:
        """True if ranks keep errors for the next step."""
        return self.errors == "kept" or (self.errors == "by codec" and CODECS[self.codec].biased)

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
    """

    block_bytes: Callable[[ClanOptions], int]
    biased: bool
    times: PieceTimes


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
        ),
        "random-k": CodecTraits(
            block_bytes=lambda options: options.kept * options.value_bits // 8,
            biased=True,
            times=PieceTimes(5.1, 14.0, 11.0),
        ),
        "linear-dithering": CodecTraits(
            block_bytes=_codes_and_scale, biased=False, times=PieceTimes(1.4, 3.2, 2.9)
        ),
        "natural-dithering": CodecTraits(
            block_bytes=_codes_and_scale, biased=False, times=PieceTimes(5.6, 19.0, 6.3)
        ),
        "fp16": CodecTraits(
            block_bytes=lambda options: 2 * options.block, biased=True, times=PieceTimes(1.5, 4.0, 8.6)
        ),
    }
)
