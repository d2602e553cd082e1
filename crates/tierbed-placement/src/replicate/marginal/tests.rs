//! Tests of blocks: the same whenever and wherever they are made.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use super::*;
use crate::progress::BuildReport;

/// Circles of six rows in a row of 40 circles; a query asks for rows of one, and for a stranger.
fn log() -> QueryLog {
    let mut rng = SplitMix64::new(8);
    let queries = (0..2500).map(|_| {
        let circle = rng.below(40) as u32;
        let mut rows: Vec<u32> = (0..3).map(|_| circle + 40 * rng.below(6) as u32).collect();
        rows.push(rng.below(240) as u32);
        rows
    });
    QueryLog::from_queries(250, queries).expect("in range")
}

fn options() -> GrowthOptions {
    GrowthOptions { block_rows: 64, ..GrowthOptions::new(8) }
}

const RATIOS: [f64; 3] = [0.4, 0.0, 0.1];

/// Builds with a folder until `steps_max` steps are told.
fn build(
    log: &QueryLog,
    options: &GrowthOptions,
    (folder, steps_max): (&Path, u64),
) -> Result<Vec<Placement>> {
    let mut report = |report: BuildReport| match report.done {
        done if done < steps_max => Ok(()),
        _ => Err(Error::invalid("power cut")),
    };
    let progress = Progress::new(&mut report);
    let context = BuildContext { resume_dir: Some(folder), ..BuildContext::alone(&progress) };
    Ok(by_marginal_gain_in(
        log.clone(),
        BlockRules { options, is_guarded: false },
        &RATIOS,
        &context,
    )?
    .0)
}

fn kept(folder: &Path, step: &str) -> usize {
    let names = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a name"));
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with(step)).count()
}

#[test]
fn a_stopped_build_goes_on_to_the_same_placements() {
    let (log, options) = (log(), options());
    let whole =
        RATIOS.map(|ratio| by_marginal_gain(log.clone(), &options, ratio).expect("a ratio"));
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let mut seen = Vec::new();
    for steps_max in [50, 300, 500, 700, 900] {
        let stopped = build(&log, &options, (folder, steps_max)).expect_err("stopped");
        assert!(stopped.to_string().contains("power cut"), "{stopped}");
        seen.push((kept(folder, "homes"), kept(folder, "seats")));
    }
    // Blocks were kept one after the other, and none was lost.
    assert!(seen.windows(2).all(|pair| pair[0] <= pair[1]), "{seen:?}");
    assert!(seen.iter().any(|&(homes, _)| (1..4).contains(&homes)), "{seen:?}");
    assert!(seen.iter().any(|&(_, seats)| (1..4).contains(&seats)), "{seen:?}");
    assert_eq!(build(&log, &options, (folder, 2000)).expect("goes on"), whole);
    // All is kept: nothing is left to be told of but the end of stages.
    assert_eq!(build(&log, &options, (folder, 2000)).expect("reads all"), whole);
    assert_eq!((kept(folder, "homes"), kept(folder, "seats")), (4, 4));
}

#[test]
fn what_was_kept_is_used_and_checked() {
    let (log, options) = (log(), options());
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let whole = build(&log, &options, (folder, 2000)).expect("whole");
    let other = GrowthOptions {
        bisection: crate::partition::BisectionOptions { seed: 7, ..options.bisection.clone() },
        ..options.clone()
    };
    let refused = build(&log, &other, (folder, 2000)).expect_err("another seed");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    for name in ["blocks", "homes-2", "seats-1"] {
        let path = folder.join(name);
        let bytes = std::fs::read(&path).expect("kept");
        let mut wrong = bytes.clone();
        wrong[bytes.len() / 2] ^= 1;
        File::create(&path).and_then(|mut file| file.write_all(&wrong)).expect("space");
        let error = build(&log, &options, (folder, 2000)).expect_err("damaged");
        assert_eq!(error.kind(), ErrorKind::Corruption, "{name}");
        assert!(error.to_string().contains(name), "{error}");
        std::fs::remove_file(&path).expect("there");
        assert_eq!(build(&log, &options, (folder, 2000)).expect("made again"), whole);
        assert_eq!(std::fs::read(&path).expect("kept again"), bytes, "{name}");
    }
}

#[test]
fn guarded_blocks_are_those_that_won_their_trials() {
    let mut rng = SplitMix64::new(21);
    let mut query = |_| [0; 5].map(|_| rng.below(500) as u32);
    let chance = QueryLog::from_queries(500, (0..900).map(&mut query)).expect("in range");
    for log in [log(), chance] {
        let options = options();
        let progress = Progress::silent();
        let context = BuildContext::alone(&progress);
        let graph = Hypergraph::from_log(log.clone()).expect("few rows");
        let blocks = Blocks::split(graph, &options, &context).expect("nothing kept");
        let row_counts = blocks.rows().map(<[u32]>::len);
        let of_blocks = blocks.run(row_counts, |source, row_count| {
            let stage = context.stage(0.0..1.0, 1);
            let reads = source.with(|part, _| try_on_part(part, &options.bisection, source.seed));
            let pages = match reads.way() {
                Way::Bisected => source.with(|part, _| bisected_pages(part, &options.bisection)),
                way => source.block().home_pages(&options.bisection, way, &stage),
            };
            assert_eq!(pages.iter().map(Vec::len).sum::<usize>(), row_count);
            Ok((reads, pages))
        });
        let of_blocks = of_blocks.expect("nobody stopped it");
        let rules = BlockRules { options: &options, is_guarded: true };
        let homes = home_pages(&blocks, rules, &context, 1.0).expect("few rows");
        assert!(homes
            .iter()
            .map(|homes| (homes.trial, &homes.pages))
            .eq(of_blocks.iter().map(|(reads, pages)| (*reads, pages))));
        let guarded = by_marginal_gain_in(log, rules, &RATIOS, &context);
        let (placements, trial) = guarded.expect("ratios");
        let sum = of_blocks.iter().fold(TrialReads::default(), |sum, block| sum.plus(block.0));
        assert_eq!((placements.len(), trial), (3, sum));
    }
}

#[test]
fn blocks_of_too_many_pins_are_divided_and_sampled() {
    let log = log();
    let mut reads = Vec::new();
    for block_pins in [u32::MAX, 2000, 200] {
        let options = GrowthOptions { block_pins, ..options() };
        let placement = by_marginal_gain(log.clone(), &options, 0.0).expect("a ratio");
        reads.push(crate::connectivity_sum(&placement, &log));
        let again = GrowthOptions {
            bisection: crate::partition::BisectionOptions {
                thread_count: 3,
                ..options.bisection.clone()
            },
            ..options
        };
        assert_eq!(by_marginal_gain(log.clone(), &again, 0.0).expect("same"), placement);
    }
    let random = crate::partition::random(250, 8, 1).expect("room");
    let by_chance = crate::connectivity_sum(&random, &log);
    // Fewer queries teach less, but far more than none.
    assert!(reads[0] < reads[2] && reads[2] < by_chance, "{reads:?}, {by_chance} by chance");
}
