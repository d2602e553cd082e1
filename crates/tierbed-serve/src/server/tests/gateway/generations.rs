//! Shards that switch while a gateway asks them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// Writes a delta of a shard in which all rows of two tables are `number`. It is made against the
/// snapshot itself, so it takes the place of those before.
fn delta(shards: &Shards, shard: usize, number: u64) -> Arc<dyn Folder> {
    let base = &*shards.open(shard);
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&folder), base.schema(), &budget).unwrap();
    writer.set_base(base).unwrap();
    for table in 0..2 {
        let of = &base.schema().tables()[table];
        let weights = vec![number as f32; of.dim as usize];
        for row in 0..of.row_count.min(60) {
            writer.push(TableId(table as u32), RowId(row), &weights).unwrap();
        }
    }
    writer.attach("shard", kit::tag(kit::PUBLISH, number, shard, 2).as_bytes()).unwrap();
    writer.finish().unwrap();
    folder
}

/// Ends the load however the test ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Ids of the whole model whose rows deltas change, some of each shard.
fn changed_ids(shards: &Shards) -> Vec<i64> {
    let map = shards.map();
    let of = |shard| (0..60).step_by(7).map(move |row| (shard, row));
    let global = |(shard, row)| map.global_of(TableId(0), shard, row).unwrap().unwrap() as i64;
    of(0).chain(of(1)).map(global).collect()
}

#[test]
fn test_no_answer_mixes_generations() {
    let shards = Shards::new(2, Ways::Hash);
    let servers = shards.start_all();
    // All begin at generation 1.
    for (shard, server) in servers.iter().enumerate() {
        server.apply(delta(&shards, shard, 1)).unwrap();
    }
    let gateway = shards.gateway(&servers, |_| {});
    let ids = changed_ids(&shards);
    let offsets: Vec<usize> = (0..=ids.len()).collect();
    let body = json!({"features": {"user": {"values": ids, "offsets": offsets}}});
    let sum = json!({"features": {"user": {"values": ids, "offsets": [0, ids.len()]}}});
    let (ends, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let newest = AtomicUsize::new(1);
    let ask = |random: &mut SplitMix64| {
        let is_sum = random.below(2) == 0;
        let answer = post_json(&gateway, if is_sum { &sum } else { &body });
        assert_eq!(answer.status, 200, "{}", answer.text());
        let mut rows = floats(&answer.json()["features"]["user"]);
        if is_sum {
            rows.iter_mut().for_each(|x| *x /= ids.len() as f32);
        }
        let number = rows[0];
        assert!(rows.iter().all(|x| *x == number), "an answer mixes generations: {rows:?}");
        assert!(number.fract() == 0.0 && number >= 1.0);
        answered.fetch_add(1, Ordering::Relaxed);
        newest.fetch_max(number as usize, Ordering::Relaxed);
        number
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            let (ends, ask) = (&ends, &ask);
            scope.spawn(move || {
                let mut random = SplitMix64::new(seed);
                let mut last = 0.0;
                while !ends.load(Ordering::Relaxed) {
                    let number = ask(&mut random);
                    assert!(number >= last, "generation {number} after {last}");
                    last = number;
                }
            });
        }
        let ending = Ends(&ends);
        let mut random = SplitMix64::new(99);
        for number in 2..14 {
            let first = random.below(2) as usize;
            for shard in [first, 1 - first] {
                servers[shard].apply(delta(&shards, shard, number)).unwrap();
                thread::sleep(Duration::from_millis(random.below(60)));
            }
        }
        thread::sleep(Duration::from_millis(400));
        drop(ending);
    });
    assert!(answered.into_inner() > 100);
    assert_eq!(newest.into_inner(), 13, "the gateway follows");
    assert_eq!(metric(&gateway, "tierbed_shards_delta"), 13);
}

#[test]
fn a_shard_answers_from_the_generation_before_for_a_while() {
    let shards = Shards::new(2, Ways::Hash);
    let snapshot = shards.open(0);
    let options = ServeOptions { generation_grace_ms: Some(700), ..kit::shard_options() };
    let server = Server::start(&options, Arc::clone(&snapshot), None).unwrap();
    let before = snapshot.generation().identity;
    let ask = |generation: &str| {
        let body = json!({"parameters": {"generation": generation}, "inputs": [
            {"name": "user.values", "datatype": "INT64", "shape": [2], "data": [0, 200]},
            {"name": "user.lengths", "datatype": "INT64", "shape": [2], "data": [1, 1]}],
            "outputs": [{"name": "user"}]});
        let path = "/v2/models/tierbed.rows/infer";
        super::ask(&server, "POST", path, "application/json", body.to_string().as_bytes())
    };
    let old = ask(&before).json();
    server.apply(delta(&shards, 0, 1)).unwrap();
    let now = snapshot.generation().identity;
    assert_ne!(before, now);
    // Asked for all the time, it stays for longer than its time.
    for _ in 0..8 {
        thread::sleep(Duration::from_millis(150));
        let answer = ask(&before).json();
        assert_eq!(answer, old, "the rows and the name of the generation before");
        assert_eq!(answer["parameters"]["generation"], json!(before));
        let new = ask(&now).json();
        assert_eq!(new["parameters"]["generation"], json!(now));
        assert_ne!(new["outputs"], old["outputs"]);
    }
    assert_eq!(snapshot.generations(), [now.clone(), before.clone()]);
    // The next one comes upon it: two answer beside the newest.
    server.apply(delta(&shards, 0, 2)).unwrap();
    assert_eq!(ask(&before).json(), old);
    assert_eq!(snapshot.generations().len(), 3);
    thread::sleep(Duration::from_millis(1_800));
    assert_eq!(snapshot.generations().len(), 1, "nobody asks for it any more");
    let answer = ask(&before);
    assert_eq!(answer.status, 412, "{}", answer.text());
    assert!(answer.text().contains("generation-grace"));
    // One that is no shard keeps none.
    let plain = Server::start(&super::options(), super::snapshot(), None).unwrap();
    assert_eq!(get(&plain, "/health").status, 200);
}

#[test]
fn a_whole_snapshot_answers_beside_the_next_one() {
    let shards = Shards::new(2, Ways::Hash);
    let server = shards.start(0);
    let (before, next) = (shards.open(0), shards.open(1));
    let guard = lock(&server.running);
    let service = Arc::clone(&guard.as_ref().unwrap().service);
    drop(guard);
    let (old, new) = (before.identity().unwrap(), next.identity().unwrap());
    let left = service.answering.swap(Arc::clone(&next));
    assert!(service.serving(Some(&old)).is_ok() && service.serving(Some(&new)).is_ok());
    assert_eq!(service.answering.views().len(), 2);
    service.answering.forget_unused().unwrap();
    assert!(Arc::strong_count(&left) > 1, "it was asked for just now");
    service.answering.keep_former(1);
    thread::sleep(Duration::from_millis(5));
    service.answering.forget_unused().unwrap();
    assert_eq!(Arc::strong_count(&left), 1);
    assert!(service.serving(Some(&old)).is_err());
}
