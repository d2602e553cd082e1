//! The memory budget: one shared account of named reservations with a limit.
//!
//! One knob, `dram_budget`, bounds everything: buffers, caches, indexes, filters, I/O buffers,
//! scratch. Each part reserves before it allocates; the report names every part.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};

/// One part in so many of the limit stays free for short needs.
const SPARE_SHARE: u64 = 16;

/// A byte budget shared by the parts of one store. Clones share the account.
#[derive(Debug, Clone)]
pub struct Budget {
    account: Arc<Mutex<Account>>,
}

#[derive(Debug)]
struct Account {
    limit_bytes: u64,
    /// Smallest limit that any error names.
    least_bytes: u64,
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
        let account = Account {
            limit_bytes,
            least_bytes: 0,
            used_bytes: 0,
            peak_bytes: 0,
            parts: BTreeMap::new(),
        };
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

    /// Makes errors name at least `bytes` as the smallest limit.
    ///
    /// For parts that grow with the rows or with the limit: the reservation that fails first does
    /// not know what the ones after it will need.
    pub fn name_at_least(&self, bytes: u64) {
        let mut account = self.lock();
        account.least_bytes = account.least_bytes.max(bytes);
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
        self.resize_leaving(bytes, 0)
    }

    /// Grows or shrinks to `bytes`; grows only when a sixteenth of the limit stays free. For what
    /// can be done without.
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn resize_optional(&mut self, bytes: u64) -> Result<()> {
        let spare_bytes = self.budget.limit_bytes() / SPARE_SHARE;
        self.resize_leaving(bytes, if bytes > self.bytes { spare_bytes } else { 0 })
    }

    fn resize_leaving(&mut self, bytes: u64, spare_bytes: u64) -> Result<()> {
        let mut account = self.budget.lock();
        let used_elsewhere = account.used_bytes - self.bytes;
        let wanted = used_elsewhere.saturating_add(bytes);
        if wanted.saturating_add(spare_bytes) > account.limit_bytes {
            let minimum = wanted.saturating_add(spare_bytes).max(account.least_bytes);
            return Err(Error::invalid("dram budget too small")
                .with("part", self.part)
                .with("part_bytes", bytes)
                .with("dram_budget_bytes", account.limit_bytes)
                .with_minimum_bytes(minimum)
                .with("remedy", format_args!("raise dram_budget to at least {minimum} bytes")));
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

    #[test]
    fn names_at_least_what_is_known_to_be_needed() {
        let budget = Budget::new(100);
        budget.name_at_least(500);
        budget.name_at_least(300);
        let error = budget.reserve("index", 101).unwrap_err();
        assert!(error.to_string().contains("at least 500 bytes"), "{error}");
        assert!(budget.reserve("index", 100).is_ok(), "what fits is granted");
    }

    #[test]
    fn optional_parts_leave_room_for_the_others() {
        let budget = Budget::new(160);
        let mut part = budget.reserve("hot rows", 0).unwrap();
        assert!(part.resize_optional(151).is_err());
        part.resize_optional(150).unwrap();
        let _index = budget.reserve("index", 10).unwrap();
        part.resize_optional(149).expect("shrinking always works");
    }
}
