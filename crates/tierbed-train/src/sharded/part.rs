//! Parts of a batch, its output and its gradients that belong to each shard.
//!
//! Features of a shard keep their columns: a gradient `[B, output_dim]` is read where it lies. An
//! output is carved into pieces, and each shard gets those that are its own:
//!
//! ```text
//! features   a  b  c  d          shard 0: a, b, d     shard 1: c
//! sample 0 │aaaa bb cccc dd│     pieces of sample 0: [aaaa bb], [dd]  │  [cccc]
//! sample 1 │aaaa bb cccc dd│     ...
//! ```

#![expect(clippy::indexing_slicing, reason = "every feature of a plan belongs to one part")]

use tierbed_core::{Bags, Error, Result};
use tierbed_kernels::{Destination, FeatureLayout};

use super::split::Split;

/// What one shard does of the features of a plan.
#[derive(Debug)]
pub(crate) struct Part {
    /// Which features of the batch they are, ascending.
    pub(crate) features: Vec<usize>,
    /// The features alone, over the shard's tables, in the columns they have in the whole.
    pub(crate) plan: FeatureLayout,
    /// Where each feature's vector lies among the pieces of a sample: piece, first element.
    starts: Vec<(usize, usize)>,
    pieces_per_sample: usize,
}

/// How the features of a plan are divided.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) whole: FeatureLayout,
    /// One per shard that has a feature, with the shard's number, ascending.
    pub(crate) of_shards: Vec<(usize, Part)>,
    /// Part and length of the pieces of a sample, from left to right.
    pieces: Vec<(usize, usize)>,
}

/// Where one shard puts its vectors.
pub(crate) struct Places<'a> {
    pieces: Vec<&'a mut [f32]>,
    part: &'a Part,
}

impl Parts {
    /// Divides the features of `whole`.
    ///
    /// # Errors
    /// `Invalid` for a plan over other tables.
    pub(crate) fn new(split: &Split, whole: &FeatureLayout) -> Result<Self> {
        let places = whole.features().iter().map(|feature| split.place(feature.table));
        let places = places.collect::<Result<Vec<_>>>()?;
        let mut shards: Vec<usize> = places.iter().map(|(shard, _)| *shard).collect();
        let in_order = shards.clone();
        shards.sort_unstable();
        shards.dedup();
        let mut of_shards = Vec::with_capacity(shards.len());
        for shard in shards {
            let own = (0..).zip(&places).filter(|(_, (of, _))| *of == shard);
            let (features, tables): (Vec<_>, Vec<_>) =
                own.map(|(at, (_, table))| (at, *table)).unzip();
            let plan = whole.part(&features, &tables)?;
            of_shards
                .push((shard, Part { features, plan, starts: Vec::new(), pieces_per_sample: 0 }));
        }
        let feature_count: usize = of_shards.iter().map(|(_, part)| part.features.len()).sum();
        assert_eq!(feature_count, whole.features().len(), "every feature belongs to one shard");
        let mut parts = Self { whole: whole.clone(), of_shards, pieces: Vec::new() };
        parts.lay_out(&in_order);
        Ok(parts)
    }

    // Neighbouring features of one shard share a piece.
    fn lay_out(&mut self, shard_of_feature: &[usize]) {
        for (feature, &shard) in self.whole.features().iter().zip(shard_of_feature) {
            let at = self.of_shards.iter().position(|(of, _)| *of == shard);
            let Some(at) = at else { panic!("shard {shard} has a feature and no part") };
            let dim = feature.columns.dim;
            let (_, part) = &mut self.of_shards[at];
            match self.pieces.last_mut() {
                Some((of, len)) if *of == at => {
                    part.starts.push((part.pieces_per_sample - 1, *len));
                    *len += dim;
                }
                _ => {
                    part.starts.push((part.pieces_per_sample, 0));
                    part.pieces_per_sample += 1;
                    self.pieces.push((at, dim));
                }
            }
        }
    }

    /// Carves the output of `bags` into the places of each part.
    pub(crate) fn carve<'a>(&'a self, bags: &Bags<'_>, out: &'a mut [f32]) -> Vec<Places<'a>> {
        assert_eq!(out.len(), self.whole.output_len(bags), "an output of another batch");
        let place = |(_, part): &'a (usize, Part)| Places { pieces: Vec::new(), part };
        let mut places: Vec<Places<'a>> = self.of_shards.iter().map(place).collect();
        let mut give = |at: usize, piece| places[at].pieces.push(piece);
        if self.whole.is_pooled() {
            for mut row in out.chunks_exact_mut(self.whole.output_dim().max(1)) {
                for &(at, len) in &self.pieces {
                    let (piece, rest) = row.split_at_mut(len);
                    give(at, piece);
                    row = rest;
                }
                debug_assert!(row.is_empty(), "{} columns of a sample have no shard", row.len());
            }
        } else {
            let mut rest = out;
            for feature in 0..self.whole.features().len() {
                let len = self.whole.range(bags, feature).len() * self.whole.output_dim();
                let (piece, after) = std::mem::take(&mut rest).split_at_mut(len);
                rest = after;
                let has = |(_, part): &(usize, Part)| part.features.contains(&feature);
                let at = self.of_shards.iter().position(has);
                let Some(at) = at else { panic!("no shard has feature {feature}") };
                give(at, piece);
            }
        }
        places
    }
}

impl Part {
    /// Returns the gradient of this part's output: the whole one with pooling, else a copy of
    /// the rows of its features.
    pub(crate) fn grad<'a>(
        &self,
        whole: &FeatureLayout,
        bags: &Bags<'_>,
        grad: &'a [f32],
    ) -> std::borrow::Cow<'a, [f32]> {
        if whole.is_pooled() {
            return grad.into();
        }
        let dim = whole.output_dim();
        let ranges = self.features.iter().map(|&feature| whole.range(bags, feature));
        let rows = ranges.map(|range| &grad[range.start * dim..range.end * dim]);
        rows.flatten().copied().collect::<Vec<f32>>().into()
    }

    /// Puts values of this part's indices, `[E]` of the part, where they lie in the batch.
    pub(crate) fn put_back(
        &self,
        whole: &FeatureLayout,
        bags: &Bags<'_>,
        mut own: &[f32],
        into: &mut [f32],
    ) {
        for &feature in &self.features {
            let range = whole.range(bags, feature);
            let (values, rest) = own.split_at(range.len());
            into[range].copy_from_slice(values);
            own = rest;
        }
        assert!(own.is_empty(), "{} values belong to no index", own.len());
    }
}

impl Destination for Places<'_> {
    #[inline]
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let Part { plan, starts, pieces_per_sample, .. } = self.part;
        let dim = plan.features()[feature].columns.dim;
        let (piece, start) = match plan.is_pooled() {
            true => {
                let (piece, start) = starts[feature];
                (at * pieces_per_sample + piece, start)
            }
            false => (feature, at * dim),
        };
        &mut self.pieces[piece][start..start + dim]
    }
}

/// Tells that a plan leaves a shard without anything to do, which only counts in forward order.
pub(crate) fn idle_shard(parts: &Parts, shard_count: usize) -> Result<()> {
    if parts.of_shards.len() == shard_count {
        return Ok(());
    }
    Err(Error::invalid("a shard has no table of this collection").with(
        "remedy",
        "put all tables of the store into one collection, or open a new store with fewer shards",
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use tierbed_core::TableId;
    use tierbed_kernels::Pooling;

    use super::super::split::tests::schema;
    use super::*;

    // Features a, b, c, d; table 1, of c, is in shard 1.
    fn parts(pooling: Pooling) -> Parts {
        let split = Split { schema: schema(&[5, 5, 5]), shard_of: vec![0, 1, 0] };
        let features = [0, 2, 1, 0].map(|table| (TableId(table), pooling));
        Parts::new(&split, &FeatureLayout::new(&split.schema, &features).unwrap()).unwrap()
    }

    #[test]
    fn a_pooled_output_is_carved_by_columns() {
        let parts = parts(Pooling::Sum);
        let features: Vec<_> = parts.of_shards.iter().map(|(_, part)| &part.features).collect();
        assert_eq!(features, [&[0, 1, 3][..], &[2]]);
        let (indices, offsets) = ([0; 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let bags = Bags::new(&indices, &offsets, None, 4).unwrap();
        let mut out = vec![0.0; 2 * 16];
        for (shard, mut places) in parts.carve(&bags, &mut out).into_iter().enumerate() {
            for feature in 0..places.part.features.len() {
                for sample in 0..2 {
                    let told = (100 * shard + 10 * sample + feature) as f32;
                    places.vector(feature, sample).fill(told);
                }
            }
        }
        let vectors: Vec<f32> = out.chunks(4).map(|vector| vector[0]).collect();
        assert_eq!(vectors, [0.0, 1.0, 100.0, 2.0, 10.0, 11.0, 110.0, 12.0]);
        assert!(out.chunks(4).all(|vector| vector == [vector[0]; 4]));
    }

    #[test]
    fn rows_without_pooling_are_carved_by_features() {
        let parts = parts(Pooling::None);
        // a has two indices, b none, c one, d two.
        let (indices, offsets) = ([0; 5], [0, 2, 2, 3, 5]);
        let bags = Bags::new(&indices, &offsets, None, 4).unwrap();
        let mut out = vec![0.0; 5 * 4];
        for (shard, mut places) in parts.carve(&bags, &mut out).into_iter().enumerate() {
            let counts: &[usize] = if shard == 0 { &[2, 0, 2] } else { &[1] };
            for (feature, &count) in counts.iter().enumerate() {
                for at in 0..count {
                    places.vector(feature, at).fill((100 * shard + 10 * feature + at + 1) as f32);
                }
            }
        }
        let rows: Vec<f32> = out.chunks(4).map(|row| row[0]).collect();
        assert_eq!(rows, [1.0, 2.0, 101.0, 21.0, 22.0]);
        let (_, first) = &parts.of_shards[0];
        let grad = first.grad(&parts.whole, &bags, &out);
        assert_eq!(grad.chunks(4).map(|row| row[0]).collect::<Vec<_>>(), [1.0, 2.0, 21.0, 22.0]);
        let mut back = [0.0; 5];
        first.put_back(&parts.whole, &bags, &[1.0, 2.0, 3.0, 4.0], &mut back);
        assert_eq!(back, [1.0, 2.0, 0.0, 3.0, 4.0]);
    }
}
