//! Completion of the parts of an output.
//!
//! Holders signal after each part. Who waits for a part may be another thread than the one that
//! looks up rows for others, and reads it while rows of later parts are still on their way.
//! Rows of tables divided by rows arrive one by one and are pooled here.

#![expect(
    clippy::indexing_slicing,
    reason = "features are those of the plan; samples and indices are those of checked bags"
)]

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use tierbed_core::Result;
use tierbed_kernels::{PoolFeature, Rows};

use crate::batch::{feature_range, Source};
use crate::destinations::{row_bases, Outputs};
use crate::exchange::{Output, Place};
use crate::pad::Channel;
use crate::precision::Precision;
use crate::step::{part_samples, OwnBags, Step};

/// An output on its way, part by part.
#[derive(Debug, Clone)]
pub struct Arrivals {
    place: Arc<Place>,
    output: Output,
    part_count: usize,
    /// Signals before that of the first part.
    signals_before: u32,
    /// This rank's batch, where it is no longer published.
    own: Option<Arc<OwnBags>>,
}

impl Arrivals {
    pub(crate) fn new(place: Arc<Place>, step: &Step, signals_before: u32) -> Self {
        let (plan, region) = (&place.plan, place.region(place.rank()));
        let sample_count = step.samples_of(place.rank()).len();
        let bytes = sample_count * plan.output_precision().vector_bytes(plan.output_dim());
        let at = place.layout.output_at(step.output_epoch);
        let address = region.address::<u8>(at, bytes);
        let output = Output { step: step.number, address, sample_count, epoch: step.output_epoch };
        let (part_count, own) = (step.part_count, step.own.clone());
        Self { output, part_count, signals_before, place, own }
    }

    /// Returns where the output will be.
    #[must_use]
    pub fn place(&self) -> Output {
        self.output
    }

    /// Returns the samples of `part`, of this rank.
    #[must_use]
    pub fn samples(&self, part: usize) -> Range<usize> {
        part_samples(self.output.sample_count, part, self.part_count)
    }

    /// Waits until `part` is complete; then its rows of the output may be read.
    ///
    /// # Errors
    /// `Closed` naming a rank that failed, this one as well; `Io` naming one that is silent.
    pub fn wait(&self, part: usize) -> Result<Range<usize>> {
        self.place.pad.wait_all(Channel::Outputs, self.signal(part))?;
        let samples = self.samples(part);
        if self.place.plan.row_features().next().is_some() {
            self.pool_received(samples.clone())?;
        }
        Ok(samples)
    }

    /// Waits for `part` and returns its vectors, `[samples, output_dim]`; narrow ones as the
    /// numbers they stand for.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn values(&self, part: usize) -> Result<Vec<f32>> {
        let samples = self.wait(part)?;
        Ok(self.place.vectors(samples, self.output.epoch))
    }

    /// Waits for every part.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn output(&self) -> Result<Output> {
        for part in 0..self.part_count {
            self.wait(part)?;
        }
        Ok(self.output)
    }

    /// Waits until all ranks have looked up all parts, and reads nothing.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.place.pad.wait_all(Channel::Outputs, self.signal(self.part_count - 1))
    }

    /// Returns the signal behind `part`.
    pub(crate) fn signal(&self, part: usize) -> u32 {
        self.signals_before.wrapping_add(part as u32).wrapping_add(1)
    }

    // Pools the rows that came for row-wise features, in index order.
    fn pool_received(&self, samples: Range<usize>) -> Result<()> {
        let place = self.place.as_ref();
        let rank = place.rank();
        let own = match &self.own {
            Some(own) => own.source(rank)?,
            None => place.source(rank)?,
        };
        for received in place.received(&own, samples.clone(), self.output.epoch) {
            let dim = place.plan.table_of(received.feature).dim;
            let columns = vec![(place.plan.first_column(received.feature), dim)];
            let to_samples = std::iter::once((rank, samples.clone()));
            let mut to = Outputs::sender(place, to_samples, columns, self.output.epoch);
            let (_, pooling) = place.plan.features()[received.feature];
            let of = PoolFeature { feature: 0, offsets: received.offsets, pooling, dim };
            let (arena, starts) = (received.arena.as_ref(), received.starts.as_slice());
            place.kernels.pool_to(Rows { arena, starts, weights: received.weights }, of, &mut to);
        }
        Ok(())
    }
}

/// Rows of a row-wise feature, as they arrived for some of this rank's samples.
pub(crate) struct Received<'s> {
    pub(crate) feature: usize,
    pub(crate) offsets: &'s [i64],
    /// Where the rows lie.
    pub(crate) arena: Cow<'s, [f32]>,
    /// First word of the row of each index, `[E]`.
    pub(crate) starts: Vec<usize>,
    pub(crate) weights: Option<&'s [f32]>,
}

impl Place {
    /// Returns the vectors of `samples` of this rank's output of `epoch`.
    pub(crate) fn vectors(&self, samples: Range<usize>, epoch: u64) -> Vec<f32> {
        let (dim, precision) = (self.plan.output_dim(), self.plan.output_precision());
        if dim * samples.len() == 0 {
            return Vec::new();
        }
        let row_bytes = precision.vector_bytes(dim);
        let at = self.layout.output_at(epoch) + samples.start * row_bytes;
        let region = self.region(self.rank());
        precision.read(self.kernels, region.read(at, samples.len() * row_bytes), samples.len(), dim)
    }

    /// Returns what arrived in `epoch` for `samples` of `own`, the bags of this rank.
    pub(crate) fn received<'s>(
        &'s self,
        own: &'s Source<'s>,
        samples: Range<usize>,
        epoch: u64,
    ) -> impl Iterator<Item = Received<'s>> {
        let region = self.region(self.rank());
        row_bases(&self.plan, own).into_iter().map(move |base| {
            let offsets = own.bags.feature_offsets(base.feature);
            let offsets = &offsets[samples.start..=samples.end];
            let range = feature_range(offsets);
            let dim = self.plan.table_of(base.feature).dim;
            let precision = self.plan.row_precision();
            let row_bytes = precision.vector_bytes(dim);
            let first = base.byte + (range.start - base.first_index) * row_bytes;
            let at = self.layout.rows_at(epoch) + first;
            let arena = match precision {
                Precision::F32 => Cow::Borrowed(region.read(at, range.len() * dim)),
                _ => {
                    let bytes = region.read(at, range.len() * row_bytes);
                    Cow::Owned(precision.read(self.kernels, bytes, range.len(), dim))
                }
            };
            Received {
                feature: base.feature,
                offsets,
                arena,
                starts: (0..range.len()).map(|at| at * dim).collect(),
                weights: own.bags.weights.map(|weights| &weights[range]),
            }
        })
    }
}
