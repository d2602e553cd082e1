//! Two-phase commit of all shards.
//!
//! Each shard prepares its own commit as a store by itself would, in files that nobody reads
//! yet. Where that store would replace its `CURRENT`, the shard votes with those bytes and
//! waits. The last one to vote replaces the one file `SHARDS`, which holds the `CURRENT` of all:
//! then all commits are in force, and until then the ones before. A shard that leaves without
//! having voted ends the round for the others, so nobody waits for ever.
//!
//! ```text
//! shard 0   files of commit 7 ─▶ vote ─┐
//! shard 1   files of commit 7 ─▶ vote ─┴▶ SHARDS := [CURRENT of 0, CURRENT of 1] ─▶ in force
//! ```

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, ErrorKind, Result};
use tierbed_io::Folder;
use tierbed_store::shards::{write_file, ShardsFile};
use tierbed_store::CommitLog;

/// Where the shards of one store agree.
#[derive(Debug)]
pub(crate) struct CommitCoordinator {
    folder: Arc<dyn Folder>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What a reopen finds.
    in_force: Option<ShardsFile>,
    open_round: Option<Round>,
}

/// A time in which the shards may vote, once or several times.
#[derive(Debug)]
struct Round {
    /// What is voted on, but for the votes.
    proposed: ShardsFile,
    votes: Vec<Option<String>>,
    present: usize,
    rounds_done: u64,
    /// Why there will be no more rounds.
    ended: Option<String>,
}

/// The right of one shard to vote in a round; dropping it leaves the round.
#[derive(Debug)]
pub(crate) struct Participant(Arc<CommitCoordinator>);

impl CommitCoordinator {
    /// Reads what is in force in `folder`.
    pub(crate) fn new(folder: Arc<dyn Folder>, in_force: Option<ShardsFile>) -> Self {
        let state = Mutex::new(State { in_force, open_round: None });
        Self { folder, state, changed: Condvar::new() }
    }

    // The state is whole after every statement, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the `CURRENT` of `shard`.
    pub(crate) fn current(&self, shard: usize) -> Option<Vec<u8>> {
        let state = self.lock();
        let currents = &state.in_force.as_ref()?.currents;
        currents.get(shard).map(|current| current.clone().into_bytes())
    }

    /// Begins a store in which no commit is in force, unless there is one; `proposed` says which
    /// shard has which table.
    ///
    /// # Errors
    /// Those of writing the file.
    pub(crate) fn begin(&self, proposed: ShardsFile, shard_count: usize) -> Result<()> {
        assert!(proposed.currents.is_empty(), "a shard has a commit before the store began");
        let mut state = self.lock();
        if state.in_force.is_none() {
            let currents = vec![CommitLog::none_in_force(); shard_count];
            let file = ShardsFile { currents, ..proposed };
            write_file(&*self.folder, &file)?;
            state.in_force = Some(file);
        }
        Ok(())
    }

    /// Opens a round on `proposed`, whose `currents` are to be voted; returns a participants
    /// for each shard.
    pub(crate) fn sit(
        self: &Arc<Self>,
        proposed: ShardsFile,
        shard_count: usize,
    ) -> Vec<Participant> {
        let votes = vec![None; shard_count];
        let open_round =
            Round { proposed, votes, present: shard_count, rounds_done: 0, ended: None };
        let before = self.lock().open_round.replace(open_round);
        assert!(before.is_none(), "a round begins before all shards left the last one");
        std::iter::repeat_with(|| Participant(Arc::clone(self))).take(shard_count).collect()
    }

    /// Votes that `current` be what `shard` has in force, and waits for the others.
    ///
    /// # Errors
    /// `Poisoned` when another shard leaves before it voted, `Invalid` outside of a round,
    /// otherwise those of writing the file.
    pub(crate) fn vote(&self, shard: usize, current: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let Some(open_round) = &mut state.open_round else {
            return Err(Error::invalid("shards commit together, not one by one"));
        };
        if let Some(why) = &open_round.ended {
            return Err(ended(why));
        }
        let round = open_round.rounds_done;
        let text = String::from_utf8_lossy(current).into_owned();
        let Some(vote) = open_round.votes.get_mut(shard) else {
            panic!("shard {shard} votes among fewer")
        };
        assert!(vote.is_none(), "shard {shard} votes twice");
        *vote = Some(text);
        if open_round.votes.iter().all(Option::is_some) {
            let result = self.count(&mut state);
            self.changed.notify_all();
            return result;
        }
        loop {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            let Some(open_round) = &state.open_round else {
                return Err(ended("the round was closed"));
            };
            if open_round.rounds_done > round {
                let done = open_round.rounds_done;
                assert_eq!(done, round + 1, "shards voted again without shard {shard}");
                return Ok(());
            }
            if let Some(why) = &open_round.ended {
                return Err(ended(why));
            }
        }
    }

    // All have voted.
    fn count(&self, state: &mut State) -> Result<()> {
        let Some(open_round) = &mut state.open_round else { panic!("votes belong to a round") };
        let currents: Vec<_> = open_round.votes.iter_mut().filter_map(Option::take).collect();
        assert_eq!(currents.len(), open_round.votes.len(), "a shard has not voted");
        let file = ShardsFile { currents, ..open_round.proposed.clone() };
        match write_file(&*self.folder, &file) {
            Ok(()) => {
                open_round.rounds_done += 1;
                state.in_force = Some(file);
                Ok(())
            }
            Err(error) => {
                open_round.ended = Some(error.to_string());
                Err(error)
            }
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if let Some(open_round) = &mut state.open_round {
            assert!(open_round.present > 0, "more shards leave than came");
            open_round.present -= 1;
            open_round.ended.get_or_insert_with(|| "a shard left without having voted".to_owned());
            if open_round.present == 0 {
                state.open_round = None;
            }
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

fn ended(why: &str) -> Error {
    Error::new(ErrorKind::Poisoned, "the shards have not committed together")
        .with("cause", why)
        .with("remedy", "reopen the store; it continues at its last checkpoint")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use tierbed_io::MemoryFolder;
    use tierbed_store::shards::read_file;

    use super::super::run_shards::run_shards;
    use super::super::split::tests::schema;
    use super::*;

    fn coordinator(folder: &MemoryFolder) -> Arc<CommitCoordinator> {
        Arc::new(CommitCoordinator::new(Arc::new(folder.clone()), None))
    }

    fn jobs(coordinator: &Arc<CommitCoordinator>, shards: usize) -> Vec<(usize, Participant)> {
        let schema = schema(&vec![10; shards]);
        let shard_of = (0..shards as u32).collect();
        let proposed = ShardsFile { schema, shard_of, currents: Vec::new() };
        (0..).zip(coordinator.sit(proposed, shards)).collect()
    }

    #[test]
    fn a_commit_is_in_force_for_all_at_once() {
        let folder = MemoryFolder::new();
        let coordinator = coordinator(&folder);
        // Two rounds in one round, as a move to another plan has.
        let voted =
            run_shards(&mut [(); 3], false, jobs(&coordinator, 3), |(), (shard, participant)| {
                for round in 0..2 {
                    coordinator.vote(shard, format!("{shard}.{round}").as_bytes())?;
                }
                drop(participant);
                Ok(())
            });
        voted.unwrap();
        assert_eq!(read_file(&folder).unwrap().unwrap().currents, ["0.1", "1.1", "2.1"]);
        assert_eq!(coordinator.current(2).unwrap(), b"2.1");
        assert_eq!(coordinator.vote(0, b"alone").unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn who_fails_before_its_vote_keeps_the_commit_before_for_all() {
        for panics in [false, true] {
            let folder = MemoryFolder::new();
            let coordinator = coordinator(&folder);
            let result =
                run_shards(&mut [(); 3], false, jobs(&coordinator, 3), |(), (shard, _seat)| {
                    assert!(!(panics && shard == 1), "a bug in a shard");
                    if shard == 1 {
                        return Err(Error::new(ErrorKind::NoSpace, "disk is full"));
                    }
                    coordinator.vote(shard, b"new")
                });
            let kind = if panics { ErrorKind::Poisoned } else { ErrorKind::NoSpace };
            assert_eq!(result.unwrap_err().kind(), kind);
            assert!(read_file(&folder).unwrap().is_none());
            assert!(coordinator.current(0).is_none());
        }
    }
}
