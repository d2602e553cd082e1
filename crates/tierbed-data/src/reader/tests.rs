use std::fs::File;
use std::io::Write;

use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use super::*;
use crate::vocabulary::VocabularyOptions;

const CRITEO: ReaderOptions =
    ReaderOptions { format: LogFormat::Criteo, bad_lines: BadLines::Fail };

/// Three files of 700 samples each, one of each packing; some tokens are missing.
fn generated(folder: &Path) -> Vec<PathBuf> {
    let mut rng = SplitMix64::new(2);
    let mut write = |at: usize| {
        let path = folder.join(format!("part-{at}"));
        let file = File::create(&path).unwrap();
        let mut packed: Box<dyn Write> = match at {
            0 => Box::new(file),
            1 => Box::new(flate2::write::GzEncoder::new(file, flate2::Compression::fast())),
            _ => Box::new(zstd::Encoder::new(file, 1).unwrap().auto_finish()),
        };
        for _ in 0..700 {
            let label = rng.below(2);
            let numbers: String = (0..13).map(|_| format!("\t{}", rng.below(1000))).collect();
            let token = |draw: u64| if draw == 0 { String::new() } else { format!("{draw:x}") };
            let tokens: String = (0..26).map(|_| format!("\t{}", token(rng.below(300)))).collect();
            writeln!(packed, "{label}{numbers}{tokens}").unwrap();
        }
        path
    };
    (0..3).map(&mut write).collect()
}

fn vocabulary(paths: &[PathBuf], options: ReaderOptions, folder: &Path) -> Vocabulary {
    let mut reader = LogReader::open(paths.to_vec(), options).unwrap();
    let vocabulary_options = VocabularyOptions {
        memory_budget_bytes: 1 << 20,
        scratch_folder: folder.to_path_buf(),
        min_count: 1,
    };
    let names = reader.parser().feature_names().to_vec();
    let mut builder = VocabularyBuilder::new(&names, vocabulary_options).unwrap();
    while reader.count_tokens(&mut builder, 100).unwrap() > 0 {}
    let progress = reader.progress();
    assert_eq!(progress.done_bytes, progress.total_bytes);
    let path = folder.join("vocabulary");
    builder.finish(&path).unwrap();
    Vocabulary::open(&path, 1 << 20).unwrap()
}

fn batches(reader: &mut LogReader, vocabulary: &Vocabulary, size: usize) -> Vec<SampleBatch> {
    let mut batches = Vec::new();
    loop {
        let mut batch = SampleBatch::new(reader.parser().shape());
        if reader.next_batch(vocabulary, size, &mut batch).unwrap() == 0 {
            return batches;
        }
        batches.push(batch);
    }
}

#[test]
fn a_log_in_parts_reads_as_one_and_resumes_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let paths = generated(folder.path());
    let vocabulary = vocabulary(&paths, CRITEO, folder.path());
    assert_eq!(vocabulary.sample_count(), 2_100);
    let all = batches(&mut LogReader::open(paths.clone(), CRITEO).unwrap(), &vocabulary, 150);
    assert_eq!(all.iter().map(SampleBatch::len).sum::<usize>(), 2_100);
    for done in 0..=14 {
        let mut reader = LogReader::open(paths.clone(), CRITEO).unwrap();
        let mut batch = SampleBatch::new(reader.parser().shape());
        for _ in 0..done {
            reader.next_batch(&vocabulary, 150, &mut batch).unwrap();
        }
        let position = reader.position();
        assert_eq!(position.sample_count, done as u64 * 150);
        let mut resumed = LogReader::open(paths.clone(), CRITEO).unwrap();
        resumed.seek(position).unwrap();
        let mut skipped = LogReader::open(paths.clone(), CRITEO).unwrap();
        assert_eq!(skipped.skip(done as u64 * 150).unwrap(), done as u64 * 150);
        for mut reader in [resumed, skipped] {
            let rest = batches(&mut reader, &vocabulary, 150);
            assert_eq!(rest.len(), all.len() - done);
            for (found, expected) in rest.iter().zip(&all[done..]) {
                assert_eq!(found.values, expected.values);
                assert_eq!(found.label, expected.label);
                assert_eq!(found.dense, expected.dense);
            }
        }
    }
    let beyond = Position { file_index: 4, ..Position::default() };
    assert!(LogReader::open(paths, CRITEO).unwrap().seek(beyond).is_err());
}

#[test]
fn bad_lines_stop_with_their_number_or_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let good = format!("1{}{}\n", "\t7".repeat(13), "\tab".repeat(26));
    let path = folder.path().join("log");
    let text = format!("{good}{good}oops\n{good}\n{good}");
    File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    let skip = ReaderOptions { bad_lines: BadLines::Skip, ..CRITEO };
    let vocabulary = vocabulary(std::slice::from_ref(&path), skip, folder.path());
    let mut reader = LogReader::open(vec![path.clone()], skip).unwrap();
    let mut batch = SampleBatch::new(reader.parser().shape());
    assert_eq!(reader.next_batch(&vocabulary, 10, &mut batch).unwrap(), 4);
    assert_eq!(reader.position().skipped_line_count, 2);
    assert_eq!(batch.values, vec![1; 26 * 4]);
    let mut reader = LogReader::open(vec![path.clone()], skip).unwrap();
    assert_eq!(reader.skip(3).unwrap(), 3);
    assert_eq!(reader.next_batch(&vocabulary, 10, &mut batch).unwrap(), 1);

    let mut reader = LogReader::open(vec![path.clone()], CRITEO).unwrap();
    let error = reader.next_batch(&vocabulary, 10, &mut batch).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let text = error.to_string();
    for part in [path.to_str().unwrap(), "line: 3", "oops", "remedy"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn avazu_files_read_by_their_header() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, text: &str| {
        let path = folder.path().join(name);
        File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
        path
    };
    let one = save("one", "id,click,hour,C1,site\n1,0,14102100,a,x\n2,1,14102101,a,\n");
    let two = save("two", "id,click,hour,C1,site\n3,1,14102200,b,x\n");
    let options = ReaderOptions { format: LogFormat::Avazu, bad_lines: BadLines::Fail };
    let paths = vec![one.clone(), two];
    let vocabulary = vocabulary(&paths, options, folder.path());
    let mut reader = LogReader::open(paths, options).unwrap();
    let all = batches(&mut reader, &vocabulary, 8);
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].label, [0.0, 1.0, 1.0]);
    assert!(all[0].dense.is_empty());
    // Hour 00 of both days is one token; a missing site is id 0.
    assert_eq!(all[0].values, [1, 2, 1, 1, 1, 2, 1, 0, 1]);
    let other = save("other", "id,click,hour,C1,app\n3,1,14102200,b,x\n");
    let mut reader = LogReader::open(vec![one, other], options).unwrap();
    assert!(reader.skip(9).unwrap_err().to_string().contains("another header"));
    let empty = save("empty", "");
    assert_eq!(LogReader::open(vec![empty], options).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn wrong_files_and_vocabularies_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(LogReader::open(vec![], CRITEO).unwrap_err().kind(), ErrorKind::Invalid);
    let absent = LogReader::open(vec![folder.path().join("absent")], CRITEO).unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::Io);
    let error = LogReader::open(vec![folder.path().to_path_buf()], CRITEO).unwrap_err();
    assert!(error.to_string().contains("folder"), "{error}");
    let path = folder.path().join("vocabulary");
    let options = VocabularyOptions {
        memory_budget_bytes: 1 << 20,
        scratch_folder: folder.path().to_path_buf(),
        min_count: 1,
    };
    VocabularyBuilder::new(&["one".to_owned()], options).unwrap().finish(&path).unwrap();
    let vocabulary = Vocabulary::open(&path, 0).unwrap();
    let paths = generated(folder.path());
    let mut reader = LogReader::open(paths, CRITEO).unwrap();
    let mut batch = SampleBatch::new(reader.parser().shape());
    let error = reader.next_batch(&vocabulary, 1, &mut batch).unwrap_err();
    assert!(error.to_string().contains("vocabulary"), "{error}");
}
