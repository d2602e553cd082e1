//! Click-log readers, vocabularies of tokens and a seeded generator.
//!
//! First step of the training river: logs come in as lines ([`tierbed_io::lines`]), a line becomes
//! a label, dense features and token fingerprints ([`layout`], [`fingerprint`]), a [`vocabulary`]
//! turns fingerprints into dense row ids, and a [`reader`] hands out batches as flat arrays
//! ([`batch`]). Where there is no log, the [`generator`] makes one up, the same one for the same
//! seed; a [`trace`] is ids alone, at the size of the published log. Everything streams; memory is
//! bounded by the batch and the budgets given.

pub mod batch;
pub mod fingerprint;
pub mod fuzz;
pub mod generator;
pub mod layout;
pub mod reader;
pub mod trace;
pub mod vocabulary;

pub use batch::{BatchShape, SampleBatch};
pub use generator::{Generator, GeneratorOptions};
pub use layout::LogFormat;
pub use reader::{BadLines, LogReader, Position, ReaderOptions};
pub use vocabulary::{Vocabulary, VocabularyBuilder, VocabularyOptions, VocabularyReport};
