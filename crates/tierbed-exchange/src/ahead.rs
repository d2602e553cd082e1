//! Batches that are announced before they are looked up.
//!
//! All ranks announce equally many batches together. Their ids go to the holders at once, so that a
//! store can bring the rows, and need not be sent again when the batch is looked up. Whether a
//! lookup is of an announced batch, each rank knows of its own samples only; so they agree.

use std::collections::VecDeque;

use tierbed_core::{Bags, Error, Result};

use crate::exchange::Exchange;
use crate::pad::{Channel, Pad};
use crate::step::{OwnBags, Step, StepRows, Wants};

/// Batches that were announced and not looked up yet, nearest first.
#[derive(Debug)]
pub(crate) struct Ahead {
    steps: VecDeque<Step>,
    /// How many of them the store was told to bring.
    brought: usize,
    /// Whether ranks ever announced: from then on they agree before each lookup.
    has_announced: bool,
    agreements: u64,
    /// The publication that was gathered last for an announcement.
    gathered: Option<u32>,
    /// What followed the last lookup that was trained on.
    wants: Wants,
    /// Brought batches that are done when the next one is looked up, beside those it passes itself.
    skipped: usize,
}

impl Default for Ahead {
    fn default() -> Self {
        Self {
            steps: VecDeque::new(),
            brought: 0,
            has_announced: false,
            agreements: 0,
            gathered: None,
            wants: Wants { backward: true, weight_grads: false },
            skipped: 0,
        }
    }
}

/// The smallest and the largest number that ranks gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// The smallest.
    pub least: u64,
    /// The largest.
    pub most: u64,
}

impl Agreement {
    /// Returns the number that all gave, if it is not 0.
    #[must_use]
    pub fn of_all(self) -> Option<u64> {
        (self.least == self.most && self.least > 0).then_some(self.least)
    }
}

impl Ahead {
    /// Waits until the bags that were announced last may be overwritten.
    pub(crate) fn wait_until_gathered(&self, pad: &Pad) -> Result<()> {
        self.gathered.map_or(Ok(()), |number| pad.wait_all(Channel::Gathered, number))
    }

    // Number of the batch that `bags` are, counted from 1; 0 for none of them.
    fn number_of(&self, bags: &Bags<'_>, wants: Wants, part_count: usize) -> u64 {
        let is_it = |step: &Step| {
            let is_wanted = !wants.backward || step.wants == wants;
            let has_bags = step.own.as_ref().is_some_and(|own| own.is_of(bags));
            part_count == 1 && is_wanted && has_bags
        };
        self.steps.iter().position(is_it).map_or(0, |at| at as u64 + 1)
    }
}

impl Exchange {
    /// Announces a batch together, with the ranks of one node: `bags` are this rank's samples.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn announce(&mut self, bags: &Bags<'_>) -> Result<()> {
        assert_eq!(self.nodes().count(), 1, "several nodes ask each other");
        let wants = self.ahead.wants;
        self.publish(bags, wants, 1)?;
        let result = self.gather_here(wants, 1, Some(OwnBags::new(bags)));
        let step = self.break_on_error(result)?;
        self.push_announced(step);
        Ok(())
    }

    /// Returns what is wanted of announced batches.
    pub(crate) fn announced_wants(&self) -> Wants {
        self.ahead.wants
    }

    /// Adds an announced batch; what its ranks published may be overwritten.
    pub(crate) fn push_announced(&mut self, step: Step) {
        let published = self.published();
        self.place.pad.put_all(Channel::Gathered, published);
        self.ahead.gathered = Some(published);
        self.ahead.has_announced = true;
        self.ahead.steps.push_back(step);
    }

    /// Returns how many batches are announced, and how many of them were brought.
    #[must_use]
    pub fn announced(&self) -> (usize, usize) {
        (self.ahead.steps.len(), self.ahead.brought)
    }

    /// Returns whether `bags` are announced batch number `at`, as far as this rank knows.
    #[must_use]
    pub fn is_announced(&self, at: usize, bags: &Bags<'_>) -> bool {
        let step = self.ahead.steps.get(at);
        step.and_then(|step| step.own.as_ref()).is_some_and(|own| own.is_of(bags))
    }

    /// Returns the rows of the next `count` batches that were not brought, nearest first.
    #[must_use]
    pub fn rows_to_bring(&self, count: usize) -> Vec<StepRows> {
        self.rows_of(self.ahead.steps.iter().skip(self.ahead.brought).take(count))
    }

    /// Returns the rows of the batches that were brought, nearest first.
    #[must_use]
    pub fn brought_rows(&self) -> Vec<StepRows> {
        self.rows_of(self.ahead.steps.iter().take(self.ahead.brought))
    }

    fn rows_of<'a>(&self, steps: impl Iterator<Item = &'a Step>) -> Vec<StepRows> {
        steps.map(|step| step.rows(&self.place.plan, self.rank())).collect()
    }

    /// Takes the batch that was announced last, to plan it: it will not be looked up as announced.
    ///
    /// # Errors
    /// `Invalid` when none was announced, or some were brought.
    pub fn take_to_plan(&mut self) -> Result<StepRows> {
        let (count, brought) = self.announced();
        let step = if brought < count { self.ahead.steps.pop_back() } else { None };
        let step = step.ok_or_else(|| Error::invalid("no batch was announced to be planned"))?;
        // Lookups need no agreement on batches of a plan.
        self.ahead.has_announced = count > 1;
        Ok(step.rows(&self.place.plan, self.rank()))
    }

    /// Notes that the store brings the rows of `count` batches more.
    ///
    /// # Panics
    /// When fewer were announced.
    pub fn note_brought(&mut self, count: usize) {
        self.ahead.brought += count;
        assert!(self.ahead.brought <= self.ahead.steps.len(), "only what was announced is brought");
    }

    /// Forgets batches that were announced, behind the first `kept`.
    pub fn forget_announced(&mut self, kept: usize) {
        self.ahead.steps.truncate(kept);
        self.ahead.brought = self.ahead.brought.min(kept);
    }

    /// Asks the ranks of this node which announced batch is looked up, counted from 1; `None` when
    /// there was never one. All ranks of all nodes call this before they look up.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn find_announced(
        &mut self,
        bags: &Bags<'_>,
        wants: Wants,
        part_count: usize,
    ) -> Result<Option<Agreement>> {
        if wants.backward {
            self.ahead.wants = wants;
        }
        if !self.ahead.has_announced {
            return Ok(None);
        }
        self.check_batch(bags)?;
        let number = self.ahead.number_of(bags, wants, part_count);
        self.agree(number).map(Some)
    }

    /// Forgets announced batches up to `number`, counted from 1; 0 for none. All ranks agreed that
    /// the next lookup is of that batch, with ids of its own: it is asked for anew.
    ///
    /// # Errors
    /// `Invalid` when there is no such batch.
    pub fn skip_announced(&mut self, number: usize) -> Result<()> {
        self.check()?;
        if number > self.ahead.steps.len() {
            return Err(no_such_batch(number));
        }
        self.ahead.steps.drain(..number);
        let passed = number.min(self.ahead.brought);
        self.ahead.brought -= passed;
        self.ahead.skipped += passed;
        // What comes need not be compared with what was announced.
        self.ahead.has_announced = false;
        Ok(())
    }

    /// Returns how many brought batches are done when the next one is looked up.
    pub(crate) fn take_skipped(&mut self) -> usize {
        std::mem::take(&mut self.ahead.skipped)
    }

    /// Returns the announced batch `number`, counted from 1, which all ranks agreed upon; those
    /// before it are forgotten.
    ///
    /// # Errors
    /// `Invalid` when there is no such batch.
    pub(crate) fn take_number(&mut self, number: u64, wants: Wants) -> Result<Step> {
        let count = number as usize;
        let known = count.min(self.ahead.steps.len());
        let Some(mut step) = self.ahead.steps.drain(..known).next_back() else {
            return Err(no_such_batch(count));
        };
        let passed = count.min(self.ahead.brought);
        self.ahead.brought -= passed;
        step.passed = passed;
        step.wants = wants;
        Ok(self.numbered(step))
    }

    /// As [`find_announced`](Self::find_announced) with the ranks of one node, and takes it.
    pub(crate) fn take_announced(&mut self, bags: &Bags<'_>, wants: Wants) -> Result<Option<Step>> {
        let found = self.find_announced(bags, wants, 1)?;
        let number = found.and_then(Agreement::of_all);
        number.map(|number| self.take_number(number, wants)).transpose()
    }

    /// Tells the ranks of this node a number, and returns what they told.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), in all but the batch.
    pub fn agree(&mut self, number: u64) -> Result<Agreement> {
        self.check()?;
        self.ahead.agreements += 1;
        let round = self.ahead.agreements;
        let pad = &self.place.pad;
        let at = self.place.layout.agreement_at(round);
        pad.heap().region(pad.rank()).writer().values(at, 1).fill(number);
        pad.put_all(Channel::Agreement, round as u32);
        let result = pad.wait_all(Channel::Agreement, round as u32).map(|()| {
            let told = |local| pad.heap().region(local).read::<u64>(at, 1).iter().copied();
            let numbers: Vec<u64> = (0..pad.rank_count()).flat_map(told).collect();
            let least = numbers.iter().copied().min().unwrap_or(number);
            Agreement { least, most: numbers.iter().copied().max().unwrap_or(number) }
        });
        self.break_on_error(result)
    }
}

fn no_such_batch(number: usize) -> Error {
    Error::invalid("no such batch was announced").with("number", number)
}
