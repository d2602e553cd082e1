//! Lookups that are split by shards, against one lookup of the snapshot that has all rows.

use super::*;
use crate::shards::{
    DividedTable, Division, ShardInfo, ShardMap, ShardsManifest, Split, SHARDS_NAME,
};
use crate::Ask;

fn map(schema: &Schema, rng: &mut SplitMix64) -> ShardMap {
    let shard_count = 1 + rng.below(4) as u32;
    let tables = schema.tables().iter().map(|table| {
        let divided = match rng.below(4) {
            0 => Division::Hash,
            1 => Division::Everywhere,
            2 => Division::Whole { shard: rng.below(u64::from(shard_count)) as u32 },
            _ => {
                let bounds = (1..shard_count).map(|_| rng.below(table.row_count + 1));
                let mut bounds: Vec<u64> = bounds.chain([0, table.row_count]).collect();
                bounds.sort_unstable();
                Division::Rows { bounds }
            }
        };
        let (row_count, dim) = (table.row_count, table.dim);
        DividedTable { name: table.name.clone(), row_count, dim, divided }
    });
    let shards = (0..shard_count).map(|shard| ShardInfo {
        folder: format!("shard.{shard}"),
        identity: shard.to_string(),
        file_bytes: 1,
    });
    let manifest = ShardsManifest {
        publish: 1,
        replicas: 1,
        shards: shards.collect(),
        tables: tables.collect(),
    };
    let folder = memory_folder();
    folder.write_atomic(SHARDS_NAME, &manifest.encode().unwrap()).unwrap();
    ShardMap::open_in(folder.as_ref(), &Budget::unlimited()).unwrap()
}

/// What one lookup asks.
struct Asked {
    plan: FeatureLayout,
    indices: Vec<i64>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
}

impl Asked {
    fn random(schema: &Schema, may_be_plain: bool, rng: &mut SplitMix64) -> Self {
        let is_plain = may_be_plain && rng.below(2) == 0;
        let feature_count = if is_plain { 1 } else { 1 + rng.below(4) };
        let features: Vec<_> = (0..feature_count)
            .map(|_| {
                let table = TableId(rng.below(schema.tables().len() as u64) as u32);
                let pooling = if rng.below(2) == 0 { Pooling::Sum } else { Pooling::Mean };
                (table, if is_plain { Pooling::None } else { pooling })
            })
            .collect();
        let (mut indices, mut offsets) = (Vec::new(), vec![0]);
        let samples = rng.below(5);
        for (table, _) in &features {
            let rows = schema.table(*table).unwrap().row_count.min(40);
            for _ in 0..samples {
                let length = rng.below(5);
                indices.extend((0..length).map(|_| rng.below(rows) as i64));
                offsets.push(indices.len() as i64);
            }
        }
        let mut weight = |_: &i64| rng.unit_f64() as f32 - 0.5;
        let weights: Option<Vec<f32>> = Some(indices.iter().map(&mut weight).collect());
        let weights = weights.filter(|_| rng.below(2) == 0);
        Self { plan: FeatureLayout::new(schema, &features).unwrap(), indices, offsets, weights }
    }

    fn bags(&self) -> Bags<'_> {
        let (indices, offsets, weights) = (&self.indices, &self.offsets, self.weights.as_deref());
        Bags::new(indices, offsets, weights, self.plan.features().len()).unwrap()
    }
}

#[test]
fn splits_have_the_bits_of_one_lookup() {
    let folder = memory_folder();
    publish(&folder, &schema(), &some_rows(&schema(), 1));
    let whole = Snapshot::open(folder, &options(8 << 20)).unwrap();
    let schema = whole.schema();
    let mut rng = SplitMix64::new(11);
    let (mut pooled, mut alone) = (0, 0);
    for number in 0..300 {
        let map = map(schema, &mut rng);
        let may_be_plain = rng.below(2) == 0;
        let count = 1 + rng.below(3);
        let asked: Vec<_> =
            (0..count).map(|_| Asked::random(schema, may_be_plain, &mut rng)).collect();
        let lens = asked.iter().map(|asked| asked.plan.output_len(&asked.bags()));
        let mut outs: Vec<_> = lens.map(|len| vec![f32::NAN; len]).collect();
        let asks = asked.iter().zip(&mut outs);
        let mut asks: Vec<_> =
            asks.map(|(asked, out)| Ask { plan: &asked.plan, bags: asked.bags(), out }).collect();
        let mut split = Split::new(&map, &asks, 0).unwrap();
        for part in 0..split.parts().len() {
            for table in 0..split.parts()[part].tables.len() {
                let of = &split.parts()[part];
                (pooled, alone) =
                    (pooled + usize::from(of.is_pooled), alone + usize::from(!of.is_pooled));
                let pooling = if of.is_pooled { Pooling::Sum } else { Pooling::None };
                let of = &of.tables[table];
                for (value, id) in of.values.iter().zip(&of.ids) {
                    let shard = split.parts()[part].shard;
                    let global = map.global_of(of.table, shard, *value as u64).unwrap();
                    assert_eq!(global, Some(*id as u64));
                }
                // A shard has rows by numbers of its own; here they are asked for by their ids.
                let plan = FeatureLayout::new(schema, &[(of.table, pooling)]).unwrap();
                let ends = of.lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                });
                let offsets: Vec<i64> = [0].into_iter().chain(ends).collect();
                let bags = Bags::new(&of.ids, &offsets, of.weights.as_deref(), 1).unwrap();
                let mut out = vec![0.0; plan.output_len(&bags)];
                whole.lookup(&plan, &bags, &mut out).unwrap();
                split.fill(part, table, out.into_iter()).unwrap();
            }
        }
        split.finish(&mut asks);
        for (asked, out) in asked.iter().zip(&outs) {
            let mut expected = vec![0.0; out.len()];
            whole.lookup(&asked.plan, &asked.bags(), &mut expected).unwrap();
            let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(out), bits(&expected), "lookup {number}");
        }
    }
    assert!(pooled > 50 && alone > 50, "{pooled} {alone}");
}
