//! Compaction: choice of SSTs, then their merge.
//!
//! | part | here | pure |
//! |---|---|---|
//! | outdated-row monitor (RecDB §4.3) | [`outdated`] | counters only |
//! | picker (Eq. 1, Algorithms 1 and 2), plain levelled | [`picker`] | yes |
//! | scheduler (Eq. 2), SILK-like, plain | [`scheduler`] | yes, time is given to it |
//! | worker | `merge`, `LsmStore::step` | no: it alone touches files |

pub(crate) mod merge;
pub mod outdated;
pub mod picker;
pub mod scheduler;
