use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn ledger(ranks: u32) -> Ledger {
    Ledger::new(NonZeroU32::new(ranks).unwrap())
}

const fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

/// Three blocks skipped, two offered at 10 ms, leased up to 110.
fn opened(ranks: u32) -> Ledger {
    let mut ledger = ledger(ranks);
    let blocks = OfferBlocks {
        skipped: 3,
        offered: 2,
    };
    assert!(ledger.open("a", blocks, Millis(10), ms(100)));
    ledger
}

fn closed(ending: Ending, released_blocks: u64, pinned_block_ms: u64) -> Closed {
    Closed {
        ending,
        released_blocks,
        pinned_block_ms,
    }
}

#[test]
fn skipped_blocks_are_released_at_once_and_once() {
    let mut ledger = opened(1);
    assert_eq!(ledger.pinned_blocks(), 5);
    assert_eq!(ledger.release_skipped("a"), 3);
    assert_eq!(ledger.release_skipped("a"), 0);
    assert_eq!(ledger.release_skipped("b"), 0);
    assert_eq!(ledger.pinned_blocks(), 2);
    assert_eq!(
        ledger.notice("a", Rank(0), Millis(40)),
        Some(closed(Ending::Notice, 2, 60))
    );
    assert_eq!(ledger.release_skipped("a"), 0);
    assert!(ledger.is_empty());
}

#[test]
fn an_offer_that_ends_first_releases_its_skipped_blocks_too() {
    let mut ledger = opened(1);
    assert_eq!(
        ledger.close("a", Ending::Abort, Millis(11)),
        Some(closed(Ending::Abort, 5, 2))
    );
    assert_eq!(ledger.release_skipped("a"), 0);
}

#[test]
fn in_every_order_the_first_ending_counts_and_no_other() {
    for first in Ending::ALL {
        for order in 0..6_usize {
            let mut rest: Vec<_> = Ending::ALL.into_iter().filter(|e| *e != first).collect();
            let last = rest.remove(order % 3);
            rest.rotate_left(order / 3);
            let mut ledger = opened(1);
            for (at, ending) in [first, rest[0], rest[1], last].into_iter().enumerate() {
                let now = Millis(200);
                let got = match ending {
                    Ending::Notice => ledger.notice("a", Rank(0), now),
                    Ending::Expiry => ledger.expire(now).pop().map(|(_, closed)| closed),
                    other => ledger.close("a", other, now),
                };
                let expected = (at == 0).then(|| closed(first, 5, 380));
                assert_eq!(got, expected, "{first} first, {ending} at {at}");
            }
        }
    }
}

#[test]
fn every_rank_has_to_report_and_counts_once() {
    let mut ledger = opened(3);
    for rank in [2, 2, 0, 3, u32::MAX, 0] {
        assert_eq!(ledger.notice("a", Rank(rank), Millis(20)), None);
    }
    assert_eq!(ledger.notice("b", Rank(1), Millis(20)), None);
    assert_eq!(
        ledger.notice("a", Rank(1), Millis(20)),
        Some(closed(Ending::Notice, 5, 20))
    );
    assert_eq!(ledger.notice("a", Rank(1), Millis(20)), None);
}

#[test]
fn a_request_is_offered_once_at_a_time() {
    let mut ledger = opened(1);
    let other = OfferBlocks {
        skipped: 9,
        offered: 9,
    };
    assert!(!ledger.open("a", other, Millis(50), ms(1000)));
    assert_eq!((ledger.pinned_blocks(), ledger.len()), (5, 1));
    assert_eq!(ledger.expire(Millis(110)).len(), 1);
    assert!(ledger.open("a", other, Millis(120), ms(1)));
    assert_eq!(ledger.pinned_blocks(), 18);
}

#[test]
fn a_renewal_only_lengthens() {
    let mut ledger = opened(1);
    assert!(ledger.extend("a", Millis(20), ms(10)));
    assert!(!ledger.extend("b", Millis(20), ms(10)));
    assert_eq!(ledger.expire(Millis(109)), []);
    // The lease has ended, but nobody has released the blocks.
    assert!(ledger.extend("a", Millis(115), ms(5)));
    assert_eq!(ledger.expire(Millis(119)), []);
    assert_eq!(
        ledger.expire(Millis(120)),
        [("a".into(), closed(Ending::Expiry, 5, 220))]
    );
}

#[test]
fn expired_offers_come_in_the_order_of_their_ends() {
    let mut ledger = ledger(1);
    for (request, lease) in [("a", 30), ("b", 10), ("c", 20), ("d", 40)] {
        assert!(ledger.open(request, OfferBlocks::default(), Millis(0), ms(lease)));
    }
    let expired = ledger.expire(Millis(30));
    let requests: Vec<_> = expired.iter().map(|(request, _)| &**request).collect();
    assert_eq!(requests, ["b", "c", "a"]);
}

#[test]
fn the_largest_numbers_saturate() {
    let mut ledger = ledger(1);
    let blocks = OfferBlocks {
        skipped: u64::MAX,
        offered: u64::MAX,
    };
    assert!(ledger.open("a", blocks, Millis(0), Duration::MAX));
    assert!(ledger.open("b", blocks, Millis(5), ms(0)));
    assert_eq!(ledger.pinned_blocks(), u64::MAX);
    // The clock has gone back: no time has passed.
    assert_eq!(
        ledger.close("b", Ending::Release, Millis(4)),
        Some(closed(Ending::Release, u64::MAX, 0))
    );
    assert_eq!(ledger.expire(Millis(u64::MAX - 1)), []);
    assert_eq!(
        ledger.expire(Millis(u64::MAX)),
        [("a".into(), closed(Ending::Expiry, u64::MAX, u64::MAX))]
    );
}

#[test]
fn an_ending_is_read_by_its_label() {
    for ending in Ending::ALL {
        assert_eq!(ending.label().parse(), Ok(ending));
    }
    let bad = "Notice".parse::<Ending>().unwrap_err();
    assert_eq!(
        bad.to_string(),
        "\"Notice\" is no ending: it is notice, expiry, release or abort"
    );
}

const RANKS: u32 = 3;
const REQUESTS: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Copy, Debug)]
enum Call {
    Open { blocks: OfferBlocks, lease: u64 },
    ReleaseSkipped,
    Notice(u32),
    Close(Ending),
    Extend(u64),
    Expire,
}

fn call() -> impl Strategy<Value = Call> {
    let endings = prop::sample::select(&Ending::ALL[..]);
    let lease = || prop_oneof![9 => 0..60_u64, 1 => Just(u64::MAX)];
    prop_oneof![
        4 => (0..5_u64, 0..5_u64, lease()).prop_map(|(skipped, offered, lease)| Call::Open {
            blocks: OfferBlocks { skipped, offered },
            lease,
        }),
        3 => Just(Call::ReleaseSkipped),
        // One more than there are.
        6 => (0..=RANKS).prop_map(Call::Notice),
        1 => endings.prop_map(Call::Close),
        2 => lease().prop_map(Call::Extend),
        2 => Just(Call::Expire),
    ]
}

/// How the clock moves before a call: mostly on, at times far, at times back.
fn tick() -> impl Strategy<Value = i64> {
    prop_oneof![
        20 => 0..10_i64,
        2 => 50..500_i64,
        2 => -200..0_i64,
        1 => Just(i64::MAX),
    ]
}

/// An offer as sets of blocks, each of which is released by itself.
#[derive(Debug)]
struct NaiveOffer {
    request: usize,
    skipped: Vec<usize>,
    offered: Vec<usize>,
    opened: u64,
    /// All ends that were ever promised.
    ends: Vec<u64>,
    told: Vec<u32>,
}

/// A pool in which every offer takes fresh blocks; it counts how often each was released.
#[derive(Debug, Default)]
struct Naive {
    open: Vec<NaiveOffer>,
    released: Vec<u32>,
}

impl Naive {
    fn of(&mut self, request: usize) -> Option<&mut NaiveOffer> {
        self.open.iter_mut().find(|offer| offer.request == request)
    }

    fn take(&mut self, blocks: u64) -> Vec<usize> {
        let first = self.released.len();
        self.released.extend((0..blocks).map(|_| 0));
        (first..self.released.len()).collect()
    }

    fn release(&mut self, blocks: &[usize]) -> u64 {
        for block in blocks {
            self.released[*block] += 1;
        }
        blocks.len() as u64
    }

    fn open(&mut self, request: usize, blocks: OfferBlocks, now: u64, lease: u64) -> bool {
        if self.of(request).is_some() {
            return false;
        }
        let (skipped, offered) = (self.take(blocks.skipped), self.take(blocks.offered));
        self.open.push(NaiveOffer {
            request,
            skipped,
            offered,
            opened: now,
            ends: vec![now.saturating_add(lease)],
            told: Vec::new(),
        });
        true
    }

    fn release_skipped(&mut self, request: usize) -> u64 {
        let offer = self.of(request);
        let skipped = offer.map(|offer| std::mem::take(&mut offer.skipped));
        self.release(&skipped.unwrap_or_default())
    }

    fn close(&mut self, request: usize, ending: Ending, now: u64) -> Option<Closed> {
        let at = self
            .open
            .iter()
            .position(|offer| offer.request == request)?;
        let offer = self.open.remove(at);
        let time = now.saturating_sub(offer.opened);
        Some(Closed {
            ending,
            released_blocks: self.release(&offer.skipped) + self.release(&offer.offered),
            pinned_block_ms: time.saturating_mul(offer.offered.len() as u64),
        })
    }

    fn notice(&mut self, request: usize, rank: u32, now: u64) -> Option<Closed> {
        let told = &mut self.of(request)?.told;
        told.push(rank);
        let all = (0..RANKS).all(|rank| told.contains(&rank));
        all.then(|| self.close(request, Ending::Notice, now))?
    }

    fn extend(&mut self, request: usize, now: u64, lease: u64) -> bool {
        let offer = self.of(request);
        offer
            .map(|offer| offer.ends.push(now.saturating_add(lease)))
            .is_some()
    }

    fn expire(&mut self, now: u64) -> Vec<(Arc<str>, Closed)> {
        let mut ended: Vec<_> = (self.open.iter())
            .map(|offer| (*offer.ends.iter().max().unwrap(), offer.request))
            .filter(|(end, _)| *end <= now)
            .collect();
        ended.sort_unstable();
        let closed = ended.into_iter().filter_map(|(_, request)| {
            let closed = self.close(request, Ending::Expiry, now)?;
            Some((REQUESTS[request].into(), closed))
        });
        closed.collect()
    }

    fn pinned(&self) -> u64 {
        self.released.iter().filter(|times| **times == 0).count() as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_block_is_released_exactly_once(
        calls in vec((tick(), 0..REQUESTS.len(), call()), 1..80),
        start in prop_oneof![Just(0), Just(1_700_000_000_000), Just(u64::MAX - 100)],
    ) {
        let (mut ledger, mut naive, mut now) = (ledger(RANKS), Naive::default(), start);
        for (tick, request, call) in calls {
            now = now.saturating_add_signed(tick);
            let (at, id) = (Millis(now), REQUESTS[request]);
            match call {
                Call::Open { blocks, lease } => prop_assert_eq!(
                    ledger.open(id, blocks, at, ms(lease)),
                    naive.open(request, blocks, now, lease)
                ),
                Call::ReleaseSkipped => prop_assert_eq!(
                    ledger.release_skipped(id),
                    naive.release_skipped(request)
                ),
                Call::Notice(rank) => prop_assert_eq!(
                    ledger.notice(id, Rank(rank), at),
                    naive.notice(request, rank, now)
                ),
                Call::Close(ending) => prop_assert_eq!(
                    ledger.close(id, ending, at),
                    naive.close(request, ending, now)
                ),
                Call::Extend(lease) => prop_assert_eq!(
                    ledger.extend(id, at, ms(lease)),
                    naive.extend(request, now, lease)
                ),
                Call::Expire => prop_assert_eq!(ledger.expire(at), naive.expire(now)),
            }
            prop_assert_eq!(ledger.pinned_blocks(), naive.pinned());
            prop_assert_eq!(ledger.len(), naive.open.len());
            prop_assert_eq!(ledger.by_end.len(), naive.open.len());
        }
        prop_assert_eq!(ledger.expire(Millis(u64::MAX)), naive.expire(u64::MAX));
        prop_assert_eq!(ledger.pinned_blocks(), 0);
        prop_assert!(ledger.is_empty() && ledger.by_end.is_empty());
        prop_assert!(naive.released.iter().all(|times| *times == 1), "{:?}", naive.released);
    }
}
