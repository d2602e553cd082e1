//! Poisoning of a store after a failed sync, and its disk quota.
//!
//! After some failures it is unknown what the device holds. A store notes the first of them and
//! refuses everything from then on, until it is reopened at its last checkpoint.

use crate::{Error, ErrorKind, Result};

/// The failure that left a store in doubt, if there was one.
#[derive(Debug, Default)]
pub struct Poison(Option<String>);

impl Poison {
    /// Refuses to go on after a failure that left the store in doubt.
    ///
    /// # Errors
    /// `Poisoned`, naming that failure and the remedy.
    pub fn check(&self) -> Result<()> {
        match &self.0 {
            None => Ok(()),
            Some(cause) => Err(Error::new(ErrorKind::Poisoned, "store failed earlier")
                .with("cause", cause)
                .with("remedy", "reopen the store; it continues at its last checkpoint")),
        }
    }

    /// Notes that `error` left the store in doubt. The first failure is the one that is named.
    pub fn note(&mut self, error: &Error) {
        self.0.get_or_insert_with(|| error.to_string());
    }

    /// Notes any error of `result`: something was done in part.
    ///
    /// # Errors
    /// Those of `result`.
    pub fn on_any<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.note(error))
    }

    /// Notes an error of `result` unless it is a full disk, a bad argument or budget, or damaged
    /// bytes: for stores that never overwrite what is in force, and are then as they were.
    ///
    /// # Errors
    /// Those of `result`.
    pub fn on_doubt<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            let is_harmless = matches!(
                error.kind(),
                ErrorKind::NoSpace | ErrorKind::Invalid | ErrorKind::Corruption
            );
            if !is_harmless {
                self.note(error);
            }
        })
    }
}

/// Refuses a store larger than its disk quota.
///
/// # Errors
/// `NoSpace`, naming both sizes, when `wanted_bytes` are more than `quota_bytes`.
pub fn check_disk_quota(quota_bytes: Option<u64>, wanted_bytes: u64) -> Result<()> {
    match quota_bytes {
        Some(quota) if wanted_bytes > quota => {
            Err(Error::new(ErrorKind::NoSpace, "disk quota reached")
                .with("disk_quota_bytes", quota)
                .with("needed_bytes", wanted_bytes)
                .with("remedy", "raise disk_quota"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    fn failed(kind: ErrorKind) -> Result<()> {
        Err(Error::new(kind, format!("a {kind:?}")))
    }

    #[test]
    fn harmless_errors_pass_and_doubtful_ones_stay() {
        let mut poison = Poison::default();
        for kind in [ErrorKind::NoSpace, ErrorKind::Invalid, ErrorKind::Corruption] {
            assert_eq!(poison.on_doubt(failed(kind)).unwrap_err().kind(), kind);
            poison.check().unwrap();
        }
        assert_eq!(poison.on_doubt(failed(ErrorKind::Io)).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(poison.check().unwrap_err().kind(), ErrorKind::Poisoned);
        poison.on_any(Ok(())).unwrap();
        // The first failure is the one reported.
        poison.on_any(failed(ErrorKind::NoSpace)).unwrap_err();
        assert!(poison.check().unwrap_err().to_string().contains("a Io"));
    }

    #[test]
    fn any_error_may_be_doubtful() {
        let mut poison = Poison::default();
        poison.on_any(failed(ErrorKind::NoSpace)).unwrap_err();
        assert_eq!(poison.check().unwrap_err().kind(), ErrorKind::Poisoned);
    }

    #[test]
    fn the_quota_may_be_filled_and_not_passed() {
        check_disk_quota(None, u64::MAX).unwrap();
        check_disk_quota(Some(10), 10).unwrap();
        assert_eq!(check_disk_quota(Some(10), 11).unwrap_err().kind(), ErrorKind::NoSpace);
    }
}
