// SPDX-License-Identifier: Apache-2.0

//! A replay as text.

use std::fmt::Write as _;

use super::report::{Report, Row};
use crate::render::Side::{Left, Right};
use crate::render::Table;

/// How many columns there are.
const COLUMNS: usize = 12;

/// The replay as text.
pub(crate) fn text(report: &Report) -> String {
    let mut text = String::new();
    let (trace, fleet) = (&report.trace, &report.settings);
    let mean = trace.prompt_tokens as f64 / trace.requests as f64;
    let fleets: Vec<String> = report.fleets().iter().map(usize::to_string).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "trace   {} requests in {:.0} s, mean prompt {mean:.0} tokens, blocks of {} tokens",
        trace.requests, trace.seconds, trace.block_size_tokens
    );
    let _ = writeln!(
        text,
        "prefill {} workers, {} tokens/s each, prefix cache of {} blocks",
        fleet.prefill, fleet.prefill_tokens_per_s, fleet.prefill_capacity
    );
    let _ = writeln!(
        text,
        "decode  {} workers, {} blocks of {} bytes each, step {} ms + {} ms a block",
        fleets.join(", "),
        fleet.capacity,
        fleet.block_bytes,
        fleet.itl_ms,
        fleet.itl_ms_per_block
    );
    let _ = writeln!(
        text,
        "link    {} bytes/s a decode worker; events {} ms late, {} of them lost; seed {}\n",
        fleet.link_bytes_per_s, fleet.event_delay_ms, fleet.event_loss, fleet.seed
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
            ("busiest", Right),
            ("TTFT p50", Right),
            ("p99", Right),
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
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let (ttft, itl) = (outcome.ttft_ms, outcome.itl_ms);
    [
        row.policy.to_owned(),
        row.weight
            .map_or_else(|| "-".to_owned(), |weight| weight.to_string()),
        row.decode.to_string(),
        percent(outcome.saved_share),
        percent(outcome.hit_share),
        bytes(outcome.moved_bytes),
        outcome.stale_claims.to_string(),
        number(outcome.imbalance, 2),
        number(outcome.busiest, 2),
        number(ttft.p50, 0),
        number(ttft.p99, 0),
        format!("{} / {} ms", number(itl.p50, 1), number(itl.p99, 1)),
    ]
}

/// What happened that the table does not show.
fn remarks(report: &Report) -> String {
    let mut text = String::new();
    for row in &report.rows {
        let outcome = &row.outcome;
        let counts = [
            (outcome.recomputed, "recomputed after a stale claim"),
            (outcome.asked_again, "asked prefill again after one"),
            (outcome.waited, "waited for room"),
            (outcome.overloaded, "found every decode worker refused"),
        ];
        let counts: Vec<String> = counts
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if counts.is_empty() {
            continue;
        }
        if text.is_empty() {
            text.push('\n');
        }
        let weight = row.weight.map(|weight| format!(" {weight}"));
        let _ = writeln!(
            text,
            "{}{} on {}: of {} requests, {}",
            row.policy,
            weight.unwrap_or_default(),
            row.decode,
            outcome.requests,
            counts.join(", ")
        );
    }
    text
}

fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}
