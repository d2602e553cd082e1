//! Kept plans: the feature layout of each set of features that requests ask for together.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use tierbed_core::Result;
use tierbed_snapshot::{FeatureLayout, Pooling, View};

use crate::features::Feature;

/// Most plans kept. A server's clients ask in few ways; one that asks in ever new ways has its
/// plans made anew, and fills no memory.
const PLANS_MAX: usize = 256;

/// A served feature, and how a request pools it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Asked {
    /// Position among the served features.
    pub(crate) feature: usize,
    pub(crate) pooling: Pooling,
}

/// The layout of some features; those that are pooled lie side by side.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) asked: Box<[Asked]>,
    pub(crate) layout: FeatureLayout,
}

/// The plans of a server.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    known: RwLock<HashMap<Box<[Asked]>, Arc<Plan>>>,
}

impl Plans {
    /// Returns the plan of `asked`, from what is kept if it is there.
    ///
    /// # Errors
    /// Those of [`FeatureLayout::new`].
    pub(crate) fn get(
        &self,
        snapshot: &View<'_>,
        features: &[Feature],
        asked: &[Asked],
    ) -> Result<Arc<Plan>> {
        // Entries are whole: a panic elsewhere leaves nothing half done.
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = known.get(asked) {
            return Ok(Arc::clone(plan));
        }
        drop(known);
        let tables: Vec<_> = asked
            .iter()
            .map(|asked| {
                let Some(feature) = features.get(asked.feature) else {
                    panic!("{asked:?} of {} features", features.len());
                };
                (feature.table, asked.pooling)
            })
            .collect();
        let layout = FeatureLayout::new(snapshot.schema(), &tables)?;
        let plan = Arc::new(Plan { asked: asked.into(), layout });
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() < PLANS_MAX {
            known.entry(asked.into()).or_insert_with(|| Arc::clone(&plan));
        }
        Ok(plan)
    }
}
