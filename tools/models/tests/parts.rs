//! Is a row that threads share in a tier ever lost, torn or kept twice? The locks of the shards of
//! `tierbed-cache`, around a tier of two rows.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use common::{check_mistakes, in_many_orders, Case, Row};
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::sync::Arc;
use loom::thread;

/// One of the two rows of a part: two words that must always be equal, 0 when the row is not here.
/// Nothing here orders memory; that is up to the lock.
#[derive(Debug)]
struct Slot {
    words: [AtomicU32; 2],
    /// Its version: how often the row came in.
    stored: Row,
}

/// What a part holds: a handle, so that a mistake can reach the rows without the lock.
#[derive(Debug, Clone)]
struct Tier(Arc<[Slot; 2]>);

impl Tier {
    fn new() -> Self {
        let word = || AtomicU32::new(0);
        let slot = || Slot { words: [word(), word()], stored: Row::new() };
        Self(Arc::new([slot(), slot()]))
    }

    fn peek(&self, row: usize) -> Option<u32> {
        let [left, right] = &self.0[row].words;
        let (left, right) = (left.load(Relaxed), right.load(Relaxed));
        assert_eq!(left, right, "half of a row");
        (left != 0).then_some(left)
    }

    fn insert(&mut self, row: usize, word: u32) {
        let slot = &self.0[row];
        if slot.words[0].load(Relaxed) == 0 {
            slot.stored.bring();
        }
        slot.words.iter().for_each(|place| place.store(word, Relaxed));
    }
}

/// Hashes of two rows of the first part and two of the second, of two parts.
const ROWS: [u64; 4] = [0, 1 << 40, 0x8000 << 40, 0x8001 << 40];

/// The shards under their own and their mistaken names.
trait AnyParts: Send + Sync + 'static {
    /// Two parts behind so many locks.
    fn new(lock_count: usize) -> Self;
    /// Calls `visit` with the part and the number of each of `rows`, each part under its lock.
    fn visit(&self, rows: &[usize], visit: impl FnMut(&mut Tier, usize));

    /// As `visit`, but waits for no lock.
    fn visit_free(&self, rows: &[usize], visit: impl FnMut(&mut Tier, usize)) -> bool;

    /// As `peek_many`, and as `get_many` but for what the policy is told.
    fn peek(&self, row: usize) -> Option<u32> {
        let mut found = None;
        self.visit(&[row], |tier, row| found = tier.peek(row % 2));
        found
    }

    /// As `settle`: rows that are not here come in.
    fn settle(&self, rows: &[usize], word: u32) {
        self.visit(rows, |tier, row| {
            if tier.peek(row % 2).is_none() {
                tier.insert(row % 2, word);
            }
        });
    }

    /// As `insert_many`: rows that are here are replaced.
    fn insert(&self, rows: &[usize], word: u32) {
        self.visit(rows, |tier, row| tier.insert(row % 2, word));
    }

    fn stored(&self, row: usize) -> u32 {
        let mut stored = 0;
        self.visit(&[row], |tier, row| stored = tier.0[row % 2].stored.version());
        stored
    }
}

macro_rules! parts {
    ($($module:ident)*) => {$(
        impl AnyParts for tierbed_models::$module::Parts<Tier> {
            fn new(lock_count: usize) -> Self {
                Self::new([Tier::new(), Tier::new()], lock_count)
            }
            fn visit(&self, rows: &[usize], mut visit: impl FnMut(&mut Tier, usize)) {
                let mut visits = tierbed_models::$module::Visits::default();
                self.arrange(rows.iter().map(|&row| ROWS[row]), &mut visits, |_| true);
                for (mut tiers, visited) in self.by_lock(&visits) {
                    for (tier, positions) in visited.by_part(&mut tiers) {
                        positions.iter().for_each(|&at| visit(tier, rows[at as usize]));
                    }
                }
            }
            fn visit_free(&self, rows: &[usize], mut visit: impl FnMut(&mut Tier, usize)) -> bool {
                let mut visits = tierbed_models::$module::Visits::default();
                self.arrange(rows.iter().map(|&row| ROWS[row]), &mut visits, |_| true);
                self.visit_free(&visits, |tiers, visited| {
                    for (tier, positions) in visited.by_part(tiers) {
                        positions.iter().for_each(|&at| visit(tier, rows[at as usize]));
                    }
                })
            }
        }
    )*};
}

parts! {
    parts parts_unlock_too_early parts_never_unlock parts_skip_the_busy parts_claim_the_busy
    parts_of_keys_by_call
}

/// Runs `there` in another thread and `here` in this one, on the same parts behind two locks.
fn beside<P: AnyParts>(there: fn(&P), here: fn(&P)) -> Arc<P> {
    beside_behind(2, there, here)
}

/// As [`beside`], behind so many locks.
fn beside_behind<P: AnyParts>(lock_count: usize, there: fn(&P), here: fn(&P)) -> Arc<P> {
    let parts = Arc::new(P::new(lock_count));
    let shared = Arc::clone(&parts);
    let other = thread::spawn(move || there(&shared));
    here(&parts);
    other.join().unwrap();
    parts
}

/// A row is replaced while others look: they see the old or the new one.
fn a_row_is_seen_whole<P: AnyParts>() {
    let parts = beside::<P>(
        |parts| parts.insert(&[0, 1], 7),
        |parts| {
            parts.settle(&[0], 3);
            assert!([Some(3), Some(7)].contains(&parts.peek(0)));
        },
    );
    assert_eq!((parts.peek(0), parts.peek(1)), (Some(7), Some(7)));
}

/// Two lookups missed the same rows and offer them: each comes in once, and is there for both.
fn a_row_comes_in_once<P: AnyParts>() {
    let settle = |parts: &P| {
        parts.settle(&[2, 0], 5);
        assert_eq!((parts.peek(0), parts.peek(2)), (Some(5), Some(5)));
    };
    let parts = beside::<P>(settle, settle);
    assert_eq!((parts.stored(0), parts.stored(2)), (1, 1));
}

/// Different rows of one part, stored at once: none is lost.
fn rows_do_not_displace_each_other<P: AnyParts>() {
    let parts = beside::<P>(|parts| parts.insert(&[0, 3], 1), |parts| parts.insert(&[2, 1], 2));
    assert_eq!([0, 1, 2, 3].map(|row| parts.peek(row)), [1, 2, 2, 1].map(Some));
}

/// Somebody is in one part: its turn comes after that of the other.
fn a_busy_part_is_not_forgotten<P: AnyParts>() {
    beside::<P>(
        |parts| parts.insert(&[0], 1),
        |parts| {
            parts.insert(&[0, 1, 2], 2);
            assert_eq!((parts.peek(1), parts.peek(2)), (Some(2), Some(2)));
        },
    );
}

/// One lock for all parts: a visit of several of them sees nothing of another in between.
fn parts_share_a_lock<P: AnyParts>() {
    let insert = |parts: &P| parts.insert(&[0, 2], 1);
    let parts = beside_behind::<P>(1, insert, |parts| {
        let mut seen = Vec::new();
        parts.visit(&[2, 0], |tier, row| seen.push(tier.peek(row % 2)));
        assert_eq!(seen[0], seen[1]);
    });
    assert_eq!((parts.stored(0), parts.stored(2)), (1, 1));
}

/// Somebody is in a part that is not waited for: whoever looks knows that it saw not all.
fn a_part_that_is_held_is_told<P: AnyParts>() {
    fn look<P: AnyParts>(parts: &P) -> bool {
        let mut seen = Vec::new();
        let is_whole = parts.visit_free(&[0, 2], |tier, row| seen.push(tier.peek(row % 2)));
        assert!(!is_whole || seen.len() == 2, "{seen:?} is not all");
        is_whole
    }
    let parts = beside::<P>(
        |parts| parts.insert(&[0, 1], 7),
        |parts| {
            // The model stops no thread that is about to try a lock. What it reads before, without
            // the lock, makes orders in which the other has half written its row, and the lock.
            let mut rows = None;
            parts.visit(&[0], |tier, _| rows = Some(tier.clone()));
            for slot in rows.iter().flat_map(|tier| tier.0.iter()) {
                for word in &slot.words {
                    word.load(Relaxed);
                }
            }
            let _is_whole = look(parts);
        },
    );
    assert!(look(&*parts), "nobody else is there");
}

fn scenarios<P: AnyParts>() -> [fn(); 6] {
    [
        a_row_is_seen_whole::<P>,
        a_row_comes_in_once::<P>,
        rows_do_not_displace_each_other::<P>,
        a_busy_part_is_not_forgotten::<P>,
        parts_share_a_lock::<P>,
        a_part_that_is_held_is_told::<P>,
    ]
}

type Right = tierbed_models::parts::Parts<Tier>;

#[test]
fn shared_rows_hold_in_many_orders() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(3, scenario));
}

#[test]
#[ignore = "every order"]
fn shared_rows_hold_in_every_order() {
    scenarios::<Right>().into_iter().for_each(|scenario| in_many_orders(20, scenario));
}

/// A caller that looks under one lock and stores under another: the row may have come meanwhile.
fn a_caller_that_locks_twice() {
    let settle = |parts: &Right| {
        if parts.peek(0).is_none() {
            assert_eq!(parts.stored(0), 0, "nobody else stored it");
            parts.insert(&[0], 5);
        }
    };
    beside::<Right>(settle, settle);
}

#[test]
fn every_mistake_is_refused() {
    use tierbed_models as wrong;
    let cases: [Case<'_>; 7] = [
        ("right", &scenarios::<Right>()),
        ("caller that locks twice", &[a_caller_that_locks_twice]),
        ("unlocks too early", &scenarios::<wrong::parts_unlock_too_early::Parts<Tier>>()),
        ("never unlocks", &scenarios::<wrong::parts_never_unlock::Parts<Tier>>()),
        ("skips the busy", &scenarios::<wrong::parts_skip_the_busy::Parts<Tier>>()),
        ("claims the busy", &scenarios::<wrong::parts_claim_the_busy::Parts<Tier>>()),
        ("parts of keys by call", &scenarios::<wrong::parts_of_keys_by_call::Parts<Tier>>()),
    ];
    check_mistakes("every_mistake_is_refused", &cases);
}
