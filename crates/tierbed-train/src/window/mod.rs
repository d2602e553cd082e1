//! The window engine: training over a store that reads rows by number.
//!
//! An [`WindowEngine`] joins the two rivers of training over one store: [`lookup`] (ids in, pooled
//! vectors out), [`update`] (gradients in, rows stepped at their home), [`prefetch`] (the rows
//! of the next batches, brought ahead), [`checkpoint`] and [`publish`]. Between store and
//! kernels stands the [`row_buffer`], the only home of a row while it is in memory.

mod backends;
pub mod background;
pub(crate) mod changes;
pub(crate) mod changes_file;
pub mod checkpoint;
pub(crate) mod comparer;
pub mod engine;
pub mod kept;
pub mod lookup;
pub(crate) mod noted;
pub mod options;
pub mod prefetch;
pub mod publish;
pub mod publish_background;
pub(crate) mod publish_delta;
pub mod row_buffer;
pub mod rows;
mod scratch;
mod tracked;
pub mod update;
pub mod vocabularies;
pub mod vocabulary_parts;

pub use background::{Finished, FrozenRows};
pub use changes::ChangeStats;
pub use engine::{WindowEngine, WindowStats};
pub use options::{Backend, Durability, WindowConfig};
pub use publish_background::Published;
pub use publish_delta::{DeltaBase, FindBy};
pub use row_buffer::{BufferStats, EvictionOrder};
pub use tierbed_kernels::{Feature, FeatureLayout, Hyper, Kernels, Pooling};
pub use tierbed_vocab::{Evicted, Eviction, IdEntry, Policy, SHARED_ROW};
pub use vocabularies::Translate;
