//! What does a row update cost, system by system, on the same batches?
//!
//! ```text
//! trace ─▶ timeline (windows, next uses) ─▶ keyed: any `TrainStore` behind a look-ahead buffer
//!       │                               └─▶ memory: every row in one array
//!       └─▶ plan ─▶ forward order
//! ```
//! All systems pool the same bags, take the same synthetic gradient and step row-wise Adagrad.
//! Reading the trace, counting rows and making plans is outside the measured time.

mod job;
mod kernel;
mod keyed;
mod session;
mod store_thread;
mod stores;
mod system;
mod timeline;
mod worker;

pub use job::Job;
pub use worker::serve;

#[cfg(test)]
mod tests;
