// SPDX-License-Identifier: Apache-2.0

//! A replay as text.

use std::fmt::Write as _;

use super::report::{Report, Row};
use crate::render::Side::{Left, Right};
use crate::render::Table;
use crate::sim::Percentiles;
use crate::unit::{bytes, count, counted, decimal, exact};

/// How many columns there are.
const COLUMNS: usize = 12;

/// The replay as text.
pub(crate) fn text(report: &Report) -> String {
    let mut text = String::new();
    let (trace, fleet) = (&report.trace, &report.settings);
    let mean = trace.prompt_tokens as f64 / trace.requests as f64;
    let fleets = report.fleets();
    let decode: Vec<String> = fleets.iter().map(|fleet| count(*fleet)).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "trace   {} in {} s, mean prompt {} tokens, blocks of {}",
        counted(trace.requests, "request"),
        decimal(trace.seconds, 0),
        decimal(mean, 0),
        counted(trace.block_size_tokens, "token")
    );
    let _ = writeln!(
        text,
        "prefill {}, {} tokens/s each, prefix cache of {}",
        counted(fleet.prefill, "worker"),
        exact(fleet.prefill_tokens_per_s),
        counted(fleet.prefill_capacity, "block")
    );
    let _ = writeln!(
        text,
        "decode  {} {}, {} of {} each, step {} ms + {} ms a block",
        decode.join(", "),
        if fleets == [1] { "worker" } else { "workers" },
        counted(fleet.capacity, "block"),
        bytes(fleet.block_bytes),
        exact(fleet.itl_ms),
        exact((fleet.itl_ms_per_block * 1e4).round() / 1e4)
    );
    let _ = writeln!(
        text,
        "link    {} Gbit/s a decode worker; events {} ms late, {} of them lost; seed {}\n",
        exact(fleet.link_gbit_per_second),
        exact(fleet.event_delay_ms),
        fleet.event_loss,
        fleet.seed
    );
    let table = Table {
        columns: [
            ("policy", Left),
            ("weight", Right),
            ("decode", Right),
            ("saved", Right),
            ("hit", Right),
            ("moved", Right),
            ("stale", Right),
            ("imbalance", Right),
            ("least", Right),
            ("busiest", Right),
            ("TTFT p50 / p99", Right),
            ("ITL p50 / p99", Right),
        ],
        rows: report.rows.iter().map(cells).collect(),
    };
    text.push_str(&table.text());
    text.push_str(&remarks(report));
    text
}

fn cells(row: &Row) -> [String; COLUMNS] {
    let outcome = &row.outcome;
    let known = |value: Option<f64>, decimals: usize| {
        value.map_or_else(|| "-".to_owned(), |value| decimal(value, decimals))
    };
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let (ttft, itl) = (outcome.ttft_ms, outcome.itl_ms);
    [
        row.policy.to_owned(),
        row.weight
            .map_or_else(|| "-".to_owned(), |weight| weight.to_string()),
        count(row.decode),
        percent(outcome.saved_share),
        percent(outcome.hit_share),
        bytes(outcome.moved_bytes),
        count(outcome.stale_claims),
        known(outcome.imbalance, 2),
        known(outcome.least_imbalance, 2),
        known(outcome.busiest, 2),
        times(ttft, 0),
        times(itl, 1),
    ]
}

/// The median and the largest but a hundredth.
fn times(times: Percentiles, decimals: usize) -> String {
    match (times.p50, times.p99) {
        (Some(p50), Some(p99)) => {
            format!("{} / {} ms", decimal(p50, decimals), decimal(p99, decimals))
        }
        _ => "-".to_owned(),
    }
}

/// What happened that the table does not show.
fn remarks(report: &Report) -> String {
    let mut text = String::new();
    for row in &report.rows {
        let outcome = &row.outcome;
        let counts = [
            (outcome.recomputed, "recomputed after a stale claim"),
            (
                outcome.asked_again,
                "asked prefill again after a stale claim",
            ),
            (outcome.waited, "waited for room"),
            (outcome.overloaded, "found every decode worker refused"),
        ];
        let counts: Vec<String> = counts
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(many, what)| format!("{} {what}", count(many)))
            .collect();
        if counts.is_empty() {
            continue;
        }
        if text.is_empty() {
            text.push('\n');
        }
        let _ = writeln!(
            text,
            "{} on {}: of {}, {}",
            row.label,
            count(row.decode),
            counted(outcome.requests, "request"),
            counts.join(", ")
        );
    }
    text
}
