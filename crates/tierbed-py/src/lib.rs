//! The native Python module: glue and nothing else.
//!
//! Three rules. Tensors cross by DLPack and are checked here ([`tensors`]): device, dtype,
//! layout, length, aliasing. Every call into the engine releases the GIL and turns errors and
//! panics into exceptions of `tierbed.errors` ([`errors`]). Nothing is decided here that a Rust
//! caller would miss.

mod background;
mod batch;
mod calls;
mod chunks;
mod codec;
mod coded;
mod compiled;
mod data;
mod ending;
mod errors;
mod exchange;
mod folders;
mod following;
mod index;
mod neighbours;
mod objects;
mod offsets;
mod opened;
mod place_parts;
mod placement;
mod plain;
mod predictor;
mod progress;
mod python_store;
mod rails;
mod resident;
mod routing;
mod server;
mod shards;
mod snapshot;
mod store;
mod tensors;
mod tier_budget;
mod versions;
mod windows;

#[cfg(feature = "lab")]
#[path = "../../../tools/python/native/mod.rs"]
mod lab;

use pyo3::prelude::*;

/// The engine, the readers and the server behind the Python package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_features, module)?)?;
    module.add_function(wrap_pyfunction!(table_bytes, module)?)?;
    module.add_class::<batch::FeaturePlan>()?;
    module.add_class::<store::NativeStore>()?;
    module.add_class::<snapshot::NativeSnapshot>()?;
    module.add_class::<server::NativeServer>()?;
    module.add_class::<following::NativeFollowing>()?;
    module.add_class::<routing::NativeRouting>()?;
    module.add_class::<routing::NativeShardClient>()?;
    module.add_class::<codec::NativeCodec>()?;
    module.add_class::<objects::NativeObjects>()?;
    module.add_class::<resident::NativeResident>()?;
    module.add_class::<tier_budget::NativeTierBudget>()?;
    module.add_function(wrap_pyfunction!(python_store::check_python_store, module)?)?;
    background::register(module)?;
    ending::register(module)?;
    coded::register(module)?;
    offsets::register(module)?;
    exchange::register(module)?;
    folders::register(module)?;
    index::register(module)?;
    versions::register(module)?;
    placement::register(module)?;
    place_parts::register(module)?;
    shards::register(module)?;
    #[cfg(feature = "lab")]
    lab::register(module)?;
    data::register(module)
}

/// Returns the version of the native module.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns the instruction set the kernels use.
#[pyfunction]
fn cpu_features() -> &'static str {
    tierbed_train::window::Kernels::detect().isa().name()
}

/// Returns the bytes of all rows of `table`, touched or not, with their optimizer state.
#[pyfunction]
fn table_bytes(table: plain::Plain<tierbed_core::TableSchema>) -> u64 {
    table.0.table_bytes()
}
