//! One state for several threads.

use std::sync::PoisonError;

use crate::sync::Mutex;

/// A [`Ledger`](crate::Ledger) or a [`Recovery`](crate::Recovery) that several threads use: in some engines the
/// scheduler and the notices of its workers are different ones.
#[derive(Debug, Default)]
pub struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    /// Shares `state`.
    pub fn new(state: T) -> Self {
        Self(Mutex::new(state))
    }

    /// Does `call` while no other thread uses the state, which holds the lock: it must not come back here.
    pub fn with<R>(&self, call: impl FnOnce(&mut T) -> R) -> R {
        // No call of the state leaves it half changed, also where `call` itself panics.
        call(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Under shuttle, which takes the place of the lock: `cargo test -p kvdelta-transfer shared`.
#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use kvdelta_indexer::Millis;
    use shuttle::sync::Arc;
    use shuttle::thread;

    use super::Shared;
    use crate::{Closed, Ending, Ledger, OfferBlocks, Rank};

    type SharedLedger = Arc<Shared<Ledger>>;

    fn ledger(ranks: u32) -> SharedLedger {
        Arc::new(Shared::new(Ledger::new(NonZeroU32::new(ranks).unwrap())))
    }

    fn open(ledger: &SharedLedger, request: &str, lease: u64) -> bool {
        let (skipped, offered) = (3, 2);
        let blocks = OfferBlocks { skipped, offered };
        ledger.with(|state| state.open(request, blocks, Millis(0), Duration::from_millis(lease)))
    }

    fn blocks(closed: impl IntoIterator<Item = Closed>) -> u64 {
        closed
            .into_iter()
            .map(|closed| closed.released_blocks)
            .sum()
    }

    fn expired(ledger: &SharedLedger, now: u64) -> u64 {
        let expired = ledger.with(|state| state.expire(Millis(now)));
        blocks(expired.into_iter().map(|(_, closed)| closed))
    }

    /// A thread that calls the ledger and says how many blocks it released.
    fn thread(
        ledger: &SharedLedger,
        call: impl FnOnce(&SharedLedger) -> u64 + Send + 'static,
    ) -> thread::JoinHandle<u64> {
        let ledger = ledger.clone();
        thread::spawn(move || call(&ledger))
    }

    fn noticed(ledger: &SharedLedger, request: &str, rank: u32) -> u64 {
        blocks(ledger.with(|state| state.notice(request, Rank(rank), Millis(1))))
    }

    /// The scheduler offers and releases while `others` call; what they do not close ends with its lease.
    fn each_block_is_released_once(ranks: u32, others: [fn(&SharedLedger) -> u64; 2]) {
        let history = move || {
            let ledger = ledger(ranks);
            let others = others.map(|other| thread(&ledger, other));
            assert!(open(&ledger, "a", 10));
            let mut released = ledger.with(|state| state.release_skipped("a"));
            for other in others {
                released += other.join().unwrap();
            }
            released += expired(&ledger, 10);
            assert_eq!(released, 5);
            assert_eq!(
                ledger.with(|state| (state.pinned_blocks(), state.len())),
                (0, 0)
            );
        };
        shuttle::check_dfs(history, None);
    }

    fn rank_0(ledger: &SharedLedger) -> u64 {
        noticed(ledger, "a", 0)
    }

    fn rank_1(ledger: &SharedLedger) -> u64 {
        noticed(ledger, "a", 1)
    }

    fn abort(ledger: &SharedLedger) -> u64 {
        blocks(ledger.with(|state| state.close("a", Ending::Abort, Millis(1))))
    }

    #[test]
    fn every_interleaving_of_two_ranks_releases_each_block_once() {
        each_block_is_released_once(2, [rank_0, rank_1]);
    }

    #[test]
    fn every_interleaving_of_a_notice_and_an_abort_releases_each_block_once() {
        each_block_is_released_once(1, [rank_0, abort]);
    }

    #[test]
    fn no_interleaving_expires_a_renewed_lease() {
        let history = || {
            let ledger = ledger(1);
            assert!(open(&ledger, "a", 10));
            let scheduler = thread(&ledger, |ledger| expired(ledger, 10));
            let worker = thread(&ledger, rank_0);
            let renewed =
                ledger.with(|state| state.extend("a", Millis(10), Duration::from_millis(10)));
            let (by_expiry, by_notice) = (scheduler.join().unwrap(), worker.join().unwrap());
            assert_eq!(by_expiry + by_notice, 5);
            assert!(!renewed || by_expiry == 0);
        };
        shuttle::check_dfs(history, None);
    }

    /// Many offers, by chance: more than can be tried in every order.
    #[test]
    fn random_interleavings_of_many_offers_release_each_block_once() {
        let history = || {
            let ledger = ledger(2);
            let requests = ["a", "b", "c", "d"];
            let scheduler = thread(&ledger, move |ledger| {
                let mut released = 0;
                for (at, request) in (1..).zip(requests) {
                    assert!(open(ledger, request, at));
                    released += ledger.with(|state| state.release_skipped(request));
                    released += expired(ledger, at);
                }
                released
            });
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    thread(&ledger, move |ledger| {
                        requests
                            .map(|request| noticed(ledger, request, rank))
                            .into_iter()
                            .sum()
                    })
                })
                .collect();
            let mut released = scheduler.join().unwrap();
            for rank in ranks {
                released += rank.join().unwrap();
            }
            released += expired(&ledger, 10);
            assert_eq!(released, 20);
            assert!(ledger.with(|state| state.is_empty()));
        };
        shuttle::check_random(history, 2000);
    }

    /// Two calls that rely on each other are not one: the checker must see it.
    #[test]
    #[should_panic(expected = "released twice")]
    fn a_release_in_two_steps_is_found() {
        let history = || {
            let ledger = ledger(1);
            assert!(open(&ledger, "a", 10));
            let two_steps = |ledger: &SharedLedger| {
                let pinned = ledger.with(|state| state.pinned_blocks());
                ledger.with(|state| state.close("a", Ending::Abort, Millis(1)));
                pinned
            };
            let (one, other) = (thread(&ledger, two_steps), thread(&ledger, two_steps));
            let released = one.join().unwrap() + other.join().unwrap();
            assert!(released <= 5, "released twice");
        };
        shuttle::check_dfs(history, None);
    }

    #[test]
    fn a_call_that_panics_leaves_the_state_to_the_others() {
        shuttle::check_dfs(
            || {
                let ledger = ledger(1);
                assert!(open(&ledger, "a", 10));
                let panics = || ledger.with(|_| panic!("of the caller"));
                let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
                assert!(caught.is_err());
                assert_eq!(abort(&ledger), 5);
            },
            None,
        );
    }
}
