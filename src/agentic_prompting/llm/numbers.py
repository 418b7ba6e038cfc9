"""Converts numbers to canonical texts, the same for equal numbers of every type, and back."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import SupportsFloat, TypeGuard

# A number with more digits before the point, or more zeros after it, is written with an exponent.
_MAX_WHOLE_DIGITS = 400
_MAX_ZEROS = 20
_MAX_PLAIN_LENGTH = 4_000
_SMALLEST_USD = 1e-12  # a smaller amount is rounded to nothing
_MAX_FLOAT32 = 3.4028234e38
_PLAIN = re.compile(
    r"[+-]?(?:(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def count_in_words(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things as text: `1 row`, `1,200 rows`, `2 replies`.

    Args:
        count (`int`): The number.
        noun (`str`): The thing in the singular.
        plural (`str`, *optional*): Its plural. Defaults to `noun` and an s.
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or noun + 's'}"


def format_usd(usd: float, decimals: int = 4) -> str:
    """Return an amount of dollars as text, without the sign: `1.2000`, and `0.0000046`.

    Args:
        usd (`float`): The amount.
        decimals (`int`, *optional*, defaults to `4`): Digits after the point. An amount that would
            keep less than two significant digits gets more of them.
    """
    # As large as 0.0010 with four decimals, or nothing at all: two digits are shown.
    smallest = 10.0 ** (1 - decimals)
    if _SMALLEST_USD <= usd < smallest:
        decimals = 1 - math.floor(math.log10(usd))
    return f"{usd:.{decimals}f}"


def is_missing(value: object) -> bool:
    """Return whether there is no value: `None`, a NaN of any type, pandas' `NA` or `NaT`."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    # A rational number is never NaN, and a large integer cannot be converted to a float.
    if isinstance(value, Rational) or not isinstance(value, Real):
        return False
    return math.isnan(value)


def is_number(value: object) -> TypeGuard[Real | Decimal]:
    """Return whether a value is a number of Python, NumPy, `decimal` or `fractions`.

    A `bool` is not.
    """
    return isinstance(value, (Real, Decimal)) and not isinstance(value, bool)


def number_text(value: Real | Decimal) -> str:
    """Return the canonical text of a number: equal numbers have one text, whatever their type.

    Whole numbers have no point; others have as few digits as distinguish them from their neighbours
    of the same type. A fraction without a finite decimal expansion is written as a fraction.

    Args:
        value (`int`, `float`, `Decimal`, `Fraction` or a NumPy number): The number.

    Raises:
        `ValueError`: The number is infinite or NaN.

    Example:

        >>> [number_text(value) for value in (4, 4.0, Decimal("4.00"), Fraction(8, 2))]
        ['4', '4', '4', '4']
        >>> number_text(2.50), number_text(1e-7), number_text(Fraction(1, 3))
        ('2.5', '0.0000001', '1/3')
        >>> number_text(Decimal("1e500"))
        '1e500'
    """
    # A fraction may have no finite decimal expansion.
    if isinstance(value, Rational) and not isinstance(value, Integral):
        return _fraction_text(Fraction(int(value.numerator), int(value.denominator)))
    if not isinstance(value, (Decimal, Integral)) and not math.isfinite(value):
        raise ValueError(f"an accepted answer must be a finite number, got {value!r}")

    # Convert to a decimal number without losing or adding a digit.
    try:
        if isinstance(value, Decimal):
            number = value
        elif isinstance(value, Integral):
            number = Decimal(int(value))
        else:  # `str` of a NumPy float has as many digits as its precision needs
            number = Decimal(str(value))
    except (ValueError, InvalidOperation):
        raise ValueError(
            f"an accepted answer must be a number of a usual size, got a {type(value).__name__}"
        ) from None
    if not number.is_finite():
        raise ValueError(f"an accepted answer must be a finite number, got {value!r}")
    return _decimal_text(number)


def answer_text(value: object) -> str:
    """Return an accepted answer as text: a text unchanged, a number by [`number_text`].

    Raises:
        `ValueError`: If it is neither, which means that the row is broken.
    """
    if isinstance(value, str):
        return str(value)
    if not is_number(value) or is_missing(value):
        raise ValueError(
            "an accepted answer must be a text or a number, got "
            f"{type(value).__name__}: {value!r:.80}"
        )
    return number_text(value)


def value_text(value: object) -> str:
    """Return any value as text.

    A number is written as its canonical text, a missing value as the empty text, everything else by
    `str`.
    """
    if is_missing(value):
        return ""
    if is_number(value):
        try:
            return number_text(value)
        except ValueError:  # infinite
            return str(value)
    return str(value)


def finite_float(value: SupportsFloat | str) -> float | None:
    """Convert a number to a float; `None` if it is NaN or too large for single precision.

    Rewards are added up in single precision.

    Raises:
        `TypeError` or `ValueError`: The value is not a number.
    """
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _MAX_FLOAT32 else None


def read_plain_number(text: str) -> Fraction | None:
    """Return the number that a text consists of; `None` if it contains anything else.

    A sign, commas between thousands, a dollar or percent sign and a full stop are accepted; `1e3`,
    `1/2` and numbers with leading zeros (`007` is a name) are not.

    Args:
        text (`str`): An answer.
    """
    if len(text) > _MAX_PLAIN_LENGTH:
        return None

    # Remove the marks around the digits.
    text = text.strip().replace("−", "-")
    if text.endswith("."):
        text = text[:-1]
    text = text.removesuffix("%").rstrip()
    # The sign may stand in front of a dollar sign.
    sign = text[:1] if text[:1] in ("+", "-") else ""
    digits = text.removeprefix(sign).removeprefix("$").strip()
    if digits[:1] in ("+", "-") or not _PLAIN.fullmatch(digits):
        return None
    return Fraction(sign + digits.replace(",", ""))


def _decimal_text(number: Decimal) -> str:
    """Write a decimal number, with an exponent if it is very large or very small."""
    # The significant digits, without zeros at either end.
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    significant = "".join(map(str, digits)).lstrip("0")
    exponent += len(significant) - len(significant.rstrip("0"))
    significant = significant.rstrip("0")
    if not significant:
        return "0"

    # The position of the point: the number is 0.SIGNIFICANT times ten to this power.
    point = len(significant) + exponent
    if -_MAX_ZEROS <= point <= _MAX_WHOLE_DIGITS:
        # A whole number, a number with digits on both sides of the point, or one below 1.
        if exponent >= 0:
            text = significant + "0" * exponent
        elif point > 0:
            text = f"{significant[:point]}.{significant[point:]}"
        else:
            text = f"0.{'0' * -point}{significant}"
    else:
        # Scientific notation has one digit before the point.
        decimals = f".{significant[1:]}" if len(significant) > 1 else ""
        text = f"{significant[0]}{decimals}e{point - 1}"
    return f"-{text}" if sign else text


def _fraction_text(fraction: Fraction) -> str:
    """Write a fraction as a decimal number if its expansion is finite, else as a fraction.

    The expansion is finite if the denominator has no prime factors except 2 and 5.
    """
    # Divide out both primes; the larger exponent is the number of decimal places.
    rest = fraction.denominator
    places = 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest //= prime
            count += 1
        places = max(places, count)
    if rest != 1 or places > _MAX_ZEROS:
        return f"{fraction.numerator}/{fraction.denominator}"
    scaled = Decimal(int(fraction * 10**places)).as_tuple()
    return _decimal_text(Decimal((scaled.sign, scaled.digits, -places)))
