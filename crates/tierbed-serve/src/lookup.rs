//! Decoded features in, one matrix per feature out.
//!
//! Pooled features of a request go through one lookup, so that they share pages; unpooled ones
//! have as many rows as indices and are looked up one by one.

use tierbed_core::{Bags, Error, Result};
use tierbed_snapshot::PublishedIds;
use tierbed_snapshot::{FeatureLayout, Pooling, Snapshot};

use crate::features::Feature;
use crate::options::Limits;

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

/// The columns of one request, checked against what is served.
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    wanted: Vec<Asked<'a>>,
}

#[derive(Debug)]
struct Asked<'a> {
    column: Column,
    feature: &'a Feature,
    pooling: Pooling,
}

impl Asked<'_> {
    fn row_count(&self) -> usize {
        match self.pooling {
            Pooling::None => self.column.values.len(),
            Pooling::Sum | Pooling::Mean => self.column.offsets.len().saturating_sub(1),
        }
    }
}

/// Bytes of one element in JSON at most: `-1.1754944e-38` and a comma or bracket.
const JSON_BYTES: usize = 15;

impl<'a> Columns<'a> {
    /// Checks the columns of a request; `pooling` replaces that of every feature.
    ///
    /// # Errors
    /// `Invalid` for unknown features, batches of different sizes, too many indices or bags.
    pub(crate) fn check(
        features: &'a [Feature],
        columns: Vec<Column>,
        pooling: Option<Pooling>,
        limits: &Limits,
    ) -> Result<Self> {
        check(&columns, limits)?;
        let mut wanted = Vec::new();
        for column in columns {
            let feature = features.iter().find(|feature| feature.name == column.name);
            let feature = feature.ok_or_else(|| {
                let names: Vec<_> = features.iter().map(|feature| feature.name.as_str()).collect();
                Error::invalid("unknown feature")
                    .with("feature", &column.name)
                    .with("expected", format_args!("one of {}", names.join(", ")))
            })?;
            wanted.push(Asked { column, feature, pooling: pooling.unwrap_or(feature.pooling) });
        }
        Ok(Self { wanted })
    }

    /// Returns how many bytes the answer's elements take at most.
    ///
    /// # Errors
    /// `Invalid` when they are more than allowed.
    pub(crate) fn answer_bytes(&self, is_binary: bool, limits: &Limits) -> Result<usize> {
        let row_bytes = |asked: &Asked<'_>| match is_binary {
            true => asked.feature.dim as usize * size_of::<f32>(),
            // Two brackets and a comma around each row.
            false => asked.feature.dim as usize * JSON_BYTES + 3,
        };
        let bytes: usize =
            self.wanted.iter().map(|asked| asked.row_count() * row_bytes(asked)).sum();
        if bytes > limits.answer_bytes_max {
            return Err(Error::invalid("answer would be too large")
                .with("answer_bytes", bytes)
                .with("answer_bytes_max", limits.answer_bytes_max)
                .with("remedy", "send several smaller requests"));
        }
        Ok(bytes)
    }
}

/// Looks the columns of one request up; answers in their order.
///
/// # Errors
/// Those of [`Snapshot::lookup`].
pub(crate) fn lookup(source: Source<'_>, columns: &Columns<'_>) -> Result<Vec<Vectors>> {
    let known = &columns.wanted;
    let pooled: Vec<_> = known.iter().filter(|asked| asked.pooling != Pooling::None).collect();
    let mut pooled = look_up_together(source, &pooled)?.into_iter();
    let mut answers = Vec::new();
    for asked in known {
        if asked.pooling == Pooling::None {
            answers.append(&mut look_up_together(source, &[asked])?);
        } else {
            answers.extend(pooled.next());
        }
    }
    Ok(answers)
}

fn check(columns: &[Column], limits: &Limits) -> Result<()> {
    let Some(first) = columns.first() else {
        return Err(Error::invalid("a lookup needs at least one feature"));
    };
    let index_count: usize = columns.iter().map(|column| column.values.len()).sum();
    let bag_count: usize = columns.iter().map(|column| column.offsets.len().max(1) - 1).sum();
    for (what, found, name, allowed) in [
        ("indices", index_count, "indices_max", limits.indices_max),
        ("bags", bag_count, "bags_max", limits.bags_max),
    ] {
        if found > allowed {
            return Err(Error::invalid(format!("too many {what} in one request"))
                .with("found", found)
                .with(name, allowed)
                .with("remedy", "send several smaller requests"));
        }
    }
    for column in columns {
        // Checked per feature first, so that the error names the feature.
        Bags::new(&column.values, &column.offsets, column.weights.as_deref(), 1)
            .map_err(|error| error.with("feature", &column.name))?;
        // JSON's 1e39 is a number, but no 32-bit one; its product would be answered as null.
        let mut weights = column.weights.iter().flatten();
        if let Some(at) = weights.position(|weight| !weight.is_finite()) {
            return Err(Error::invalid("weight is not a finite 32-bit number")
                .with("feature", &column.name)
                .with("position", at)
                .with("remedy", "send weights between -3.4e38 and 3.4e38"));
        }
        if column.offsets.len() != first.offsets.len() {
            return Err(Error::invalid("features must have the same number of samples")
                .with("feature", &column.name)
                .with("samples", column.offsets.len() - 1)
                .with("expected", first.offsets.len() - 1));
        }
    }
    Ok(())
}

#[expect(clippy::indexing_slicing, reason = "columns of a plan lie within its output")]
fn look_up_together(
    Source { snapshot, ids }: Source<'_>,
    wanted: &[&Asked<'_>],
) -> Result<Vec<Vectors>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let (mut indices, mut offsets, mut weights) = (Vec::new(), vec![0], Vec::new());
    for Asked { column, .. } in wanted {
        let before = indices.len() as i64;
        indices.extend_from_slice(&column.values);
        offsets.extend(column.offsets.iter().skip(1).map(|offset| before + offset));
        match &column.weights {
            Some(given) => weights.extend_from_slice(given),
            // Weight 1 leaves every bit of a row as it is.
            None => weights.resize(indices.len(), 1.0),
        }
    }
    let is_weighted = wanted.iter().any(|asked| asked.column.weights.is_some());
    let weights = is_weighted.then_some(&weights[..]);
    let planned: Vec<_> = wanted.iter().map(|asked| (asked.feature.table, asked.pooling)).collect();
    let plan = FeatureLayout::new(snapshot.schema(), &planned)?;
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
    let split = plan.features().iter().zip(wanted).map(|(planned, asked)| {
        let rows = out.chunks_exact(plan.output_dim());
        let columns = planned.columns.range(0);
        // Unpooled features are looked up alone: their only column starts at 0.
        let values = rows.flat_map(|row| &row[columns.clone()]);
        Vectors {
            name: asked.column.name.clone(),
            row_count,
            dim: planned.columns.dim,
            values: values.copied().collect(),
        }
    });
    Ok(split.collect())
}
