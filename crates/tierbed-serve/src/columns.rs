//! Columns of a request, one per feature, checked and joined to queries.

use std::sync::Arc;

use tierbed_core::{Bags, Error, Result};
use tierbed_snapshot::Pooling;

use crate::features::Feature;
use crate::options::Limits;
use crate::plans::{Asked, Plan};
use crate::query::{Ids, Query, Source};

/// The bags of one feature: bag `b` holds `values[offsets[b]..offsets[b + 1]]`.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) asked: Asked,
    pub(crate) values: Ids,
    pub(crate) offsets: Vec<i64>,
    pub(crate) weights: Option<Vec<f32>>,
}

/// Where the vectors of a column are: feature `at` of a query's plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) query: usize,
    pub(crate) at: usize,
}

impl Place {
    /// Returns the query that the place is in.
    ///
    /// # Panics
    /// When they are not the queries of the place's request.
    pub(crate) fn query_of(self, queries: &[Query]) -> &Query {
        let Some(query) = queries.get(self.query) else {
            panic!("{self:?} of {} queries", queries.len());
        };
        query
    }

    /// Returns the shape of the vectors: rows and elements.
    ///
    /// # Panics
    /// As [`query_of`](Self::query_of).
    pub(crate) fn shape(self, queries: &[Query]) -> [usize; 2] {
        let query = self.query_of(queries);
        [query.row_count(), query.dim(self.at)]
    }
}

/// The queries of a request, and the place of each column.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) queries: Vec<Query>,
    pub(crate) places: Vec<Place>,
}

/// Finds a served feature.
///
/// # Errors
/// `Invalid` naming those there are.
pub(crate) fn find(features: &[Feature], name: &str) -> Result<usize> {
    features.iter().position(|feature| feature.name == name).ok_or_else(|| {
        let names: Vec<_> = features.iter().map(|feature| feature.name.as_str()).collect();
        Error::invalid("unknown feature")
            .with("feature", name)
            .with("expected", format_args!("one of {}", names.join(", ")))
    })
}

/// Checks how much a request asks for.
///
/// # Errors
/// `Invalid` for more than is allowed.
pub(crate) fn check_counts(indices: usize, bags: usize, limits: &Limits) -> Result<()> {
    for (what, found, name, allowed) in [
        ("indices", indices, "indices_max", limits.indices_max),
        ("bags", bags, "bags_max", limits.bags_max),
    ] {
        if found > allowed {
            return Err(Error::invalid(format!("too many {what} in one request"))
                .with("found", found)
                .with(name, allowed)
                .with("remedy", "send several smaller requests"));
        }
    }
    Ok(())
}

/// Checks how large an answer would be.
///
/// # Errors
/// `Invalid` when it is larger than allowed.
pub(crate) fn check_answer(bytes: usize, limits: &Limits) -> Result<()> {
    if bytes <= limits.answer_bytes_max {
        return Ok(());
    }
    Err(Error::invalid("answer would be too large")
        .with("answer_bytes", bytes)
        .with("answer_bytes_max", limits.answer_bytes_max)
        .with("remedy", "send several smaller requests"))
}

/// Checks that weights are finite. JSON's 1e39 is a number, but no 32-bit one; its product would
/// be answered as null.
///
/// # Errors
/// `Invalid` naming the first that is not.
pub(crate) fn check_weights(weights: Option<&[f32]>) -> Result<()> {
    match weights.and_then(|weights| weights.iter().position(|weight| !weight.is_finite())) {
        None => Ok(()),
        Some(at) => Err(Error::invalid("weight is not a finite 32-bit number")
            .with("position", at)
            .with("remedy", "send weights between -3.4e38 and 3.4e38")),
    }
}

/// Checks the bags of every column, and that all have as many unless they are ragged.
///
/// # Errors
/// `Invalid`, naming the feature, or when there is none.
pub(crate) fn check_columns(source: Source<'_>, columns: &[Column], is_ragged: bool) -> Result<()> {
    let Some(first) = columns.first() else {
        return Err(Error::invalid("a lookup needs at least one feature"));
    };
    for column in columns {
        let name = source.feature(column.asked.feature).name.as_str();
        Bags::new(&column.values, &column.offsets, column.weights.as_deref(), 1)
            .and_then(|_| check_weights(column.weights.as_deref()))
            .map_err(|error| error.with("feature", name))?;
        if !is_ragged && column.offsets.len() != first.offsets.len() {
            return Err(Error::invalid("features must have the same number of samples")
                .with("feature", name)
                .with("samples", column.offsets.len() - 1)
                .with("expected", first.offsets.len() - 1));
        }
    }
    Ok(())
}

/// Joins checked columns: one query for all that are pooled and have as many samples, one for each
/// that is not pooled.
///
/// # Errors
/// Those of making plans.
pub(crate) fn join(source: Source<'_>, columns: Vec<Column>) -> Result<Joined> {
    let plan = |asked: &[Asked]| source.plans.get(source.snapshot, source.features, asked);
    let (mut queries, mut places) = (Vec::new(), Vec::with_capacity(columns.len()));
    let mut joined: Vec<Side> = Vec::new();
    for (at, column) in columns.iter().enumerate() {
        let is_pooled = column.asked.pooling != Pooling::None;
        let bounds = column.offsets.len();
        let known = joined.iter_mut().find(|side| is_pooled && side.bounds == Some(bounds));
        match known {
            Some(side) => side.columns.push(at),
            None => joined.push(Side { bounds: is_pooled.then_some(bounds), columns: vec![at] }),
        }
    }
    places.resize(columns.len(), Place { query: 0, at: 0 });
    let mut columns: Vec<Option<Column>> = columns.into_iter().map(Some).collect();
    for (query, Side { columns: members, .. }) in joined.into_iter().enumerate() {
        for (at, &member) in members.iter().enumerate() {
            if let Some(place) = places.get_mut(member) {
                *place = Place { query, at };
            }
        }
        let own = members.iter().filter_map(|&member| columns.get_mut(member)?.take());
        let mut own: Vec<_> = own.collect();
        assert_eq!(own.len(), members.len(), "a column is of one query");
        if own.len() > 1 {
            let asked: Vec<_> = own.iter().map(|column| column.asked).collect();
            queries.push(side_by_side(plan(&asked)?, &own)?);
        } else if let Some(Column { asked, values, offsets, weights }) = own.pop() {
            // A lone column needs no joining.
            queries.push(Query::new(plan(&[asked])?, values, offsets, weights)?);
        }
    }
    Ok(Joined { queries, places })
}

/// Columns of one query.
struct Side {
    /// Bounds of bags that each has; `None`: it is not pooled, and alone.
    bounds: Option<usize>,
    columns: Vec<usize>,
}

/// Makes one query of several columns with as many bags each.
fn side_by_side(plan: Arc<Plan>, columns: &[Column]) -> Result<Query> {
    let index_count = columns.iter().map(|column| column.values.len()).sum();
    let is_weighted = columns.iter().any(|column| column.weights.is_some());
    let mut indices = Vec::with_capacity(index_count);
    let mut weights = Vec::with_capacity(if is_weighted { index_count } else { 0 });
    let mut offsets = vec![0];
    for column in columns {
        let before = indices.len() as i64;
        indices.extend_from_slice(&column.values);
        offsets.extend(column.offsets.iter().skip(1).map(|offset| before + offset));
        match &column.weights {
            Some(given) => weights.extend_from_slice(given),
            // Weight 1 leaves every bit of a row as it is.
            None if is_weighted => weights.resize(indices.len(), 1.0),
            None => {}
        }
    }
    Query::new(plan, Ids::Copied(indices), offsets, is_weighted.then_some(weights))
}

/// Adds lengths up to offsets.
///
/// # Errors
/// `Invalid` for lengths below 0, or that are not all of the values.
pub(crate) fn offsets(lengths: &[i64], value_count: usize) -> Result<Vec<i64>> {
    let mut offsets = Vec::with_capacity(lengths.len() + 1);
    let mut end = 0_i64;
    offsets.push(end);
    for (at, length) in lengths.iter().enumerate() {
        let next = if *length < 0 { None } else { end.checked_add(*length) };
        end = next.ok_or_else(|| {
            Error::invalid("length is out of range").with("position", at).with("found", length)
        })?;
        offsets.push(end);
    }
    if usize::try_from(end) == Ok(value_count) {
        return Ok(offsets);
    }
    Err(Error::invalid("lengths must add up to the number of values")
        .with("found", end)
        .with("values", value_count))
}

/// Turns `[B, F]` to feature by feature.
pub(crate) fn by_feature(ids: Ids, samples: usize, feature_count: usize) -> Ids {
    // What is one row or one column lies in order already.
    if samples <= 1 || feature_count <= 1 {
        return ids;
    }
    let column = |at: usize| ids.iter().skip(at).step_by(feature_count).copied();
    Ids::Copied((0..feature_count).flat_map(column).collect())
}
