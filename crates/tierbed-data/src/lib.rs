//! Click-log readers and vocabularies of tokens.
//!
//! First step of the training river: logs come in as lines ([`tierbed_io::lines`]), a line becomes
//! a label, dense features and token fingerprints ([`layout`], [`fingerprint`]), a [`vocabulary`]
//! turns fingerprints into dense row ids, and a [`reader`] hands out batches as flat arrays
//! ([`batch`]). Everything streams; memory is bounded by the batch and the budgets given.

pub mod batch;
pub mod fingerprint;
pub mod layout;
pub mod reader;
pub mod vocabulary;

pub use batch::{BatchShape, SampleBatch};
pub use layout::LogFormat;
pub use reader::{BadLines, LogReader, Position, ReaderOptions};
pub use vocabulary::{Vocabulary, VocabularyBuilder, VocabularyOptions, VocabularyReport};
