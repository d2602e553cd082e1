//! Clock with adaptive replacement (CAR): two clocks and a bit per row.
//!
//! Source: Bansal and Modha, "CAR: Clock with Adaptive Replacement" (FAST 2004).

use tierbed_cache::policy::{MarkRule, TwoClocks};

/// The rule of CAR: a bit.
#[derive(Debug, Clone, Default)]
pub struct SecondChance;

impl MarkRule for SecondChance {
    const NAME: &'static str = "car";

    fn touched(_mark: u8, _hit_count: u32) -> u8 {
        1
    }

    fn passed(_mark: u8, _hit_count: u32) -> u8 {
        0
    }
}

/// Clock with adaptive replacement.
pub type Car = TwoClocks<SecondChance>;
