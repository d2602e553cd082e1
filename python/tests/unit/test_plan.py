"""Are memory, disk and reads predicted before a run?"""

import pytest
import torch

import tierbed as tb
from tierbed.train.sizing import TableShape, predict, rows_per_page


def batch(*rows: int) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor(
        ["f"], torch.tensor(rows), lengths=torch.ones(len(rows), dtype=torch.int64)
    )


def test_rows_fit_behind_header_and_presence_bits() -> None:
    for record_bytes in (8, 12, 72, 148, 1000, 4068):
        count = rows_per_page(record_bytes)
        used = 24 + 4 * -(-count // 32) + count * record_bytes
        assert used <= 4096
        more = count + 1
        assert 24 + 4 * -(-more // 32) + more * record_bytes > 4096


def test_a_row_longer_than_a_page_has_a_longer_page() -> None:
    table = TableShape("wide", 10, 2048, "sgd")
    assert table.page_bytes == 12288
    assert table.page_count == 10


def test_rows_in_the_buffer_are_not_read_again() -> None:
    table = TableShape("t", 100_000, 16)
    roomy = predict([table], {"f": "t"}, 64 << 20, [batch(1, 2, 3), batch(1, 2, 4)])
    assert roomy.unique_rows_per_batch == 3
    assert roomy.first_pass_reads_per_batch == 0, "rows never written need no read"
    assert roomy.later_pass_reads_per_batch == 0, "all rows stayed in memory"
    assert roomy.first_pass_hit_rate == pytest.approx(2 / 6)
    assert roomy.later_pass_hit_rate == 1.0


def test_a_small_buffer_reads_from_disk_on_the_second_pass() -> None:
    table = TableShape("t", 10_000_000, 16)
    page = rows_per_page(table.record_bytes)
    batches = [batch(*(page * (64 * at + j) for j in range(64))) for at in range(64)]
    least = predict([table], {"f": "t"}, 1, batches).dram_min_bytes
    tight = predict([table], {"f": "t"}, least, batches)
    assert tight.fits
    assert not predict([table], {"f": "t"}, least - 1, batches).fits
    assert tight.later_pass_reads_per_batch >= 64
    assert tight.disk_bytes_after_sample == 64 * 64 * 4096
    assert tight.disk_max_bytes == 2 * table.page_count * 4096


def test_memory_parts_add_up_to_the_budget() -> None:
    tables = [TableShape("t", 100_000, 8)]
    prediction = predict(tables, {"f": "t"}, 1 << 20, [batch(1, 1, 1)])
    parts = (
        prediction.page_map_bytes
        + prediction.io_buffer_bytes
        + prediction.scratch_bytes
        + prediction.row_buffer_bytes
    )
    assert parts == 1 << 20
    few = predict([TableShape("t", 100, 8)], {"f": "t"}, 1 << 20, [batch(1, 1, 1)])
    assert few.row_buffer_bytes == 100 * (40 + 28), "no more room than there are rows"
    assert prediction.ids_per_batch == 3
    assert prediction.unique_rows_per_batch == 1
