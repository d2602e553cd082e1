//! The ids that all ranks request of this rank: published by each, gathered by each.
//!
//! A rank writes its bags into its own region and signals; the others read what concerns the
//! rows they hold. Samples are numbered across ranks: those of rank 0 first.

#![expect(clippy::indexing_slicing, reason = "offsets and indices are those of checked bags")]

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::Pooling;

use crate::layout::{Layout, BAGS_HEADER_BYTES};
use crate::memory::Region;
use crate::plan::{ExchangePlan, Group, GroupKind};
use crate::step::Part;

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

/// Writes the bags of this rank into its region.
///
/// # Errors
/// `Invalid` when the batch is longer than the limits, has other features than the plan, or an
/// id that its table does not have; nothing was written then.
pub(crate) fn publish(
    plan: &ExchangePlan,
    layout: &Layout,
    region: Region<'_>,
    bags: &Bags<'_>,
    options: BatchOptions,
) -> Result<()> {
    check(plan, layout, bags)?;
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
    Ok(())
}

fn check(plan: &ExchangePlan, layout: &Layout, bags: &Bags<'_>) -> Result<()> {
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
pub(crate) fn feature_range(offsets: &[i64]) -> std::ops::Range<usize> {
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

/// The bags of one group, of all ranks or of this one, gathered feature by feature.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupBags {
    /// Row ids, `[E]`.
    pub(crate) indices: Vec<i64>,
    /// Bag bounds, `[members * B + 1]`.
    pub(crate) offsets: Vec<i64>,
    /// Weights, `[E]`, where the batch has them and the group pools.
    pub(crate) weights: Option<Vec<f32>>,
    /// Where each index came from; kept where something goes back per index.
    pub(crate) origins: Vec<Origin>,
    member_count: usize,
}

/// An index, as its sample's rank numbers it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Origin {
    pub(crate) rank: u32,
    /// Position in that rank's batch.
    pub(crate) position: u32,
    /// Sample across ranks.
    pub(crate) sample: u32,
    /// Indices of the whole bag.
    pub(crate) count: u32,
    /// Weight of the index, if it has one.
    pub(crate) weight: Option<f32>,
}

impl GroupBags {
    /// Gathers what `group` needs from a part of the samples of each of `sources`;
    /// `keeps_origins` for weights' gradients.
    pub(crate) fn gather(
        group: &Group,
        sources: &[Source<'_>],
        part: Part,
        keeps_origins: bool,
    ) -> Self {
        let is_rows = group.kind == GroupKind::Rows;
        let has_weights = !is_rows && sources.iter().any(|source| source.bags.weights.is_some());
        let mut gathered = Self {
            weights: has_weights.then(Vec::new),
            member_count: group.members.len(),
            ..Self::default()
        };
        gathered.offsets.push(0);
        for member in &group.members {
            let mut first_sample = 0;
            for source in sources {
                let samples = part.samples(source.bags.batch_size());
                let offsets = source.bags.feature_offsets(member.feature);
                let offsets = &offsets[samples.start..=samples.end];
                let held = is_rows.then_some(member.first_row..member.end_row);
                if is_rows || keeps_origins {
                    let first_sample = first_sample + samples.start;
                    gathered.add_one_by_one(source, offsets, first_sample, held);
                } else {
                    gathered.add_at_once(source, offsets);
                }
                first_sample += source.bags.batch_size();
            }
        }
        gathered
    }

    /// Returns them as bags; they are as right as those they were gathered from.
    pub(crate) fn bags(&self) -> Bags<'_> {
        Bags {
            indices: &self.indices,
            offsets: &self.offsets,
            weights: self.weights.as_deref(),
            feature_count: self.member_count,
        }
    }

    /// Returns the number of samples `B`.
    pub(crate) fn sample_count(&self) -> usize {
        (self.offsets.len() - 1) / self.member_count.max(1)
    }

    /// Returns the `B + 1` offsets of member `at`, where `B` is `samples`.
    pub(crate) fn offsets_of(&self, at: usize, samples: usize) -> &[i64] {
        &self.offsets[at * samples..(at + 1) * samples + 1]
    }

    fn add_at_once(&mut self, source: &Source<'_>, offsets: &[i64]) {
        let range = feature_range(offsets);
        let shift = self.indices.len() as i64 - range.start as i64;
        self.offsets.extend(offsets.iter().skip(1).map(|&offset| offset + shift));
        self.indices.extend_from_slice(&source.bags.indices[range.clone()]);
        if let Some(weights) = &mut self.weights {
            match source.bags.weights {
                Some(given) => weights.extend_from_slice(&given[range]),
                None => weights.resize(weights.len() + range.len(), 1.0),
            }
        }
    }

    // Only rows of `held`, when given.
    fn add_one_by_one(
        &mut self,
        source: &Source<'_>,
        offsets: &[i64],
        first_sample: usize,
        held: Option<std::ops::Range<u64>>,
    ) {
        for (bag, bounds) in offsets.windows(2).enumerate() {
            let (start, end) = (bounds[0], bounds[1]);
            for position in start as usize..end as usize {
                let id = source.bags.indices[position];
                if held.as_ref().is_some_and(|held| !held.contains(&(id as u64))) {
                    continue;
                }
                let given = source.bags.weights.map(|weights| weights[position]);
                self.indices.push(id);
                if let Some(weights) = &mut self.weights {
                    weights.push(given.unwrap_or(1.0));
                }
                self.origins.push(Origin {
                    rank: source.rank as u32,
                    position: position as u32,
                    sample: (first_sample + bag) as u32,
                    count: (end - start) as u32,
                    weight: given,
                });
            }
            self.offsets.push(self.indices.len() as i64);
        }
    }
}

/// Returns the gradient of one index from that of its bag: times its weight, over the count for
/// "mean"; the roundings are those of `tierbed_kernels::grad`.
pub(crate) fn index_grad(value: f32, pooling: Pooling, origin: &Origin) -> f32 {
    let value = origin.weight.map_or(value, |weight| weight * value);
    if pooling == Pooling::Mean {
        value / origin.count as f32
    } else {
        value
    }
}
