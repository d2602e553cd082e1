//! The memory budget: one shared account of named reservations with a limit.
//!
//! One knob, `dram_budget`, bounds everything: buffers, caches, indexes, filters, I/O buffers,
//! scratch. Each part reserves before it allocates; the report names every part.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};

/// A byte budget shared by the parts of one store. Clones share the account.
#[derive(Debug, Clone)]
pub struct Budget {
    account: Arc<Mutex<Account>>,
}

#[derive(Debug)]
struct Account {
    limit_bytes: u64,
    used_bytes: u64,
    peak_bytes: u64,
    parts: BTreeMap<&'static str, PartUse>,
}

/// What one part holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartUse {
    /// Bytes held now.
    pub used_bytes: u64,
    /// Most bytes ever held.
    pub peak_bytes: u64,
}

/// What the whole budget looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetReport {
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes reserved now.
    pub used_bytes: u64,
    /// Most bytes ever reserved.
    pub peak_bytes: u64,
    /// Per part, by name.
    pub parts: BTreeMap<&'static str, PartUse>,
}

impl Budget {
    /// Builds a budget of `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        let account = Account { limit_bytes, used_bytes: 0, peak_bytes: 0, parts: BTreeMap::new() };
        Self { account: Arc::new(Mutex::new(account)) }
    }

    /// Builds a budget without a bound, for oracles and tests.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(u64::MAX)
    }

    /// Reserves `bytes` for `part`; dropping the reservation gives them back.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach, naming the part and the smallest that would.
    pub fn reserve(&self, part: &'static str, bytes: u64) -> Result<Reservation> {
        let mut reservation = Reservation { budget: self.clone(), part, bytes: 0 };
        reservation.resize(bytes)?;
        Ok(reservation)
    }

    /// Returns the bytes not reserved.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let account = self.lock();
        account.limit_bytes - account.used_bytes
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.lock().limit_bytes
    }

    /// Returns the reservations by name.
    #[must_use]
    pub fn report(&self) -> BudgetReport {
        let account = self.lock();
        BudgetReport {
            limit_bytes: account.limit_bytes,
            used_bytes: account.used_bytes,
            peak_bytes: account.peak_bytes,
            parts: account.parts.clone(),
        }
    }

    // The account is plain numbers, whole after every statement, so a panic elsewhere while
    // the lock was held leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes held by one part of a store.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    part: &'static str,
    bytes: u64,
}

impl Reservation {
    /// Returns the bytes held.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Grows or shrinks to `bytes`.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach; the old size stays.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        let mut account = self.budget.lock();
        let used_elsewhere = account.used_bytes - self.bytes;
        let wanted = used_elsewhere.saturating_add(bytes);
        if wanted > account.limit_bytes {
            return Err(Error::invalid("dram budget too small")
                .with("part", self.part)
                .with("part_bytes", bytes)
                .with("dram_budget_bytes", account.limit_bytes)
                .with("minimum_bytes", wanted)
                .with("remedy", format_args!("raise dram_budget to at least {wanted} bytes")));
        }
        account.used_bytes = wanted;
        account.peak_bytes = account.peak_bytes.max(wanted);
        let held = self.bytes;
        let part = account.parts.entry(self.part).or_default();
        part.used_bytes = part.used_bytes - held + bytes;
        part.peak_bytes = part.peak_bytes.max(part.used_bytes);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut account = self.budget.lock();
        account.used_bytes -= self.bytes;
        if let Some(part) = account.parts.get_mut(self.part) {
            part.used_bytes -= self.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_parts_and_peak() {
        let budget = Budget::new(100);
        let mut rows = budget.reserve("rows", 60).unwrap();
        let index = budget.reserve("index", 30).unwrap();
        drop(index);
        rows.resize(20).unwrap();
        let report = budget.report();
        assert_eq!((report.used_bytes, report.peak_bytes), (20, 90));
        assert_eq!(report.parts["index"], PartUse { used_bytes: 0, peak_bytes: 30 });
        assert_eq!(budget.free_bytes(), 80);
    }

    #[test]
    fn refuses_what_does_not_fit_and_names_the_minimum() {
        let budget = Budget::new(100);
        let mut rows = budget.reserve("rows", 60).unwrap();
        let error = budget.reserve("index", 50).unwrap_err();
        assert!(error.to_string().contains("at least 110 bytes"), "{error}");
        assert!(rows.resize(101).is_err());
        assert_eq!(rows.bytes(), 60);
        assert_eq!(budget.report().used_bytes, 60);
    }
}
