"""Human integers, as SGLang writes them: ``32k`` = 32000, ``1.5M`` = 1500000, ``32Ki`` = 32768.
Case matters."""

from __future__ import annotations

import re
from decimal import Decimal

_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_PATTERN = re.compile(r"([+-]?\d+)(\.\d+)?(k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)


def parse_human_int(text: str) -> int:
    """The integer meant by ``text``.

    Decimals only with an SI suffix, and only where the result is whole (``1.5k``). Raises
    ValueError otherwise.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not an integer; write 32768, 32k (= 32000) or 32Ki (= 32768)"
        )
    whole, fraction, suffix = match.groups()
    if fraction is None:
        return int(whole) * (_SI | _IEC).get(suffix, 1)
    if suffix not in _SI:
        raise ValueError(f"{text!r}: decimals go with k, M, G or T only")
    value = Decimal(whole + fraction) * _SI[suffix]
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
