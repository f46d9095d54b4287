//! All counts of this crate and their names.
//!
//! Names follow `dynamo-runtime`'s `metrics/prometheus_names.rs` under a prefix of our own; labels
//! `worker_id` and `dp_rank` are Dynamo's. Every count is of what happened since the start.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::event::{Change, Event};
use crate::ids::WorkerRank;
use crate::index::{Applied, Refused};
use crate::time::Millis;
use crate::trust::{Trust, TrustBook};

/// Names of the metrics, and of their labels.
pub mod metric_names {
    /// Events applied to the index, by `event_type`.
    pub const EVENTS_APPLIED_TOTAL: &str = "dynamo_kvdelta_events_applied_total";
    /// Blocks that changes were about but the rank did not hold.
    pub const UNKNOWN_BLOCKS_TOTAL: &str = "dynamo_kvdelta_unknown_blocks_total";
    /// Events that the index refused, by `reason`.
    pub const EVENTS_REFUSED_TOTAL: &str = "dynamo_kvdelta_events_refused_total";
    /// Events that could not be decoded or that are of no use to the index, by `reason`.
    pub const EVENTS_SKIPPED_TOTAL: &str = "dynamo_kvdelta_events_skipped_total";
    /// Frames that were not applied, by `reason`.
    pub const FRAMES_DROPPED_TOTAL: &str = "dynamo_kvdelta_frames_dropped_total";
    /// Gaps found.
    pub const GAPS_TOTAL: &str = "dynamo_kvdelta_gaps_total";
    /// Frames missing in them.
    pub const FRAMES_MISSED_TOTAL: &str = "dynamo_kvdelta_frames_missed_total";
    /// Engines that started again under the same name.
    pub const RESTARTS_TOTAL: &str = "dynamo_kvdelta_restarts_total";
    /// Answers to replays and dumps, by `outcome`.
    pub const RECOVERIES_TOTAL: &str = "dynamo_kvdelta_recoveries_total";
    /// Changes of trust, by the state `trust` that they led to.
    pub const TRUST_CHANGES_TOTAL: &str = "dynamo_kvdelta_trust_changes_total";
    /// Stale claims that decode workers reported.
    pub const STALE_CLAIMS_TOTAL: &str = "dynamo_kvdelta_stale_claims_total";
    /// Age of the last applied batch when it was applied, by the clocks of engine and router.
    pub const LAG_SECONDS: &str = "dynamo_kvdelta_lag_seconds";
    /// 1 for the state `trust` in which a rank is, else 0.
    pub const TRUST: &str = "dynamo_kvdelta_trust";
    /// Age of a rank's last event; absent before the first one.
    pub const LAST_EVENT_AGE_SECONDS: &str = "dynamo_kvdelta_last_event_age_seconds";
}

/// Why a frame was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// It was applied already, or is superseded.
    Stale,
    /// Its rank was never admitted, or was removed.
    NotAdmitted,
    /// The feed's queue was full.
    FeedQueue,
    /// Too many frames waited for an answer.
    HeldQueue,
    /// It waited for an answer when the connection broke.
    Disconnected,
    /// It is of an earlier life of the engine.
    OtherLife,
}

impl Dropped {
    const ALL: [Self; 6] = [
        Self::Stale,
        Self::NotAdmitted,
        Self::FeedQueue,
        Self::HeldQueue,
        Self::Disconnected,
        Self::OtherLife,
    ];

    fn as_label(self) -> &'static str {
        match self {
            Self::Stale => "stale",
            Self::NotAdmitted => "not_admitted",
            Self::FeedQueue => "feed_queue_full",
            Self::HeldQueue => "held_queue_full",
            Self::Disconnected => "disconnected",
            Self::OtherLife => "other_life",
        }
    }
}

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovered {
    /// What was missing was added.
    Added,
    /// The state was replaced.
    Replaced,
    /// The answer does not reach back far enough.
    TooShort,
    /// The engine started again unseen: all is asked for.
    OtherLife,
    /// No answer, or none that can be used.
    Failed,
    /// An answer to a request that was given up.
    TooLate,
}

impl Recovered {
    const ALL: [Self; 6] = [
        Self::Added,
        Self::Replaced,
        Self::TooShort,
        Self::OtherLife,
        Self::Failed,
        Self::TooLate,
    ];

    fn as_label(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Replaced => "replaced",
            Self::TooShort => "too_short",
            Self::OtherLife => "other_life",
            Self::Failed => "failed",
            Self::TooLate => "too_late",
        }
    }
}

const KINDS: [&str; 4] = ["stored", "placed", "removed", "cleared"];

/// What happened so far. Counting takes no lock but where an event was bad.
#[derive(Debug, Default)]
pub struct Counters {
    applied: [AtomicU64; KINDS.len()],
    unknown_blocks: AtomicU64,
    refused: Labelled,
    skipped: Labelled,
    dropped: [AtomicU64; Dropped::ALL.len()],
    gaps: AtomicU64,
    missed: AtomicU64,
    restarts: AtomicU64,
    recovered: [AtomicU64; Recovered::ALL.len()],
    lag_ms: AtomicU64,
    ranks: Mutex<FxHashMap<WorkerRank, RankCounts>>,
}

/// What one rank told since it was let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankCounts {
    /// Events, those of replays and dumps among them, whether or not the index took them.
    pub events: u64,
    /// Age of the last batch when it was applied, by the clocks of engine and reader; `None`: its feed does
    /// not say when it was made.
    pub lag: Option<Duration>,
}

#[derive(Debug, Default)]
struct Labelled(Mutex<BTreeMap<&'static str, u64>>);

impl Labelled {
    /// Counts one; returns the count at 1, 2, 4, 8 ... of its label.
    fn add(&self, label: &'static str) -> Option<u64> {
        let mut counts = self.0.lock();
        let count = counts.entry(label).or_default();
        *count += 1;
        count.is_power_of_two().then_some(*count)
    }
}

impl Counters {
    /// An event that was not handed to the index, and why. Warns at the counts 1, 2, 4, 8 ... of each reason.
    pub fn skipped(&self, reason: &'static str, of: WorkerRank) {
        if let Some(count) = self.skipped.add(reason) {
            tracing::warn!(%of, reason, count, "KV event skipped");
        }
    }

    pub(crate) fn refused(&self, why: Refused, of: WorkerRank) {
        let reason = why.as_label();
        if let Some(count) = self.refused.add(reason) {
            tracing::warn!(%of, reason, count, "KV event refused by the index");
        }
    }

    pub(crate) fn applied(&self, event: &Event, applied: &Applied) {
        if let Some(why) = applied.refused {
            self.refused(why, event.of);
            return;
        }
        let kind = match event.change {
            Change::Stored(_) => 0,
            Change::Placed { .. } => 1,
            Change::Removed { .. } => 2,
            Change::Cleared => 3,
        };
        count(&self.applied[kind], 1);
        count(&self.unknown_blocks, applied.unknown_blocks);
    }

    pub(crate) fn dropped(&self, why: Dropped, frames: usize) {
        count(
            &self.dropped[why as usize],
            frames.try_into().unwrap_or(u64::MAX),
        );
    }

    pub(crate) fn recovered(&self, outcome: Recovered) {
        count(&self.recovered[outcome as usize], 1);
    }

    pub(crate) fn gap(&self, missing: u64) {
        count(&self.gaps, 1);
        count(&self.missed, missing);
    }

    pub(crate) fn restarted(&self) {
        count(&self.restarts, 1);
    }

    pub(crate) fn lag(&self, made: Option<Millis>, now: Millis) {
        if let Some(made) = made {
            let lag = u64::try_from(now.since(made).as_millis()).unwrap_or(u64::MAX);
            self.lag_ms.store(lag, Ordering::Relaxed);
        }
    }

    pub(crate) fn told(&self, of: WorkerRank, events: usize, made: Option<Millis>, now: Millis) {
        let mut ranks = self.ranks.lock();
        let counts = ranks.entry(of).or_default();
        let events = u64::try_from(events).unwrap_or(u64::MAX);
        counts.events = counts.events.saturating_add(events);
        counts.lag = made.map(|made| now.since(made));
    }

    pub(crate) fn forget(&self, of: WorkerRank) {
        self.ranks.lock().remove(&of);
    }

    /// What a rank told; nothing yet if it was not heard of.
    pub fn of_rank(&self, of: WorkerRank) -> RankCounts {
        self.ranks.lock().get(&of).copied().unwrap_or_default()
    }

    /// Events that were skipped, by reason.
    pub fn skips(&self) -> BTreeMap<&'static str, u64> {
        self.skipped.0.lock().clone()
    }

    /// All counts, and the trust in every rank, in Prometheus' text format.
    pub fn render(&self, trust: &TrustBook, now: Millis) -> String {
        let mut text = Text(String::new());
        let by_kind = KINDS.iter().zip(&self.applied);
        text.family(
            metric_names::EVENTS_APPLIED_TOTAL,
            "counter",
            by_kind.map(|(kind, count)| (label("event_type", kind), read(count))),
        );
        text.counter(metric_names::UNKNOWN_BLOCKS_TOTAL, &self.unknown_blocks);
        for (name, counts) in [
            (metric_names::EVENTS_REFUSED_TOTAL, &self.refused),
            (metric_names::EVENTS_SKIPPED_TOTAL, &self.skipped),
        ] {
            let counts = counts.0.lock();
            let all = counts.iter();
            text.family(
                name,
                "counter",
                all.map(|(reason, count)| (label("reason", reason), *count)),
            );
        }
        let dropped = Dropped::ALL.iter().zip(&self.dropped);
        text.family(
            metric_names::FRAMES_DROPPED_TOTAL,
            "counter",
            dropped.map(|(why, count)| (label("reason", why.as_label()), read(count))),
        );
        text.counter(metric_names::GAPS_TOTAL, &self.gaps);
        text.counter(metric_names::FRAMES_MISSED_TOTAL, &self.missed);
        text.counter(metric_names::RESTARTS_TOTAL, &self.restarts);
        let recovered = Recovered::ALL.iter().zip(&self.recovered);
        text.family(
            metric_names::RECOVERIES_TOTAL,
            "counter",
            recovered.map(|(what, count)| (label("outcome", what.as_label()), read(count))),
        );
        let changes = trust.changes();
        text.family(
            metric_names::TRUST_CHANGES_TOTAL,
            "counter",
            changes.map(|(state, count)| (label("trust", state.as_label()), count)),
        );
        let stale = [(String::new(), trust.stale_reports())];
        text.family(metric_names::STALE_CLAIMS_TOTAL, "counter", stale);
        let lag = [(String::new(), seconds(read(&self.lag_ms)))];
        text.family(metric_names::LAG_SECONDS, "gauge", lag);

        let mut ranks = trust.standings(now);
        ranks.sort_unstable_by_key(|(of, _)| *of);
        let states = ranks.iter().flat_map(|(of, standing)| {
            Trust::ALL.map(|state| {
                let labels = format!("{},trust=\"{}\"", rank(*of), state.as_label());
                (labels, u8::from(standing.trust == state))
            })
        });
        text.family(metric_names::TRUST, "gauge", states);
        let ages = ranks.iter().filter_map(|(of, standing)| {
            let age = standing.age(now)?;
            Some((rank(*of), format!("{:.3}", age.as_secs_f64())))
        });
        text.family(metric_names::LAST_EVENT_AGE_SECONDS, "gauge", ages);
        text.0
    }
}

struct Text(String);

impl Text {
    fn counter(&mut self, name: &str, count: &AtomicU64) {
        self.family(name, "counter", [(String::new(), read(count))]);
    }

    fn family(
        &mut self,
        name: &str,
        kind: &str,
        values: impl IntoIterator<Item = (String, impl std::fmt::Display)>,
    ) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = if labels.is_empty() {
                writeln!(self.0, "{name} {value}")
            } else {
                writeln!(self.0, "{name}{{{labels}}} {value}")
            };
        }
    }
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{value}\"")
}

fn rank(of: WorkerRank) -> String {
    format!("worker_id=\"{}\",dp_rank=\"{}\"", of.worker.0, of.rank.0)
}

fn seconds(ms: u64) -> String {
    format!("{}.{:03}", ms / 1000, ms % 1000)
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Counters, RankCounts};
    use crate::ids::WorkerRank;
    use crate::time::Millis;
    use crate::trust::TrustBook;

    #[test]
    fn a_rank_has_counts_of_its_own_until_it_is_forgotten() {
        let (of, other) = (WorkerRank::new(7, 1), WorkerRank::new(7, 0));
        let counters = Counters::default();
        counters.told(of, 3, Some(Millis(500)), Millis(1750));
        counters.told(of, 2, Some(Millis(1800)), Millis(1750));
        let told = RankCounts {
            events: 5,
            // The engine's clock is ahead.
            lag: Some(Duration::ZERO),
        };
        assert_eq!(counters.of_rank(of), told);
        assert_eq!(counters.of_rank(other), RankCounts::default());
        counters.forget(of);
        assert_eq!(counters.of_rank(of), RankCounts::default());
    }

    #[test]
    fn the_text_is_prometheus_and_names_are_dynamos() {
        let of = WorkerRank::new(7, 1);
        let trust = TrustBook::new(Duration::from_secs(30));
        trust.admit(of, Millis(0));
        trust.heard(of, 3, Millis(500));
        let counters = Counters::default();
        counters.gap(4);
        counters.lag(Some(Millis(500)), Millis(1750));
        for _ in 0..3 {
            counters.skipped("malformed", of);
        }
        let text = counters.render(&trust, Millis(2000));
        for line in [
            "dynamo_kvdelta_gaps_total 1",
            "dynamo_kvdelta_frames_missed_total 4",
            "dynamo_kvdelta_lag_seconds 1.250",
            "dynamo_kvdelta_events_skipped_total{reason=\"malformed\"} 3",
            "dynamo_kvdelta_trust{worker_id=\"7\",dp_rank=\"1\",trust=\"unknown\"} 1",
            "dynamo_kvdelta_trust{worker_id=\"7\",dp_rank=\"1\",trust=\"complete\"} 0",
            "dynamo_kvdelta_last_event_age_seconds{worker_id=\"7\",dp_rank=\"1\"} 1.500",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        for declared in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = declared.split_once(' ').unwrap();
            assert!(name.starts_with("dynamo_kvdelta_"), "{name}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert_eq!(text.matches(&format!("# TYPE {name} ")).count(), 1);
        }
    }
}
