//! How long nothing is claimed of a rank whose claim was stale.

use std::time::Duration;

use kvdelta_indexer::Millis;

/// The first one; late events come in well within it.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// A report that is as old says nothing of the next one.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// The time in which nothing is claimed of a rank because a claim of it was stale.
///
/// A claim is stale where the events were late, which settles by itself within a second, or where they never
/// came, so that the index stays wrong. The first case must not cost the claims of minutes, and the second not
/// a repeated prefill for each request. So it doubles from 1 to 60 seconds with each stale claim in a row, and
/// starts again at 1 after a claim that held. Claims made before the last report tell nothing new: a burst of
/// them counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoolDown {
    reported: Millis,
    length: Duration,
    has_held: bool,
}

impl CoolDown {
    /// The one after a claim that was made at `claimed` and reported stale at `now`; `before` is that of the
    /// rank's last report. `None`: the claim is older than that report, which stays in force.
    pub fn after(before: Option<Self>, claimed: Millis, now: Millis) -> Option<Self> {
        let length = match before {
            Some(before) if claimed <= before.reported => return None,
            Some(before) if !before.has_held && now.since(before.reported) < FORGOTTEN_AFTER => {
                LONGEST.min(before.length * 2)
            }
            _ => SHORTEST,
        };
        Some(Self {
            reported: now,
            length,
            has_held: false,
        })
    }

    /// A claim that was made at `claimed` held.
    pub fn held(&mut self, claimed: Millis) {
        self.has_held |= claimed > self.reported;
    }

    /// Whether claims may be made again.
    pub fn is_over(self, now: Millis) -> bool {
        now.since(self.reported) >= self.length
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvdelta_indexer::Millis;
    use proptest::prelude::*;

    use super::CoolDown;

    const START: Millis = Millis(1_000_000);

    fn at(seconds: u64) -> Millis {
        START.plus(Duration::from_secs(seconds))
    }

    /// Seconds until claims may be made again.
    fn seconds(cool_down: CoolDown, now: Millis) -> u64 {
        let over = (0..1000).find(|after| cool_down.is_over(now.plus(Duration::from_secs(*after))));
        over.expect("it ends")
    }

    #[test]
    fn doubles_with_each_stale_claim_in_a_row() {
        let (mut last, mut now) = (None, 0);
        let mut lengths = Vec::new();
        for _ in 0..9 {
            let next = CoolDown::after(last, at(now), at(now)).expect("a new claim");
            let length = seconds(next, at(now));
            lengths.push(length);
            last = Some(next);
            now += length + 1;
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn a_burst_counts_as_one() {
        let first = CoolDown::after(None, at(0), at(5)).expect("the first");
        for reported in [5, 6, 100] {
            assert_eq!(CoolDown::after(Some(first), at(5), at(reported)), None);
        }
        assert_eq!(seconds(first, at(5)), 1);
    }

    #[test]
    fn starts_again_after_a_claim_that_held_or_a_long_time() {
        let first = CoolDown::after(None, at(0), at(0)).expect("the first");
        let second = CoolDown::after(Some(first), at(2), at(2)).expect("the second");
        assert_eq!(seconds(second, at(2)), 2);

        let mut held = second;
        held.held(at(2));
        assert_eq!(held, second, "it was made before the report");
        held.held(at(5));
        let third = CoolDown::after(Some(held), at(6), at(6)).expect("the third");
        assert_eq!(seconds(third, at(6)), 1);

        for (later, length) in [(601, 4), (602, 1)] {
            let third = CoolDown::after(Some(second), at(later), at(later)).expect("the third");
            assert_eq!(seconds(third, at(later)), length);
        }
    }

    proptest! {
        #[test]
        fn is_never_longer_than_a_minute_nor_shorter_than_a_second(
            steps in prop::collection::vec((any::<bool>(), 0..100_000_u64, 0..700_000_u64), 0..50),
        ) {
            let (mut last, mut now) = (None::<CoolDown>, START);
            for (held, ago, later) in steps {
                now = now.plus(Duration::from_millis(later));
                let claimed = Millis(now.0 - ago);
                match (held, &mut last) {
                    (true, Some(last)) => last.held(claimed),
                    (true, None) => {}
                    (false, before) => {
                        if let Some(next) = CoolDown::after(*before, claimed, now) {
                            prop_assert!(!next.is_over(now.plus(Duration::from_millis(999))));
                            prop_assert!(next.is_over(now.plus(Duration::from_secs(60))));
                            *before = Some(next);
                        } else {
                            prop_assert!(before.is_some());
                        }
                    }
                }
            }
        }
    }
}
