//! Distinct ids in the order in which they first come.
//!
//! Who asks for rows and who sends them number them alike, so that no list of them is sent.

use hashbrown::HashMap;
use tierbed_core::{Error, Result};

/// Numbers of ids, from 0.
#[derive(Debug, Default)]
pub(crate) struct Uniques {
    numbers: HashMap<i64, u32>,
}

impl Uniques {
    /// Returns the number of `id`, and whether it is a new one.
    pub(crate) fn number(&mut self, id: i64) -> (u32, bool) {
        let next = self.numbers.len() as u32;
        let number = *self.numbers.entry(id).or_insert(next);
        (number, number == next)
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> usize {
        self.numbers.len()
    }
}

/// Where distinct ids are listed; as long as the ids.
#[derive(Debug)]
pub struct Distinct<'a> {
    /// The ids, in the order in which they first come; what is behind them is left.
    pub ids: &'a mut [i64],
    /// Of each id, its place among them.
    pub numbers: &'a mut [i64],
}

/// Lists the distinct ones of `ids`, which have several features; those of each end at `ends`.
/// Returns how many are new in each feature.
///
/// # Errors
/// `Invalid` when features do not cover all ids, or there are not as many places.
pub fn distinct(ids: &[i64], ends: &[usize], to: Distinct<'_>) -> Result<Vec<usize>> {
    let covers = ends.is_sorted() && ends.last().copied().unwrap_or(0) == ids.len();
    if !covers || to.ids.len() != ids.len() || to.numbers.len() != ids.len() {
        return Err(Error::invalid("features cover all ids, and each has a place")
            .with("ids", ids.len())
            .with("places", to.ids.len()));
    }
    let mut known = Uniques { numbers: HashMap::with_capacity(ids.len()) };
    let mut places = to.ids.iter_mut();
    let mut rest = ids.iter().zip(to.numbers);
    let (mut counts, mut start) = (Vec::with_capacity(ends.len()), 0);
    for end in ends {
        let before = known.count();
        for (&id, number) in rest.by_ref().take(end - start) {
            let (found, is_new) = known.number(id);
            *number = i64::from(found);
            if is_new {
                let Some(place) = places.next() else { panic!("there are places for all ids") };
                *place = id;
            }
        }
        counts.push(known.count() - before);
        start = *end;
    }
    Ok(counts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    #[test]
    fn ids_are_listed_in_the_order_in_which_they_first_come() {
        let ids = [7, -1, 7, i64::MIN, -1, 3];
        let (mut found, mut numbers) = ([0; 6], [9; 6]);
        let to = Distinct { ids: &mut found, numbers: &mut numbers };
        assert_eq!(distinct(&ids, &[3, 3, 6], to).unwrap(), [2, 0, 2]);
        assert_eq!(found, [7, -1, i64::MIN, 3, 0, 0]);
        assert_eq!(numbers, [0, 1, 0, 2, 1, 3]);
    }

    #[test]
    fn features_that_do_not_cover_the_ids_are_refused() {
        for ends in [&[][..], &[1], &[3], &[2, 1], &[3, 2]] {
            let (mut found, mut numbers) = ([0; 2], [0; 2]);
            let to = Distinct { ids: &mut found, numbers: &mut numbers };
            assert!(distinct(&[1, 2], ends, to).is_err(), "{ends:?}");
        }
        let (mut found, mut numbers) = ([0; 1], [0; 2]);
        let to = Distinct { ids: &mut found, numbers: &mut numbers };
        assert!(distinct(&[1, 2], &[2], to).is_err());
    }
}
