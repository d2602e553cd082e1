//! Prints how a log looks: a generated one, or a Criteo file for comparison.
//!
//! `cargo run --release -p tierbed-lab --example calibrate -- generate [SAMPLES [SCALE [SEED]]]`
//! `cargo run --release -p tierbed-lab --example calibrate -- read FILE`

use std::path::{Path, PathBuf};

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Error, Result};
use tierbed_data::{
    BadLines, LogFormat, LogReader, ReaderOptions, SampleBatch, Vocabulary, VocabularyBuilder,
    VocabularyOptions,
};
use tierbed_lab::generator::{measure, Calibration, CRITEO_CARDINALITIES};
use tierbed_lab::{Generator, GeneratorOptions};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: f64| -> f64 {
        arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let calibration = match arguments.first().map(String::as_str) {
        Some("generate") => {
            generate(number(1, 80_000.0) as usize, number(2, 1.0), number(3, 1.0) as u64)?
        }
        Some("read") => read(Path::new(arguments.get(1).map_or("", String::as_str)))?,
        _ => return Err(Error::invalid("say generate [SAMPLES [SCALE [SEED]]], or read FILE")),
    };
    print(&calibration);
    Ok(())
}

fn generate(sample_count: usize, scale: f64, seed: u64) -> Result<Calibration> {
    let clock = SystemClock::default();
    let generator = Generator::new(GeneratorOptions::new(seed, scale))?;
    let made_us = clock.now_us();
    let mut batch = SampleBatch::new(Generator::shape());
    let batch_len = 4_096;
    for at in 0..64 {
        generator.fill(at * batch_len, batch_len as usize, &mut batch)?;
    }
    let rate = 64.0 * batch_len as f64 * 1e6 / (clock.now_us() - made_us) as f64;
    println!("prepared in {made_us} us; {rate:.0} samples/s on one core");
    measure(sample_count, Generator::has_missing(), &mut |first, count, batch| {
        generator.fill(first, count, batch)
    })
}

fn read(path: &Path) -> Result<Calibration> {
    let clock = SystemClock::default();
    let options = ReaderOptions { format: LogFormat::Criteo, bad_lines: BadLines::Fail };
    let mut reader = LogReader::open(vec![path.to_path_buf()], options)?;
    let folder = std::env::temp_dir();
    let vocabulary_path: PathBuf =
        folder.join(format!("calibrate-{}.vocabulary", std::process::id()));
    let vocabulary_options =
        VocabularyOptions { memory_budget_bytes: 256 << 20, scratch_folder: folder, min_count: 1 };
    let mut builder = VocabularyBuilder::new(reader.parser().feature_names(), vocabulary_options)?;
    while reader.count_tokens(&mut builder, 1 << 16)? > 0 {}
    let counted_us = clock.now_us();
    let text_bytes = reader.progress().total_bytes as f64;
    let sample_count = builder.sample_count() as usize;
    builder.finish(&vocabulary_path)?;
    let built_us = clock.now_us();
    let vocabulary = Vocabulary::open(&vocabulary_path, 256 << 20)?;
    let mut reader = LogReader::open(vec![path.to_path_buf()], options)?;
    let mut batch = SampleBatch::new(reader.parser().shape());
    let opened_us = clock.now_us();
    while reader.next_batch(&vocabulary, 4_096, &mut batch)? > 0 {}
    let read_us = clock.now_us() - opened_us;
    println!(
        "{sample_count} samples; counted at {:.0} MB/s, vocabulary finished in {} us, \
         batches read at {:.0} MB/s",
        text_bytes / counted_us as f64,
        built_us - counted_us,
        text_bytes / read_us as f64,
    );
    let mut reader = LogReader::open(vec![path.to_path_buf()], options)?;
    let calibration = measure(sample_count, Generator::has_missing(), &mut |_, count, batch| {
        reader.next_batch(&vocabulary, count, batch).map(|_| ())
    });
    let removed = std::fs::remove_file(&vocabulary_path);
    removed.map_err(|error| Error::os("cannot remove the vocabulary", error))?;
    calibration
}

fn print(calibration: &Calibration) {
    println!("clicks            {:.4}", calibration.click_share);
    println!("tokens a sample   {:.2}", calibration.tokens_per_sample);
    println!("top 1 % share     {:.4}", calibration.top_1_percent_share);
    println!("top 10 % share    {:.4}", calibration.top_10_percent_share);
    println!("ids seen once     {:.4}", calibration.seen_once_share);
    println!("distinct ids      {}", calibration.distinct_counts.iter().sum::<u64>());
    println!("logistic AUC      {:.4}", calibration.logistic_auc);
    println!("feature  published    distinct  top share  missing");
    let columns = CRITEO_CARDINALITIES.iter().zip(&calibration.distinct_counts);
    let columns = columns.zip(&calibration.top_shares).zip(&calibration.missing_shares);
    for (number, (((published, distinct), top), missing)) in (1..).zip(columns) {
        println!("C{number:<6} {published:>10} {distinct:>11} {top:>10.4} {missing:>8.4}");
    }
}
