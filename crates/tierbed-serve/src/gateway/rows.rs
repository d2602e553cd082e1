//! Rows of one generation, asked of shards.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tierbed_core::{Error, Result, Schema};
use tierbed_snapshot::shards::{ShardMap, ShardPart, Split};
use tierbed_snapshot::{Ask, Elsewhere, LookupStats};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::calling::{stand_in, Time};
use super::pool::{Lost, Pool, Question};
use super::together::Together;
use super::{MissingShard, RowType};
use crate::grpc::message::{GENERATION, RAGGED};
use crate::grpc::pb::infer_parameter::ParameterChoice;
use crate::grpc::pb::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::grpc::pb::{InferParameter, ModelInferRequest, ModelInferResponse};

/// The rows of a generation. See the module documentation.
#[derive(Debug)]
pub(crate) struct ShardedRows {
    pub(super) identity: Arc<str>,
    /// The generation of each shard.
    pub(super) identities: Vec<Arc<str>>,
    pub(super) map: Arc<ShardMap>,
    /// A feature of the shards for each table; `None`: none reads it.
    pub(super) features: Vec<Option<String>>,
    /// The shards' model of lookups.
    pub(super) model: String,
    pub(super) pool: Arc<Pool>,
    pub(super) runtime: Handle,
    pub(super) row_type: RowType,
    pub(super) missing: MissingShard,
    /// Longest time for an answer, where its request has no other.
    pub(super) time_max: Duration,
}

type Answered = (usize, std::result::Result<ModelInferResponse, Lost>);

impl Elsewhere for ShardedRows {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn lookup(&self, schema: &Schema, asks: &mut [Ask<'_>]) -> Result<LookupStats> {
        let asking = self.begin(asks)?;
        let answers = self.runtime.block_on(self.answers(asking));
        let stats = self.finish(answers, schema, asks)?;
        stand_in(stats.rows_default);
        Ok(stats)
    }
}

/// A lookup as questions to shards, which wait to be asked.
#[derive(Debug)]
pub(crate) struct Asking {
    split: Split,
    /// Of each part.
    questions: Vec<Question>,
}

/// A lookup whose questions have been answered.
#[derive(Debug)]
pub(crate) struct Answers {
    split: Split,
    answered: Vec<Answered>,
}

fn part_of(split: &Split, part: usize) -> &ShardPart {
    let Some(found) = split.parts().get(part) else {
        panic!("part {part} of {}", split.parts().len());
    };
    found
}

impl ShardedRows {
    /// Returns the shard that answers for rows that all have.
    fn anywhere(&self) -> u32 {
        let turn = self.pool.clock().now_us();
        let count = self.identities.len() as u64;
        let in_turn = (0..count).map(|at| ((turn + at) % count) as u32);
        let has_live = |shard: &u32| {
            let identity = self.identities.get(*shard as usize);
            identity.is_some_and(|identity| self.pool.shard(*shard).has_live(identity))
        };
        in_turn.clone().find(has_live).or_else(|| in_turn.clone().next()).unwrap_or(0)
    }

    /// Splits a lookup by shards. The time of its questions is that of the thread's batch.
    ///
    /// # Errors
    /// Those of [`Split::new`], and `Invalid` for a table that shards do not serve.
    pub(crate) fn begin(&self, asks: &[Ask<'_>]) -> Result<Asking> {
        let split = Split::new(&self.map, asks, self.anywhere())?;
        let until = self.until();
        let questions = split.parts().iter().map(|part| {
            let Some(identity) = self.identities.get(part.shard as usize) else {
                panic!("shard {} of {}", part.shard, self.identities.len());
            };
            let (identity, request) = (Arc::clone(identity), self.request(part, identity)?);
            Ok(Question { identity, request, until })
        });
        let questions = questions.collect::<Result<_>>()?;
        Ok(Asking { split, questions })
    }

    /// Asks all shards at once, and waits for their answers; no thread is held meanwhile.
    pub(crate) async fn answers(&self, Asking { split, questions }: Asking) -> Answers {
        let (pool, mut asking) = (&self.pool, Together::default());
        for (at, (part, question)) in split.parts().iter().zip(&questions).enumerate() {
            let shard = pool.shard(part.shard);
            asking.push(async move { (at, shard.ask(&**pool.clock(), question).await) });
        }
        let mut answered = Vec::with_capacity(questions.len());
        while let Some(one) = asking.next().await {
            answered.push(one);
        }
        drop(asking);
        Answers { split, answered }
    }

    /// Pools what shards answered for `asks`, which have been begun.
    ///
    /// # Errors
    /// `Closed` for a shard that did not answer, `Corruption` for an answer that does not fit.
    pub(crate) fn finish(
        &self,
        answers: Answers,
        schema: &Schema,
        asks: &mut [Ask<'_>],
    ) -> Result<LookupStats> {
        let Answers { mut split, answered } = answers;
        let mut stats = LookupStats {
            index_count: asks.iter().map(|ask| ask.bags.indices.len() as u64).sum(),
            row_count: split.row_count(),
            chunk_count: split.parts().len() as u64,
            ..LookupStats::default()
        };
        for (part, answered) in answered {
            let shard = part_of(&split, part).shard;
            match answered {
                Ok(answer) => self.fill(&mut split, part, answer)?,
                Err(lost) if self.missing == MissingShard::DefaultRows && lost.is_absence() => {
                    let rows = split.fill_initial(part, schema)?;
                    self.pool.shard(shard).counts.default_rows.fetch_add(rows, Ordering::Relaxed);
                    stats.rows_default += rows;
                }
                Err(lost) => return Err(lost.error(shard)),
            }
        }
        stats.rows_read = stats.row_count - stats.rows_default;
        split.finish(asks);
        Ok(stats)
    }

    fn until(&self) -> Instant {
        let left = Time::deadline_us().map(|deadline_us| {
            Duration::from_micros(deadline_us.saturating_sub(self.pool.clock().now_us()))
        });
        Instant::now() + left.map_or(self.time_max, |left| left.min(self.time_max))
    }

    /// Makes the question to a shard: bags of a feature for each table.
    fn request(&self, part: &ShardPart, identity: &str) -> Result<ModelInferRequest> {
        let mut request =
            ModelInferRequest { model_name: self.model.clone(), ..ModelInferRequest::default() };
        let mut set = |name: &str, choice| {
            let parameter = InferParameter { parameter_choice: Some(choice) };
            request.parameters.insert(name.to_owned(), parameter);
        };
        let word = |word: &str| ParameterChoice::StringParam(word.to_owned());
        set(GENERATION, word(identity));
        set("pooling", word(if part.is_pooled { "sum" } else { "none" }));
        set("output_dtype", word(self.row_type.name()));
        if part.is_pooled {
            set(RAGGED, ParameterChoice::BoolParam(true));
        }
        for table in &part.tables {
            let name = self.feature(table.table.0)?;
            let value_count = table.values.len();
            let mut put = |suffix: &str, datatype: &str, count: usize, bytes: Bytes| {
                request.inputs.push(InferInputTensor {
                    name: format!("{name}.{suffix}"),
                    datatype: datatype.to_owned(),
                    shape: vec![count as i64],
                    ..InferInputTensor::default()
                });
                request.raw_input_contents.push(bytes);
            };
            put("values", "INT64", value_count, words(&table.values));
            if part.is_pooled {
                put("lengths", "INT64", table.lengths.len(), words(&table.lengths));
            } else {
                // Unpooled rows come in the order of their indices, whatever bags they are in.
                put("lengths", "INT64", 1, words(&[value_count as i64]));
            }
            if let Some(weights) = &table.weights {
                put("weights", "FP32", value_count, words(weights));
            }
            let output = InferRequestedOutputTensor { name: name.clone(), ..Default::default() };
            request.outputs.push(output);
        }
        Ok(request)
    }

    fn feature(&self, table: u32) -> Result<&String> {
        let feature = self.features.get(table as usize).and_then(Option::as_ref);
        feature.ok_or_else(|| {
            let tables = self.map.tables();
            let name = tables.get(table as usize).map(|table| table.name.as_str());
            Error::invalid("no feature of the shards reads a table")
                .with("table", name.unwrap_or_default())
                .with("remedy", "publish with a feature of each table, or without serving.json")
        })
    }

    /// Takes what a shard answered.
    fn fill(&self, split: &mut Split, part: usize, answer: ModelInferResponse) -> Result<()> {
        let (shard, table_count) = {
            let part = part_of(split, part);
            (part.shard, part.tables.len())
        };
        let wrong = |what: &str| Error::corruption(what.to_owned()).with("shard_number", shard);
        let expected = self.identities.get(shard as usize).map(|identity| &**identity);
        let told = answer.parameters.get(GENERATION).and_then(|told| told.parameter_choice.clone());
        match told {
            Some(ParameterChoice::StringParam(told)) if Some(told.as_str()) == expected => {}
            told => {
                return Err(wrong("a shard answered from another generation")
                    .with("expected", expected.unwrap_or_default())
                    .with("found", format_args!("{told:?}")));
            }
        }
        if answer.raw_output_contents.len() != table_count {
            return Err(wrong("a shard answered another number of tensors")
                .with("found", answer.raw_output_contents.len())
                .with("expected", table_count));
        }
        for (table, bytes) in answer.raw_output_contents.iter().enumerate() {
            split.fill(part, table, self.row_type.decode(bytes).into_iter())?;
        }
        Ok(())
    }
}

/// Returns words as they are on the wire: as in memory, since both are little-endian.
fn words<T: bytemuck::NoUninit>(words: &[T]) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(words))
}
