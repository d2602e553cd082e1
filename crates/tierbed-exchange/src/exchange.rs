//! One rank's part in a lookup of all ranks.
//!
//! ```text
//! begin     publish own ids, wait for those of all, gather what concerns the rows held here
//! exchange  look up and pool into the outputs of all ranks, signal, wait for all
//! ```
//!
//! Every rank makes the same calls in the same order. An error in the middle breaks the exchange
//! for all: the others get an error that names this rank instead of waiting for it.

use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_kernels::{Destination, Kernels, PoolFeature, Rows};

use crate::batch::{feature_range, publish, GroupBags, Source};
use crate::destinations::{columns_of, row_bases, Outputs, RowPlaces};
use crate::layout::Layout;
use crate::pad::{Channel, Pad};
use crate::plan::{ExchangePlan, GroupKind};

/// Who looks up the rows this rank holds.
pub trait LookupRows {
    /// Puts the vectors of `bags` where `to` says: one per bag of each member of the rank's
    /// `group`, or one per index in a group of rows.
    ///
    /// # Errors
    /// Whatever keeps it from reading rows.
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()>;
}

/// What follows a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wants {
    /// Whether a backward follows.
    pub backward: bool,
    /// Whether it returns gradients of weights.
    pub weight_grads: bool,
}

/// One batch on its way.
#[derive(Debug)]
pub struct Step {
    pub(crate) number: u64,
    /// Number of its exchange, which says where its rows are.
    pub(crate) output_epoch: u64,
    /// First sample of each rank, then the number of samples.
    pub(crate) first_samples: Vec<usize>,
    /// Which ranks want gradients of weights.
    pub(crate) wanting: Vec<bool>,
    pub(crate) groups: Vec<GroupBags>,
    /// This rank's batch, where gradients of weights are wanted.
    pub(crate) own: Option<OwnBags>,
}

impl Step {
    /// Returns the number of samples of all ranks.
    #[must_use]
    pub fn sample_count(&self) -> usize {
        self.first_samples.last().copied().unwrap_or(0)
    }

    /// Returns the samples of `rank`, as numbered across ranks.
    #[must_use]
    pub fn samples_of(&self, rank: usize) -> std::ops::Range<usize> {
        let bound = |at| self.first_samples.get(at).copied().unwrap_or(0);
        bound(rank)..bound(rank + 1)
    }

    /// Returns the bags of `group`.
    ///
    /// # Errors
    /// `Invalid` when there is no such group.
    pub fn bags(&self, group: usize) -> Result<Bags<'_>> {
        let bags = self.groups.get(group).ok_or_else(|| Error::invalid("no such group"))?;
        bags.bags()
    }
}

/// A copy of this rank's batch.
#[derive(Debug)]
pub(crate) struct OwnBags {
    pub(crate) indices: Vec<i64>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    feature_count: usize,
}

impl OwnBags {
    fn new(bags: &Bags<'_>) -> Self {
        Self {
            indices: bags.indices.to_vec(),
            offsets: bags.offsets.to_vec(),
            weights: bags.weights.map(<[f32]>::to_vec),
            feature_count: bags.feature_count,
        }
    }

    pub(crate) fn bags(&self) -> Result<Bags<'_>> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), self.feature_count)
    }
}

/// Where the output of a step lies: `[samples, output_dim]` f32 from `address` on, until
/// [`Exchange::begin`] of the step after the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Number of the step, for its backward.
    pub step: u64,
    /// Address of the first element.
    pub address: usize,
    /// Samples of this rank.
    pub sample_count: usize,
    pub(crate) epoch: u64,
}

/// One rank of an exchange.
#[derive(Debug)]
pub struct Exchange {
    pub(crate) plan: ExchangePlan,
    pub(crate) layout: Layout,
    pub(crate) pad: Pad,
    pub(crate) kernels: Kernels,
    /// The failure that broke it.
    broken: Option<String>,
    /// Steps that wait for their backward.
    pub(crate) kept: Vec<Step>,
    pub(crate) step: u64,
    pub(crate) output_epoch: u64,
    pub(crate) grads_step: u64,
    is_closed: bool,
}

impl Exchange {
    /// Joins as the rank of `pad`.
    ///
    /// # Errors
    /// `Invalid` when the plan is for another number of ranks, or regions are too short for it.
    pub fn new(plan: ExchangePlan, layout: Layout, pad: Pad) -> Result<Self> {
        let found = pad.heap().region(pad.rank()).len_bytes();
        if plan.rank_count() != pad.rank_count() || found < layout.region_bytes() {
            return Err(Error::invalid("the heap is not that of the plan")
                .with("ranks", pad.rank_count())
                .with("expected_ranks", plan.rank_count())
                .with("region_bytes", found)
                .with("expected_bytes", layout.region_bytes()));
        }
        Ok(Self {
            plan,
            layout,
            pad,
            kernels: Kernels::detect(),
            broken: None,
            kept: Vec::new(),
            step: 0,
            output_epoch: 0,
            grads_step: 0,
            is_closed: false,
        })
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &ExchangePlan {
        &self.plan
    }

    /// Returns this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.pad.rank()
    }

    /// Changes how long a rank may be silent.
    pub fn set_timeout(&mut self, timeout: std::time::Duration) {
        self.pad.set_timeout(timeout);
    }

    /// Looks up one batch together: `bags` are this rank's samples.
    ///
    /// # Errors
    /// `Invalid` for a batch that is too large or an id out of range: nothing has happened then.
    /// Later errors (a rank that failed or is silent, named; those of `rows`) break the exchange.
    pub fn forward(
        &mut self,
        bags: &Bags<'_>,
        wants: Wants,
        rows: &mut impl LookupRows,
    ) -> Result<Output> {
        let mut step = self.begin(bags, wants)?;
        let output = self.exchange(&mut step, rows)?;
        if wants.backward {
            // A forward without its backward, as of an interrupted step, is forgotten in time.
            let oldest = self.step.saturating_sub(self.layout.output_count() as u64);
            self.kept.retain(|step| step.number > oldest);
            self.kept.push(step);
        }
        Ok(output)
    }

    /// Publishes this rank's bags and gathers those of all.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn begin(&mut self, bags: &Bags<'_>, wants: Wants) -> Result<Step> {
        self.check()?;
        if wants.weight_grads && self.plan.has_columns() {
            return Err(Error::unsupported("no gradient of weights of tables divided by columns")
                .with("remedy", "divide weighted tables by rows, or hold them whole"));
        }
        let (rank, heap) = (self.pad.rank(), self.pad.heap());
        publish(&self.plan, &self.layout, heap.region(rank), bags, wants.weight_grads)?;
        self.step += 1;
        let result = self
            .gather(wants)
            .map(|step| Step { own: wants.weight_grads.then(|| OwnBags::new(bags)), ..step });
        self.break_on_error(result)
    }

    /// Looks up the rows held here, into the outputs of all ranks, and waits for their part.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn exchange(&mut self, step: &mut Step, rows: &mut impl LookupRows) -> Result<Output> {
        self.check()?;
        self.output_epoch += 1;
        step.output_epoch = self.output_epoch;
        let result = self.look_up_and_wait(step, rows);
        self.break_on_error(result)
    }

    /// Returns the values of an output, `[samples, output_dim]`, while it is valid.
    #[must_use]
    pub fn output(&self, output: &Output) -> &[f32] {
        let word_count = output.sample_count * self.plan.output_dim();
        let at = self.layout.output_at(output.epoch);
        self.pad.heap().region(self.rank()).read(at, word_count)
    }

    /// Leaves together with all other ranks.
    ///
    /// # Errors
    /// As [`Pad::close`]; this rank has left in any case.
    pub fn close(&mut self) -> Result<()> {
        if self.is_closed {
            return Ok(());
        }
        self.is_closed = true;
        self.check()?;
        self.pad.close()
    }

    pub(crate) fn break_on_error<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.pad.fail();
            self.broken.get_or_insert_with(|| error.to_string());
        })
    }

    pub(crate) fn check(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(cause) => Err(Error::new(ErrorKind::Poisoned, "exchange failed earlier")
                .with("cause", cause)
                .with("remedy", "start all ranks again; stores continue at their checkpoint")),
        }
    }

    pub(crate) fn sources(&self) -> Result<Vec<Source<'_>>> {
        let read =
            |rank| Source::read(&self.plan, &self.layout, self.pad.heap().region(rank), rank);
        (0..self.pad.rank_count()).map(read).collect()
    }

    fn gather(&self, wants: Wants) -> Result<Step> {
        self.pad.put_all(Channel::Bags, self.step as u32);
        self.pad.wait_all(Channel::Bags, self.step as u32)?;
        let sources = self.sources()?;
        let mut first_samples = vec![0];
        let mut samples = 0;
        for source in &sources {
            samples += source.bags.batch_size();
            first_samples.push(samples);
        }
        let wanting: Vec<bool> = sources.iter().map(|source| source.wants_weight_grads).collect();
        let keeps_origins = wanting.contains(&true);
        let groups = self.plan.groups(self.rank()).iter();
        // Mirrors need the others' bags only to update.
        let groups = groups.map(|group| match group.kind {
            GroupKind::Mirrors if !wants.backward => GroupBags::default(),
            _ => GroupBags::gather(group, &sources, keeps_origins),
        });
        Ok(Step {
            number: self.step,
            output_epoch: 0,
            first_samples,
            wanting,
            groups: groups.collect(),
            own: None,
        })
    }

    fn look_up_and_wait(&self, step: &Step, rows: &mut impl LookupRows) -> Result<Output> {
        let (rank, heap, epoch) = (self.pad.rank(), self.pad.heap(), step.output_epoch);
        let sources = self.sources()?;
        let place = (&self.plan, &self.layout);
        let samples = |source: &Source<'_>| (source.rank, source.bags.batch_size());
        for (at, (group, bags)) in self.plan.groups(rank).iter().zip(&step.groups).enumerate() {
            match group.kind {
                GroupKind::Sums => {
                    let all = sources.iter().map(samples);
                    let mut to = Outputs::new(place, heap, all, columns_of(group), epoch);
                    rows.lookup(at, &bags.bags()?, &mut to)?;
                }
                GroupKind::Mirrors => {
                    let own = sources.get(rank..=rank).unwrap_or(&[]);
                    let bags = GroupBags::gather(group, own, false);
                    let samples = own.iter().map(samples);
                    let mut to = Outputs::new(place, heap, samples, columns_of(group), epoch);
                    rows.lookup(at, &bags.bags()?, &mut to)?;
                }
                GroupKind::Rows => {
                    let mut to = RowPlaces::new(place, heap, (group, bags), &sources, epoch);
                    rows.lookup(at, &bags.bags()?, &mut to)?;
                }
            }
        }
        let own_rows = sources.get(rank).map(|own| self.own_rows(own));
        self.pad.put_all(Channel::Outputs, epoch as u32);
        self.pad.wait_all(Channel::Outputs, epoch as u32)?;
        if let Some(own_rows) = own_rows {
            self.pool_received(&own_rows, epoch);
        }
        let words = self.plan.output_dim();
        let sample_count = sources.get(rank).map_or(0, |own| own.bags.batch_size());
        let region = heap.region(rank);
        let address = region.address::<f32>(self.layout.output_at(epoch), sample_count * words);
        Ok(Output { step: step.number, address, sample_count, epoch })
    }

    // Pools the rows that came for row-wise features, in index order.
    fn pool_received(&self, features: &[OwnRows<'_>], step: u64) {
        let region = self.pad.heap().region(self.rank());
        for own in features {
            let dim = self.plan.table_of(own.feature).dim;
            let word_count = own.starts.last().map_or(0, |last| last + dim);
            let arena = region.read::<f32>(self.layout.rows_at(step), word_count);
            let columns = vec![(self.plan.first_column(own.feature), dim)];
            let samples = own.offsets.len() - 1;
            let place = (&self.plan, &self.layout);
            let own_samples = std::iter::once((self.rank(), samples));
            let mut to = Outputs::new(place, self.pad.heap(), own_samples, columns, step);
            let Some(&(_, pooling)) = self.plan.features().get(own.feature) else { continue };
            let of = PoolFeature { feature: 0, offsets: own.offsets, pooling, dim };
            let rows = Rows { arena, starts: &own.starts, weights: own.weights };
            self.kernels.pool_to(rows, of, &mut to);
        }
    }

    pub(crate) fn own_rows<'s>(&self, own: &Source<'s>) -> Vec<OwnRows<'s>> {
        let rows_of = |base: crate::destinations::RowBase| {
            let offsets = own.bags.feature_offsets(base.feature);
            let range = feature_range(offsets);
            let dim = self.plan.table_of(base.feature).dim;
            OwnRows {
                feature: base.feature,
                offsets,
                starts: (0..range.len()).map(|at| base.word + at * dim).collect(),
                weights: own.bags.weights.and_then(|weights| weights.get(range)),
            }
        };
        row_bases(&self.plan, own).into_iter().map(rows_of).collect()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // Whoever waits learns that this rank left; leaving together is for `close`.
        if !self.is_closed {
            self.pad.fail();
        }
    }
}

/// A row-wise feature of this rank's samples, and where its rows arrive.
pub(crate) struct OwnRows<'s> {
    pub(crate) feature: usize,
    pub(crate) offsets: &'s [i64],
    /// First word of the row of each index, `[E]`.
    pub(crate) starts: Vec<usize>,
    pub(crate) weights: Option<&'s [f32]>,
}
