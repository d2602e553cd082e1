//! What does a row update cost, system by system, on the same batches?
//!
//! ```text
//! trace ─▶ batches ─▶ window engine, its look-ahead ─▶ any `TrainStore`
//!       │         └─▶ memory: every row in one array
//!       └─▶ plan ─▶ forward order
//! ```
//! Window engine and forward order are the product's, as users get them. All systems pool the same
//! bags, take the same synthetic gradient and step row-wise Adagrad. Reading the trace, counting
//! rows and making plans is outside the measured time.

mod batches;
mod job;
mod memory;
mod session;
mod stores;
mod system;
mod windowed;
mod worker;

pub use job::Job;
pub use worker::serve;

#[cfg(test)]
mod tests;
