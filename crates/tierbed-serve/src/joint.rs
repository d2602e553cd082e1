//! Joint lookups: queries of several requests as one.
//!
//! Queries of one plan lie behind each other. Queries of different plans are joined where their
//! features are pooled: each has empty bags for what the others ask, and gets its own columns.
//! Rows are added per bag in index order, whatever else is in a lookup, so every query gets the
//! bits it would get alone.

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::{Bags, Result};
use tierbed_snapshot::{Ask, LookupStats, Pooling};

use crate::plans::{Asked, Plan};
use crate::query::{look_up, Query, Source};

/// Most elements of the answer to a joint lookup: what is beyond is looked up in several.
pub(crate) const WORDS_MAX: usize = 1 << 20;
/// Most elements of a joint answer for each that is asked for.
const WASTE_MAX: usize = 2;

/// A query of a batch.
pub(crate) struct Member<'a> {
    /// Position of its request.
    pub(crate) request: usize,
    pub(crate) query: &'a mut Query,
}

/// Queries that are looked up together.
pub(crate) struct Group<'a> {
    /// What they ask, all together.
    asked: Vec<Asked>,
    rows: usize,
    /// Elements of their answers.
    words: usize,
    pub(crate) members: Vec<Member<'a>>,
}

/// Puts queries into as few groups as their sizes allow.
pub(crate) fn groups<'a>(
    source: Source<'_>,
    members: impl Iterator<Item = Member<'a>>,
) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for member in members {
        let rows = member.query.row_count();
        let words = member.query.matrix.get().len();
        let joined = groups.iter_mut().find_map(|group| {
            let asked = group.with(&member.query.plan)?;
            let together = width(source, &asked) * (group.rows + rows);
            let is_small = together <= WORDS_MAX && together <= WASTE_MAX * (group.words + words);
            is_small.then_some((group, asked))
        });
        match joined {
            Some((group, asked)) => {
                group.asked = asked;
                group.rows += rows;
                group.words += words;
                group.members.push(member);
            }
            None => {
                let asked = member.query.plan.asked.to_vec();
                groups.push(Group { asked, rows, words, members: vec![member] });
            }
        }
    }
    groups
}

fn width(source: Source<'_>, asked: &[Asked]) -> usize {
    match asked {
        [Asked { feature, pooling: Pooling::None }] => source.feature(*feature).dim as usize,
        _ => asked.iter().map(|asked| source.feature(asked.feature).dim as usize).sum(),
    }
}

impl Group<'_> {
    /// Returns what would be asked with another query; `None` where it cannot be joined.
    fn with(&self, plan: &Plan) -> Option<Vec<Asked>> {
        if *plan.asked == *self.asked {
            return Some(self.asked.clone());
        }
        let is_pooled = |asked: &Asked| asked.pooling != Pooling::None;
        if !self.asked.iter().chain(&plan.asked).all(is_pooled) {
            return None;
        }
        let new = plan.asked.iter().filter(|asked| !self.asked.contains(asked));
        Some(self.asked.iter().chain(new).copied().collect())
    }

    /// Looks all queries up as one.
    ///
    /// # Errors
    /// Those of [`Query::look_up`], of any of them.
    pub(crate) fn look_up(&mut self, source: Source<'_>) -> Result<LookupStats> {
        let (plan, joint) = self.join(source)?;
        let bags = joint.bags(&plan)?;
        let mut out = vec![0.0; plan.layout.output_len(&bags)];
        let stats = look_up(source, &plan, &bags, &mut out)?;
        self.hand_out(&plan, &out);
        Ok(stats)
    }

    fn join(&self, source: Source<'_>) -> Result<(Arc<Plan>, Joint)> {
        let plan = source.plans.get(source.snapshot, source.features, &self.asked)?;
        let mut joint = Joint::default();
        for asked in &self.asked {
            self.members.iter().for_each(|member| joint.append(member.query, *asked));
        }
        Ok((plan, joint))
    }

    /// Gives each query its own of a joint answer.
    fn hand_out(&mut self, plan: &Plan, out: &[f32]) {
        let mut rest = out;
        for Member { query, .. } in &mut self.members {
            let (own, after) = rest.split_at(query.row_count() * plan.layout.output_dim());
            copy(own, plan, query);
            rest = after;
        }
        assert!(rest.is_empty(), "{} elements of a joint answer have no request", rest.len());
    }
}

/// Looks all groups up by one question to who has the rows.
///
/// # Errors
/// Those of [`Elsewhere::lookup`](tierbed_snapshot::Elsewhere::lookup), of any of them.
///
/// # Panics
/// When the rows are here.
pub(crate) fn look_up_elsewhere(
    source: Source<'_>,
    groups: &mut [Group<'_>],
) -> Result<LookupStats> {
    let Some(rows) = source.snapshot.rows_elsewhere() else { panic!("the rows are here") };
    let joined = groups.iter().map(|group| group.join(source)).collect::<Result<Vec<_>>>()?;
    let mut outs = Vec::with_capacity(joined.len());
    for (plan, joint) in &joined {
        outs.push(vec![0.0; plan.layout.output_len(&joint.bags(plan)?)]);
    }
    let mut asks = Vec::with_capacity(joined.len());
    for ((plan, joint), out) in joined.iter().zip(&mut outs) {
        asks.push(Ask { plan: &plan.layout, bags: joint.bags(plan)?, out });
    }
    let stats = rows.lookup(source.snapshot.schema(), &mut asks)?;
    drop(asks);
    for ((group, (plan, _)), out) in groups.iter_mut().zip(&joined).zip(&outs) {
        group.hand_out(plan, out);
    }
    Ok(stats)
}

/// Rows of several queries behind each other, and where they came from.
pub(crate) struct Rows {
    pub(crate) elements: Vec<f32>,
    pub(crate) stats: LookupStats,
}

/// Looks queries of one plan up together, and returns their rows behind each other.
///
/// # Errors
/// Those of [`Query::look_up`], of any of them.
///
/// # Panics
/// When there is none.
pub(crate) fn look_up_rows(source: Source<'_>, queries: &[&Query]) -> Result<Rows> {
    let Some(plan) = queries.first().map(|query| &*query.plan) else { panic!("no query") };
    let mut joint = Joint::default();
    let bags = match queries {
        [alone] => alone.bags(),
        _ => {
            for asked in &plan.asked {
                queries.iter().for_each(|query| joint.append(query, *asked));
            }
            let weights = joint.weights.as_deref();
            Bags::new(&joint.indices, &joint.offsets, weights, plan.asked.len())?
        }
    };
    let mut elements = vec![0.0; plan.layout.output_len(&bags)];
    let stats = look_up(source, plan, &bags, &mut elements)?;
    Ok(Rows { elements, stats })
}

/// Bags of several queries, feature by feature.
struct Joint {
    indices: Vec<i64>,
    offsets: Vec<i64>,
    /// Once one of the queries has some.
    weights: Option<Vec<f32>>,
}

impl Default for Joint {
    fn default() -> Self {
        Self { indices: Vec::new(), offsets: vec![0], weights: None }
    }
}

impl Joint {
    fn bags(&self, plan: &Plan) -> Result<Bags<'_>> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), plan.asked.len())
    }

    /// Appends the bags of one feature of a query; empty ones where it does not ask for it.
    fn append(&mut self, query: &Query, asked: Asked) {
        let (bags, before) = (query.bags(), self.indices.len());
        let Some(at) = query.plan.asked.iter().position(|known| *known == asked) else {
            let end = self.offsets.len() + bags.batch_size();
            self.offsets.resize(end, before as i64);
            return;
        };
        let range = query.plan.layout.range(&bags, at);
        let shift = before as i64 - range.start as i64;
        let own = bags.feature_offsets(at).iter().skip(1);
        self.offsets.extend(own.map(|offset| offset + shift));
        let (Some(ids), weights) =
            (bags.indices.get(range.clone()), bags.weights.map(|weights| weights.get(range)))
        else {
            panic!("bags of feature {at} lie beyond their ids");
        };
        self.indices.extend_from_slice(ids);
        match (weights, &mut self.weights) {
            (None, None) => {}
            // Weight 1 leaves every bit of a row as it is.
            (None, Some(all)) => all.resize(self.indices.len(), 1.0),
            (Some(own), all) => {
                let Some(own) = own else {
                    panic!("bags of feature {at} lie beyond their weights");
                };
                let all = all.get_or_insert_with(Vec::new);
                all.resize(before, 1.0);
                all.extend_from_slice(own);
            }
        }
    }
}

/// Copies a query's columns of its rows of a joint answer.
fn copy(rows: &[f32], plan: &Plan, query: &mut Query) {
    let Query { plan: own, matrix, .. } = query;
    let matrix = matrix.get_mut();
    if own.asked == plan.asked {
        matrix.copy_from_slice(rows);
        return;
    }
    let columns: Vec<_> = own.asked.iter().map(|asked| columns(plan, *asked)).collect();
    let rows = rows.chunks_exact(plan.layout.output_dim());
    for (row, mut out) in rows.zip(matrix.chunks_exact_mut(own.layout.output_dim())) {
        for columns in &columns {
            let (Some(from), (to, rest)) =
                (row.get(columns.clone()), out.split_at_mut(columns.len()))
            else {
                panic!("columns {columns:?} lie beyond a row of {}", row.len());
            };
            to.copy_from_slice(from);
            out = rest;
        }
    }
}

/// Returns where a feature's columns are in a row of a plan.
fn columns(plan: &Plan, asked: Asked) -> Range<usize> {
    let mut features = plan.asked.iter().zip(plan.layout.features());
    let Some((_, feature)) = features.find(|(known, _)| **known == asked) else {
        panic!("a joint plan lacks {asked:?}");
    };
    feature.columns.range(0)
}
