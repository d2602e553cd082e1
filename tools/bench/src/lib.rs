//! How fast, how big, how often? Measuring the engines without Python.
//!
//! [`serve`] asks servers of rows over the network, as many callers would. [`lookup`] asks queries
//! of a log from a snapshot, [`ssd`] from a simulated device;
//! [`generated_log`] asks many caches for generated samples. [`training`] trains the same batches
//! of a generated trace with each system and reports what was counted. Python starts one process
//! per system ([`training::serve`]) so that memory is that of the system alone, and asks for slices
//! in turn.

pub mod generated_log;
pub mod lookup;
mod meter;
pub mod samples;
pub mod serve;
pub mod ssd;
pub mod training;
