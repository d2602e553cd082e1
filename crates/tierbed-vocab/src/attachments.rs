//! Attachments in which a store and its snapshots keep their vocabularies.
//!
//! One JSON file has the state of every open table, in their order; the directory of the table at
//! place `n` of that list is a file of its own.

use serde::{Deserialize, Serialize};

use crate::State;

/// Name of the attachment with the [`States`].
pub const STATES: &str = "_vocabularies.json";
/// Beginning of the name of a directory's attachment; the table's place in the list follows.
pub const DIRECTORY: &str = "_directory.";

/// The content of [`STATES`].
#[derive(Debug, Serialize, Deserialize)]
pub struct States {
    /// One per open table.
    pub vocabularies: Vec<State>,
}
