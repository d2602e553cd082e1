//! Growth of a table of any size in bounded memory, block after block.
//!
//! Blocks are parts of a bisected log, and lie in it: 4 bytes a pin for all of them. What growth
//! needs, some times that, is made of one block at a time by each thread, and made again when
//! the block is wanted again.

use std::path::Path;

use tierbed_core::env::mix64;
use tierbed_core::Result;

use super::block::Block;
use super::GrowthOptions;
use crate::hypergraph::{sample_edges, Hypergraph};
use crate::partition::bisect::{identity_of, into_parts, Part, PartLimits, Parts};
use crate::partition::parallel;
use crate::progress::BuildContext;
use crate::resume::ResumeFile;

/// Rows of a block that is not divided further, however many pins it has.
const UNIT_ROWS: u32 = 1 << 12;

/// Place of a build, from 0 to 1, where it is in blocks.
pub(crate) const BISECTED: f64 = 0.1;

/// Levels that are told of apart, about.
const LEVELS: u64 = 32;

/// A table in blocks.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    parts: Parts,
    options: &'a GrowthOptions,
    /// Names the log and the options.
    identity: Vec<u32>,
    folder: Option<&'a Path>,
}

impl<'a> Blocks<'a> {
    /// Bisects a hypergraph into blocks, and goes on where an earlier run was.
    ///
    /// # Errors
    ///
    /// Those of kept files; what stops the build.
    pub(crate) fn split(
        graph: Hypergraph,
        options: &'a GrowthOptions,
        context: &BuildContext<'a, '_>,
    ) -> Result<Self> {
        let page = options.bisection.rows_per_page;
        let limits = PartLimits {
            rows: options.block_rows,
            pins: options.block_pins,
            unit_rows: options.block_rows.min(UNIT_ROWS.max(page)) / page * page,
        };
        let mut identity = identity_of(&graph, &options.bisection);
        identity.extend([limits.rows, limits.pins]);
        let stage = context.stage(0.0..BISECTED, LEVELS);
        let state_path = context.resume_dir.map(|folder| folder.join("blocks"));
        let report = &mut stage.listener();
        let parts = into_parts(graph, limits, &options.bisection, state_path.as_deref(), report)?;
        stage.advance(LEVELS);
        Ok(Self { parts, options, identity, folder: context.resume_dir })
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.iter().len()
    }

    /// Returns the rows of each block, `[local row]`.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.parts.iter().map(|part| part.rows)
    }

    /// Returns the file for a step of block `at`.
    pub(crate) fn resume_file(&self, step: &str, at: usize, more: &[u32]) -> ResumeFile {
        let path = self.folder.map(|folder| folder.join(format!("{step}-{at}")));
        let mut identity = self.identity.clone();
        identity.push(at as u32);
        identity.extend_from_slice(more);
        ResumeFile::new(path, identity)
    }

    /// Does every job on its block, on the threads of the options; results are in order of blocks.
    ///
    /// # Errors
    ///
    /// The first of `work`.
    pub(crate) fn run<J: Send, T: Send>(
        &self,
        jobs: impl IntoIterator<Item = J>,
        work: impl Fn(Source<'_>, J) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let GrowthOptions { bisection, block_pins, .. } = self.options;
        let jobs: Vec<_> = self.parts.iter().zip(jobs).enumerate().collect();
        let results = parallel(jobs, bisection.thread_count, |(at, (part, job))| {
            let seed = mix64(bisection.seed ^ at as u64);
            work(Source { at, part, pins_max: *block_pins, seed }, job)
        });
        results.into_iter().collect()
    }
}

/// What a block is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    /// Number of the block.
    pub(crate) at: usize,
    part: Part<'a>,
    pins_max: u32,
    pub(crate) seed: u64,
}

impl Source<'_> {
    /// Works on the part, or on a fair sample of its queries when it has too many pins; the second
    /// argument of `work` is how many pins the part has for each that is looked at.
    pub(crate) fn with<T>(&self, work: impl FnOnce(Part<'_>, f64) -> T) -> T {
        if self.part.pins.len() <= self.pins_max as usize {
            return work(self.part, 1.0);
        }
        let pins = sample_edges(self.part.pins, self.pins_max, self.seed);
        let scale = self.part.pins.len() as f64 / pins.len().max(1) as f64;
        work(Part { pins: &pins, ..self.part }, scale)
    }

    /// Returns the block, sampled as in [`with`](Self::with).
    pub(crate) fn block(&self) -> Block {
        self.with(|part, _| Block::new(part, self.seed))
    }
}
