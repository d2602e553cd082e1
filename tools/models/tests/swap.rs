//! Does a swap of what is served ever let an old row answer? The leases of `tierbed-core`, around
//! lookups with two tiers of a row each, as in `tierbed-snapshot`.
//!
//! Held in every order: an answer has rows of one generation only; behind a swap no tier has an old
//! row; a generation is freed once, when nobody leases it.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::convert::Infallible;

use common::{check_mistakes, in_many_orders, Case, Row};
use loom::sync::atomic::{AtomicU32, Ordering::SeqCst};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// The two rows that a lookup asks for. The first changes with every generation; the second never
/// does, and pushes the first out of a tier.
const CHANGED: u32 = 0;
const OTHER: u32 = 1;

/// What one generation answers from: its pages, and whether its changed row is about to change.
#[derive(Debug)]
struct Generation {
    number: u32,
    is_pending: bool,
    freed: Arc<[Row; 4]>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        let at = 2 * (self.number - 1) + u32::from(self.is_pending);
        self.freed[at as usize].bring();
    }
}

impl Generation {
    fn page(&self, row: u32) -> u32 {
        if row == CHANGED {
            self.number
        } else {
            1
        }
    }

    fn is_pending(&self, row: u32) -> bool {
        row == CHANGED && self.is_pending
    }
}

/// A row in a tier, and the generation whose weights it has.
type Kept = Option<(u32, u32)>;

/// What lookups do wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// A pending row that leaves a tier is offered to the next.
    PendingFalls,
    /// Each row of a lookup is of the generation that is served just then.
    LeaseByRow,
    /// Rows stop being pending for all when the next generation is served.
    PendingClearedEarly,
    /// A lookup that needs no page takes pending rows from tiers.
    ResidentTakesPending,
    /// A lookup that needs no page ends its lease before it looks into the tiers.
    ResidentLetsGo,
}

struct Served<S> {
    generations: S,
    /// Whether the changed row is pending, for lookups that look there.
    is_pending: AtomicU32,
    tiers: [Mutex<Kept>; 2],
    freed: Arc<[Row; 4]>,
    wrong: Wrong,
}

/// The leases under their own and their mistaken names.
trait AnyLeases: Send + Sync + Sized + 'static {
    fn start(first: Generation) -> Self;
    fn with<R>(&self, look: impl FnOnce(&Generation) -> R) -> R;
    fn swap(&self, announced: Generation, work: impl FnOnce(), next: Generation);
}

macro_rules! leases {
    ($($module:ident)*) => {$(
        impl AnyLeases for std::sync::Arc<tierbed_models::$module::Leases<Generation>> {
            fn start(first: Generation) -> Self {
                Self::new(tierbed_models::$module::Leases::new(first))
            }
            fn with<R>(&self, look: impl FnOnce(&Generation) -> R) -> R {
                look(&self.lease())
            }
            fn swap(&self, announced: Generation, work: impl FnOnce(), next: Generation) {
                let work = || { work(); Ok::<(), Infallible>(()) };
                let Ok(()) = tierbed_models::$module::Leases::swap(self, announced, work, next);
            }
        }
    )*};
}

leases! {
    leases leases_without_first_wait leases_without_last_wait leases_work_before_announcing
    leases_serve_the_next_before_work leases_end_wakes_nobody leases_count_nothing
}

impl<S: AnyLeases> Served<S> {
    fn new(wrong: Wrong) -> Self {
        let freed = Arc::new([(); 4].map(|()| Row::new()));
        let first = Generation { number: 1, is_pending: false, freed: Arc::clone(&freed) };
        Self {
            generations: S::start(first),
            is_pending: AtomicU32::new(0),
            tiers: [(); 2].map(|()| Mutex::new(None)),
            freed,
            wrong,
        }
    }

    /// Rows of one generation: from a tier, else from its pages, and then offered to the tiers.
    fn look_up(&self, rows: &[u32]) {
        if self.wrong == Wrong::LeaseByRow {
            let found: Vec<u32> =
                rows.iter().map(|row| self.generations.with(|now| self.row(now, *row))).collect();
            return assert_eq!(found.iter().min(), found.iter().max(), "rows of two generations");
        }
        self.generations.with(|now| {
            for row in rows {
                let expected = now.page(*row);
                assert_eq!(self.row(now, *row), expected, "row {row} of generation {}", now.number);
            }
        });
    }

    /// Rows of one generation from the tiers alone; nothing where a row is in none of them, or
    /// somebody else is there. No page is read, nobody is waited for.
    fn look_up_resident(&self, rows: &[u32]) {
        let expected = |now: &Generation| -> Option<Vec<u32>> {
            let may_take =
                |row| !self.is_pending(now, row) || self.wrong == Wrong::ResidentTakesPending;
            rows.iter().map(|row| may_take(*row).then(|| now.page(*row))).collect()
        };
        let check = |expected: Option<Vec<u32>>| {
            let found: Option<Vec<u32>> = rows.iter().map(|row| self.in_tiers(*row)).collect();
            if let (Some(expected), Some(found)) = (expected, found) {
                assert_eq!(found, expected, "rows of tiers are of the generation");
            }
        };
        if self.wrong == Wrong::ResidentLetsGo {
            return check(self.generations.with(expected));
        }
        self.generations.with(|now| check(expected(now)));
    }

    fn in_tiers(&self, row: u32) -> Option<u32> {
        for tier in &self.tiers {
            if let Some((kept, number)) = *tier.try_lock().ok()? {
                if kept == row {
                    return Some(number);
                }
            }
        }
        None
    }

    fn is_pending(&self, now: &Generation, row: u32) -> bool {
        match self.wrong {
            Wrong::PendingClearedEarly => row == CHANGED && self.is_pending.load(SeqCst) == 1,
            _ => now.is_pending(row),
        }
    }

    fn row(&self, now: &Generation, row: u32) -> u32 {
        if self.is_pending(now, row) {
            // Neither from the tiers nor to them.
            return now.page(row);
        }
        for tier in &self.tiers {
            if let Some((kept, number)) = *tier.lock().unwrap() {
                if kept == row {
                    return number;
                }
            }
        }
        let number = now.page(row);
        let fallen = self.tiers[0].lock().unwrap().replace((row, number));
        // On its way, this row is in no tier.
        let Some((fallen, number)) = fallen.filter(|(fallen, _)| *fallen != row) else {
            return now.page(row);
        };
        if !self.is_pending(now, fallen) || self.wrong == Wrong::PendingFalls {
            *self.tiers[1].lock().unwrap() = Some((fallen, number));
        }
        now.page(row)
    }

    fn swap(&self) {
        let generation =
            |number, is_pending| Generation { number, is_pending, freed: Arc::clone(&self.freed) };
        self.is_pending.store(1, SeqCst);
        let replace = || {
            for tier in &self.tiers {
                if let Some((CHANGED, number)) = &mut *tier.lock().unwrap() {
                    *number = 2;
                }
            }
            if self.wrong == Wrong::PendingClearedEarly {
                self.is_pending.store(0, SeqCst);
            }
        };
        self.generations.swap(generation(1, true), replace, generation(2, false));
        self.is_pending.store(0, SeqCst);
        // Whoever swapped is the last to have it: files are closed when it returns.
        let freed = [0, 1].map(|at| self.freed[at].version());
        assert_eq!(freed, [1, 1], "former generations are freed once");
        for tier in &self.tiers {
            let kept = *tier.lock().unwrap();
            assert!(kept != Some((CHANGED, 1)), "an old row in a tier");
        }
    }
}

/// A thread looks up beside a swap; `before` is in the tiers when both begin.
fn beside<S: AnyLeases>(wrong: Wrong, before: &[u32], look: fn(&Served<S>)) {
    let served = Arc::new(Served::<S>::new(wrong));
    before.iter().for_each(|row| served.look_up(&[*row]));
    let shared = Arc::clone(&served);
    let looking = thread::spawn(move || look(&shared));
    served.swap();
    looking.join().unwrap();
    served.look_up(&[CHANGED]);
    let freed = Arc::clone(&served.freed);
    drop(served);
    assert_eq!([0, 1, 2, 3].map(|at| freed[at].version()), [1, 1, 1, 0], "freed once each");
}

/// The row comes into an empty tier while it is about to change.
fn a_row_comes<S: AnyLeases>(wrong: Wrong) {
    beside::<S>(wrong, &[], |served| [(); 2].iter().for_each(|()| served.look_up(&[CHANGED])));
}

/// The row falls from the first tier while it is about to change.
fn a_row_falls<S: AnyLeases>(wrong: Wrong) {
    beside::<S>(wrong, &[CHANGED], |served| served.look_up(&[OTHER]));
}

/// A lookup asks for the row twice, with another between.
fn a_lookup_has_one_generation<S: AnyLeases>(wrong: Wrong) {
    beside::<S>(wrong, &[CHANGED], |served| served.look_up(&[CHANGED, CHANGED]));
}

/// A lookup that needs no page asks for the row twice.
fn a_lookup_needs_no_page<S: AnyLeases>(wrong: Wrong) {
    beside::<S>(wrong, &[CHANGED], |served| served.look_up_resident(&[CHANGED, CHANGED]));
}

macro_rules! scenarios {
    ($leases:ty, $wrong:expr) => {
        [
            (|| a_row_comes::<$leases>($wrong)) as fn(),
            || a_row_falls::<$leases>($wrong),
            || a_lookup_has_one_generation::<$leases>($wrong),
            || a_lookup_needs_no_page::<$leases>($wrong),
        ]
    };
    ($module:ident) => {
        scenarios!(Shared<tierbed_models::$module::Leases<Generation>>, Wrong::Nothing)
    };
}

type Shared<T> = std::sync::Arc<T>;
type Right = Shared<tierbed_models::leases::Leases<Generation>>;

#[test]
fn a_swap_holds_in_many_orders() {
    scenarios!(Right, Wrong::Nothing).into_iter().for_each(|scenario| in_many_orders(2, scenario));
}

#[test]
#[ignore = "many more orders: seconds"]
fn a_swap_holds_in_many_more_orders() {
    scenarios!(Right, Wrong::Nothing).into_iter().for_each(|scenario| in_many_orders(4, scenario));
}

#[test]
fn every_mistake_is_refused() {
    let cases: [Case<'_>; 12] = [
        ("right", &scenarios!(Right, Wrong::Nothing)),
        ("no first wait", &scenarios!(leases_without_first_wait)),
        ("no last wait", &scenarios!(leases_without_last_wait)),
        ("work before announcing", &scenarios!(leases_work_before_announcing)),
        ("next before work", &scenarios!(leases_serve_the_next_before_work)),
        ("wakes nobody", &scenarios!(leases_end_wakes_nobody)),
        ("counts nothing", &scenarios!(leases_count_nothing)),
        ("pending falls", &scenarios!(Right, Wrong::PendingFalls)),
        ("lease by row", &scenarios!(Right, Wrong::LeaseByRow)),
        ("pending cleared early", &scenarios!(Right, Wrong::PendingClearedEarly)),
        ("resident takes pending", &scenarios!(Right, Wrong::ResidentTakesPending)),
        ("resident lets go", &scenarios!(Right, Wrong::ResidentLetsGo)),
    ];
    check_mistakes("every_mistake_is_refused", &cases);
}
