//! Where the size of a prompt stands among those that came before.

use std::fmt;

/// All of an order, in the steps of a [`Place`].
const WHOLE: u32 = 1 << 16;
/// Buckets to a power of two.
const PARTS: u32 = 4;
/// Prompts of up to 2^32 blocks; longer ones count as the longest of these.
const BUCKETS: usize = 32 * 4;
/// So many prompts later a prompt counts half.
const FORGET_AFTER: u32 = 4096;

/// A place in an order from 0 to 1: the share of the whole that stands before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(u16);

impl Place {
    /// The middle of part `at` of `parts` equal ones. `None`: there are not so many.
    pub fn middle(at: usize, parts: usize) -> Option<Self> {
        let twice = |count: usize| u128::try_from(count).ok().map(|count| 2 * count);
        (at < parts).then_some(())?;
        Some(Self::share(twice(at)? + 1, twice(parts)?))
    }

    /// How far the two are apart: 0 to 1.
    pub fn distance(self, other: Self) -> f64 {
        f64::from(self.0.abs_diff(other.0)) / f64::from(WHOLE)
    }

    /// `part` of a `whole` that is not 0.
    fn share(part: u128, whole: u128) -> Self {
        let steps = part.saturating_mul(u128::from(WHOLE)) / whole;
        Self(u16::try_from(steps).unwrap_or(u16::MAX))
    }
}

/// How the load of a fleet divides among prompts of different sizes, by those that it had.
///
/// Sorted by size and weighed by their blocks, prompts have places of which each share of the order is that share of
/// the load. So if each goes to the worker with its place in the order of workers, prompts of like size meet, and
/// all workers have the same load. [`Form::BelowPeak`](crate::Form::BelowPeak) leans to that.
///
/// Sizes are told apart by a quarter of a power of two. What was seen 4,096 prompts ago counts half.
#[derive(Clone, PartialEq, Eq)]
pub struct Sizes {
    blocks: [u64; BUCKETS],
    seen: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        let blocks = [0; BUCKETS];
        Self { blocks, seen: 0 }
    }
}

impl Sizes {
    /// The place of a prompt of so many blocks. `None`: there was no prompt yet.
    pub fn place(&self, blocks: usize) -> Option<Place> {
        let (before, from) = self.blocks.split_at(bucket(blocks));
        let sum = |blocks: &[u64]| blocks.iter().copied().map(u128::from).sum::<u128>();
        let (before, own) = (sum(before), sum(&from[..1]));
        let all = before + sum(from);
        (all > 0).then(|| Place::share(2 * before + own, 2 * all))
    }

    /// There was a prompt of so many blocks.
    pub fn saw(&mut self, blocks: usize) {
        let own = &mut self.blocks[bucket(blocks)];
        *own = own.saturating_add(u64::try_from(blocks).unwrap_or(u64::MAX));
        self.seen += 1;
        if self.seen == FORGET_AFTER {
            self.seen = 0;
            self.blocks.iter_mut().for_each(|blocks| *blocks /= 2);
        }
    }
}

impl fmt::Debug for Sizes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: u128 = self.blocks.iter().copied().map(u128::from).sum();
        out.debug_struct("Sizes")
            .field("blocks", &all)
            .finish_non_exhaustive()
    }
}

fn bucket(blocks: usize) -> usize {
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).max(1);
    let power = blocks.ilog2();
    // The two bits below the highest.
    let part = (u64::from(blocks) * u64::from(PARTS)) >> power;
    let part = usize::try_from(part % u64::from(PARTS)).unwrap_or(0);
    let power = usize::try_from(power).unwrap_or(0);
    4 * power + part
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{BUCKETS, FORGET_AFTER, Place, Sizes, bucket};

    #[test]
    fn buckets_are_in_order_and_within_the_table() {
        let sizes = [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            12,
            100,
            1 << 31,
            usize::MAX,
        ];
        let buckets = sizes.map(bucket);
        assert_eq!(buckets[..12], [0, 0, 4, 6, 8, 9, 10, 11, 12, 12, 13, 14]);
        assert!(buckets.is_sorted());
        assert_eq!(buckets[14], BUCKETS - 1);
    }

    #[test]
    fn parts_of_the_order_are_equal() {
        assert_eq!(Place::middle(0, 0), None);
        assert_eq!(Place::middle(4, 4), None);
        let at = |at| Place::middle(at, 4).unwrap();
        assert_eq!(at(0).distance(at(3)), 0.75);
        assert_eq!(at(2).distance(at(1)), 0.25);
        assert_eq!(at(0).distance(Place::middle(0, 1).unwrap()), 0.375);
    }

    #[test]
    fn half_the_load_is_before_the_middle() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.place(8), None);
        // As many blocks in short prompts as in long ones.
        for _ in 0..10 {
            sizes.saw(10);
        }
        sizes.saw(100);
        let middle = |at| Place::middle(at, 2).unwrap();
        assert_eq!(sizes.place(10), Some(middle(0)));
        assert_eq!(sizes.place(100), Some(middle(1)));
        assert_eq!(sizes.place(30), Place::middle(0, 1), "between the two");
        assert_eq!(sizes.place(0), Some(Place(0)));
        assert_eq!(sizes.place(usize::MAX), Some(Place(u16::MAX)));
    }

    #[test]
    fn what_was_is_forgotten() {
        let mut sizes = Sizes::default();
        for blocks in [100, 10] {
            for _ in 0..20 * FORGET_AFTER {
                sizes.saw(blocks);
            }
        }
        let past = Place::middle(0, 1)
            .unwrap()
            .distance(sizes.place(10).unwrap());
        assert!(past < 0.001, "{past}");
    }

    proptest! {
        /// Against all prompts, sorted.
        #[test]
        fn a_place_is_the_share_of_the_load_before_it(
            seen in prop::collection::vec(0_usize..5000, 1..200), asked in 0_usize..6000,
        ) {
            let mut sizes = Sizes::default();
            seen.iter().for_each(|blocks| sizes.saw(*blocks));
            let share = |of: &dyn Fn(usize) -> bool| {
                seen.iter().filter(|blocks| of(bucket(**blocks))).sum::<usize>() as f64
            };
            let own = bucket(asked);
            let all = share(&|_| true);
            let before = share(&|other| other < own) + share(&|other| other == own) / 2.0;
            match sizes.place(asked) {
                None => prop_assert_eq!(all, 0.0),
                Some(place) => {
                    let place = place.distance(Place(0));
                    prop_assert!((place - before / all).abs() < 2e-5, "{} {}", place, before / all);
                }
            }
        }
    }
}
