//! Lookups of several nodes: what a rank sends along its rail, and what comes.
//!
//! ```text
//! ask      publish own ids in the node; tell holders on the rail what all ranks of the node want
//!          --- questions along the rail --->
//! hear     gather for all ranks of all nodes what concerns the rows held here
//! answer   look up: into outputs of the node, into an answer for each other node
//!          --- answers along the rail --->
//! deliver  put vectors that came into the outputs of all ranks of the node; signal
//! ```
//!
//! Bytes are moved by the caller, who knows sockets or a library that does: lengths of questions
//! are to be told, those of answers both sides know. Source: TorchRec's table-wise-row-wise
//! sharding, which talks between equal local ranks as well; there every rank sends its own ids.

#![expect(
    clippy::indexing_slicing,
    reason = "other nodes and groups are those of the plan; parts are those that were asked for"
)]

use tierbed_core::{Bags, Error, Result};

use crate::ahead::Agreement;
use crate::arrivals::Arrivals;
use crate::asked::{Answer, Asked, NodeBags};
use crate::away::{read_mirrors, write_message, AwayRank, Hearer};
use crate::backward::runs_of;
use crate::bags::RankBags;
use crate::batch::BatchOptions;
use crate::destinations::row_bases;
use crate::exchange::{sources_in_parts, Exchange, LookupRows, Output};
use crate::memory::Region;
use crate::message::damaged;
use crate::pad::Channel;
use crate::plan::GroupKind;
use crate::row_lookup::Asking;
use crate::step::{part_samples, Gathering, OwnBags, Step, StepOf, Wants};

/// Bytes before the mirrored bags of a guest: their length.
const LENGTH_BYTES: usize = 8;

/// Bytes to and from each node; 0 for the own one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailBytes {
    /// That are sent.
    pub sent: Vec<usize>,
    /// That come.
    pub received: Vec<usize>,
}

/// What was asked of other nodes, in their order.
#[derive(Debug)]
pub(crate) struct Question {
    asked: Vec<Asked>,
    messages: Vec<Vec<u8>>,
    wants: Wants,
    part_count: usize,
    own: Option<OwnBags>,
}

impl Exchange {
    /// Publishes this rank's bags; returns the bytes of the questions to each node.
    ///
    /// # Errors
    /// As [`forward_parts`](Self::forward_parts).
    pub fn ask(&mut self, bags: &Bags<'_>, wants: Wants, part_count: usize) -> Result<Vec<usize>> {
        let own = wants.weight_grads.then(|| OwnBags::new(bags));
        self.ask_with(bags, wants, part_count, own)
    }

    /// As [`ask`](Self::ask), for a batch that is looked up later.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn ask_ahead(&mut self, bags: &Bags<'_>) -> Result<Vec<usize>> {
        self.ask_with(bags, self.announced_wants(), 1, Some(OwnBags::new(bags)))
    }

    fn ask_with(
        &mut self,
        bags: &Bags<'_>,
        wants: Wants,
        part_count: usize,
        own: Option<OwnBags>,
    ) -> Result<Vec<usize>> {
        self.publish(bags, wants, part_count)?;
        let result = self.questions(wants, part_count);
        let (asked, messages) = self.break_on_error(result)?.into_iter().unzip();
        let question = Question { asked, messages, wants, part_count, own };
        let lengths: Vec<usize> = question.messages.iter().map(Vec::len).collect();
        self.asking = Some(question);
        Ok(self.by_node(&lengths))
    }

    fn questions(&self, wants: Wants, part_count: usize) -> Result<Vec<(Asked, Vec<u8>)>> {
        let place = self.place.as_ref();
        let sources = sources_in_parts(place, part_count)?;
        let bases: Vec<_> = sources.iter().map(|source| row_bases(&place.plan, source)).collect();
        let (plan, nodes) = (&place.plan, place.nodes);
        let node_bags = NodeBags { plan, nodes, sources: &sources, bases: &bases };
        let options = BatchOptions { wants_weight_grads: wants.weight_grads, part_count };
        let local = place.pad.rank();
        let question = |node: usize| {
            let holder = nodes.ranks_of(node).start + local;
            let message = write_message(plan, holder, &sources, local, options);
            (node_bags.ask(holder, part_count), message)
        };
        Ok(nodes.others().map(question).collect())
    }

    /// Copies the questions to `to`, one behind the other.
    ///
    /// # Errors
    /// `Invalid` when nothing was asked, or `to` has another length.
    pub fn write_questions(&self, to: &mut [u8]) -> Result<()> {
        let Some(question) = &self.asking else {
            return Err(Error::invalid("nothing was asked"));
        };
        let bytes = question.messages.concat();
        if bytes.len() != to.len() {
            return Err(wrong_bytes(to.len(), bytes.len()));
        }
        to.copy_from_slice(&bytes);
        Ok(())
    }

    /// Takes the questions of the other nodes, `lengths` bytes of each, for a lookup.
    ///
    /// # Errors
    /// As [`forward_parts`](Self::forward_parts).
    pub fn hear(&mut self, from: &[u8], lengths: &[usize]) -> Result<Arrivals> {
        let step = self.hear_step(from, lengths);
        let step = self.break_on_error(step)?;
        let step = self.numbered(step);
        Ok(self.expect_answers(step))
    }

    /// Takes the questions of the other nodes for a batch that is looked up later.
    ///
    /// # Errors
    /// As [`hear`](Self::hear).
    pub fn hear_ahead(&mut self, from: &[u8], lengths: &[usize]) -> Result<()> {
        let step = self.hear_step(from, lengths);
        let step = self.break_on_error(step)?;
        self.push_announced(step);
        Ok(())
    }

    /// Begins the lookup of the announced batch that all ranks agreed upon.
    ///
    /// # Errors
    /// `Invalid` when the ranks agreed upon none.
    pub fn look_up_announced(&mut self, agreed: Agreement, wants: Wants) -> Result<Arrivals> {
        let number = agreed.of_all().ok_or_else(|| Error::invalid("ranks agreed upon no batch"))?;
        let step = self.take_number(number, wants)?;
        Ok(self.expect_answers(step))
    }

    fn hear_step(&mut self, from: &[u8], lengths: &[usize]) -> Result<Step> {
        self.check()?;
        let Some(question) = self.asking.take() else {
            return Err(Error::invalid("nothing was asked"));
        };
        let Question { asked, wants, part_count, own, .. } = question;
        let place = self.place.as_ref();
        let (plan, nodes, rank) = (&place.plan, place.nodes, self.rank());
        if lengths.len() != nodes.count() || lengths.iter().sum::<usize>() != from.len() {
            return Err(wrong_bytes(from.len(), lengths.iter().sum()));
        }
        let mut away: Vec<AwayRank> = Vec::new();
        let mut rest = from;
        for node in nodes.others() {
            let (message, later) = rest.split_at(lengths[node]);
            rest = later;
            let heard = Hearer { plan, nodes, rank, part_count }.read(node, message)?;
            away.extend(heard.ranks);
            if plan.has_mirrors() {
                self.put_guest(nodes.place_of(node), heard.mirrors)?;
            }
        }
        if plan.has_mirrors() {
            place.pad.put_all(Channel::Guests, self.published());
            place.pad.wait_all(Channel::Guests, self.published())?;
            for of_rank in &mut away {
                let local = nodes.local(of_rank.rank);
                let other = nodes.place_of(of_rank.rank / nodes.ranks_each());
                read_mirrors(plan, rank, of_rank, self.guest(local, other)?)?;
            }
        }
        let sources = sources_in_parts(place, part_count)?;
        let bases: Vec<_> = sources.iter().map(|source| row_bases(plan, source)).collect();
        let mut ranks: Vec<RankBags<'_>> = away.iter().map(RankBags::Away).collect();
        let first = nodes.first_rank();
        ranks.splice(first..first, sources.into_iter().map(RankBags::Here));
        let asking = Asking { plan, nodes, ranks: &ranks, bases: &bases };
        Ok(Step::gather(Gathering { asking, asked, own }, StepOf { rank, wants, part_count }))
    }

    // Shows the ranks of this node the mirrored bags that came from another one.
    fn put_guest(&self, other: usize, mirrors: &[u8]) -> Result<()> {
        let (at, room) = self.place.layout.guests_at(other);
        if mirrors.len() + LENGTH_BYTES > room {
            return Err(damaged().with("bytes", mirrors.len()).with("bytes_max", room));
        }
        let mut writer = self.place.region(self.rank()).writer();
        writer.values(at, 1).fill(mirrors.len() as u64);
        writer.values(at + LENGTH_BYTES, mirrors.len()).copy_from_slice(mirrors);
        Ok(())
    }

    fn guest(&self, local: usize, other: usize) -> Result<&[u8]> {
        let (at, room) = self.place.layout.guests_at(other);
        let region = self.place.pad.heap().region(local);
        let length = region.read::<u64>(at, 1).first().copied().unwrap_or_default() as usize;
        if length > room - LENGTH_BYTES {
            return Err(damaged().with("bytes", length).with("bytes_max", room));
        }
        Ok(region.read(at + LENGTH_BYTES, length))
    }

    /// Returns the bytes of the answers of a part.
    ///
    /// # Errors
    /// `Invalid` when no lookup was begun, or it has no such part.
    pub fn answer_bytes(&self, part: usize) -> Result<RailBytes> {
        let (step, _) = self.open_step(part)?;
        let sent: Vec<_> = step.lookups[part].answers.iter().map(|one| one.bytes()).collect();
        let received: Vec<_> = step.asked.iter().map(|asked| asked.answer_bytes(part)).collect();
        Ok(RailBytes { sent: self.by_node(&sent), received: self.by_node(&received) })
    }

    /// Looks up a part: into the outputs of this node, and the answers to other nodes into `to`,
    /// one behind the other.
    ///
    /// # Errors
    /// As [`forward_parts`](Self::forward_parts); `to` has another length.
    pub fn answer(&mut self, part: usize, rows: &mut impl LookupRows, to: &mut [u8]) -> Result<()> {
        let result = self.answer_part(part, rows, to);
        self.break_on_error(result)
    }

    fn answer_part(
        &self,
        part: usize,
        rows: &mut impl LookupRows,
        mut to: &mut [u8],
    ) -> Result<()> {
        let (step, _) = self.open_step(part)?;
        let answers = &step.lookups[part].answers;
        let bytes: usize = answers.iter().map(|answer| answer.bytes()).sum();
        if bytes != to.len() {
            return Err(wrong_bytes(to.len(), bytes));
        }
        let mut regions = Vec::new();
        for answer in answers {
            let (own, later) = to.split_at_mut(answer.bytes());
            to = later;
            regions.push(Region::over(own));
        }
        self.begin_rows(step, rows)?;
        self.look_up_part(step, part, rows, &regions)?;
        if part + 1 == step.part_count {
            rows.pass(step.passed);
        }
        Ok(())
    }

    /// Puts the vectors of a part that came from other nodes where they belong, and tells the ranks
    /// of this node that this rank's part in it is done.
    ///
    /// # Errors
    /// `Invalid` when `from` has another length, or no lookup was begun.
    pub fn deliver(&mut self, part: usize, from: &[u8]) -> Result<()> {
        let result = self.deliver_part(part, from);
        self.break_on_error(result)
    }

    fn deliver_part(&self, part: usize, from: &[u8]) -> Result<()> {
        let (step, arrivals) = self.open_step(part)?;
        let bytes: usize = step.asked.iter().map(|asked| asked.answer_bytes(part)).sum();
        if bytes != from.len() {
            return Err(wrong_bytes(from.len(), bytes));
        }
        let place = self.place.as_ref();
        let here = place.nodes.ranks_of(place.nodes.own());
        let regions: Vec<_> = here.map(|rank| place.region(rank)).collect();
        let rows_at = place.layout.rows_at(step.output_epoch);
        let mut rest = from;
        for asked in &step.asked {
            let (bytes, later) = rest.split_at(asked.answer_bytes(part));
            rest = later;
            let answer = Answer { part, bytes };
            for (at, group) in place.plan.groups(asked.holder).iter().enumerate() {
                match group.kind {
                    GroupKind::Mirrors => {}
                    GroupKind::Sums => self.place_sums(step, asked, at, answer),
                    GroupKind::Rows => asked.place_rows(at, answer, rows_at, &regions),
                }
            }
        }
        place.pad.put_all(Channel::Outputs, arrivals.signal(part));
        Ok(())
    }

    // Copies pooled vectors to the outputs of the ranks of this node.
    fn place_sums(&self, step: &Step, asked: &Asked, at: usize, answer: Answer<'_>) {
        let Answer { part, bytes } = answer;
        let place = self.place.as_ref();
        let precision = place.plan.output_precision();
        let group = &place.plan.groups(asked.holder)[at];
        let runs = runs_of(group);
        let width = precision.vector_bytes(group.width);
        let row_bytes = precision.vector_bytes(place.plan.output_dim());
        let mut rows = bytes[asked.section(part, at)..].chunks_exact(width);
        for rank in place.nodes.ranks_of(place.nodes.own()) {
            let mut writer = place.region(rank).writer();
            let samples = part_samples(step.samples_of(rank).len(), part, step.part_count);
            for (sample, row) in samples.zip(&mut rows) {
                let first = place.layout.output_at(step.output_epoch) + sample * row_bytes;
                for run in &runs {
                    let (from, len) =
                        (precision.vector_bytes(run.grad_column), precision.vector_bytes(run.len));
                    let to = first + precision.vector_bytes(run.output_column);
                    writer.values(to, len).copy_from_slice(&row[from..from + len]);
                }
            }
        }
    }

    /// Ends the lookup whose parts were all delivered: waits for the ranks of this node.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn finish_lookup(&mut self) -> Result<Output> {
        self.check()?;
        let Some((step, arrivals)) = self.pending.take() else {
            return Err(Error::invalid("no lookup was begun"));
        };
        let result = arrivals.wait_for_all();
        self.break_on_error(result)?;
        self.keep(step);
        Ok(arrivals.place())
    }

    fn open_step(&self, part: usize) -> Result<(&Step, &Arrivals)> {
        self.check()?;
        let pending = self.pending.as_ref().filter(|(step, _)| part < step.part_count);
        let (step, arrivals) = pending.ok_or_else(|| {
            Error::invalid("no lookup with such a part was begun").with("part", part)
        })?;
        Ok((step, arrivals))
    }

    /// Returns numbers of the other nodes as numbers of all nodes, 0 for this one.
    pub(crate) fn by_node(&self, of_others: &[usize]) -> Vec<usize> {
        let nodes = self.place.nodes;
        let of_node = |node| if node == nodes.own() { 0 } else { of_others[nodes.place_of(node)] };
        (0..nodes.count()).map(of_node).collect()
    }
}

/// Builds the error of a buffer of another length.
pub(crate) fn wrong_bytes(found: usize, expected: usize) -> Error {
    Error::invalid("a message between nodes has another length")
        .with("found_bytes", found)
        .with("expected_bytes", expected)
}
