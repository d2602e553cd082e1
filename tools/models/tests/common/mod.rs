//! Running a scenario in many orders, and expecting it to fail.

use std::process::{Command, Stdio};

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::Arc;

/// Which scenario a child process runs.
const SCENARIO: &str = "TIERBED_MODEL_SCENARIO";

/// A row in memory that both threads could reach: what the hand-over must order.
#[derive(Debug, Clone)]
pub(crate) struct Row(Arc<AtomicU32>);

impl Row {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicU32::new(0)))
    }

    /// Storage work: the row's version rises by one. Nothing here orders memory; that is up to
    /// the hand-over.
    pub(crate) fn bring(&self) {
        self.0.store(self.version() + 1, Ordering::Relaxed);
    }

    pub(crate) fn version(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs `scenario` in every order with at most so many switches of threads that need not be.
pub(crate) fn in_many_orders(switches_max: usize, scenario: fn()) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches_max);
    model.check(scenario);
}

/// A name, and the scenarios that stand or fall under it.
pub(crate) type Case<'a> = (&'a str, &'a [fn()]);

/// Checks that each named set of scenarios fails in some order, by an assertion or a wait that
/// never ends, and that those named "right" do not. Called by the test `test` alone.
///
/// Each scenario runs in a process of its own: a model that ends in the middle may abort.
pub(crate) fn check_mistakes(test: &str, cases: &[Case<'_>]) {
    if let Ok(chosen) = std::env::var(SCENARIO) {
        let named = |(name, at): (&str, usize)| format!("{name} {at}") == chosen;
        for (name, scenarios) in cases {
            let chosen = scenarios.iter().enumerate().filter(|(at, _)| named((name, *at)));
            chosen.for_each(|(_, scenario)| in_many_orders(2, *scenario));
        }
        return;
    }
    let fails = |name: &str, at: usize| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([test, "--exact"]).env(SCENARIO, format!("{name} {at}"));
        !child.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    };
    for (name, scenarios) in cases {
        let is_refused = (0..scenarios.len()).any(|at| fails(name, at));
        assert_eq!(is_refused, *name != "right", "{name}");
    }
}
