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

use crate::ahead::Ahead;
use crate::arrivals::Arrivals;
use crate::bags::RankBags;
use crate::batch::{check_bags, publish, BatchOptions, Source};
use crate::destinations::row_bases;
use crate::layout::Layout;
use crate::memory::Region;
use crate::nodes::Nodes;
use crate::pad::{Channel, Pad};
use crate::plan::ExchangePlan;
use crate::rail_grads::Stepping;
use crate::rails::Question;
use crate::row_lookup::Asking;
use crate::step::{Gathering, OwnBags, Step, StepOf, StepRows, Wants};

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

    /// Prepares for lookups of a batch that is trained on; `rows` lists all rows of its step.
    ///
    /// # Errors
    /// Whatever keeps it from reading rows.
    fn begin(&mut self, _rows: impl FnOnce() -> StepRows) -> Result<()> {
        Ok(())
    }

    /// Notes that `count` batches are looked up whose rows were brought before they were needed.
    fn pass(&mut self, _count: usize) {}
}

/// What ranks agree on, and this rank's way to the memory of all.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) plan: ExchangePlan,
    pub(crate) layout: Layout,
    /// Of the ranks of this node.
    pub(crate) pad: Pad,
    pub(crate) nodes: Nodes,
    pub(crate) kernels: Kernels,
}

impl Place {
    /// Returns this rank.
    pub(crate) fn rank(&self) -> usize {
        self.nodes.first_rank() + self.pad.rank()
    }

    /// Returns the region of `rank`, which is on this node.
    pub(crate) fn region(&self, rank: usize) -> Region<'_> {
        assert!(self.nodes.is_here(rank), "memory of other nodes is out of reach");
        self.pad.heap().region(self.nodes.local(rank))
    }

    /// Returns what `rank`, which is on this node, published.
    pub(crate) fn source(&self, rank: usize) -> Result<Source<'_>> {
        Source::read(&self.plan, &self.layout, self.region(rank), rank)
    }

    /// Returns what the ranks of this node published.
    pub(crate) fn sources(&self) -> Result<Vec<Source<'_>>> {
        self.nodes.ranks_of(self.nodes.own()).map(|rank| self.source(rank)).collect()
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
    /// A step that is still to be looked up here.
    pub(crate) pending: Option<(Step, Arrivals)>,
    /// What was asked of other nodes, until they have told what they ask.
    pub(crate) asking: Option<Question>,
    /// Batches that were announced.
    pub(crate) ahead: Ahead,
    /// Steps that wait for their backward, and the one whose backward is under way.
    pub(crate) kept: Vec<Step>,
    pub(crate) stepping: Option<Stepping>,
    step: u64,
    /// How often bags were published.
    published: u32,
    output_epoch: u64,
    /// Signals of outputs that were planned: one for each part.
    output_signals: u32,
    pub(crate) grads_step: u64,
    is_closed: bool,
}

impl Exchange {
    /// Joins as the rank of `pad`, whose ranks are all there are.
    ///
    /// # Errors
    /// `Invalid` when the plan is for another number of ranks, or regions are too short for it.
    pub fn new(plan: ExchangePlan, layout: Layout, pad: Pad) -> Result<Self> {
        let nodes = Nodes::one(pad.rank_count());
        Self::of_nodes(plan, layout, pad, nodes)
    }

    /// Joins as the rank of `pad`, whose ranks are those of one of the `nodes`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_nodes(plan: ExchangePlan, layout: Layout, pad: Pad, nodes: Nodes) -> Result<Self> {
        let found = pad.heap().region(pad.rank()).len_bytes();
        let is_its = plan.rank_count() == nodes.rank_count();
        if !is_its || pad.rank_count() != nodes.ranks_each() || found < layout.region_bytes() {
            return Err(Error::invalid("the heap is not that of the plan")
                .with("ranks", pad.rank_count())
                .with("nodes", nodes.count())
                .with("expected_ranks", plan.rank_count())
                .with("region_bytes", found)
                .with("expected_bytes", layout.region_bytes()));
        }
        Ok(Self {
            place: Arc::new(Place {
                pad: pad.named_from(nodes.first_rank()),
                plan,
                layout,
                nodes,
                kernels: Kernels::detect(),
            }),
            broken: None,
            pending: None,
            asking: None,
            ahead: Ahead::default(),
            kept: Vec::new(),
            stepping: None,
            step: 0,
            published: 0,
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
        self.place.rank()
    }

    /// Returns which ranks share memory.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.place.nodes
    }

    /// Changes how long a rank may be silent.
    pub fn set_timeout(&mut self, timeout: std::time::Duration) {
        Arc::make_mut(&mut self.place).pad.set_timeout(timeout);
    }

    /// Looks up one batch together, with the ranks of one node: `bags` are this rank's samples.
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
        let mut step = match self.take_announced(bags, wants)? {
            Some(step) => step,
            None => self.begin(bags, wants)?,
        };
        let output = self.exchange(&mut step, rows)?;
        self.keep(step);
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
        let step = self.begin_parts(bags, wants, part_count)?;
        Ok(self.expect_answers(step))
    }

    /// Looks up what [`forward_parts`](Self::forward_parts) began; returns when all ranks have.
    ///
    /// # Errors
    /// `Invalid` when nothing was begun, otherwise as [`forward`](Self::forward).
    pub fn serve(&mut self, rows: &mut impl LookupRows) -> Result<()> {
        self.check()?;
        let Some((step, arrivals)) = self.pending.take() else {
            return Err(Error::invalid("no parts are to be looked up"));
        };
        let result = self.look_up(&step, &arrivals, rows).and_then(|()| arrivals.wait_for_all());
        self.break_on_error(result)?;
        self.keep(step);
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

    /// Makes sure that a batch may be looked up now.
    ///
    /// # Errors
    /// `Invalid` for one that is too large, has an id out of range, or comes too early.
    pub fn check_batch(&self, bags: &Bags<'_>) -> Result<()> {
        self.check()?;
        if self.pending.is_some() || self.asking.is_some() {
            return Err(Error::invalid("parts of the lookup before are still to be looked up"));
        }
        check_bags(&self.place.plan, &self.place.layout, bags)
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

    /// Breaks the exchange: `cause` kept this rank from its part in a call of all ranks.
    pub fn fail(&mut self, cause: &str) {
        self.place.pad.fail();
        self.broken.get_or_insert_with(|| cause.to_owned());
    }

    /// Breaks the exchange because `lost`, a rank of another node, does not answer: `cause` says
    /// how it was noticed.
    pub fn lose(&mut self, lost: usize, cause: &str) {
        self.place.pad.fail_for(lost);
        self.broken.get_or_insert_with(|| cause.to_owned());
    }

    /// Returns whether a failure broke the exchange: nothing can be looked up any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
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

    /// Lets `step` be the one whose parts are to be looked up.
    pub(crate) fn expect_answers(&mut self, mut step: Step) -> Arrivals {
        let arrivals = self.expect(&mut step);
        self.pending = Some((step, arrivals.clone()));
        arrivals
    }

    fn begin_parts(&mut self, bags: &Bags<'_>, wants: Wants, part_count: usize) -> Result<Step> {
        assert_eq!(self.nodes().count(), 1, "several nodes ask each other");
        self.publish(bags, wants, part_count)?;
        let own = wants.weight_grads.then(|| OwnBags::new(bags));
        let result = self.gather_here(wants, part_count, own);
        let step = self.break_on_error(result)?;
        Ok(self.numbered(step))
    }

    /// Gives `step` the next number.
    pub(crate) fn numbered(&mut self, mut step: Step) -> Step {
        self.step += 1;
        step.number = self.step;
        step.passed += self.take_skipped();
        step
    }

    /// Publishes this rank's bags, and waits for those of the ranks of this node.
    ///
    /// # Errors
    /// As [`forward_parts`](Self::forward_parts).
    pub(crate) fn publish(
        &mut self,
        bags: &Bags<'_>,
        wants: Wants,
        part_count: usize,
    ) -> Result<()> {
        self.check_batch(bags)?;
        if part_count == 0 || part_count > PARTS_MAX {
            return Err(Error::invalid("a batch has 1 to 1024 parts").with("parts", part_count));
        }
        let Place { plan, layout, pad, .. } = self.place.as_ref();
        if wants.weight_grads && plan.has_columns() {
            return Err(Error::unsupported("no gradient of weights of tables divided by columns")
                .with("remedy", "divide weighted tables by rows, or hold them whole"));
        }
        let is_free = self.ahead.wait_until_gathered(pad);
        let region = pad.heap().region(pad.rank());
        let options = BatchOptions { wants_weight_grads: wants.weight_grads, part_count };
        if is_free.is_ok() {
            publish(plan, layout, region, bags, options);
        }
        self.break_on_error(is_free)?;
        self.published = self.published.wrapping_add(1);
        let published = self.published;
        let pad = &self.place.pad;
        pad.put_all(Channel::Bags, published);
        let result = pad.wait_all(Channel::Bags, published);
        self.break_on_error(result)
    }

    /// Returns how often bags were published.
    pub(crate) fn published(&self) -> u32 {
        self.published
    }

    /// Gathers what the ranks of this node, which are all, published.
    pub(crate) fn gather_here(
        &self,
        wants: Wants,
        part_count: usize,
        own: Option<OwnBags>,
    ) -> Result<Step> {
        let place = self.place.as_ref();
        let sources = sources_in_parts(place, part_count)?;
        let bases: Vec<_> = sources.iter().map(|source| row_bases(&place.plan, source)).collect();
        let ranks: Vec<_> = sources.into_iter().map(RankBags::Here).collect();
        let (plan, nodes) = (&place.plan, place.nodes);
        let asking = Asking { plan, nodes, ranks: &ranks, bases: &bases };
        let of = StepOf { rank: self.rank(), wants, part_count };
        Ok(Step::gather(Gathering { asking, asked: Vec::new(), own }, of))
    }

    // A forward without its backward, as of an interrupted step, is forgotten in time.
    pub(crate) fn keep(&mut self, step: Step) {
        if step.wants.backward {
            let oldest = self.step.saturating_sub(self.place.layout.output_count() as u64);
            self.kept.retain(|step| step.number > oldest);
            self.kept.push(step);
        }
    }

    /// Lets `rows` prepare for the lookups of a step.
    pub(crate) fn begin_rows(&self, step: &Step, rows: &mut impl LookupRows) -> Result<()> {
        match step.wants.backward {
            true => rows.begin(|| step.rows(&self.place.plan, self.rank())),
            false => Ok(()),
        }
    }

    // Looks up all parts, each with its signal behind it.
    fn look_up(&self, step: &Step, arrivals: &Arrivals, rows: &mut impl LookupRows) -> Result<()> {
        self.begin_rows(step, rows)?;
        for part in 0..step.part_count {
            self.look_up_part(step, part, rows, &[])?;
            self.place.pad.put_all(Channel::Outputs, arrivals.signal(part));
        }
        rows.pass(step.passed);
        Ok(())
    }
}

/// Reads what the ranks of this node published.
///
/// # Errors
/// `Invalid` when one of them has other parts.
pub(crate) fn sources_in_parts(place: &Place, part_count: usize) -> Result<Vec<Source<'_>>> {
    let sources = place.sources()?;
    if let Some(other) = sources.iter().find(|source| source.part_count != part_count) {
        return Err(Error::invalid(format!("rank {} has other parts", other.rank))
            .with("rank", other.rank)
            .with("found_parts", other.part_count)
            .with("expected_parts", part_count)
            .with("remedy", "all ranks divide a batch into equally many parts"));
    }
    Ok(sources)
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // Waiting ranks learn that this rank left; leaving together is for `close`.
        if !self.is_closed {
            self.place.pad.fail();
        }
    }
}
