//! Eviction policies to compare with; those of the product are in `tierbed-cache`.

mod arc;
mod car;
mod clock;
mod conformance;
mod lfu;
mod lirs;
mod sieve;
mod w_tiny_lfu;

pub use arc::Arc;
pub use car::{Car, SecondChance};
pub use clock::Clock;
pub use conformance::check_eviction_policy;
pub use lfu::Lfu;
pub use lirs::Lirs;
pub use sieve::Sieve;
pub use w_tiny_lfu::WTinyLfu;

use tierbed_cache::policy::{register_policy, EvictionPolicy, Group, SLOT_BITS};

/// Makes the policies known by their names, in options and in `PolicyKind::registered`.
pub fn register_policies() {
    register_policy("lfu", || Box::new(Lfu::default()));
    register_policy("clock", || Box::new(Clock::default()));
    register_policy("sieve", || Box::new(Sieve::default()));
    register_policy("arc", || Box::new(Arc::default()));
    register_policy("car", || Box::new(Car::default()));
    register_policy("lirs", || Box::new(Lirs::default()));
    register_policy("w_tiny_lfu", || Box::new(WTinyLfu::default()));
}
