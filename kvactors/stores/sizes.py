"""Sizes as people write them in configuration files."""

from __future__ import annotations

import re

from kvactors.errors import ConfigError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PATTERN = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT]?)(?:I?B)?)", re.IGNORECASE | re.ASCII)


def parse_size(text: object, key: str) -> int:
    """Bytes from an int, or from text such as "16 MB" (16777216) or "1.5GB" (1610612736).

    Units are binary whatever their spelling (K, KB, KiB = 1024), as in Mooncake's configuration; case and a space do not
    matter; a fraction of a byte is cut. ConfigError naming `key` for anything else, also for negative sizes.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if isinstance(text, str):
        found = _PATTERN.fullmatch(text.strip())
        if found:
            number, unit = found.groups()
            whole, _, fraction = number.partition(".")
            scale = 1 << 10 * _UNITS[unit.upper()]
            return int(whole) * scale + int(fraction or 0) * scale // int("1" + "0" * len(fraction))
    raise ConfigError(f'{key} = {text!r}: not a size; write bytes as a whole number, or text such as "16 MB" or "1.5GB"')
