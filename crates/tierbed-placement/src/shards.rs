//! Division of rows into shards: rows that are asked for together live together.
//!
//! The bisection that makes pages, cut where there are as many parts as shards, makes parts of
//! equal size. Parts may be asked for unequally, and a server answers what it is asked. So rows
//! then change shards, one by one, until no shard has more rows or more load than is tolerated:
//!
//! ```text
//! log ─▶ bisection, cut at the top ─▶ parts of equal size ─▶ move rows ─▶ load even, too
//!                                        rows never asked for fill up what is missing ─┘
//! ```
//!
//! What a move gains is counted in shards over all queries: those it no longer needs, less those it
//! newly needs. *Load* is rows asked for, over all queries. A shard that has all the rows it may
//! have takes one of a shard with too much load for one of its own that is hardly asked for.
//!
//! What always holds: the result depends on log and options, never on threads.
#![expect(clippy::indexing_slicing, reason = "rows, queries and shards are those of the log")]

use tierbed_core::{Error, Result};
use tierbed_snapshot::shards::RowShards;

use crate::hypergraph::Hypergraph;
use crate::partition::{split_evenly, BisectionOptions};
use crate::QueryLog;

/// Loss that a row may cost to relieve its shard, as a share of its load, pass by pass.
const LOSSES: [f64; 8] = [0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.0, 1.0];
/// A row is hot that alone has this part of the load that a shard may have.
const HOT_SHARE: u64 = 4;
/// Rows that are hardly asked for, of which the one goes that costs least.
const COLD_ROWS: usize = 8;
/// Counts of rows by query and shard at most: 256 MiB. Of a longer log the later queries count.
const COUNTS_MAX: usize = 1 << 27;

/// How rows are divided.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardingOptions {
    /// Shards.
    pub shard_count: u32,
    /// By how much a shard may have more rows, and more load, than the mean.
    pub tolerance: f64,
    /// How parts are made; rows of a page do not matter.
    pub bisection: BisectionOptions,
}

impl ShardingOptions {
    /// The defaults: 5 % more than the mean at most.
    #[must_use]
    pub fn new(shard_count: u32) -> Self {
        Self { shard_count, tolerance: 0.05, bisection: BisectionOptions::new(1) }
    }
}

/// What some queries ask of shards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardReads {
    /// Queries with a row at least.
    pub query_count: u64,
    /// Shards that these queries need, summed.
    pub shard_sum: u64,
    /// By shard: queries that need it.
    pub queries: Vec<u64>,
    /// By shard: rows asked of it.
    pub rows: Vec<u64>,
}

impl ShardReads {
    /// Returns how many shards a query needs on average; 0 without queries.
    #[must_use]
    pub fn shards_per_query(&self) -> f64 {
        self.shard_sum as f64 / self.query_count.max(1) as f64
    }
}

/// Counts what `log` asks of shards.
///
/// # Errors
/// `Invalid` for shards of another table.
pub fn count_shard_reads(shards: &RowShards, log: &QueryLog) -> Result<ShardReads> {
    if shards.shards().len() as u64 != u64::from(log.row_count()) {
        return Err(Error::invalid("query log and shards are of different tables")
            .with("rows_of_log", log.row_count())
            .with("rows_of_shards", shards.shards().len()));
    }
    let shard_count = shards.shard_count() as usize;
    let mut reads = ShardReads {
        queries: vec![0; shard_count],
        rows: vec![0; shard_count],
        ..ShardReads::default()
    };
    let mut last_query = vec![0u64; shard_count];
    for (number, query) in (1u64..).zip(log.iter()) {
        reads.query_count += u64::from(!query.is_empty());
        for &row in query {
            let shard = usize::from(shards.shards()[row as usize]);
            reads.rows[shard] += 1;
            if std::mem::replace(&mut last_query[shard], number) != number {
                reads.queries[shard] += 1;
                reads.shard_sum += 1;
            }
        }
    }
    Ok(reads)
}

/// Divides the rows of `log`, which are all of its table.
///
/// # Errors
/// `Invalid` for options out of range, `Unsupported` for 2^31 rows or more.
pub fn divide_rows(log: &QueryLog, options: &ShardingOptions) -> Result<RowShards> {
    options.bisection.check()?;
    let shard_count = options.shard_count as usize;
    if !(0.0..=10.0).contains(&options.tolerance) {
        return Err(Error::invalid("tolerance of shards must be from 0 to 10")
            .with("tolerance", options.tolerance));
    }
    // Refuses numbers out of range before anything is computed.
    let empty = RowShards::new(options.shard_count, Vec::new())?;
    if shard_count == 1 {
        return RowShards::new(1, vec![0; log.row_count() as usize]);
    }
    drop(empty);
    let graph = Hypergraph::from_log(log.clone())?;
    let (order, sizes) = split_evenly(graph, shard_count, &options.bisection);
    let mut division = Division::new(log, shard_count, options.tolerance);
    let mut rest = order.as_slice();
    for (shard, size) in sizes.into_iter().enumerate() {
        let (rows, behind) = rest.split_at(size);
        rows.iter().for_each(|&row| division.put(row, shard));
        rest = behind;
    }
    division.count(log);
    for loss in LOSSES {
        if division.improve(&order, loss) == 0 && division.is_balanced() {
            break;
        }
    }
    division.spread_unseen();
    RowShards::new(options.shard_count, division.shard_of)
}

/// Stands for a row that no shard has yet.
const NO_SHARD: u16 = u16::MAX;

/// Rows on their way to shards.
struct Division {
    shard_count: usize,
    shard_of: Vec<u16>,
    /// By row: queries that ask for it.
    frequencies: Vec<u32>,
    /// By shard.
    rows: Vec<u64>,
    load: Vec<u64>,
    rows_max: u64,
    load_max: u64,
    /// Queries of each row: those that are counted, and where each row's begin.
    query_starts: Vec<usize>,
    queries: Vec<u32>,
    /// Rows by query and shard.
    counts: Vec<u16>,
}

impl Division {
    fn new(log: &QueryLog, shard_count: usize, tolerance: f64) -> Self {
        let frequencies = log.frequencies();
        let more = |mean: f64| (mean * (1.0 + tolerance)).ceil() as u64;
        Self {
            rows_max: more(f64::from(log.row_count()) / shard_count as f64),
            load_max: more(log.pin_count() as f64 / shard_count as f64),
            shard_count,
            shard_of: vec![NO_SHARD; log.row_count() as usize],
            frequencies,
            rows: vec![0; shard_count],
            load: vec![0; shard_count],
            query_starts: Vec::new(),
            queries: Vec::new(),
            counts: Vec::new(),
        }
    }

    fn put(&mut self, row: u32, shard: usize) {
        self.shard_of[row as usize] = shard as u16;
        self.rows[shard] += 1;
        self.load[shard] += u64::from(self.frequencies[row as usize]);
    }

    /// Counts the rows of each query by shard.
    fn count(&mut self, log: &QueryLog) {
        let query_count = log.query_count().min(COUNTS_MAX / self.shard_count);
        let skipped = log.query_count() - query_count;
        let counted = || log.iter().skip(skipped);
        let mut starts = vec![0usize; self.shard_of.len() + 1];
        counted().flatten().for_each(|&row| starts[row as usize + 1] += 1);
        for row in 1..starts.len() {
            starts[row] += starts[row - 1];
        }
        let mut next = starts.clone();
        self.queries = vec![0; starts[starts.len() - 1]];
        self.counts = vec![0; query_count * self.shard_count];
        for (number, query) in counted().enumerate() {
            for &row in query {
                let place = &mut next[row as usize];
                self.queries[*place] = number as u32;
                *place += 1;
                let shard = usize::from(self.shard_of[row as usize]);
                let count = &mut self.counts[number * self.shard_count + shard];
                *count = count.saturating_add(1);
            }
        }
        self.query_starts = starts;
    }

    fn is_over(&self, shard: usize) -> bool {
        self.rows[shard] > self.rows_max || self.load[shard] > self.load_max
    }

    fn is_balanced(&self) -> bool {
        !(0..self.shard_count).any(|shard| self.is_over(shard))
    }

    /// Moves every row once at most: where that gains, or where its shard has too much and it costs
    /// no more than `loss` of the row's load. Returns how many moved.
    fn improve(&mut self, order: &[u32], loss: f64) -> usize {
        let mut moved = 0;
        let mut present = vec![0i64; self.shard_count];
        let mut cold = ColdRows::new(order, &self.frequencies, self.shard_count);
        for &row in order {
            let from = usize::from(self.shard_of[row as usize]);
            let is_over = self.is_over(from);
            let Some(best) = self.best_move(row, is_over, &mut present) else { continue };
            let frequency = f64::from(self.frequencies[row as usize]);
            if best.gain <= 0 && (!is_over || -best.gain as f64 > loss * frequency) {
                continue;
            }
            if self.rows[best.to] >= self.rows_max {
                // Room for one row is made by one that takes little load along.
                let Some(back) = cold.pick(self, best.to, from, row) else { continue };
                self.carry(back, from);
            }
            self.carry(row, best.to);
            moved += 1;
        }
        moved
    }

    /// Brings a row from its shard to another one.
    fn carry(&mut self, row: u32, to: usize) {
        let from = usize::from(self.shard_of[row as usize]);
        self.rows[from] -= 1;
        self.load[from] -= u64::from(self.frequencies[row as usize]);
        self.put(row, to);
        for at in self.query_starts[row as usize]..self.query_starts[row as usize + 1] {
            let counts = self.queries[at] as usize * self.shard_count;
            self.counts[counts + from] = self.counts[counts + from].saturating_sub(1);
            self.counts[counts + to] = self.counts[counts + to].saturating_add(1);
        }
    }

    /// Returns the shard with room that gains most; among equals that of least load, then the
    /// first. One that `may_exchange` a row needs no room for it.
    fn best_move(&self, row: u32, may_exchange: bool, present: &mut [i64]) -> Option<Move> {
        let from = usize::from(self.shard_of[row as usize]);
        let frequency = u64::from(self.frequencies[row as usize]);
        present.fill(0);
        let (mut leaves, mut asked) = (0i64, 0i64);
        for at in self.query_starts[row as usize]..self.query_starts[row as usize + 1] {
            let start = self.queries[at] as usize * self.shard_count;
            let counts = &self.counts[start..start + self.shard_count];
            for (present, &count) in present.iter_mut().zip(counts) {
                *present += i64::from(count > 0);
            }
            leaves += i64::from(counts[from] == 1);
            asked += 1;
        }
        let takes_rows =
            |&shard: &usize| shard != from && (may_exchange || self.rows[shard] < self.rows_max);
        let has_room = |&shard: &usize| self.load[shard] + frequency <= self.load_max;
        let most_present =
            |&shard: &usize| (present[shard], std::cmp::Reverse((self.load[shard], shard)));
        let shards = || (0..self.shard_count).filter(takes_rows);
        let to = match shards().filter(has_room).max_by_key(most_present) {
            Some(to) => to,
            // A row may have more load than a shard may: it goes where it does least harm.
            None if may_exchange && HOT_SHARE * frequency >= self.load_max => {
                let least = shards().min_by_key(|&shard| (self.load[shard], shard))?;
                (self.load[least] + frequency < self.load[from]).then_some(least)?
            }
            None => return None,
        };
        Some(Move { to, gain: leaves - (asked - present[to]) })
    }

    /// Returns what it gains to bring a row to shard `to`.
    fn gain_of(&self, row: u32, to: usize) -> i64 {
        let from = usize::from(self.shard_of[row as usize]);
        let queries = self.query_starts[row as usize]..self.query_starts[row as usize + 1];
        let gains = queries.map(|at| {
            let start = self.queries[at] as usize * self.shard_count;
            i64::from(self.counts[start + from] == 1) - i64::from(self.counts[start + to] == 0)
        });
        gains.sum()
    }

    /// Gives rows that no query names to the shards that have fewer rows than others, in turn.
    fn spread_unseen(&mut self) {
        let (row_count, shards) = (self.shard_of.len() as u64, self.shard_count as u64);
        let wanted =
            |shard: usize| row_count / shards + u64::from((shard as u64) < row_count % shards);
        let mut missing: Vec<(usize, u64)> = (0..self.shard_count)
            .map(|shard| (shard, wanted(shard).saturating_sub(self.rows[shard])))
            .filter(|&(_, missing)| missing > 0)
            .collect();
        let mut turn = 0;
        for row in 0..self.shard_of.len() {
            if self.shard_of[row] != NO_SHARD {
                continue;
            }
            turn %= missing.len().max(1);
            let (shard, left) = missing[turn];
            self.put(row as u32, shard);
            if left == 1 {
                missing.remove(turn);
            } else {
                missing[turn].1 = left - 1;
                turn += 1;
            }
        }
    }
}

/// Where a row goes best, and what that gains in shards over all queries.
struct Move {
    to: usize,
    gain: i64,
}

/// Rows by how seldom they are asked for, and how far each shard's are used up.
struct ColdRows {
    /// The rows asked for least come first.
    rows: Vec<u32>,
    next: Vec<usize>,
}

impl ColdRows {
    fn new(order: &[u32], frequencies: &[u32], shard_count: usize) -> Self {
        let mut rows = order.to_vec();
        rows.sort_by_key(|&row| (frequencies[row as usize], row));
        Self { rows, next: vec![0; shard_count] }
    }

    /// Picks one of the rows of shard `of` that are asked for least: the one that costs least in
    /// shard `to`. `None` when all are asked for as often as `than`.
    fn pick(&mut self, division: &Division, of: usize, to: usize, than: u32) -> Option<u32> {
        let is_held = |row: u32| usize::from(division.shard_of[row as usize]) == of;
        let next = &mut self.next[of];
        while self.rows.get(*next).is_some_and(|&row| !is_held(row)) {
            *next += 1;
        }
        let frequency = |row: u32| division.frequencies[row as usize];
        let rows = self.rows[*next..].iter().copied();
        let colder = rows.take_while(|&row| frequency(row) < frequency(than));
        let held = colder.take(64 * COLD_ROWS).filter(|&row| is_held(row)).take(COLD_ROWS);
        held.max_by_key(|&row| (division.gain_of(row, to), std::cmp::Reverse(row)))
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// Queries of six rows, five of them of one of `group_count` groups of 30; every third row of
    /// the table is never asked for.
    fn grouped(group_count: u32, query_count: usize, seed: u64) -> QueryLog {
        let mut random = SplitMix64::new(seed);
        let row_count = 45 * group_count;
        let row_of = |group: u32, at: u32| 3 * (group + group_count * at) / 2;
        let queries = (0..query_count).map(|_| {
            let group = random.below(u64::from(group_count)) as u32;
            let mut query: Vec<u32> =
                (0..5).map(|_| row_of(group, random.below(30) as u32)).collect();
            query.push(row_of(random.below(u64::from(group_count)) as u32, 3));
            query
        });
        let queries: Vec<Vec<u32>> = queries.collect();
        QueryLog::from_queries(row_count, queries).unwrap()
    }

    #[test]
    fn groups_stay_together_and_later_queries_need_fewer_shards() {
        let log = grouped(40, 6000, 1);
        let (earlier, later) = log.split_by_share(0.5).unwrap();
        let shards = divide_rows(&earlier, &ShardingOptions::new(8)).unwrap();
        let placed = count_shard_reads(&shards, &later).unwrap();
        let hashed = RowShards::by_hash(8, log.row_count()).unwrap();
        let hashed = count_shard_reads(&hashed, &later).unwrap();
        assert_eq!(placed.query_count, 3000);
        let (placed, hashed) = (placed.shards_per_query(), hashed.shards_per_query());
        assert!(placed < 0.6 * hashed, "{placed} next to {hashed}");
    }

    #[test]
    fn rows_and_load_are_within_the_tolerance_though_one_group_is_hot() {
        let mut queries: Vec<Vec<u32>> = grouped(40, 3000, 2).iter().map(<[u32]>::to_vec).collect();
        // Rows 0 to 59 get as much load again as all others together.
        let mut random = SplitMix64::new(3);
        queries.extend((0..3000).map(|_| (0..6).map(|_| random.below(60) as u32).collect()));
        let log = QueryLog::from_queries(1800, queries).unwrap();
        for shard_count in [3, 8] {
            let options = ShardingOptions::new(shard_count);
            let shards = divide_rows(&log, &options).unwrap();
            let reads = count_shard_reads(&shards, &log).unwrap();
            let mean = log.pin_count() as f64 / f64::from(shard_count);
            let most = *reads.rows.iter().max().unwrap() as f64;
            assert!(most <= 1.05 * mean + 1.0, "{:?} of {mean}", reads.rows);
            let mut rows = vec![0u64; shard_count as usize];
            shards.shards().iter().for_each(|&shard| rows[usize::from(shard)] += 1);
            let most = *rows.iter().max().unwrap() as f64;
            assert!(most <= 1.05 * 1800.0 / f64::from(shard_count) + 1.0, "{rows:?}");
        }
    }

    #[test]
    fn hot_rows_part_although_every_shard_has_all_the_rows_it_may_have() {
        // 8 groups of 30 rows, all asked for; the first two have ten times the load of others.
        let mut random = SplitMix64::new(6);
        let queries: Vec<Vec<u32>> = (0..5200)
            .map(|at| {
                let group = if at % 26 < 20 { at % 2 } else { 2 + at % 6 } as u32;
                (0..4).map(|_| 30 * group + random.below(30) as u32).collect()
            })
            .collect();
        let log = QueryLog::from_queries(240, queries).unwrap();
        let shards = divide_rows(&log, &ShardingOptions::new(8)).unwrap();
        let reads = count_shard_reads(&shards, &log).unwrap();
        let mean = log.pin_count() as f64 / 8.0;
        let most = *reads.rows.iter().max().unwrap() as f64;
        assert!(most <= 1.1 * mean, "{:?} of {mean}", reads.rows);
        let mut rows = [0u64; 8];
        shards.shards().iter().for_each(|&shard| rows[usize::from(shard)] += 1);
        assert!(rows.iter().all(|&count| count <= 32), "{rows:?}");
    }

    #[test]
    fn rows_with_more_load_than_a_shard_may_have_do_not_meet() {
        // Every query asks for rows 0 to 3: each has more load than the mean of 8 shards.
        let mut random = SplitMix64::new(7);
        let queries: Vec<Vec<u32>> = (0..2000)
            .map(|_| (0..4).chain((0..2).map(|_| 4 + random.below(76) as u32)).collect())
            .collect();
        let log = QueryLog::from_queries(80, queries).unwrap();
        let shards = divide_rows(&log, &ShardingOptions::new(8)).unwrap();
        let reads = count_shard_reads(&shards, &log).unwrap();
        assert!(*reads.rows.iter().max().unwrap() < 2 * 2000, "{:?}", reads.rows);
    }

    #[test]
    fn rows_never_asked_for_fill_up_and_nothing_depends_on_threads() {
        let log = grouped(20, 500, 4);
        let mut options = ShardingOptions::new(7);
        let one = divide_rows(&log, &options).unwrap();
        options.bisection.thread_count = 3;
        assert_eq!(divide_rows(&log, &options).unwrap(), one);
        let mut rows = [0u64; 7];
        one.shards().iter().for_each(|&shard| rows[usize::from(shard)] += 1);
        assert!(rows.iter().all(|&count| (128..=129).contains(&count)), "{rows:?}");
        let empty = QueryLog::from_queries(10, Vec::<Vec<u32>>::new()).unwrap();
        let spread = divide_rows(&empty, &ShardingOptions::new(4)).unwrap();
        assert_eq!(spread.shards(), [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let log = grouped(2, 5, 4);
        assert!(divide_rows(&log, &ShardingOptions::new(0)).is_err());
        let wide = ShardingOptions { tolerance: -0.1, ..ShardingOptions::new(2) };
        assert!(divide_rows(&log, &wide).is_err());
        assert_eq!(divide_rows(&log, &ShardingOptions::new(1)).unwrap().shards(), [0; 90]);
        let other = RowShards::new(2, vec![0; 3]).unwrap();
        assert!(count_shard_reads(&other, &log).is_err());
    }
}
