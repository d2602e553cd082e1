//! Arrivals: when requests are meant to be sent.

use serde::Deserialize;
use tierbed_core::env::SplitMix64;
use tierbed_core::{Error, Result};

/// How requests are spread over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Spread {
    /// Independent of each other, as those of many callers are.
    Poisson,
    /// Equally far apart.
    Constant,
}

/// Some time at one rate.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Phase {
    /// Requests a second.
    pub(super) rate: f64,
    pub(super) seconds: f64,
}

impl Phase {
    pub(super) fn check(&self) -> Result<()> {
        let Self { rate, seconds } = *self;
        if (1e-3..=1e7).contains(&rate) && (1e-3..=1e5).contains(&seconds) {
            return Ok(());
        }
        Err(Error::invalid("a phase needs a rate and seconds")
            .with("found", format_args!("{self:?}")))
    }

    pub(super) fn us(&self) -> f64 {
        self.seconds * 1e6
    }
}

/// One request: its phase, and when it is due, in microseconds from the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Arrival {
    pub(super) phase: usize,
    pub(super) due_us: u64,
}

/// The arrivals of all phases; equal seeds draw equal ones.
#[derive(Debug)]
pub(super) struct Arrivals<'a> {
    phases: &'a [Phase],
    spread: Spread,
    numbers: SplitMix64,
    phase: usize,
    /// Start of the phase.
    start_us: f64,
    /// Since the phase's start.
    next_us: f64,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(phases: &'a [Phase], spread: Spread, seed: u64) -> Self {
        let numbers = SplitMix64::new(seed);
        Self { phases, spread, numbers, phase: 0, start_us: 0.0, next_us: 0.0 }
    }
}

impl Iterator for Arrivals<'_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        loop {
            let phase = self.phases.get(self.phase)?;
            let gap_us = 1e6 / phase.rate;
            self.next_us += match self.spread {
                Spread::Poisson => -(1.0 - self.numbers.unit_f64()).ln() * gap_us,
                Spread::Constant => gap_us,
            };
            if self.next_us <= phase.us() {
                let due_us = (self.start_us + self.next_us) as u64;
                return Some(Arrival { phase: self.phase, due_us });
            }
            self.start_us += phase.us();
            (self.phase, self.next_us) = (self.phase + 1, 0.0);
        }
    }
}
