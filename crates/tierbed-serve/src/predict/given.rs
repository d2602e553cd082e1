//! What a request gives of its samples, in no protocol's form, and its check against the model.

use tierbed_core::{Error, Result};

use super::Samples;
use crate::columns::{by_feature, check_answer, check_counts, offsets};
use crate::generation::Serving;
use crate::predictor::Model;
use crate::query::{Ids, Query};

/// Samples as they came.
#[derive(Debug)]
pub(crate) struct Given {
    /// A model without numerical features needs none.
    pub(crate) dense: Option<Dense>,
    pub(crate) ids: GivenIds,
}

/// Numerical features.
#[derive(Debug)]
pub(crate) struct Dense {
    pub(crate) shape: [usize; 2],
    pub(crate) values: Vec<f32>,
}

/// The ids of the model's features, in order.
#[derive(Debug)]
pub(crate) enum GivenIds {
    /// `[B, F]`, one for each sample and feature.
    Matrix { ids: Ids, shape: [usize; 2] },
    /// Feature by feature: the values of all bags, and how many each has, `[F * B]`; without
    /// lengths one each.
    Bags { values: Ids, lengths: Option<Ids> },
}

impl Given {
    /// Checks the samples against the model of `serving`, and what they cost.
    ///
    /// # Errors
    /// `Invalid` for shapes that do not fit the model, ids that are no rows, and too much of
    /// anything.
    pub(crate) fn check(self, serving: &Serving<'_>, model: &Model) -> Result<Samples> {
        let limits = &serving.limits;
        let source = model.source(serving.source());
        let feature_count = model.features.len();
        let count = self.sample_count(model)?;
        let bag_count = count.checked_mul(feature_count);
        let (values, offsets) = match self.ids {
            GivenIds::Matrix { ids, shape: [samples, found] } => {
                if found != feature_count {
                    return Err(Error::invalid("ids must have one column per feature")
                        .with("found", found)
                        .with("features", feature_count));
                }
                check_counts(ids.len(), ids.len(), limits)?;
                let offsets = (0..=ids.len() as i64).collect();
                (by_feature(ids, samples, feature_count), offsets)
            }
            GivenIds::Bags { values, lengths } => {
                let found = lengths.as_ref().map_or(values.len(), |lengths| lengths.len());
                check_counts(values.len(), found, limits)?;
                let offsets = match lengths {
                    Some(lengths) => offsets(&lengths, values.len())?,
                    None => (0..=values.len() as i64).collect(),
                };
                (values, offsets)
            }
        };
        if Some(offsets.len() - 1) != bag_count {
            return Err(Error::invalid("each feature of each sample needs one of the lengths")
                .with("found", offsets.len() - 1)
                .with("samples", count)
                .with("features", feature_count));
        }
        let plan = source.plans.get(source.snapshot, source.features, &model.asked)?;
        check_answer(count * plan.layout.output_dim() * size_of::<f32>(), limits)
            .map_err(|error| error.with("what", "the rows of all samples"))?;
        let query = Query::new(plan, values, offsets, None)?;
        query.check_ids(source)?;
        let dense = self.dense.map(|dense| dense.values).unwrap_or_default();
        Ok(Samples { count, dense, query })
    }

    /// Returns how many samples there are: of `dense`, or of the ids where the model takes none.
    ///
    /// # Errors
    /// `Invalid` for numerical features that are missing or too few, and samples that are not
    /// whole.
    fn sample_count(&self, model: &Model) -> Result<usize> {
        let dense_count = model.predictor.inputs().dense_count;
        let feature_count = model.features.len();
        let of_ids = match &self.ids {
            GivenIds::Matrix { shape: [samples, _], .. } => Some(*samples),
            GivenIds::Bags { values, lengths } => {
                let bags = lengths.as_ref().map_or(values.len(), |lengths| lengths.len());
                bags.is_multiple_of(feature_count).then(|| bags / feature_count)
            }
        };
        let Some(Dense { shape: [samples, found], .. }) = self.dense else {
            return match (dense_count, of_ids) {
                (0, Some(samples)) => Ok(samples),
                (0, None) => {
                    Err(Error::invalid("ids do not make whole samples")
                        .with("features", feature_count))
                }
                _ => Err(Error::invalid("the request lacks dense")
                    .with("expected", format_args!("[B, {dense_count}]"))),
            };
        };
        if found != dense_count && samples > 0 {
            return Err(Error::invalid("dense must have one column per numerical feature")
                .with("expected", format_args!("[B, {dense_count}]"))
                .with("found", format_args!("[{samples}, {found}]")));
        }
        match &self.ids {
            GivenIds::Matrix { shape: [of_ids, _], .. } if *of_ids != samples => {
                Err(Error::invalid("dense and ids must have the same number of samples")
                    .with("dense", samples)
                    .with("ids", of_ids))
            }
            _ => Ok(samples),
        }
    }
}
