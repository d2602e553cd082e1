//! Inputs of a lookup, in their three forms, joined to queries.
//!
//! | form | tensors |
//! |---|---|
//! | one id per feature | `ids` `[B, F]` |
//! | bags of all features in order | `values` `[E]`, `lengths` `[F * B]`, perhaps `weights` `[E]` |
//! | bags of some features | `<feature>.values`, `<feature>.lengths`, perhaps `<feature>.weights` |

use tierbed_core::{Error, Result};
use tierbed_snapshot::Pooling;

use super::inputs::Tensor;
use crate::columns::{
    by_feature, check_columns, check_counts, check_weights, find, join, offsets, Column, Joined,
    Place,
};
use crate::options::Limits;
use crate::plans::Asked;
use crate::query::{Ids, Query, Source};

/// Bags of one or several features, feature by feature.
#[derive(Debug)]
struct Bags {
    values: Ids,
    /// `[features * B + 1]`
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
}

/// What a request gives: the bags of all served features together, or of some.
#[derive(Debug)]
pub(super) enum Given {
    All(AllBags),
    Some(Vec<FeatureBags>),
}

/// The bags of all served features.
#[derive(Debug)]
pub(super) struct AllBags {
    bags: Bags,
    feature_count: usize,
}

/// The bags of one served feature.
#[derive(Debug)]
pub(super) struct FeatureBags {
    feature: usize,
    bags: Bags,
}

/// What given bags are joined by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joining<'a> {
    pub(super) limits: &'a Limits,
    /// Features may have different numbers of samples.
    pub(super) is_ragged: bool,
}

impl Given {
    /// Reads the inputs of a request to `source`.
    ///
    /// # Errors
    /// `Invalid` for unknown inputs, forms that are mixed or not whole, and too many of anything.
    pub(super) fn read(source: Source<'_>, tensors: Vec<Tensor>, limits: &Limits) -> Result<Self> {
        let feature_count = source.features.len();
        let mut parts = Vec::new();
        let (mut ids, mut all, mut has_all) = (None, Parts::default(), false);
        for tensor in tensors {
            match tensor.name.as_str() {
                "ids" => ids = Some(tensor),
                "values" | "lengths" | "weights" => {
                    let part = tensor.name.clone();
                    has_all = true;
                    all.put(&part, tensor)?;
                }
                _ => put(source, &mut parts, tensor)?,
            }
        }
        match (ids, has_all, parts.is_empty()) {
            (Some(ids), false, true) => {
                let bags = one_each(ids, feature_count, limits)?;
                Ok(Self::All(AllBags { bags, feature_count }))
            }
            (None, true, true) => {
                let bags = all.bags(feature_count, limits)?;
                Ok(Self::All(AllBags { bags, feature_count }))
            }
            (None, false, false) => {
                let bags = parts.into_iter().map(|(feature, parts): (usize, Parts)| {
                    let named = |error: Error| error.with("feature", &source.feature(feature).name);
                    let bags = parts.bags(1, limits).map_err(named)?;
                    Ok(FeatureBags { feature, bags })
                });
                Ok(Self::Some(bags.collect::<Result<_>>()?))
            }
            _ => Err(Error::invalid("inputs must be of one form").with(
                "expected",
                "ids, or values and lengths, or <feature>.values and <feature>.lengths",
            )),
        }
    }

    /// Returns the features that are given, in order.
    pub(super) fn features(&self) -> Vec<usize> {
        match self {
            Self::All(all) => (0..all.feature_count).collect(),
            Self::Some(some) => some.iter().map(|of| of.feature).collect(),
        }
    }

    pub(super) fn sample_count(&self) -> usize {
        match self {
            Self::All(AllBags { bags, feature_count }) => (bags.offsets.len() - 1) / feature_count,
            Self::Some(some) => some.first().map_or(0, |of| of.bags.offsets.len() - 1),
        }
    }

    /// Joins the bags of `asked` features, which are among the given ones, to queries.
    ///
    /// # Errors
    /// `Invalid` for features with different numbers of samples.
    pub(super) fn join(
        self,
        source: Source<'_>,
        asked: &[Asked],
        joining: Joining<'_>,
    ) -> Result<Joined> {
        let Joining { limits, is_ragged } = joining;
        let columns = match self {
            Self::All(AllBags { bags, feature_count }) => {
                let is_whole = asked.len() == feature_count
                    && asked.iter().enumerate().all(|(at, asked)| asked.feature == at)
                    && asked.iter().all(|asked| asked.pooling != Pooling::None);
                if is_whole {
                    // The usual request: its values are looked up where they lie.
                    let plan = source.plans.get(source.snapshot, source.features, asked)?;
                    let Bags { values, offsets, weights } = bags;
                    let places = (0..asked.len()).map(|at| Place { query: 0, at }).collect();
                    let queries = vec![Query::new(plan, values, offsets, weights)?];
                    return Ok(Joined { queries, places });
                }
                asked.iter().map(|asked| bags.column(*asked, feature_count)).collect()
            }
            Self::Some(some) => {
                let mut columns = Vec::new();
                for FeatureBags { feature, bags: Bags { values, offsets, weights } } in some {
                    let Some(asked) = asked.iter().find(|asked| asked.feature == feature) else {
                        continue;
                    };
                    columns.push(Column { asked: *asked, values, offsets, weights });
                }
                columns
            }
        };
        check_columns(source, &columns, is_ragged)?;
        let bag_count = columns.iter().map(|column| column.offsets.len() - 1).sum();
        let index_count = columns.iter().map(|column| column.values.len()).sum();
        check_counts(index_count, bag_count, limits)?;
        join(source, columns)
    }
}

impl Bags {
    /// Cuts out the bags of one feature.
    #[expect(clippy::indexing_slicing, reason = "offsets are checked, [features * B + 1]")]
    fn column(&self, asked: Asked, feature_count: usize) -> Column {
        let samples = (self.offsets.len() - 1) / feature_count;
        let offsets = &self.offsets[asked.feature * samples..=(asked.feature + 1) * samples];
        let (first, last) = (offsets[0], offsets[samples]);
        let range = first as usize..last as usize;
        Column {
            asked,
            values: self.values.slice(range.clone()),
            offsets: offsets.iter().map(|offset| offset - first).collect(),
            weights: self.weights.as_ref().map(|weights| weights[range].to_vec()),
        }
    }
}

/// The tensors of bags, as they come.
#[derive(Debug, Default)]
struct Parts {
    values: Option<Tensor>,
    lengths: Option<Tensor>,
    weights: Option<Tensor>,
}

/// Finds the place of a tensor `<feature>.<part>`.
fn put(source: Source<'_>, parts: &mut Vec<(usize, Parts)>, tensor: Tensor) -> Result<()> {
    let name = tensor.name.clone();
    // Feature names may contain dots; the last one separates.
    let Some((feature, part)) = name.rsplit_once('.') else {
        return Err(unknown_input(&name));
    };
    let feature = find(source.features, feature).map_err(|error| error.with("tensor", &name))?;
    if let Some((_, own)) = parts.iter_mut().find(|(known, _)| *known == feature) {
        return own.put(part, tensor);
    }
    let mut own = Parts::default();
    own.put(part, tensor)?;
    parts.push((feature, own));
    Ok(())
}

fn unknown_input(name: &str) -> Error {
    Error::invalid("unknown input").with("tensor", name).with(
        "expected",
        "ids, values, lengths, weights, <feature>.values, <feature>.lengths, <feature>.weights",
    )
}

impl Parts {
    fn put(&mut self, part: &str, tensor: Tensor) -> Result<()> {
        tensor.check_flat()?;
        match part {
            "values" => self.values = Some(tensor),
            "lengths" => self.lengths = Some(tensor),
            "weights" => self.weights = Some(tensor),
            _ => return Err(unknown_input(&tensor.name)),
        }
        Ok(())
    }

    fn bags(self, feature_count: usize, limits: &Limits) -> Result<Bags> {
        let (Some(values), Some(lengths)) = (self.values, self.lengths) else {
            return Err(Error::invalid("bags need both values and lengths"));
        };
        let (values, lengths) = (values.integers()?, lengths.integers()?);
        check_counts(values.len(), lengths.len(), limits)?;
        if !lengths.len().is_multiple_of(feature_count) {
            return Err(Error::invalid("lengths must have one value per feature and sample")
                .with("found", lengths.len())
                .with("features", feature_count));
        }
        let weights = self.weights.map(Tensor::floats).transpose()?;
        check_weights(weights.as_deref())?;
        Ok(Bags { offsets: offsets(&lengths, values.len())?, values, weights })
    }
}

/// Makes bags of one id each, feature by feature, of `ids` `[B, F]`.
fn one_each(ids: Tensor, feature_count: usize, limits: &Limits) -> Result<Bags> {
    let [samples, found] = ids.matrix()?;
    if found != feature_count {
        return Err(ids.misshapen(format_args!("[B, {feature_count}]")));
    }
    let ids = ids.integers()?;
    check_counts(ids.len(), ids.len(), limits)?;
    let offsets = (0..=ids.len() as i64).collect();
    Ok(Bags { values: by_feature(ids, samples, feature_count), offsets, weights: None })
}
