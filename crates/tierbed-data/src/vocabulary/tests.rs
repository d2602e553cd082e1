use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;
use tierbed_core::ErrorKind;

use super::*;

fn names(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("f{at}")).collect()
}

fn build(
    samples: &[Vec<String>],
    memory_budget_bytes: u64,
    min_count: u64,
    path: &Path,
) -> VocabularyReport {
    let options = VocabularyOptions {
        memory_budget_bytes,
        scratch_folder: path.parent().unwrap().to_path_buf(),
        min_count,
    };
    let feature_count = samples.first().map_or(1, Vec::len);
    let mut builder = VocabularyBuilder::new(&names(feature_count), options).unwrap();
    for sample in samples {
        let fingerprints: Vec<_> =
            sample.iter().zip(0..).map(|(token, at)| fingerprint(at, token.as_bytes())).collect();
        builder.add_sample(&fingerprints).unwrap();
    }
    builder.finish(path).unwrap()
}

/// What anybody would write: a map from token to count, ids by first appearance.
fn oracle(samples: &[Vec<String>], feature: usize, min_count: u64) -> HashMap<&str, i64> {
    let mut counts: HashMap<&str, u64> = HashMap::new();
    for sample in samples {
        *counts.entry(&sample[feature]).or_default() += 1;
    }
    let mut ids = HashMap::from([("", 0)]);
    let mut next = 1;
    for sample in samples {
        let token = sample[feature].as_str();
        if counts[token] >= min_count && !ids.contains_key(token) {
            ids.insert(token, next);
            next += 1;
        }
    }
    ids
}

fn check_against_oracle(samples: &[Vec<String>], min_count: u64, vocabulary: &Vocabulary) {
    for feature in 0..vocabulary.feature_count() {
        let ids = oracle(samples, feature, min_count);
        for sample in samples {
            let token = &sample[feature];
            let expected = ids.get(token.as_str()).copied().unwrap_or(0);
            assert_eq!(vocabulary.id(feature, token.as_bytes()), expected, "{feature} {token:?}");
        }
        assert_eq!(vocabulary.row_counts().nth(feature).unwrap(), ids.len() as u64);
        assert_eq!(vocabulary.id(feature, b"never seen"), 0);
    }
}

#[test]
fn a_tiny_budget_spills_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = tierbed_core::env::SplitMix64::new(5);
    let samples: Vec<Vec<String>> = (0..30_000)
        .map(|_| {
            let skewed = rng.below(1 + rng.clone().below(40_000));
            vec![format!("{skewed}"), format!("{:x}", rng.below(20_000)), String::new()]
        })
        .collect();
    for min_count in [1, 3] {
        let (small, large) = (folder.path().join("small"), folder.path().join("large"));
        let spilled = build(&samples, MEMORY_BUDGET_BYTES_MIN, min_count, &small);
        let unlimited = build(&samples, 1 << 40, min_count, &large);
        assert!(spilled.run_count > 20, "{}", spilled.run_count);
        assert_eq!(unlimited.run_count, 0);
        assert_eq!(spilled.features, unlimited.features);
        assert_eq!(std::fs::read(&small).unwrap(), std::fs::read(&large).unwrap());
        assert_eq!(spilled.features[2].missing_count, 30_000);
        for resident_budget_bytes in [0, 400_000, u64::MAX] {
            let vocabulary = Vocabulary::open(&small, resident_budget_bytes).unwrap();
            assert!(vocabulary.resident_bytes() <= resident_budget_bytes);
            assert_eq!(vocabulary.resident_bytes() > 0, resident_budget_bytes > 0);
            check_against_oracle(&samples, min_count, &vocabulary);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_log_gets_the_oracles_ids(
        tokens in proptest::collection::vec(proptest::collection::vec(0u32..9_000, 2), 1..9_000),
        min_count in 1u64..4,
    ) {
        let text = |&token: &u32| if token == 0 { String::new() } else { format!("t{token}") };
        let samples: Vec<Vec<String>> =
            tokens.iter().map(|sample| sample.iter().map(text).collect()).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary");
        build(&samples, MEMORY_BUDGET_BYTES_MIN, min_count, &path);
        check_against_oracle(&samples, min_count, &Vocabulary::open(&path, 0).unwrap());
    }

    #[test]
    fn search_finds_what_is_there_even_when_values_are_not_uniform(
        mut keys in proptest::collection::vec(
            prop_oneof![any::<u64>(), 1u64..200, (u64::MAX - 200)..=u64::MAX], 0..300),
        wanted in prop_oneof![any::<u64>(), 0u64..200, (u64::MAX - 200)..=u64::MAX],
    ) {
        keys.retain(|key| *key != 0);
        keys.sort_unstable();
        keys.dedup();
        let bytes: Vec<_> = keys.iter().map(|key| key.to_le_bytes()).collect();
        for key in keys.iter().chain([&wanted]) {
            prop_assert_eq!(search(&bytes, *key), keys.binary_search(key).ok());
        }
    }

    #[test]
    fn any_flipped_bit_or_cut_is_an_error_never_a_panic(at in 0usize..4_000, bit in 0u8..8) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary");
        let sample = |at: usize| vec![format!("a{at}"), format!("b{}", at % 3)];
        let samples: Vec<_> = (0..200).map(sample).collect();
        build(&samples, 1 << 20, 1, &path);
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at % bytes.len();
        save(&path, &bytes[..at]);
        let error = Vocabulary::open(&path, 0).unwrap_err();
        let expected = if at < 8 { ErrorKind::Invalid } else { ErrorKind::Corruption };
        prop_assert_eq!(error.kind(), expected, "{}", error);
        bytes[at] ^= 1 << bit;
        save(&path, &bytes);
        for resident_budget_bytes in [0, 1 << 20] {
            // Zeroes between sections are the one part no checksum covers, and nobody reads.
            if let Err(error) = Vocabulary::open(&path, resident_budget_bytes) {
                let expected = if at < 8 { ErrorKind::Invalid } else { ErrorKind::Corruption };
                prop_assert_eq!(error.kind(), expected, "{}", error);
            } else {
                check_against_oracle(&samples, 1, &Vocabulary::open(&path, 0).unwrap());
            }
        }
    }
}

fn save(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    File::create(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn bad_calls_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = |memory_budget_bytes, min_count| VocabularyOptions {
        memory_budget_bytes,
        scratch_folder: folder.path().to_path_buf(),
        min_count,
    };
    assert!(VocabularyBuilder::new(&names(1), options(1, 1)).is_err());
    assert!(VocabularyBuilder::new(&names(1), options(1 << 20, 0)).is_err());
    assert!(VocabularyBuilder::new(&[], options(1 << 20, 1)).is_err());
    let mut builder = VocabularyBuilder::new(&names(2), options(1 << 20, 1)).unwrap();
    assert!(builder.add_sample(&[1]).is_err());
    assert!(builder.add_column(2, std::iter::empty()).is_err());
    builder.add_column(1, [&b"x"[..], b"y", b"x"].into_iter()).unwrap();
    builder.note_samples(3);
    let path = folder.path().join("vocabulary");
    let report = builder.finish(&path).unwrap();
    assert_eq!(report.file_bytes, std::fs::metadata(&path).unwrap().len());
    let vocabulary = Vocabulary::open(&path, 0).unwrap();
    assert_eq!(
        (vocabulary.id(1, b"x"), vocabulary.id(1, b"y"), vocabulary.sample_count()),
        (1, 2, 3)
    );
    assert_eq!(vocabulary.feature_names().collect::<Vec<_>>(), ["f0", "f1"]);
    let absent = Vocabulary::open(&folder.path().join("absent"), 0).unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::Io);
}

#[test]
#[should_panic(expected = "feature 2 of 2")]
fn a_feature_that_is_none_has_no_ids() {
    let folder = tempfile::tempdir().unwrap();
    let samples = [vec!["a".to_owned(), "b".to_owned()]];
    let path = folder.path().join("v");
    build(&samples, 1 << 20, 1, &path);
    let _ = Vocabulary::open(&path, 0).unwrap().id(2, b"a");
}

#[test]
fn the_format_text_names_the_constants() {
    let text = include_str!("../../../../docs/reference/formats/vocabulary.md");
    assert!(text.contains("`TBVOCAB\\n`") && MAGIC == *b"TBVOCAB\n");
    assert!(text.contains(&format!("version {VERSION}")));
    assert!(text.contains(&format!("header of {HEADER_BYTES} bytes")));
    assert!(text.contains(&format!("entry of {ENTRY_BYTES} bytes")));
    assert!(text.contains(&format!("multiple of {SECTION_ALIGN_BYTES} bytes")));
}
