//! One part of a lookup: rows looked up for all ranks, into outputs and answers.

#![expect(
    clippy::indexing_slicing,
    reason = "groups and parts are those of the step; other nodes have an answer each"
)]

use tierbed_core::Result;

use crate::destinations::{Outputs, RankOutput, RowPlaces};
use crate::exchange::{Exchange, LookupRows};
use crate::memory::Region;
use crate::plan::GroupKind;
use crate::step::{GroupLookup, Step};

impl Exchange {
    /// Looks up a part: into outputs of this node, and into `answers` to the others.
    pub(crate) fn look_up_part(
        &self,
        step: &Step,
        part: usize,
        rows: &mut impl LookupRows,
        answers: &[Region<'_>],
    ) -> Result<()> {
        let place = self.place.as_ref();
        let epoch = step.output_epoch;
        for (at, group) in place.plan.groups(self.rank()).iter().enumerate() {
            let bags = step.lookup(part, at);
            if let GroupLookup::Rows(lookup) = &step.lookups[part].groups[at] {
                let mut to = RowPlaces::sender(place, group, lookup, answers, epoch);
                rows.lookup(at, &bags, &mut to)?;
                to.into_result()?;
                continue;
            }
            let outputs = match group.kind {
                GroupKind::Mirrors => {
                    let own = step.part_of(self.rank(), part);
                    let samples = 0..own.len();
                    vec![RankOutput::here(place, self.rank(), own.start, samples, epoch)]
                }
                _ => self.outputs(step, part, at, answers),
            };
            let precision = place.plan.output_precision();
            let mut to = Outputs::of_group(precision, outputs, group);
            rows.lookup(at, &bags, &mut to)?;
        }
        Ok(())
    }

    // Where the vectors of a group go: outputs of ranks of this node, answers to the others.
    fn outputs<'a>(
        &'a self,
        step: &Step,
        part: usize,
        group: usize,
        answers: &[Region<'a>],
    ) -> Vec<RankOutput<'a>> {
        let place = self.place.as_ref();
        let width = place.plan.groups(self.rank())[group].width;
        let row_bytes = place.plan.output_precision().vector_bytes(width);
        let mut outputs = Vec::new();
        let mut end = 0;
        for node in 0..place.nodes.count() {
            let first = end;
            for rank in place.nodes.ranks_of(node) {
                let own = step.part_of(rank, part);
                let samples = end..end + own.len();
                end = samples.end;
                if place.nodes.is_here(rank) {
                    let here = RankOutput::here(place, rank, own.start, samples, step.output_epoch);
                    outputs.push(here);
                }
            }
            if node != place.nodes.own() {
                let other = place.nodes.place_of(node);
                let first_byte = step.lookups[part].answers[other].start(group);
                outputs.push(RankOutput::away(answers[other], first_byte, row_bytes, first..end));
            }
        }
        outputs
    }
}
