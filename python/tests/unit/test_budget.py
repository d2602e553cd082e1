"""Are sizes read as people write them?"""

import pytest

from tierbed._util.bytes import format_bytes, parse_bytes
from tierbed.errors import InvalidError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512B", 512),
        ("16MiB", 16 << 20),
        ("16 mib", 16 << 20),
        ("16M", 16 << 20),
        ("4GiB", 4 << 30),
        ("4GB", 4_000_000_000),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_read(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "many", "4 XiB", "-1", -1, True, "1e3", "4GiB/s"])
def test_what_is_no_size_names_the_argument(text: int | str) -> None:
    with pytest.raises(InvalidError, match="dram_budget"):
        parse_bytes(text, "dram_budget")


def test_sizes_are_written_for_people() -> None:
    sizes = [format_bytes(size) for size in (10, 2048, 3 << 20, 5 << 30, 6 << 40)]
    assert sizes == ["10 B", "2.0 KiB", "3.0 MiB", "5.0 GiB", "6.00 TiB"]


@pytest.mark.parametrize("size", [None, 1.5, True])
def test_what_is_no_size_is_named(size: object) -> None:
    with pytest.raises(InvalidError, match="dram_budget must be a number of bytes"):
        parse_bytes(size, "dram_budget")
