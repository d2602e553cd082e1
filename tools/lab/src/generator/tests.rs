use std::collections::HashMap;

use super::*;
use tierbed_io::lines::{LineReader, Packing};

fn generate(options: GeneratorOptions, first: u64, count: usize) -> SampleBatch {
    let mut batch = SampleBatch::new(Generator::shape());
    Generator::new(options).unwrap().fill(first, count, &mut batch).unwrap();
    batch
}

fn column(batch: &SampleBatch, feature: usize) -> &[i64] {
    &batch.values[(feature - 1) * batch.len()..feature * batch.len()]
}

#[test]
fn a_sample_depends_on_its_number_only() {
    let generator = Generator::new(GeneratorOptions::new(4, 0.001)).unwrap();
    let mut whole = SampleBatch::new(Generator::shape());
    generator.fill(1_000, 300, &mut whole).unwrap();
    for (first, count) in [(1_000, 1), (1_200, 100), (1_299, 1)] {
        let mut part = SampleBatch::new(Generator::shape());
        generator.fill(first, count, &mut part).unwrap();
        let skipped = first as usize - 1_000;
        assert_eq!(part.label, whole.label[skipped..skipped + count]);
        assert_eq!(part.dense, whole.dense[skipped * 13..(skipped + count) * 13]);
        for feature in 1..=26 {
            assert_eq!(column(&part, feature), &column(&whole, feature)[skipped..skipped + count]);
        }
    }
    let other = generate(GeneratorOptions::new(5, 0.001), 1_000, 300);
    assert_ne!(other.values, whole.values);
}

#[test]
fn samples_do_not_change_between_versions() {
    // A checkpoint stores the number of the next sample: it must mean the same sample later.
    let batch = generate(GeneratorOptions::new(1, 0.01), 0, 512);
    let hash = batch.values.iter().fold(0u64, |hash, value| mix64(hash ^ *value as u64));
    let clicks: f32 = batch.label.iter().sum();
    assert_eq!((hash, clicks), (PINNED_HASH, PINNED_CLICKS));
}

#[test]
fn ids_lie_in_their_tables_at_every_scale() {
    for scale in [1e-6, 0.003, 1.0] {
        let options = GeneratorOptions { drift: 50.0, ..GeneratorOptions::new(2, scale) };
        let rows = *Generator::new(options).unwrap().row_counts();
        let batch = generate(options, 1 << 40, 2_000);
        for (feature, rows) in (1..=26).zip(rows) {
            let ids = column(&batch, feature);
            assert!(ids.iter().all(|id| (0..i64::from(rows)).contains(id)), "C{feature}");
        }
    }
    assert_eq!(row_counts(1.0).iter().map(|rows| u64::from(*rows)).sum::<u64>(), 33_762_577);
    for rows in [1_000, 10_000, 1_000_000, 40_000_000] {
        let scale = GeneratorOptions::scale_for_rows(rows);
        let found: u64 = row_counts(scale).iter().map(|rows| u64::from(*rows)).sum();
        assert!(found <= rows && (found * 10 > rows * 8), "{rows}: {found}");
    }
}

#[test]
fn chains_are_exact_functions() {
    for drift in [0.0, 30.0] {
        let options = GeneratorOptions { drift, ..GeneratorOptions::new(3, 0.01) };
        let batch = generate(options, 500_000, 40_000);
        let chains: [&[usize]; 3] = [&[3, 12, 21, 16, 4, 24], &[7, 11, 13], &[15, 18, 2]];
        for chain in chains {
            for pair in chain.windows(2) {
                let mut parents: HashMap<i64, i64> = HashMap::new();
                for (child, parent) in column(&batch, pair[0]).iter().zip(column(&batch, pair[1])) {
                    assert_eq!(*parents.entry(*child).or_insert(*parent), *parent, "{pair:?}");
                }
            }
        }
    }
}

#[test]
fn drift_replaces_the_popular_tokens_slowly() {
    let top = |drift: f64, first: u64| -> Vec<i64> {
        let options = GeneratorOptions { drift, ..GeneratorOptions::new(6, 0.01) };
        let batch = generate(options, first, 20_000);
        let mut counts: HashMap<i64, u32> = HashMap::new();
        for id in column(&batch, 7) {
            *counts.entry(*id).or_default() += 1;
        }
        let mut ids: Vec<_> = counts.into_iter().collect();
        ids.sort_by_key(|(id, count)| (std::cmp::Reverse(*count), *id));
        ids.into_iter().take(20).map(|(id, _)| id).collect()
    };
    let kept = |drift: f64, later: u64| {
        let start = top(drift, 0);
        top(drift, later).iter().filter(|id| start.contains(id)).count()
    };
    assert!(kept(0.0, 1_000_000_000) >= 15);
    assert!((3..=17).contains(&kept(0.5, 1_000_000)), "{}", kept(0.5, 1_000_000));
    assert!(kept(1.0, 3_000_000) <= 5);
}

#[test]
fn the_log_looks_like_the_real_one() {
    let generator = Generator::new(GeneratorOptions::new(1, 1.0)).unwrap();
    let found = measure(80_000, Generator::has_missing(), &mut |first, count, batch| {
        generator.fill(first, count, batch)
    })
    .unwrap();
    let near = |found: f64, expected: f64, tolerance: f64| (found - expected).abs() <= tolerance;
    // Targets: the first 80,000 rows of the real log; the click share is that of the whole log.
    assert!(near(found.click_share, 0.256, 0.01), "{found:?}");
    assert!(near(found.tokens_per_sample, 23.2, 0.3), "{found:?}");
    assert!(near(found.top_1_percent_share, 0.70, 0.03), "{found:?}");
    assert!(near(found.top_10_percent_share, 0.87, 0.03), "{found:?}");
    assert!(near(found.seen_once_share, 0.71, 0.05), "{found:?}");
    assert!((0.73..0.79).contains(&found.logistic_auc), "{found:?}");
    for (feature, expected) in
        [(3, 35_000.0), (12, 33_000.0), (21, 31_000.0), (16, 28_000.0), (4, 21_000.0)]
    {
        let distinct = found.distinct_counts[feature - 1] as f64;
        assert!(near(distinct / expected, 1.0, 0.15), "C{feature}: {distinct}");
    }
}

#[test]
fn files_hold_the_same_samples_as_batches() {
    let folder = tempfile::tempdir().unwrap();
    let generator = Generator::new(GeneratorOptions::new(8, 0.001)).unwrap();
    let mut texts = Vec::new();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let path = folder.path().join("log");
        let mut reported = 0;
        write_criteo(&generator, 100..40_100, &path, packing, &mut |count| {
            reported = count;
            Ok(())
        })
        .unwrap();
        assert_eq!(reported, 40_000);
        let mut reader = LineReader::open(&path).unwrap();
        assert_eq!(reader.packing(), packing);
        let mut lines = Vec::new();
        while let Some(line) = reader.next_line().unwrap() {
            lines.push(String::from_utf8(line.to_vec()).unwrap());
        }
        texts.push(lines);
    }
    assert!(texts[0] == texts[1] && texts[0] == texts[2]);
    let batch = generate(*generator.options(), 100, 40_000);
    let parser = tierbed_data::layout::Parser::criteo();
    let mut sample = tierbed_data::layout::Sample::new(Generator::shape());
    let mut ids: Vec<HashMap<u64, i64>> = vec![HashMap::new(); 26];
    let mut tokens: Vec<HashMap<i64, u64>> = vec![HashMap::new(); 26];
    for (at, line) in texts[0].iter().enumerate() {
        parser.parse(line.as_bytes(), &mut sample).unwrap();
        assert_eq!(sample.label, batch.label[at]);
        assert_eq!(sample.dense, batch.dense[at * 13..(at + 1) * 13]);
        for (feature, token) in sample.fingerprints.iter().enumerate() {
            let id = column(&batch, feature + 1)[at];
            assert_eq!(*ids[feature].entry(*token).or_insert(id), id);
            assert_eq!(*tokens[feature].entry(id).or_insert(*token), *token);
        }
    }
    let stopped =
        write_criteo(&generator, 0..10, &folder.path().join("stop"), Packing::Plain, &mut |_| {
            Err(Error::invalid("stop"))
        });
    assert_eq!(stopped.unwrap_err().message(), "stop");
}

#[test]
fn bad_options_are_refused() {
    for (scale, drift) in
        [(0.0, 0.0), (1.1, 0.0), (f64::NAN, 0.0), (0.5, -1.0), (0.5, f64::INFINITY)]
    {
        assert!(Generator::new(GeneratorOptions { seed: 1, scale, drift }).is_err());
    }
    let generator = Generator::new(GeneratorOptions::new(1, 0.01)).unwrap();
    let mut batch = SampleBatch::new(BatchShape { dense_count: 1, feature_count: 26 });
    assert!(generator.fill(0, 1, &mut batch).is_err());
}

const PINNED_HASH: u64 = 17_167_202_195_512_618_636;
const PINNED_CLICKS: f32 = 139.0;
