//! One rank's part in a lookup of all ranks.
//!
//! ```text
//! begin     publish own ids, wait for those of all, gather what concerns the rows held here
//! exchange  look up and pool into the outputs of all ranks, part by part; signal after each
//! wait      for all ranks' signals of a part (arrivals.rs)
//! ```
//!
//! Every rank makes the same calls in the same order. An error in the middle breaks the exchange
//! for all: the others get an error that names this rank instead of waiting for it.

use std::sync::Arc;

use tierbed_core::{Bags, Error, ErrorKind, Result};
use tierbed_kernels::{Destination, Kernels};

use crate::arrivals::Arrivals;
use crate::batch::{publish, BatchOptions, Source};
use crate::destinations::{columns_of, Outputs, RowPlaces};
use crate::layout::Layout;
use crate::pad::{Channel, Pad};
use crate::plan::{ExchangePlan, GroupKind};
use crate::step::{OwnBags, Step, StepOf, Wants};

/// Most parts of a batch: each costs a signal to every rank.
pub const PARTS_MAX: usize = 1024;

/// Who looks up the rows this rank holds.
pub trait LookupRows {
    /// Puts the vectors of `bags` where `to` says: one per bag of each member of the rank's
    /// `group`, or one per index in a group of rows.
    ///
    /// # Errors
    /// Whatever keeps it from reading rows.
    fn lookup(&mut self, group: usize, bags: &Bags<'_>, to: &mut impl Destination) -> Result<()>;
}

/// What ranks agree on, and this rank's way to the memory of all.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) plan: ExchangePlan,
    pub(crate) layout: Layout,
    pub(crate) pad: Pad,
    pub(crate) kernels: Kernels,
}

impl Place {
    /// Returns what `rank` published.
    pub(crate) fn source(&self, rank: usize) -> Result<Source<'_>> {
        Source::read(&self.plan, &self.layout, self.pad.heap().region(rank), rank)
    }
}

/// Where the output of a step lies: `[samples, output_dim]` numbers of the plan's output precision
/// from `address` on, until [`Exchange::begin`] of the step after the next.
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
    pub(crate) place: Arc<Place>,
    /// The failure that broke it.
    broken: Option<String>,
    /// A step whose parts are still to be looked up here.
    pending: Option<(Step, Arrivals, Wants)>,
    /// Steps that wait for their backward.
    pub(crate) kept: Vec<Step>,
    step: u64,
    output_epoch: u64,
    /// Signals of outputs that were planned: one for each part.
    output_signals: u32,
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
            place: Arc::new(Place { plan, layout, pad, kernels: Kernels::detect() }),
            broken: None,
            pending: None,
            kept: Vec::new(),
            step: 0,
            output_epoch: 0,
            output_signals: 0,
            grads_step: 0,
            is_closed: false,
        })
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &ExchangePlan {
        &self.place.plan
    }

    /// Returns this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.place.pad.rank()
    }

    /// Changes how long a rank may be silent.
    pub fn set_timeout(&mut self, timeout: std::time::Duration) {
        Arc::make_mut(&mut self.place).pad.set_timeout(timeout);
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
        self.keep(step, wants);
        Ok(output)
    }

    /// Begins a lookup whose output completes in `part_count` parts: [`serve`](Self::serve), on
    /// any thread, looks up part after part, and the arrivals tell when one is complete. All
    /// ranks give the same `part_count`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), `Invalid` for no part or more than [`PARTS_MAX`].
    pub fn forward_parts(
        &mut self,
        bags: &Bags<'_>,
        wants: Wants,
        part_count: usize,
    ) -> Result<Arrivals> {
        let mut step = self.begin_parts(bags, wants, part_count)?;
        let arrivals = self.expect(&mut step);
        self.pending = Some((step, arrivals.clone(), wants));
        Ok(arrivals)
    }

    /// Looks up what [`forward_parts`](Self::forward_parts) began; returns when all ranks have.
    ///
    /// # Errors
    /// `Invalid` when nothing was begun, otherwise as [`forward`](Self::forward).
    pub fn serve(&mut self, rows: &mut impl LookupRows) -> Result<()> {
        self.check()?;
        let Some((step, arrivals, wants)) = self.pending.take() else {
            return Err(Error::invalid("no parts are to be looked up"));
        };
        let result = self.look_up(&step, &arrivals, rows).and_then(|()| arrivals.wait_for_all());
        self.break_on_error(result)?;
        self.keep(step, wants);
        Ok(())
    }

    /// Publishes this rank's bags and gathers those of all.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn begin(&mut self, bags: &Bags<'_>, wants: Wants) -> Result<Step> {
        self.begin_parts(bags, wants, 1)
    }

    /// Looks up the rows held here, into the outputs of all ranks, and waits for their part.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn exchange(&mut self, step: &mut Step, rows: &mut impl LookupRows) -> Result<Output> {
        self.check()?;
        let arrivals = self.expect(step);
        let result = self.look_up(step, &arrivals, rows).and_then(|()| arrivals.output());
        self.break_on_error(result)
    }

    /// Returns the values of an output, `[samples, output_dim]`, while it is valid; narrow ones
    /// as the numbers they stand for.
    #[must_use]
    pub fn output(&self, output: &Output) -> Vec<f32> {
        self.place.vectors(0..output.sample_count, output.epoch)
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
        self.place.pad.close()
    }

    pub(crate) fn break_on_error<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            self.place.pad.fail();
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

    /// Gives `step` the next output, and the signals that its parts need.
    pub(crate) fn expect(&mut self, step: &mut Step) -> Arrivals {
        self.output_epoch += 1;
        step.output_epoch = self.output_epoch;
        let arrivals = Arrivals::new(self.place.clone(), step, self.output_signals);
        self.output_signals = self.output_signals.wrapping_add(step.part_count as u32);
        arrivals
    }

    fn begin_parts(&mut self, bags: &Bags<'_>, wants: Wants, part_count: usize) -> Result<Step> {
        self.check()?;
        if self.pending.is_some() {
            return Err(Error::invalid("parts of the lookup before are still to be looked up"));
        }
        if part_count == 0 || part_count > PARTS_MAX {
            return Err(Error::invalid("a batch has 1 to 1024 parts").with("parts", part_count));
        }
        let Place { plan, layout, pad, .. } = self.place.as_ref();
        if wants.weight_grads && plan.has_columns() {
            return Err(Error::unsupported("no gradient of weights of tables divided by columns")
                .with("remedy", "divide weighted tables by rows, or hold them whole"));
        }
        let region = pad.heap().region(pad.rank());
        let options = BatchOptions { wants_weight_grads: wants.weight_grads, part_count };
        publish(plan, layout, region, bags, options)?;
        self.step += 1;
        let result = self.gather(wants, part_count).map(|mut step| {
            step.own = wants.weight_grads.then(|| OwnBags::new(bags));
            step
        });
        self.break_on_error(result)
    }

    fn gather(&self, wants: Wants, part_count: usize) -> Result<Step> {
        let Place { plan, pad, .. } = self.place.as_ref();
        pad.put_all(Channel::Bags, self.step as u32);
        pad.wait_all(Channel::Bags, self.step as u32)?;
        let sources: Result<Vec<_>> =
            (0..pad.rank_count()).map(|rank| self.place.source(rank)).collect();
        let sources = sources?;
        if let Some(other) = sources.iter().find(|source| source.part_count != part_count) {
            return Err(Error::invalid(format!("rank {} has other parts", other.rank))
                .with("rank", other.rank)
                .with("found_parts", other.part_count)
                .with("expected_parts", part_count)
                .with("remedy", "all ranks divide a batch into equally many parts"));
        }
        let of = StepOf { rank: pad.rank(), number: self.step, wants, part_count };
        Ok(Step::gather(plan, &sources, of))
    }

    // A forward without its backward, as of an interrupted step, is forgotten in time.
    fn keep(&mut self, step: Step, wants: Wants) {
        if wants.backward {
            let oldest = self.step.saturating_sub(self.place.layout.output_count() as u64);
            self.kept.retain(|step| step.number > oldest);
            self.kept.push(step);
        }
    }

    // Looks up all parts, each with its signal behind it.
    fn look_up(&self, step: &Step, arrivals: &Arrivals, rows: &mut impl LookupRows) -> Result<()> {
        for part in 0..step.part_count {
            self.look_up_part(step, part, rows)?;
            self.place.pad.put_all(Channel::Outputs, arrivals.signal(part));
        }
        Ok(())
    }

    fn look_up_part(&self, step: &Step, part: usize, rows: &mut impl LookupRows) -> Result<()> {
        let place = self.place.as_ref();
        let (rank, epoch) = (self.rank(), step.output_epoch);
        for (at, group) in place.plan.groups(rank).iter().enumerate() {
            let bags = step.lookup(part, at);
            if group.kind == GroupKind::Rows {
                let mut to = RowPlaces::sender(place, group, bags, &step.bases, epoch);
                rows.lookup(at, &bags.bags(), &mut to)?;
                to.into_result()?;
                continue;
            }
            let is_own = group.kind == GroupKind::Mirrors;
            let ranks = if is_own { rank..rank + 1 } else { 0..place.plan.rank_count() };
            let samples = ranks.map(|rank| (rank, step.part_of(rank, part)));
            let mut to = Outputs::sender(place, samples, columns_of(group), epoch);
            rows.lookup(at, &bags.bags(), &mut to)?;
        }
        Ok(())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // Waiting ranks learn that this rank left; leaving together is for `close`.
        if !self.is_closed {
            self.place.pad.fail();
        }
    }
}
