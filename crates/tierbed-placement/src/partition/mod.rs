//! Which row has its home where? One answer per file, each a [`Placement`] without replicas.

mod bisect;
mod order;

use crate::{Placement, QueryLog};

pub use bisect::{bisect, bisect_evenly, BisectionOptions, LevelReport};
pub use order::{by_frequency, random};
