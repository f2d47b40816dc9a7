from __future__ import annotations

import pytest

from kvactors.errors import ConfigError
from kvactors.stores import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16 MB", 16777216),
        ("1.5GB", 1610612736),
        (4096, 4096),
        (0, 0),
        ("4096", 4096),
        ("12 kb", 12288),
        ("3KiB", 3072),
        ("2g", 2 << 30),
        ("1TB", 1 << 40),
        (" 7 B ", 7),
        ("0.1KB", 102),
        ("4503599627370497.5KB", 4503599627370497 * 1024 + 512),
    ],
)
def test_sizes_are_binary_and_exact(text: object, nbytes: int) -> None:
    assert parse_size(text, "capacity") == nbytes


@pytest.mark.parametrize("text", ["-5", "50%", "10XB", "", "MB", "1.GB", "1e3", "1 2", -1, True, 1.5, None, "١MB", "9" * 5000])
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match="global_segment_size = "):
        parse_size(text, "global_segment_size")
