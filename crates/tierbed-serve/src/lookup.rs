//! Decoded features in, one matrix per feature out.
//!
//! Pooled features of a request go through one lookup, so that they share pages; unpooled ones
//! have as many rows as indices and are looked up one by one.

use tierbed::PublishedIds;
use tierbed_core::{Bags, Error, Result};
use tierbed_pagestore::{FeaturePlan, Pooling, Snapshot};

use crate::features::Feature;

/// What is looked up: rows, and the rows of raw ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) ids: &'a PublishedIds,
}

/// The indices of one feature, as they came in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) values: Vec<i64>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) weights: Option<Vec<f32>>,
}

/// The vectors of one feature: `[rows, dim]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Vectors {
    pub(crate) name: String,
    pub(crate) row_count: usize,
    pub(crate) dim: usize,
    pub(crate) values: Vec<f32>,
}

/// Looks the columns of one request up; answers in their order.
///
/// `pooling` replaces that of every feature.
///
/// # Errors
/// `Invalid` for unknown features, batches of different sizes and too many indices, and the
/// errors of [`Snapshot::lookup`].
pub(crate) fn lookup(
    source: Source<'_>,
    features: &[Feature],
    columns: &[Column],
    pooling: Option<Pooling>,
    indices_max: usize,
) -> Result<Vec<Vectors>> {
    check(columns, indices_max)?;
    let mut known = Vec::new();
    for column in columns {
        let feature = features.iter().find(|feature| feature.name == column.name);
        let feature = feature.ok_or_else(|| {
            let names: Vec<_> = features.iter().map(|feature| feature.name.as_str()).collect();
            Error::invalid("unknown feature")
                .with("feature", &column.name)
                .with("expected", format_args!("one of {}", names.join(", ")))
        })?;
        known.push((column, feature, pooling.unwrap_or(feature.pooling)));
    }
    let pooled: Vec<_> = known.iter().copied().filter(|(_, _, p)| *p != Pooling::None).collect();
    let mut pooled = look_up_together(source, &pooled)?.into_iter();
    let mut answers = Vec::new();
    for one in &known {
        if one.2 == Pooling::None {
            answers.append(&mut look_up_together(source, &[*one])?);
        } else {
            answers.extend(pooled.next());
        }
    }
    Ok(answers)
}

fn check(columns: &[Column], indices_max: usize) -> Result<()> {
    let Some(first) = columns.first() else {
        return Err(Error::invalid("a lookup needs at least one feature"));
    };
    let index_count: usize = columns.iter().map(|column| column.values.len()).sum();
    if index_count > indices_max {
        return Err(Error::invalid("too many indices in one request")
            .with("found", index_count)
            .with("allowed", indices_max)
            .with("remedy", "send several smaller requests"));
    }
    for column in columns {
        // Checked per feature first, so that the error names the feature.
        Bags::new(&column.values, &column.offsets, column.weights.as_deref(), 1)
            .map_err(|error| error.with("feature", &column.name))?;
        if column.offsets.len() != first.offsets.len() {
            return Err(Error::invalid("features must have the same number of samples")
                .with("feature", &column.name)
                .with("samples", column.offsets.len() - 1)
                .with("expected", first.offsets.len() - 1));
        }
    }
    Ok(())
}

fn look_up_together(
    Source { snapshot, ids }: Source<'_>,
    wanted: &[(&Column, &Feature, Pooling)],
) -> Result<Vec<Vectors>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let (mut indices, mut offsets, mut weights) = (Vec::new(), vec![0], Vec::new());
    for (column, _, _) in wanted {
        let before = indices.len() as i64;
        indices.extend_from_slice(&column.values);
        offsets.extend(column.offsets.iter().skip(1).map(|offset| before + offset));
        match &column.weights {
            Some(given) => weights.extend_from_slice(given),
            // Weight 1 leaves every bit of a row as it is.
            None => weights.resize(indices.len(), 1.0),
        }
    }
    let is_weighted = wanted.iter().any(|(column, _, _)| column.weights.is_some());
    let weights = is_weighted.then_some(&weights[..]);
    let planned: Vec<_> = wanted.iter().map(|(_, feature, p)| (feature.table, *p)).collect();
    let plan = FeaturePlan::new(snapshot.schema(), &planned)?;
    let mut bags = Bags::new(&indices, &offsets, weights, wanted.len())?;
    let mut rows = Vec::new();
    if !ids.is_empty() {
        rows.resize(indices.len(), 0);
        ids.translate(snapshot, &plan, &bags, &mut rows)?;
        bags = Bags::new(&rows, &offsets, weights, wanted.len())?;
    }
    let mut out = vec![0.0; plan.output_len(&bags)];
    snapshot.lookup(&plan, &bags, &mut out)?;
    let row_count = plan.output_rows(&bags);
    let split = plan.features().iter().zip(wanted).map(|(planned, (column, _, _))| {
        let rows = out.chunks_exact(plan.output_dim());
        let columns = planned.columns.range(0);
        // Unpooled features are looked up alone: their only column starts at 0.
        let values = rows.flat_map(|row| row.get(columns.clone()).unwrap_or_default());
        Vectors {
            name: column.name.clone(),
            row_count,
            dim: planned.columns.dim,
            values: values.copied().collect(),
        }
    });
    Ok(split.collect())
}
