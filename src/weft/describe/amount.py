"""Quantities that depend on the shape of a micro-batch: sums of products of b, s, 1/t, 1/d and 1/e.

A layer's work is data, not code, so it can be written to a file and hashed. Its variables are a rank's
samples of a micro-batch (b) and sequence length (s). Degrees are those of tensor (t), sequence (d) and expert
parallelism (e).
Context ranks divide the tokens equally: each has an equal part of every term in tokens or in token pairs.
`Amount.parse("2*4096*b*s/t + b")` reads what `str(amount)` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import InputError, Violation


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes for the evaluation of a layer; `micro_batch_size` counts a rank's own samples."""

    micro_batch_size: int
    sequence: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def sequence_parallel(self) -> int:
        """The number of tensor ranks that divide the tokens outside of divided products: all or 1.

        If context ranks divide the tokens, too, the tokens are those of one context rank.
        """
        own_tokens = self.sequence // self.context_parallel
        return self.tensor_parallel if own_tokens % self.tensor_parallel == 0 else 1

    @property
    def divides_tokens(self) -> bool:
        """True if context ranks divide the tokens of a sample."""
        return self.context_parallel > 1

    @property
    def adds_up_gradients(self) -> bool:
        """True if ranks of a replica have gradients of their own tokens or samples, which they add up."""
        return self.divides_tokens or self.expert_parallel > 1

    def own_part(self, whole: float) -> float:
        """Return one context rank's part of a quantity of all tokens in a sample."""
        return whole / self.context_parallel

    def all_parts(self, own: float) -> float:
        """Return the sum over all context ranks of an equal part `own`."""
        return own * self.context_parallel


@dataclass(frozen=True, slots=True)
class Term:
    """coefficient * b**batch * s**sequence / t**tensor / d**stream / e**expert."""

    coefficient: float
    batch: int = 0
    sequence: int = 0
    tensor: int = 0
    stream: int = 0
    expert: int = 0

    @property
    def powers(self) -> tuple[int, int, int, int, int]:
        return (self.batch, self.sequence, self.tensor, self.stream, self.expert)


@dataclass(frozen=True, slots=True)
class Amount:
    """A sum of terms, kept canonical: one term per combination of powers, sorted, zero terms dropped."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def of(
        cls,
        coefficient: float,
        *,
        batch: int = 0,
        sequence: int = 0,
        tensor: int = 0,
        stream: int = 0,
        expert: int = 0,
    ) -> Amount:
        return cls((Term(coefficient, batch, sequence, tensor, stream, expert),)) if coefficient else cls()

    def __call__(self, shape: Shape) -> float:
        b, s, t = shape.micro_batch_size, shape.sequence, shape.tensor_parallel
        d, c, e = shape.sequence_parallel, shape.context_parallel, shape.expert_parallel
        return float(
            sum(
                term.coefficient
                * b**term.batch
                * s**term.sequence
                / t**term.tensor
                / d**term.stream
                / e**term.expert
                / (c if term.sequence else 1)
                for term in self.terms
            )
        )

    def __add__(self, other: Amount) -> Amount:
        return _canonical(self.terms + other.terms)

    def __mul__(self, other: Amount | float) -> Amount:
        if not isinstance(other, Amount):
            other = Amount.of(other)
        return _canonical(
            tuple(
                Term(
                    left.coefficient * right.coefficient,
                    *map(sum, zip(left.powers, right.powers, strict=True)),
                )
                for left in self.terms
                for right in other.terms
            )
        )

    __rmul__ = __mul__

    def __str__(self) -> str:
        return " + ".join(_term_text(term) for term in self.terms) or "0"

    @classmethod
    def parse(cls, text: str) -> Amount:
        """Read an expression such as ``2*4096*b*s/t + b``.

        Raises:
            InputError: when the text has anything but numbers, b, s, t, d, e, ``*``, ``/`` and ``+``.
        """
        return _canonical(tuple(_parse_term(part.strip(), text) for part in text.split(" + ")))


ZERO = Amount()


def _canonical(terms: tuple[Term, ...]) -> Amount:
    sums: dict[tuple[int, int, int, int, int], float] = {}
    for term in terms:
        sums[term.powers] = sums.get(term.powers, 0.0) + term.coefficient
    return Amount(tuple(Term(value, *powers) for powers, value in sorted(sums.items()) if value))


def _term_text(term: Term) -> str:
    # repr of a float is the shortest text that reads back exactly; integers are written without ".0".
    number = repr(term.coefficient)
    number = number[:-2] if number.endswith(".0") else number
    letters = zip(("*b", "*s", "/t", "/d", "/e"), term.powers, strict=True)
    return number + "".join(letter * power for letter, power in letters)


def _parse_term(part: str, text: str) -> Term:
    powers = {"b": 0, "s": 0, "t": 0, "d": 0, "e": 0}
    coefficient = 1.0
    for index, divided in enumerate(part.split("/")):
        for position, factor in enumerate(divided.split("*")):
            factor = factor.strip()
            dividing = index > 0 and position == 0
            if factor in powers:
                if dividing != (factor in ("t", "d", "e")):
                    problem = f"{text!r}: only t, d and e may divide, and they only divide"
                    raise InputError(Violation("amount", problem))
                powers[factor] += 1
                continue
            try:
                value = float(factor)
            except ValueError:
                raise InputError(
                    Violation("amount", f"{text!r}: {factor!r} is neither a number nor b, s, t, d or e")
                ) from None
            if dividing and value == 0.0:
                raise InputError(Violation("amount", f"{text!r} divides by zero"))
            coefficient = coefficient / value if dividing else coefficient * value
    return Term(coefficient, *powers.values())
