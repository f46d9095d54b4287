//! How far the index may be believed about each rank.
//!
//! The index is a hint; what a claim lets prefill skip must be there. So every rank carries a standing, and
//! only `Complete` backs a claim. The others still count for routing, where a wrong overlap costs a cache
//! miss. This part knows nothing of the index: it works beside any.
//!
//! `Complete` says that all the engine has published since its start, or since the last state that replaced
//! all, was applied. It does not say that the engine has published everything: vLLM sends queued events in a
//! scheduler step, so an idle engine that resets its cache sends nothing until its next request. The
//! decode worker's own lookup finds that; [`TrustBook::report_stale`] is how it tells.
//!
//! `Silent` separates a dead source from an idle one. An idle engine sends no events either, so what counts
//! is a sign of life: a frame, an answer to a replay or a dump, or the feed's word that the connection still
//! stands (`alive`). Without one for `silent_after`, or without one event ever since the admission, the rank
//! is silent. So a worker that publishes nothing (events off, prefix caching off) shows up within that time,
//! and so does one that has served nothing yet: it holds nothing that a claim could be about.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

use crate::ids::{EngineHash, WorkerRank};
use crate::time::Millis;

/// How far the index may be believed about a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Trust {
    /// All that was published was applied.
    Complete,
    /// Something may be missing, or be there that is gone.
    MayHaveHoles,
    /// The worker is known, but no event or no sign of life came in for the stated time.
    Silent,
    /// Nothing came in yet.
    Unknown,
}

impl Trust {
    /// All states.
    pub const ALL: [Self; 4] = [
        Self::Complete,
        Self::MayHaveHoles,
        Self::Silent,
        Self::Unknown,
    ];

    /// Whether a claim that lets prefill skip may rest on it.
    pub const fn may_back_claim(self) -> bool {
        matches!(self, Self::Complete)
    }

    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::MayHaveHoles => "may_have_holes",
            Self::Silent => "silent",
            Self::Unknown => "unknown",
        }
    }
}

/// A decode worker's word that it held less than a claim said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StaleClaim {
    /// Blocks that the claim said.
    pub said_blocks: u32,
    /// Blocks that the worker had.
    pub had_blocks: u32,
    /// The engine's hash of the first block that the worker lacked, the one at index `had_blocks`, if the
    /// index still knows it. With it the report is settled as soon as the events tell of that block's
    /// removal: then they were late, not wrong.
    pub missing: Option<EngineHash>,
}

/// Why a rank is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Admitted, and nothing of it came in.
    NeverHeard,
    /// It shows signs of life, but never published an event.
    PublishesNothing,
    /// No event and no sign of life.
    NoSignOfLife,
    /// The connection broke: frames may be lost, and the engine may have started again.
    Disconnected,
    /// The subscription began after the engine, and there is no way to learn what was before.
    JoinedLate,
    /// Frames are missing, and there is no way to ask for them.
    Gap,
    /// What is missing was asked for.
    Recovering,
    /// It was asked for and did not come.
    RecoveryFailed,
    /// The replay does not reach back far enough.
    ReplayTooShort,
    /// A store whose parent is not known.
    UnknownParent,
    /// A store that the index refused for another reason.
    RefusedEvent,
    /// An event that may have changed the cache could not be read.
    Malformed,
    /// Frames were dropped because a queue was full.
    Overflow,
    /// The engine started again, and its first frames are missing.
    RestartedUnseen,
    /// A hybrid model's cache groups are not known, so neither is what all of them can reuse.
    UnknownCacheGroups,
    /// Two streams tell of the same rank: their order is not known.
    FedTwice,
    /// A decode worker held less than a claim said.
    StaleClaim(StaleClaim),
}

impl Reason {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::NeverHeard => "never_heard",
            Self::PublishesNothing => "publishes_nothing",
            Self::NoSignOfLife => "no_sign_of_life",
            Self::Disconnected => "disconnected",
            Self::JoinedLate => "joined_late",
            Self::Gap => "gap",
            Self::Recovering => "recovering",
            Self::RecoveryFailed => "recovery_failed",
            Self::ReplayTooShort => "replay_too_short",
            Self::UnknownParent => "unknown_parent",
            Self::RefusedEvent => "refused_event",
            Self::Malformed => "malformed",
            Self::Overflow => "overflow",
            Self::RestartedUnseen => "restarted_unseen",
            Self::UnknownCacheGroups => "unknown_cache_groups",
            Self::FedTwice => "fed_twice",
            Self::StaleClaim(_) => "stale_claim",
        }
    }
}

/// What is known about one rank at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// How far to believe the index.
    pub trust: Trust,
    /// Why not further; `None` exactly where `trust` is `Complete`.
    pub reason: Option<Reason>,
    /// Number of the last applied frame; `None`: none yet.
    pub last_seq: Option<u64>,
    /// When the last event was applied; `None`: none yet.
    pub last_event: Option<Millis>,
    /// When the last sign of life came, the admission counting as one.
    pub last_sign: Millis,
}

impl Standing {
    /// Age of the last event; `None`: there was none. It does not tell that an engine is dead.
    pub fn age(&self, now: Millis) -> Option<Duration> {
        self.last_event.map(|at| now.since(at))
    }
}

/// A rank's trust changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Whose.
    pub of: WorkerRank,
    /// What it was; `None`: the rank was just admitted.
    pub from: Option<(Trust, Option<Reason>)>,
    /// What it is, and why it is not complete.
    pub to: (Trust, Option<Reason>),
}

/// Marks the time at which a rebuild was asked for: it settles no stale report that came later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u64);

/// The standing of every admitted rank.
///
/// Shared by those who feed it and those who ask. A query finds its rank without a lock and copies a small
/// record under a lock that no one holds longer than such a copy takes.
#[derive(Debug)]
pub struct TrustBook {
    silent_after: Duration,
    ranks: papaya::HashMap<WorkerRank, Mutex<Record>, FxBuildHasher>,
    changes: [AtomicU64; Trust::ALL.len()],
    stale_reports: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    /// What keeps the content from being complete.
    flaw: Option<Reason>,
    stale: Option<StaleClaim>,
    reports: u64,
    last_seq: Option<u64>,
    last_event: Option<Millis>,
    last_sign: Millis,
    signs: bool,
    admitted: Millis,
    told: (Trust, Option<Reason>),
}

impl Record {
    fn state(&self, now: Millis, silent_after: Duration) -> (Trust, Option<Reason>) {
        let silent = |since| now.since(since) >= silent_after;
        let reason = match (self.last_event, self.signs) {
            (None, false) if silent(self.admitted) => return silence(Reason::NeverHeard),
            (None, true) if silent(self.admitted) => return silence(Reason::PublishesNothing),
            (Some(_), _) if silent(self.last_sign) => return silence(Reason::NoSignOfLife),
            _ => self.flaw.or(self.stale.map(Reason::StaleClaim)),
        };
        let trust = match reason {
            None => Trust::Complete,
            Some(Reason::NeverHeard) => Trust::Unknown,
            Some(_) => Trust::MayHaveHoles,
        };
        (trust, reason)
    }
}

fn silence(why: Reason) -> (Trust, Option<Reason>) {
    (Trust::Silent, Some(why))
}

impl TrustBook {
    /// A book without ranks. A rank is silent after `silent_after` without a sign of life.
    pub fn new(silent_after: Duration) -> Self {
        Self {
            silent_after,
            ranks: papaya::HashMap::with_hasher(FxBuildHasher),
            changes: Default::default(),
            stale_reports: AtomicU64::new(0),
        }
    }

    /// Lets a rank in, unknown. `None`: it is in already, and stays as it is.
    pub fn admit(&self, of: WorkerRank, now: Millis) -> Option<Transition> {
        let to = (Trust::Unknown, Some(Reason::NeverHeard));
        let record = Record {
            flaw: to.1,
            stale: None,
            reports: 0,
            last_seq: None,
            last_event: None,
            last_sign: now,
            signs: false,
            admitted: now,
            told: to,
        };
        let ranks = self.ranks.pin();
        let is_new = ranks.try_insert(of, Mutex::new(record)).is_ok();
        is_new.then_some(Transition { of, from: None, to })
    }

    /// Forgets a rank. What comes in for it later leaves nothing behind. `false`: it was not there.
    pub fn remove(&self, of: WorkerRank) -> bool {
        self.ranks.pin().remove(&of).is_some()
    }

    /// What is known about a rank; `None`: not admitted.
    pub fn standing(&self, of: WorkerRank, now: Millis) -> Option<Standing> {
        let record = *self.ranks.pin().get(&of)?.lock();
        Some(self.standing_of(&record, now))
    }

    /// What is known about all ranks, in no order.
    pub fn standings(&self, now: Millis) -> Vec<(WorkerRank, Standing)> {
        let ranks = self.ranks.pin();
        let records = ranks.iter().map(|(of, record)| (*of, *record.lock()));
        let all = records.map(|(of, record)| (of, self.standing_of(&record, now)));
        all.collect()
    }

    /// Whether a claim about `of` that lets prefill skip may be made. `false` for a rank not admitted.
    pub fn may_back_claim(&self, of: WorkerRank, now: Millis) -> bool {
        let standing = self.standing(of, now);
        standing.is_some_and(|standing| standing.trust.may_back_claim())
    }

    /// Frame `seq` of the rank was applied.
    pub fn heard(&self, of: WorkerRank, seq: u64, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| {
            record.last_seq = Some(seq);
            record.last_event = Some(now);
            record.see_sign(now);
        })
    }

    /// A sign of life without an event: an answer, a heartbeat, a connection that stands.
    pub fn alive(&self, of: WorkerRank, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| record.see_sign(now))
    }

    /// The rank may have holes from now on.
    pub fn lower(&self, of: WorkerRank, why: Reason, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| record.flaw = Some(why))
    }

    /// A decode worker held less than a claim said: lowers the rank at once, until a rebuild that is asked
    /// for after this, or [`settle_stale`](Self::settle_stale).
    pub fn report_stale(
        &self,
        of: WorkerRank,
        said: StaleClaim,
        now: Millis,
    ) -> Option<Transition> {
        self.stale_reports.fetch_add(1, Ordering::Relaxed);
        self.change(of, now, |record| {
            record.stale = Some(said);
            record.reports = record.reports.wrapping_add(1);
        })
    }

    /// The report in force, if there is one.
    pub fn stale_report(&self, of: WorkerRank) -> Option<StaleClaim> {
        self.ranks.pin().get(&of)?.lock().stale
    }

    /// The events told by now what the report `said`, so they were late and not wrong. Does nothing if
    /// another report came in meanwhile.
    pub fn settle_stale(
        &self,
        of: WorkerRank,
        said: StaleClaim,
        now: Millis,
    ) -> Option<Transition> {
        self.change(of, now, |record| {
            if record.stale == Some(said) {
                record.stale = None;
            }
        })
    }

    /// To be taken when a rebuild is asked for, and given to [`rebuilt`](Self::rebuilt).
    pub fn mark(&self, of: WorkerRank) -> Option<Mark> {
        let ranks = self.ranks.pin();
        ranks.get(&of).map(|record| Mark(record.lock().reports))
    }

    /// All that was missing was applied to the known state: the rank is complete, unless a stale report is
    /// in force.
    pub fn caught_up(&self, of: WorkerRank, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| record.flaw = None)
    }

    /// The rank's state was replaced by one that was asked for at `asked`: it is complete, and stale reports
    /// from before are settled.
    pub fn rebuilt(&self, of: WorkerRank, asked: Mark, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| {
            record.flaw = None;
            record.settle_before(asked);
        })
    }

    /// The part of [`rebuilt`](Self::rebuilt) about stale reports: those from before `asked` are settled.
    pub fn settle_before(&self, of: WorkerRank, asked: Mark, now: Millis) -> Option<Transition> {
        self.change(of, now, |record| record.settle_before(asked))
    }

    /// Finds who fell silent. To be called a few times in each `silent_after`.
    pub fn tick(&self, now: Millis) -> Vec<Transition> {
        let ranks = self.ranks.pin();
        let all = ranks.iter().filter_map(|(of, record)| {
            let mut record = record.lock();
            self.tell(*of, &mut record, now)
        });
        all.collect()
    }

    /// How often ranks came into each state, except by their admission.
    pub fn changes(&self) -> [(Trust, u64); Trust::ALL.len()] {
        Trust::ALL.map(|state| (state, self.changes[state as usize].load(Ordering::Relaxed)))
    }

    /// How many stale claims were reported.
    pub fn stale_reports(&self) -> u64 {
        self.stale_reports.load(Ordering::Relaxed)
    }

    fn standing_of(&self, record: &Record, now: Millis) -> Standing {
        let (trust, reason) = record.state(now, self.silent_after);
        Standing {
            trust,
            reason,
            last_seq: record.last_seq,
            last_event: record.last_event,
            last_sign: record.last_sign,
        }
    }

    fn change(
        &self,
        of: WorkerRank,
        now: Millis,
        change: impl FnOnce(&mut Record),
    ) -> Option<Transition> {
        let ranks = self.ranks.pin();
        let mut record = ranks.get(&of)?.lock();
        change(&mut record);
        self.tell(of, &mut record, now)
    }

    fn tell(&self, of: WorkerRank, record: &mut Record, now: Millis) -> Option<Transition> {
        let to = record.state(now, self.silent_after);
        let from = std::mem::replace(&mut record.told, to);
        if from == to {
            return None;
        }
        self.changes[to.0 as usize].fetch_add(1, Ordering::Relaxed);
        Some(Transition {
            of,
            from: Some(from),
            to,
        })
    }
}

impl Record {
    fn settle_before(&mut self, asked: Mark) {
        if self.reports == asked.0 {
            self.stale = None;
        }
    }

    fn see_sign(&mut self, now: Millis) {
        self.last_sign = self.last_sign.max(now);
        self.signs = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Reason, StaleClaim, Trust, TrustBook};
    use crate::ids::WorkerRank;
    use crate::time::Millis;

    const W: WorkerRank = WorkerRank::new(7, 0);
    const NOW: Millis = Millis(1_000_000);
    const SAID: StaleClaim = StaleClaim {
        said_blocks: 64,
        had_blocks: 60,
        missing: None,
    };

    fn complete() -> TrustBook {
        let book = TrustBook::new(Duration::from_secs(30));
        book.admit(W, NOW);
        book.heard(W, 0, NOW);
        book.caught_up(W, NOW);
        assert!(book.may_back_claim(W, NOW));
        book
    }

    #[test]
    fn only_complete_backs_a_claim() {
        for state in Trust::ALL {
            assert_eq!(state.may_back_claim(), state == Trust::Complete);
        }
        let book = complete();
        assert!(
            !book.may_back_claim(WorkerRank::new(7, 1), NOW),
            "not admitted"
        );
    }

    #[test]
    fn a_stale_report_lowers_at_once_and_is_not_raised_by_what_was_under_way() {
        let book = complete();
        let asked = book.mark(W).unwrap();
        let told = book.report_stale(W, SAID, NOW).unwrap();
        assert_eq!(
            told.to,
            (Trust::MayHaveHoles, Some(Reason::StaleClaim(SAID)))
        );
        assert_eq!(book.caught_up(W, NOW), None);
        assert_eq!(
            book.rebuilt(W, asked, NOW),
            None,
            "asked for before the report"
        );
        assert!(!book.may_back_claim(W, NOW));
        let asked = book.mark(W).unwrap();
        book.rebuilt(W, asked, NOW);
        assert!(book.may_back_claim(W, NOW));
        assert_eq!(book.stale_reports(), 1);
    }

    #[test]
    fn a_removed_rank_is_not_revived() {
        let book = complete();
        assert!(book.remove(W));
        assert_eq!(book.heard(W, 1, NOW), None);
        assert_eq!(book.report_stale(W, SAID, NOW), None);
        assert_eq!(book.standing(W, NOW), None);
        assert!(!book.remove(W));
        book.admit(W, NOW);
        assert_eq!(book.standing(W, NOW).unwrap().trust, Trust::Unknown);
    }

    #[test]
    fn every_change_is_told_once() {
        let book = complete();
        let gap = book.lower(W, Reason::Gap, NOW).unwrap();
        assert_eq!(gap.from, Some((Trust::Complete, None)));
        assert_eq!(gap.to, (Trust::MayHaveHoles, Some(Reason::Gap)));
        assert_eq!(book.lower(W, Reason::Gap, NOW), None);
        let later = NOW.plus(Duration::from_secs(30));
        assert_eq!(book.tick(later).len(), 1);
        assert_eq!(book.tick(later), []);
        assert_eq!(
            book.standing(W, later).unwrap().age(later),
            Some(Duration::from_secs(30))
        );
        let back = book.alive(W, later).unwrap();
        assert_eq!(
            back.to,
            (Trust::MayHaveHoles, Some(Reason::Gap)),
            "what it was before"
        );
    }

    #[test]
    fn readers_see_whole_standings_while_a_writer_changes_them() {
        let book = complete();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in 1..2_000 {
                    book.lower(W, Reason::Gap, NOW);
                    book.heard(W, seq, NOW);
                    book.caught_up(W, NOW);
                }
            });
            for _ in 0..2_000 {
                let standing = book.standing(W, NOW).unwrap();
                let is_complete = standing.trust == Trust::Complete;
                assert_eq!(is_complete, standing.reason.is_none());
            }
        });
    }
}
