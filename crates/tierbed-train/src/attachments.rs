//! Attachments that callers give: names that start with `_` are the engine's own.

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result};

/// Refuses names that the engine keeps for itself.
///
/// # Errors
/// `Invalid`, naming the first of them.
pub(crate) fn check_names(attachments: &[Attachment<'_>]) -> Result<()> {
    match attachments.iter().find(|given| given.name.starts_with('_')) {
        None => Ok(()),
        Some(own) => {
            Err(Error::invalid("attachment names must not start with '_'")
                .with("attachment", own.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_engine_are_refused() {
        let given = |name| [Attachment { name, bytes: b"" }];
        assert!(check_names(&given("dense_1")).is_ok());
        let error = check_names(&given("_applied")).unwrap_err();
        assert!(error.to_string().contains("_applied"), "{error}");
    }
}
