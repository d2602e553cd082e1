//! Heads of requests that are known: what follows from them, made once for a generation.
//!
//! ```text
//! head ─▶ known? ─▶ ids into its query, the answer behind its answer's head
//!           └ no ─▶ decoded, checked, planned ─▶ kept, where only ids follow, one matrix answers
//! ```
//!
//! Clients ask in the same words again and again: names, shapes and parameters are equal byte for
//! byte, only the ids differ. Requests with an id of their own, or with numbers in the head, are
//! decoded each time.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use axum::body::Bytes;
use tierbed_core::Result;

use crate::answer::Refusal;
use crate::body::Held;
use crate::columns::by_feature;
use crate::job::{Body, Prepared};
use crate::oip::outputs::OCTETS;
use crate::plans::Plan;
use crate::query::{Ids, Query, Source};

/// Longest head that is kept.
const HEAD_BYTES_MAX: usize = 2 << 10;
/// Most heads that are kept. A client that asks in ever new words has each request decoded, and
/// fills no memory.
const HEADS_MAX: usize = 256;

/// A request's bytes: its head, and the binary tensors behind it.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    /// Of the answer.
    pub(crate) body_type: &'static str,
    pub(crate) head: Bytes,
    pub(crate) binary: Bytes,
}

/// What the binary tensors behind a head are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Tensors {
    /// Ids `[B, F]` of the plan's features, one for each sample.
    Ids,
    /// The ids of one feature, and where each bag begins; as bytes.
    Bags { values: Range<usize>, offsets: Range<usize> },
}

/// What follows from a head.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) plan: Arc<Plan>,
    pub(crate) tensors: Tensors,
    /// Bytes of the tensors.
    pub(crate) binary_bytes: usize,
    /// What comes before the matrix that answers.
    pub(crate) told: Vec<u8>,
    pub(crate) body_type: &'static str,
}

/// The heads of a generation.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    known: RwLock<HashMap<Bytes, Arc<Head>>>,
}

impl Heads {
    /// Returns what follows from the head of `cut`, where that is known and its tensors are whole.
    pub(crate) fn get(&self, cut: &Cut) -> Option<Arc<Head>> {
        if cut.head.len() > HEAD_BYTES_MAX {
            return None;
        }
        // Entries are whole: a panic elsewhere leaves nothing half done.
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let head = known.get(&cut.head)?;
        let is_whole = head.binary_bytes == cut.binary.len() && head.body_type == cut.body_type;
        is_whole.then(|| Arc::clone(head))
    }

    /// Tells whether the head of `cut` would be kept.
    pub(crate) fn has_room(&self, cut: &Cut) -> bool {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        cut.head.len() <= HEAD_BYTES_MAX && known.len() < HEADS_MAX
    }

    /// Keeps what follows from the head of `cut`, if there is room yet.
    pub(crate) fn keep(&self, cut: &Cut, head: Head) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() < HEADS_MAX {
            // Copied: the body that it is a part of may be large.
            known.insert(Bytes::copy_from_slice(&cut.head), Arc::new(head));
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.read().unwrap().len()
    }
}

impl Head {
    /// Checks the tensors behind the head, and makes room for their answer.
    ///
    /// # Errors
    /// 400 for ids that are no rows and bags of another form, 503 when there is no memory.
    pub(crate) fn prepare(
        &self,
        source: Source<'_>,
        binary: &Bytes,
        mut held: Held,
    ) -> std::result::Result<Prepared, Refusal> {
        let mut query = self.query(source, binary)?;
        let elements = query.plan.layout.output_len(&query.bags());
        held.resize(elements * size_of::<f32>() + binary.len())?;
        query.check_ids(source)?;
        query.make_room(&self.told);
        let sample_count = query.bags().batch_size() as u64;
        let (body_type, told_bytes) = (self.body_type, self.told.len());
        let header_bytes = (body_type == OCTETS).then_some(told_bytes);
        let encode = move |queries: Vec<Query>| {
            let Ok([query]) = <[Query; 1]>::try_from(queries) else {
                panic!("one query was prepared");
            };
            Ok(Body { bytes: query.matrix.into_bytes(), body_type, header_bytes, coding: None })
        };
        let (queries, encode) = (vec![query], Box::new(encode));
        Ok(Prepared { queries, held, sample_count, encode_cost: elements, encode })
    }

    fn query(&self, source: Source<'_>, binary: &Bytes) -> Result<Query> {
        let plan = Arc::clone(&self.plan);
        let feature_count = plan.asked.len();
        match &self.tensors {
            Tensors::Ids => {
                let ids = Ids::from_le(binary.clone());
                let offsets = (0..=ids.len() as i64).collect();
                let samples = ids.len() / feature_count;
                Query::new(plan, by_feature(ids, samples, feature_count), offsets, None)
            }
            Tensors::Bags { values, offsets } => {
                let values = Ids::from_le(binary.slice(values.clone()));
                let offsets = Ids::from_le(binary.slice(offsets.clone())).to_vec();
                let Some(asked) = plan.asked.first().copied() else {
                    panic!("a plan of no feature");
                };
                let name = &source.feature(asked.feature).name;
                Query::new(plan, values, offsets, None).map_err(|error| error.with("feature", name))
            }
        }
    }
}
