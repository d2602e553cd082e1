//! Which simulations does every training store run? The tests themselves, written once.

/// Writes the tests that every training store passes: repeated power loss, failing calls, a
/// failed sync, full disks, lies. `seeds` are the suite's, `job` makes the
/// [`StoreJob`](crate::job::StoreJob) of a seed, `pressure_rows` see
/// [`check_use_after_full_disk`](crate::job::check_use_after_full_disk).
///
/// Power loss at every I/O is left to the suite: it is the longest, and says which I/Os.
#[macro_export]
macro_rules! store_simulations {
    (seeds: $seeds:path, job: $job:path, pressure_rows: $pressure_rows:expr) => {
        #[test]
        fn repeated_power_loss_and_resume_reaches_the_same_end() {
            for seed in $seeds() {
                let once = $job(seed);
                let job = $crate::job::StoreJob { steps: 2 * once.steps, ..once };
                $crate::job::check_repeated_power_loss(&job, seed, 20, 120);
            }
        }

        #[test]
        fn failed_writes_and_syncs_lose_no_commit() {
            for seed in $seeds() {
                let calls = $crate::job::FailedCalls { count: 16, write_stride: 5, read_stride: 9 };
                let failure_count = $crate::job::check_failed_calls(&$job(seed), seed, calls);
                assert!(failure_count > 20, "{failure_count}");
            }
        }

        #[test]
        fn a_failed_sync_poisons_the_store() {
            $seeds().into_iter().for_each(|seed| $crate::job::check_failed_sync(&$job(seed)));
        }

        #[test]
        fn a_full_disk_is_no_space_and_loses_nothing() {
            for seed in $seeds() {
                let disk_bytes = (4096..300_000).step_by(8 * 1024);
                let refusals = $crate::job::check_full_disk(&$job(seed), seed, disk_bytes);
                assert!(refusals > 3, "{refusals}");
            }
        }

        #[test]
        fn after_a_full_disk_the_same_store_goes_on() {
            for seed in $seeds() {
                $crate::job::check_use_after_full_disk(&$job(seed), $pressure_rows);
            }
        }

        #[test]
        fn lies_of_the_disk_are_corruption_never_other_values() {
            let seeds =
                $seeds().into_iter().flat_map(|seed| (0..40).map(move |at| 101 * seed + at));
            let (mut found, mut tried) = (0, 0);
            for seed in seeds {
                // All four jobs with every kind of lie.
                let plan = $crate::job::lie(seed % 4, (seed / 4) % 70, seed);
                let told = $crate::job::check_lie(&$job(1 + (seed / 8) % 4), plan);
                found += u64::from(told != $crate::job::Told::Never);
                tried += 1;
            }
            // More than half are on average; of the forty of a single seed a third were seen.
            assert!(found * 8 > tried, "{found} of {tried} lies were found");
        }
    };
}
