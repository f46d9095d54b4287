// SPDX-License-Identifier: Apache-2.0

//! How requests ended, whether they may, and whether the engines counted the same. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::faults::plan::{Fault, Kill};
use crate::outputs::{Tally, Verdict};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ending {
    /// Decode answered and told of no stale claim.
    Answered,
    /// Decode told of a stale claim and computed what it lacked.
    Recomputed,
    /// Decode failed the request and prefill was asked again without a claim.
    AskedAgain,
    /// The client left.
    Left,
}

/// A request that ended as one may.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) index: usize,
    /// What was done to it: less than was planned if an engine was killed meanwhile.
    pub(crate) fault: Fault,
    pub(crate) ending: Ending,
    /// Blocks that its claim said.
    pub(crate) claimed_blocks: Option<u64>,
    /// Whether the offer was cut.
    pub(crate) cut: bool,
    /// Whether the fault came about: decode lacked what was claimed when it was asked.
    pub(crate) forced: bool,
    /// Why the claim was stale, in decode's words.
    pub(crate) reason: Option<String>,
    /// How often it was begun anew since an engine had been killed.
    pub(crate) begun_again: usize,
    /// `None`: the client left before the first token.
    pub(crate) verdict: Option<Verdict>,
}

impl Outcome {
    /// What is wrong with it, the answer aside.
    fn broken(&self) -> Option<String> {
        let recovered = matches!(self.ending, Ending::Recomputed | Ending::AskedAgain);
        let wrong = match self.fault {
            Fault::EvictWhole
            | Fault::EvictTail
            | Fault::EvictMiddle
            | Fault::TooLong
            | Fault::NeverHeld
            | Fault::OtherDecode
            | Fault::BeyondLease => self.forced && !recovered,
            Fault::OtherHash | Fault::OtherSalt | Fault::BadClaim => self.cut,
            Fault::StockDecode => self.cut && self.ending != Ending::Answered,
            _ => false,
        };
        // A kill may have come before or after whatever was forced.
        (wrong && self.begun_again == 0).then(|| {
            format!(
                "request {}, {}: ended as {:?}, claimed {:?}, cut {}, forced {}",
                self.index, self.fault, self.ending, self.claimed_blocks, self.cut, self.forced
            )
        })
    }
}

/// Bounds of what an engine must have counted in one life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Seen {
    /// What the driver saw happen.
    pub(crate) sure: u64,
    /// What may have happened unseen: the client was gone, or the answer was streamed.
    pub(crate) unknown: u64,
}

impl Seen {
    /// What is wrong with `counted`; `is_dead`: the counter was read before the engine was killed, and may lack
    /// the last ones.
    pub(crate) fn broken(self, what: &str, counted: u64, is_dead: bool) -> Option<String> {
        let least = if is_dead { 0 } else { self.sure };
        let most = self.sure + self.unknown;
        (counted < least || counted > most)
            .then(|| format!("{what}: counted {counted}, seen {least} to {most}"))
    }
}

/// A metric by the value of one label.
pub(crate) fn by_label(text: &str, name: &str, label: &str) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let Some(labels) = line
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('{'))
        else {
            continue;
        };
        let value = labels
            .split(&format!("{label}=\""))
            .nth(1)
            .and_then(|rest| rest.split('"').next());
        let count = line.rsplit(' ').next().and_then(|count| count.parse().ok());
        if let (Some(value), Some(count)) = (value, count) {
            *all.entry(value.to_owned()).or_default() += whole(count);
        }
    }
    all
}

/// A counter, which holds a whole number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn whole(count: f64) -> u64 {
    count.round().max(0.0) as u64
}

/// A run of the fault bench.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) requests: usize,
    pub(crate) kills: Vec<Kill>,
    pub(crate) seconds: f64,
    pub(crate) outcomes: Vec<Outcome>,
    /// Requests that failed, with all that is needed to repeat them.
    pub(crate) failures: Vec<String>,
    /// Whatever else is not as it must be: counters, blocks that are not free, engines.
    pub(crate) broken: Vec<String>,
    /// Counters of the engines, summed over their lives.
    pub(crate) counters: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Row {
    requests: usize,
    forced: usize,
    endings: [usize; 4],
    begun_again: usize,
    verdicts: Vec<Verdict>,
}

impl Report {
    /// All that is wrong.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let different =
            |outcome: &&Outcome| matches!(outcome.verdict, Some(Verdict::Different { .. }));
        let outputs = self.outcomes.iter().filter(different).map(|outcome| {
            format!(
                "request {}, {}: the answer is not the aggregated worker's: {:?}",
                outcome.index, outcome.fault, outcome.verdict
            )
        });
        let missing = self.requests - self.outcomes.len().min(self.requests);
        let lost =
            (missing != self.failures.len()).then(|| format!("{missing} requests have no outcome"));
        self.failures
            .iter()
            .cloned()
            .chain(outputs)
            .chain(self.outcomes.iter().filter_map(Outcome::broken))
            .chain(self.broken.iter().cloned())
            .chain(lost)
            .collect()
    }

    /// Faults by kind, how many, and how they ended.
    pub(crate) fn table(&self) -> String {
        let mut rows: BTreeMap<Fault, Row> = BTreeMap::new();
        let mut all = Row::default();
        for outcome in &self.outcomes {
            for row in [rows.entry(outcome.fault).or_default(), &mut all] {
                row.requests += 1;
                row.forced += usize::from(outcome.forced);
                row.endings[outcome.ending as usize] += 1;
                row.begun_again += usize::from(outcome.begun_again > 0);
                row.verdicts.extend(outcome.verdict);
            }
        }
        let mut text = format!(
            "seed {}: {} requests, {} kills, {:.0} s\n\
             {:26} {:>8} {:>6} {:>8} {:>10} {:>11} {:>5} {:>11} {:>6} {:>5} {:>6}\n",
            self.seed,
            self.requests,
            self.kills.len(),
            self.seconds,
            "fault",
            "requests",
            "forced",
            "answered",
            "recomputed",
            "asked again",
            "left",
            "begun again",
            "equal",
            "ties",
            "wrong"
        );
        let named = rows
            .iter()
            .map(|(fault, row)| (fault.to_string(), row))
            .chain([("all".to_owned(), &all)]);
        for (name, row) in named {
            let tally = Tally::of(&row.verdicts);
            let [answered, recomputed, asked, left] = row.endings;
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{name:26} {:8} {:6} {answered:8} {recomputed:10} {asked:11} {left:5} {:11} {:6} {:5} {:6}",
                row.requests,
                row.forced,
                row.begun_again,
                tally.equal,
                tally.near_ties,
                tally.different
            );
        }
        let _ = writeln!(text, "failed: {}", self.failures.len());
        for (name, count) in &self.counters {
            let _ = writeln!(text, "{name} {count}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(fault: Fault, ending: Ending) -> Outcome {
        Outcome {
            index: 7,
            fault,
            ending,
            claimed_blocks: Some(4),
            cut: true,
            forced: true,
            reason: None,
            begun_again: 0,
            verdict: Some(Verdict::Equal),
        }
    }

    fn report(outcomes: Vec<Outcome>) -> Report {
        Report {
            seed: 1,
            requests: outcomes.len(),
            kills: Vec::new(),
            seconds: 1.0,
            outcomes,
            failures: Vec::new(),
            broken: Vec::new(),
            counters: BTreeMap::new(),
        }
    }

    #[test]
    fn a_stale_claim_has_to_be_recovered() {
        for ending in [Ending::Recomputed, Ending::AskedAgain] {
            let good = report(vec![outcome(Fault::EvictTail, ending)]);
            assert_eq!(good.wrong(), Vec::<String>::new());
        }
        let bad = report(vec![outcome(Fault::EvictTail, Ending::Answered)]);
        assert_eq!(bad.wrong().len(), 1);
        let killed = Outcome {
            begun_again: 1,
            ..outcome(Fault::EvictTail, Ending::Answered)
        };
        assert_eq!(report(vec![killed]).wrong(), Vec::<String>::new());
    }

    #[test]
    fn a_claim_with_a_wrong_hash_must_not_be_believed() {
        assert_eq!(
            report(vec![outcome(Fault::OtherHash, Ending::Answered)])
                .wrong()
                .len(),
            1
        );
    }

    #[test]
    fn a_wrong_answer_and_a_lost_request_are_found() {
        let mut wrong = outcome(Fault::None, Ending::Answered);
        wrong.verdict = Some(Verdict::Different {
            token: 0,
            margin: None,
        });
        let mut report = report(vec![wrong]);
        report.requests = 2;
        assert_eq!(report.wrong().len(), 2, "{:?}", report.wrong());
        assert!(report.table().contains("none"));
    }

    #[test]
    fn counters_lie_between_what_was_seen_and_what_may_have_been() {
        let seen = Seen {
            sure: 3,
            unknown: 2,
        };
        assert_eq!(seen.broken("stale", 3, false), None);
        assert_eq!(seen.broken("stale", 5, false), None);
        assert!(seen.broken("stale", 2, false).is_some());
        assert_eq!(seen.broken("stale", 2, true), None);
        assert!(seen.broken("stale", 6, true).is_some());
    }

    #[test]
    fn a_metric_by_its_label() {
        let text = "a_total{engine=\"0\",outcome=\"stale\"} 2.0\na_total{outcome=\"stale\"} 1\n\
                    a_total{outcome=\"confirmed\"} 4.0\nb{outcome=\"stale\"} 9\n";
        let found = by_label(text, "a_total", "outcome");
        assert_eq!(
            found,
            BTreeMap::from([("confirmed".to_owned(), 4), ("stale".to_owned(), 3)])
        );
    }
}
