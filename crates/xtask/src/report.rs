// SPDX-License-Identifier: Apache-2.0

//! The result of the main job as a table and as JSON.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::counts::{Count, Counts};
use crate::outputs::{Tally, Verdict};
use crate::workload::Workload;

const NAME_WIDTH: usize = 38;
const CELL_WIDTH: usize = 20;

/// The whole result.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Prefill workers.
    pub(crate) prefill_workers: usize,
    /// Decode workers.
    pub(crate) decode_workers: usize,
    /// Requests in flight at once.
    pub(crate) concurrency: usize,
    /// Seed of the requests.
    pub(crate) seed: u64,
    /// Tokens in a block.
    pub(crate) block_size: usize,
    /// KV bytes of a block, over all layers.
    pub(crate) block_bytes: u64,
    /// Margin below which two tokens count as tied, in log-probability.
    pub(crate) epsilon: f64,
    /// Weight 0 first.
    pub(crate) runs: Vec<Run>,
    /// Requests whose answers are equal in all runs.
    pub(crate) equal_between_runs: usize,
}

/// One run of all workloads with one weight.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    /// How the frontend was started.
    #[serde(flatten)]
    pub(crate) routing: Routing,
    /// Whether the workers had kvdelta's connector.
    pub(crate) connector: bool,
    /// Whether the frontend's log says that it subscribed to the decode workers' KV events.
    pub(crate) decode_events: DecodeEvents,
    /// What `kvdelta doctor` says keeps the flag from helping, as codes; `None` if it was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) doctor: Option<Vec<String>>,
    /// The workloads.
    pub(crate) workloads: Vec<Measured>,
    /// A decode worker that was killed and started again on purpose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kill: Option<Kill>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.connector {
            f.write_str("connector")
        } else {
            self.routing.fmt(f)
        }
    }
}

/// How the frontend chooses decode workers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Routing {
    /// `decode_overlap_score_weight`.
    pub(crate) weight: f64,
    /// Dynamo's conditional disaggregation: decode computes a short rest of the prompt itself.
    pub(crate) conditional_disagg: bool,
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.conditional_disagg {
            f.write_str("conditional disagg")
        } else {
            write!(f, "weight {}", self.weight)
        }
    }
}

/// What the frontend did about the KV events of decode workers, by its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DecodeEvents {
    /// It subscribed.
    Subscribed,
    /// It said that it skips them.
    Skipped,
}

/// One workload of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    /// Which.
    pub(crate) workload: Workload,
    /// Requests sent, each answered.
    pub(crate) requests: usize,
    /// Tokens of all prompts.
    pub(crate) prompt_tokens: usize,
    /// Bytes of the KV of all prompts.
    pub(crate) full_bytes: u64,
    /// Bytes if every prefix had travelled once.
    pub(crate) once_bytes: u64,
    /// Bytes that NIXL moved, by the decode workers' counters.
    pub(crate) moved_bytes: u64,
    /// Requests that each decode worker finished.
    pub(crate) decode_requests: Vec<u64>,
    /// What frontend and workers counted.
    pub(crate) counts: Counts,
    /// Median time to the first token.
    pub(crate) ttft_ms: f64,
    /// Median over requests of the mean time between tokens.
    pub(crate) inter_token_ms: f64,
    /// Comparison with the aggregated worker.
    pub(crate) outputs: Tally,
    /// Answers that are not equal, by request.
    pub(crate) not_equal: Vec<(usize, Verdict)>,
}

impl Measured {
    fn saved_share(&self) -> f64 {
        1.0 - self.moved_bytes as f64 / self.full_bytes as f64
    }
}

/// One line, for those who wait for the table.
impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} of {} bytes moved, {} saved; {} of {} answers equal",
            self.workload,
            grouped(self.moved_bytes),
            grouped(self.full_bytes),
            percent(self.saved_share()),
            self.outputs.equal,
            self.requests
        )
    }
}

/// What happened around the killed worker.
#[derive(Debug, Serialize)]
pub(crate) struct Kill {
    /// Requests sent before, during and after; each was answered in the end.
    pub(crate) requests: usize,
    /// Attempts that ended in an error before the router had dropped the worker.
    pub(crate) failed_attempts: usize,
    /// Workers whose KV events the router takes: before, without the killed worker, and after.
    pub(crate) event_sources: [usize; 3],
    /// Whether the router never failed to take the blocks of a worker out of its index.
    pub(crate) index_was_cleared: bool,
    /// Requests that the worker finished after it was started again.
    pub(crate) requests_after_restart: u64,
    /// Comparison with the aggregated worker.
    pub(crate) outputs: Tally,
}

impl Report {
    /// Whether every answer is that of the aggregated worker, near ties aside.
    pub(crate) fn outputs_are_right(&self) -> bool {
        let kills = self.runs.iter().filter_map(|run| run.kill.as_ref());
        self.measured()
            .map(|measured| measured.outputs)
            .chain(kills.map(|kill| kill.outputs))
            .all(|outputs| outputs.different == 0)
    }

    fn measured(&self) -> impl Iterator<Item = &Measured> {
        self.runs.iter().flat_map(|run| &run.workloads)
    }

    /// The table for people, and the line about outputs.
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "{} prefill + {} decode workers, {} in flight, blocks of {} tokens ({} bytes), seed {}\n",
            self.prefill_workers,
            self.decode_workers,
            self.concurrency,
            self.block_size,
            self.block_bytes,
            self.seed
        );
        let workloads = self.runs.first().map_or(0, |run| run.workloads.len());
        for index in 0..workloads {
            let measured: Vec<&Measured> =
                self.runs.iter().map(|run| &run.workloads[index]).collect();
            row(
                &mut text,
                &measured[0].workload.to_string(),
                self.runs.iter().map(Run::to_string),
            );
            text.push_str(&"-".repeat(NAME_WIDTH + CELL_WIDTH * self.runs.len()));
            text.push('\n');
            let mut line = |name: &str, cell: &dyn Fn(&Measured) -> String| {
                row(
                    &mut text,
                    name,
                    measured.iter().map(|measured| cell(measured)),
                );
            };
            line("requests", &|m| m.requests.to_string());
            line("prompt tokens", &|m| grouped(m.prompt_tokens as u64));
            line("bytes of a full transfer", &|m| grouped(m.full_bytes));
            line("bytes moved", &|m| grouped(m.moved_bytes));
            line("bytes if every prefix travelled once", &|m| {
                grouped(m.once_bytes)
            });
            line("saved of a full transfer", &|m| percent(m.saved_share()));
            line("share of each decode worker", &shares);
            line("time to first token, median", &|m| {
                format!("{:.0} ms", m.ttft_ms)
            });
            line("time between tokens, median", &|m| {
                format!("{:.1} ms", m.inter_token_ms)
            });
            line("descriptors per transfer", &descriptors);
            for (name, counts) in CLAIM_ROWS {
                line(name, &|m| cell(&m.counts, counts));
            }
            text.push('\n');
        }
        text.push_str(&self.outputs_line());
        for run in &self.runs {
            let events = match run.decode_events {
                DecodeEvents::Subscribed => "subscribed to the decode workers' KV events",
                DecodeEvents::Skipped => "skipped the decode workers' KV events",
            };
            let _ = writeln!(text, "{}: the router {events}.", capitalized(run));
            if let Some(codes) = &run.doctor {
                let said = if codes.is_empty() {
                    "nothing keeps the flag from helping".to_owned()
                } else {
                    codes.join(", ")
                };
                let _ = writeln!(text, "{}: the doctor says: {said}.", capitalized(run));
            }
            if let Some(kill) = &run.kill {
                let _ = writeln!(
                    text,
                    "{}: a decode worker was killed among {} more requests: {} attempts \
                     failed and were repeated, {} answers equal, {} near ties, {} different; event \
                     sources {:?}; started again it finished {} requests.",
                    capitalized(run),
                    kill.requests,
                    kill.failed_attempts,
                    kill.outputs.equal,
                    kill.outputs.near_ties,
                    kill.outputs.different,
                    kill.event_sources,
                    kill.requests_after_restart
                );
            }
        }
        text
    }

    fn outputs_line(&self) -> String {
        let answers: usize = self.measured().map(|measured| measured.requests).sum();
        let (mut equal, mut near_ties, mut different) = (0, 0, 0);
        for measured in self.measured() {
            equal += measured.outputs.equal;
            near_ties += measured.outputs.near_ties;
            different += measured.outputs.different;
        }
        let requests = answers / self.runs.len().max(1);
        let mut text = format!(
            "Outputs: {equal} of {answers} answers equal those of one aggregated worker, {near_ties} \
             differ from a near tie on (margin below {}), {different} differ otherwise. {} of \
             {requests} requests got the same answer in all runs.\n",
            self.epsilon, self.equal_between_runs
        );
        for run in &self.runs {
            for (request, verdict) in run
                .workloads
                .iter()
                .flat_map(|measured| &measured.not_equal)
            {
                let _ = writeln!(text, "  {run}, request {request}: {verdict:?}");
            }
        }
        text
    }
}

/// Rows about claims, and the numbers in them.
const CLAIM_ROWS: [(&str, &[Count]); 12] = [
    ("claims", &[Count::Claims]),
    ("blocks claimed", &[Count::ClaimedBlocks]),
    ("blocks skipped by prefill", &[Count::SkippedBlocks]),
    ("claims refused by prefill", &[Count::RefusedClaims]),
    (
        "block-seconds leased by prefill",
        &[Count::PinnedBlockSeconds],
    ),
    ("void claims", &[Count::VoidClaims]),
    ("claims confirmed by decode", &[Count::ConfirmedClaims]),
    (
        "stale claims / blocks short",
        &[Count::StaleClaims, Count::StaleBlocks],
    ),
    (
        "recomputed / asked again / failed",
        &[Count::Recomputed, Count::AskedAgain, Count::Failed],
    ),
    ("full hits", &[Count::FullHits]),
    ("bytes read by decode", &[Count::ReadBytes]),
    ("bytes saved by decode's hits", &[Count::SavedBytes]),
];

/// Numbers of `counts` as text, `-` where nobody counts one.
fn cell(counts: &Counts, wanted: &[Count]) -> String {
    let numbers: Option<Vec<String>> = wanted
        .iter()
        .map(|count| counts.get(*count).map(grouped))
        .collect();
    numbers.map_or_else(|| "-".to_owned(), |numbers| numbers.join(" / "))
}

fn descriptors(measured: &Measured) -> String {
    let count = |count| measured.counts.get(count).unwrap_or(0) as f64;
    match count(Count::Transfers) {
        0.0 => "-".to_owned(),
        transfers => format!("{:.1}", count(Count::Descriptors) / transfers),
    }
}

fn capitalized(run: &Run) -> String {
    let text = run.to_string();
    let (first, rest) = text.split_at(1);
    first.to_uppercase() + rest
}

fn row(text: &mut String, name: &str, cells: impl Iterator<Item = String>) {
    let _ = write!(text, "{name:<NAME_WIDTH$}");
    for cell in cells {
        let _ = write!(text, "{cell:>CELL_WIDTH$}");
    }
    text.push('\n');
}

fn shares(measured: &Measured) -> String {
    let all: u64 = measured.decode_requests.iter().sum();
    let shares: Vec<String> = measured
        .decode_requests
        .iter()
        .map(|requests| percent(*requests as f64 / all.max(1) as f64))
        .collect();
    shares.join(" ")
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The median; 0 of nothing.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[odd / 2],
        even => f64::midpoint(values[even / 2 - 1], values[even / 2]),
    }
}

/// Median, lower and upper quartile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread(pub(crate) [f64; 3]);

impl Spread {
    /// Those of `values`; not a number of nothing.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = values.into_iter().collect();
        all.sort_by(f64::total_cmp);
        let at = |quarter: usize| {
            let place = (all.len().saturating_sub(1) * quarter + 2) / 4;
            all.get(place).copied().unwrap_or(f64::NAN)
        };
        Self([at(2), at(1), at(3)])
    }

    /// Those of what `each` makes of every pair.
    pub(crate) fn of_pairs(ours: &[f64], theirs: &[f64], each: impl Fn(f64, f64) -> f64) -> Self {
        Self::of(
            ours.iter()
                .zip(theirs)
                .map(|(ours, theirs)| each(*ours, *theirs)),
        )
    }

    /// `median (lower..upper)`, with so many decimals.
    pub(crate) fn shown(self, digits: usize) -> String {
        let [median, low, high] = self.0.map(|value| format!("{value:.digits$}"));
        format!("{median} ({low}..{high})")
    }
}

/// Replaces what stands in `file` between the line that says that `command` wrote it and the next end line.
pub(crate) fn put_between(file: &Path, command: &str, text: &str) -> Result<()> {
    const END: &str = "<!-- end -->";
    let begin = format!("<!-- begin: {command} -->");
    let shown = file.display();
    let old = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    let (before, rest) = old
        .split_once(&begin)
        .with_context(|| format!("{shown}: no line {begin}"))?;
    let (_, after) = rest
        .split_once(END)
        .with_context(|| format!("{shown}: no line {END}"))?;
    fs::write(file, format!("{before}{begin}\n{text}{END}{after}"))
        .with_context(|| format!("cannot write {shown}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn measured(moved_bytes: u64, outputs: Tally) -> Measured {
        Measured {
            workload: Workload::SharedPrefixes,
            requests: 4,
            prompt_tokens: 8592,
            full_bytes: 1000,
            once_bytes: 300,
            moved_bytes,
            decode_requests: vec![3, 1],
            counts: Counts::default(),
            ttft_ms: 180.4,
            inter_token_ms: 9.96,
            outputs,
            not_equal: Vec::new(),
        }
    }

    /// What the connector's run counted.
    fn counts() -> Counts {
        let numbers = [
            (Count::Claims, 3),
            (Count::ClaimedBlocks, 192),
            (Count::SkippedBlocks, 192),
            (Count::VoidClaims, 0),
            (Count::RefusedClaims, 0),
            (Count::ConfirmedClaims, 3),
            (Count::SkippedClaims, 3),
            (Count::StaleClaims, 0),
            (Count::StaleBlocks, 0),
            (Count::ReadBytes, 300),
            (Count::SavedBytes, 70_000),
            (Count::LeasesHeld, 4),
            (Count::LeasesLost, 0),
            (Count::Transfers, 4),
            (Count::Descriptors, 50),
        ];
        Counts(numbers.into_iter().collect())
    }

    /// A report whose second run has this many wrong answers, and whose third has kvdelta's connector.
    pub(crate) fn report(different: usize) -> Report {
        let run = |weight, moved_bytes, decode_events, different| Run {
            routing: Routing {
                weight,
                conditional_disagg: false,
            },
            connector: false,
            decode_events,
            doctor: None,
            workloads: vec![measured(
                moved_bytes,
                Tally {
                    equal: 4 - different,
                    near_ties: 0,
                    different,
                },
            )],
            kill: None,
        };
        let mut connector = run(1.0, 300, DecodeEvents::Subscribed, 0);
        connector.connector = true;
        connector.workloads[0].counts = counts();
        Report {
            prefill_workers: 1,
            decode_workers: 2,
            concurrency: 1,
            seed: 1,
            block_size: 32,
            block_bytes: 131_072,
            epsilon: 0.001,
            runs: vec![
                run(0.0, 600, DecodeEvents::Skipped, 0),
                run(1.0, 300, DecodeEvents::Subscribed, different),
                connector,
            ],
            equal_between_runs: 4,
        }
    }

    #[test]
    fn the_table_says_what_was_measured() {
        let table = report(0).table();
        for part in [
            "weight 0",
            "weight 1",
            "8,592",
            "40%",
            "70%",
            "75% 25%",
            "180 ms",
            "12 of 12 answers equal",
            "4 of 4 requests got the same answer",
            "skipped the decode workers' KV events",
        ] {
            assert!(table.contains(part), "no {part:?} in\n{table}");
        }
    }

    #[test]
    fn a_workload_is_said_in_a_line() {
        assert_eq!(
            report(1).runs[1].workloads[0].to_string(),
            "shared prefixes: 300 of 1,000 bytes moved, 70% saved; 3 of 4 answers equal"
        );
    }

    #[test]
    fn what_a_column_cannot_have_is_a_dash() {
        let table = report(0).table();
        let line = |name: &str| {
            let line = table.lines().find(|line| line.starts_with(name));
            let cells =
                line.unwrap_or_else(|| panic!("no {name:?} in\n{table}"))[NAME_WIDTH..].trim();
            let words: Vec<&str> = cells.split_whitespace().collect();
            words.join(" ")
        };
        assert_eq!(line("shared prefixes"), "weight 0 weight 1 connector");
        assert_eq!(line("blocks skipped by prefill"), "- - 192");
        assert_eq!(line("stale claims / blocks short"), "- - 0 / 0");
        // One of the three is counted by nobody.
        assert_eq!(line("recomputed / asked again / failed"), "- - -");
        assert_eq!(line("bytes saved by decode's hits"), "- - 70,000");
        assert_eq!(line("descriptors per transfer"), "- - 12.5");
        assert!(CLAIM_ROWS.iter().all(|(name, _)| name.len() < NAME_WIDTH));
    }

    #[test]
    fn counts_are_in_the_json_under_their_names() {
        let json = serde_json::to_value(report(0)).unwrap();
        assert_eq!(json["runs"][2]["connector"], true);
        let counts = |run: usize| json["runs"][run]["workloads"][0]["counts"].clone();
        assert_eq!(counts(2)["claimed_blocks"], 192);
        assert_eq!(counts(1), serde_json::json!({}));
    }

    #[test]
    fn one_wrong_answer_makes_the_report_wrong() {
        assert!(report(0).outputs_are_right());
        assert!(!report(1).outputs_are_right());
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(
            [0, 999, 1000, 83_886_080].map(grouped),
            ["0", "999", "1,000", "83,886,080"]
        );
    }

    #[test]
    fn the_median_of_even_counts_lies_between() {
        assert_eq!(median(vec![3.0, 1.0]).to_bits(), 2.0_f64.to_bits());
        assert_eq!(median(vec![9.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
    }
}
