//! Times computed by hand, bytes of the device below, and equal runs.

use std::sync::Arc;

use tierbed_core::env::SplitMix64;

use super::*;
use tierbed_io::{open_engine, EngineChoice, EngineOptions, MemoryDevice};
use tierbed_sim::conformance;

/// 128-byte vectors, of which row `r` is at byte `r * 128`; byte `b` of the device is `b / 128`.
fn device(model: SsdModel, rows: u64) -> VectorSsd<MemoryDevice> {
    let bytes = MemoryDevice::new("ssd");
    let all: Vec<u8> = (0..rows * 128).map(|at| (at / 128) as u8).collect();
    bytes.write_at(0, &all).unwrap();
    let ssd = VectorSsd::new(bytes, model).unwrap();
    let extents = vec![Extent { row_count: rows, offset_bytes: 0 }];
    assert_eq!(ssd.add_table(VectorTable::new(128, extents).unwrap()), 0);
    ssd
}

/// Before the flash: two registers and the DMA of the indices.
fn way_in_ns(rows: u64) -> u64 {
    2 * 500 + 1000 + (rows * 8 * 1000).div_ceil(3200)
}

/// After the flash: merger, status register, DMA of the vectors.
fn way_out_ns(rows: u64) -> u64 {
    rows * 10 + 500 + 1000 + (rows * 128 * 1000).div_ceil(3200)
}

#[test]
fn one_vector_takes_the_time_of_its_parts() {
    let ssd = device(SsdModel::with_read_us(10), 4096);
    let mut out = [0; 128];
    let ticket = ssd.submit(0, 0, &[7], Some(&mut out)).unwrap();
    // 32 bytes on each of four channels at 800 bytes per microsecond.
    let flash_ns = way_in_ns(1) + 5 + 10_000 + 40;
    assert!(!ssd.is_ready(flash_ns - 1, ticket).unwrap());
    assert!(ssd.is_ready(flash_ns, ticket).unwrap());
    assert_eq!(ssd.wait(ticket).unwrap(), flash_ns + way_out_ns(1));
    assert_eq!(out, [7; 128]);
    assert!(ssd.wait(ticket).is_err());
    let expected =
        SsdCounts { flash_pages: 4, channel_bytes: 128, host_bytes: 128, vectors: 1, blocks: 0 };
    assert_eq!(ssd.counts(), expected);
}

#[test]
fn pages_of_one_die_wait_and_those_of_others_do_not() {
    let model = SsdModel::with_read_us(10);
    // 65,536 bytes of a stripe are 512 rows; stripe 8 is on the die of stripe 0.
    let last_ns = |rows: [u64; 2]| {
        let ssd = device(model, 8192);
        let ticket = ssd.submit(0, 0, &rows, None).unwrap();
        ssd.wait(ticket).unwrap() - way_out_ns(2)
    };
    let first_ns = way_in_ns(2) + 5 + 10_000 + 40;
    assert_eq!(last_ns([0, 8 * 512]), first_ns + 10_000 + 40);
    // The other die begins 5 ns later and finds the channel busy for 35 ns.
    assert_eq!(last_ns([0, 512]), first_ns + 40);
}

#[test]
fn a_block_moves_whole_pages_of_4_kib() {
    let ssd = device(SsdModel::with_read_us(10), 4096);
    let ticket = ssd.submit_blocks(100, 4000, 200);
    // Two blocks of one stripe: the second read of the die follows the first.
    let one_ns = 10_000 + 1024 * 1000 / 800;
    let way_ns = 500 + 2000 + 1000 + 8192 * 1000 / 3200;
    assert_eq!(ssd.wait(ticket).unwrap(), 100 + 2 * one_ns + way_ns);
    let counts = ssd.counts();
    assert_eq!((counts.blocks, counts.host_bytes, counts.channel_bytes), (2, 8192, 8192));
}

#[test]
fn vectors_across_stripes_read_both() {
    let bytes = MemoryDevice::new("ssd");
    bytes.set_len(1 << 20).unwrap();
    let ssd = VectorSsd::new(bytes, SsdModel::with_read_us(4)).unwrap();
    let extents = vec![
        Extent { row_count: 3, offset_bytes: 1 << 19 },
        Extent { row_count: 1000, offset_bytes: 65_536 - 100 },
    ];
    let table = ssd.add_table(VectorTable::new(144, extents).unwrap());
    let ticket = ssd.submit(0, table, &[3], None).unwrap();
    ssd.wait(ticket).unwrap();
    // 100 bytes of one stripe are 32 per channel, 44 of the next 16.
    assert_eq!((ssd.counts().flash_pages, ssd.counts().channel_bytes), (8, 4 * 32 + 4 * 16));
    assert!(ssd.submit(0, table, &[1003], None).is_err());
    assert!(ssd.submit(0, 9, &[0], None).is_err());
    assert!(ssd.submit(0, table, &[0], Some(&mut [0; 10])).is_err());
}

/// The oracle for bytes is the device below; for times a second run, and what no device can
/// beat: a die reads one page at a time.
#[test]
fn many_lookups_in_flight_are_exact_and_repeat() {
    let run = || {
        let ssd = device(SsdModel::with_read_us(30), 50_000);
        let mut rng = SplitMix64::new(5);
        let (mut host_ns, mut ends, mut reads) = (0, Vec::new(), [0u64; 8]);
        for _ in 0..50 {
            let tickets: Vec<_> = (0..4)
                .map(|_| {
                    let rows: Vec<u64> = (0..20).map(|_| rng.below(50_000)).collect();
                    rows.iter().for_each(|row| reads[(row / 512 % 8) as usize] += 1);
                    let mut out = vec![0; 20 * 128];
                    let ticket = ssd.submit(host_ns, 0, &rows, Some(&mut out)).unwrap();
                    for (row, vector) in rows.iter().zip(out.chunks(128)) {
                        assert!(vector.iter().all(|&byte| byte == *row as u8));
                    }
                    host_ns += 1000;
                    ticket
                })
                .collect();
            for ticket in tickets {
                host_ns = host_ns.max(ssd.wait(ticket).unwrap());
                ends.push(host_ns);
            }
        }
        assert!(host_ns >= reads.iter().max().unwrap() * 30_000);
        (ends, ssd.counts())
    };
    assert_eq!(run(), run());
}

#[test]
fn it_is_a_device() {
    let build = || VectorSsd::new(MemoryDevice::new("ssd"), SsdModel::with_read_us(4)).unwrap();
    let options = EngineOptions { choice: EngineChoice::Pread, ..EngineOptions::default() };
    let mut engine = open_engine(&options).unwrap();
    conformance::check_device(engine.as_mut(), Arc::new(build()), 3, 200);
    let ssd = build();
    ssd.write_at(0, &[1; 4096]).unwrap();
    ssd.read_at(0, &mut [0; 4096]).unwrap();
    assert_eq!(ssd.host_ns(), 500 + 2000 + 4000 + 1280 + 1000 + 1280);
    assert!(
        VectorSsd::new(MemoryDevice::new("ssd"), SsdModel { channels: 0, ..ssd.model }).is_err()
    );
}
