//! The ids that a rank requests, as it publishes them for the ranks of its node.
//!
//! A rank writes its bags into its own region and signals; the others read what concerns the
//! rows they hold.

#![expect(clippy::indexing_slicing, reason = "offsets and indices are those of checked bags")]

use std::ops::Range;

use tierbed_core::{Bags, Error, Result};

use crate::bags::MemberBags;
use crate::layout::{Layout, BAGS_HEADER_BYTES};
use crate::memory::Region;
use crate::plan::ExchangePlan;

/// What precedes a rank's bags.
#[derive(Debug, Clone, Copy)]
struct Header {
    fingerprint: u64,
    sample_count: u64,
    index_count: u64,
    has_weights: u64,
    wants_weight_grads: u64,
    part_count: u64,
}

/// What a rank publishes beside its bags.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchOptions {
    /// Whether a backward with gradients of weights follows.
    pub(crate) wants_weight_grads: bool,
    /// Parts that complete on their own.
    pub(crate) part_count: usize,
}

/// Writes the bags of this rank, which were checked, into its region.
pub(crate) fn publish(
    plan: &ExchangePlan,
    layout: &Layout,
    region: Region<'_>,
    bags: &Bags<'_>,
    options: BatchOptions,
) {
    let mut writer = region.writer();
    let header = [
        plan.fingerprint(),
        bags.batch_size() as u64,
        bags.indices.len() as u64,
        u64::from(bags.weights.is_some()),
        u64::from(options.wants_weight_grads),
        options.part_count as u64,
    ];
    writer.values::<u64>(layout.bags_at(), header.len()).copy_from_slice(&header);
    writer.values(layout.offsets_at(), bags.offsets.len()).copy_from_slice(bags.offsets);
    writer.values(layout.indices_at(), bags.indices.len()).copy_from_slice(bags.indices);
    if let Some(weights) = bags.weights {
        writer.values(layout.weights_at(), weights.len()).copy_from_slice(weights);
    }
}

/// Checks a batch against the plan and the limits.
///
/// # Errors
/// `Invalid` when it is longer than the limits, has other features than the plan, or an id that its
/// table does not have.
pub(crate) fn check_bags(plan: &ExchangePlan, layout: &Layout, bags: &Bags<'_>) -> Result<()> {
    if bags.feature_count != plan.feature_count() {
        return Err(Error::invalid("batch has another number of features than the plan")
            .with("features", bags.feature_count)
            .with("expected", plan.feature_count()));
    }
    let limits = layout.limits;
    if bags.batch_size() > limits.samples_max || bags.indices.len() > limits.indices_max {
        return Err(Error::invalid("batch is larger than the exchange was made for")
            .with("samples", bags.batch_size())
            .with("samples_max", limits.samples_max)
            .with("indices", bags.indices.len())
            .with("indices_max", limits.indices_max)
            .with("remedy", "raise samples_max or indices_max on all ranks"));
    }
    for feature in 0..plan.feature_count() {
        let row_count = plan.table_of(feature).row_count;
        let indices = feature_range(bags.feature_offsets(feature));
        let is_bad = |id: &&i64| u64::try_from(**id).map_or(true, |id| id >= row_count);
        if let Some(id) = bags.indices[indices].iter().find(is_bad) {
            return Err(Error::invalid("row id is out of range")
                .with("feature", feature)
                .with("row_id", id)
                .with("row_count", row_count));
        }
    }
    Ok(())
}

/// Returns the positions of a feature's indices; a feature has at least one offset.
pub(crate) fn feature_range(offsets: &[i64]) -> Range<usize> {
    offsets[0] as usize..offsets[offsets.len() - 1] as usize
}

/// The bags that one rank published.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'h> {
    pub(crate) rank: usize,
    pub(crate) bags: Bags<'h>,
    pub(crate) wants_weight_grads: bool,
    pub(crate) part_count: usize,
}

impl<'h> Source<'h> {
    /// Returns the bags of `feature`.
    pub(crate) fn member(&self, feature: usize) -> MemberBags<'h> {
        let Bags { indices, weights, .. } = self.bags;
        MemberBags { offsets: self.bags.feature_offsets(feature), indices, weights, counts: None }
    }

    /// Reads what `rank` published.
    ///
    /// # Errors
    /// `Invalid` when it has another plan, or bags that are none.
    pub(crate) fn read(
        plan: &ExchangePlan,
        layout: &Layout,
        region: Region<'h>,
        rank: usize,
    ) -> Result<Self> {
        let numbers = region.read::<u64>(layout.bags_at(), BAGS_HEADER_BYTES / 8);
        let &[fingerprint, sample_count, index_count, ref flags @ ..] = numbers else {
            return Err(Error::invalid("no header"));
        };
        let &[has_weights, wants_weight_grads, part_count, ..] = flags else {
            return Err(Error::invalid("no header"));
        };
        let header = Header {
            fingerprint,
            sample_count,
            index_count,
            has_weights,
            wants_weight_grads,
            part_count,
        };
        let limits = layout.limits;
        if header.fingerprint != plan.fingerprint() {
            return Err(Error::invalid(format!("rank {rank} has another plan"))
                .with("rank", rank)
                .with("remedy", "give all ranks the same tables, plan and limits"));
        }
        let (samples, count) = (header.sample_count as usize, header.index_count as usize);
        if samples > limits.samples_max || count > limits.indices_max {
            return Err(Error::invalid(format!("rank {rank} has other limits"))
                .with("rank", rank)
                .with("remedy", "give all ranks the same samples_max and indices_max"));
        }
        let offsets = region.read(layout.offsets_at(), plan.feature_count() * samples + 1);
        let indices = region.read(layout.indices_at(), count);
        let weights = (header.has_weights != 0).then(|| region.read(layout.weights_at(), count));
        let bags = Bags::new(indices, offsets, weights, plan.feature_count())?;
        Ok(Self {
            rank,
            bags,
            wants_weight_grads: header.wants_weight_grads != 0,
            part_count: header.part_count as usize,
        })
    }
}
