// SPDX-License-Identifier: Apache-2.0

//! A snapshot as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::reading::BLOCK_SIZE_MISMATCH;
use super::snapshot::{DeviceLine, OverlapLine, PromptLine, RankLine, Snapshot};
use crate::render::Side::{Left, Right};
use crate::render::{Table, counted, plain};

/// The snapshot as text.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", head(snapshot));
    for line in skipped(&snapshot.events_skipped) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "{}", device(&snapshot.device));
    text.push('\n');
    text.push_str(&ranks(&snapshot.ranks));
    for prompt in &snapshot.prompts {
        let _ = writeln!(text, "\n{}", prompt_head(prompt));
        text.push_str(&overlaps(&prompt.overlaps));
    }
    text
}

/// The first `lines` lines of `columns` columns, as a terminal shows them; the last says what is cut.
pub(crate) fn fit(text: &str, lines: usize, columns: usize) -> String {
    let all = text.lines().count();
    let shown = if all > lines {
        lines.saturating_sub(1)
    } else {
        all
    };
    let mut fitted = String::new();
    for line in text.lines().take(shown) {
        fitted.extend(line.chars().take(columns));
        fitted.push('\n');
    }
    if all > shown {
        let more = format!("... {} more lines (--json has all)", all - shown);
        fitted.extend(more.chars().take(columns));
        fitted.push('\n');
    }
    fitted
}

fn head(snapshot: &Snapshot) -> String {
    let mut head = format!(
        "{}  {}, blocks of {} tokens",
        clock(snapshot.time_ms),
        counted(snapshot.ranks.len(), "rank"),
        snapshot.block_size_tokens
    );
    let incomplete = snapshot
        .ranks
        .iter()
        .filter(|rank| rank.reason.is_some())
        .count();
    if incomplete > 0 {
        head.push_str(&format!("; {incomplete} not complete"));
    }
    if snapshot.messages_lost > 0 {
        head.push_str(&format!("; {} messages lost", snapshot.messages_lost));
    }
    head
}

/// Lines on events that were not of use; one of them for those that an option would mend.
fn skipped(skipped: &BTreeMap<&'static str, u64>) -> impl Iterator<Item = String> {
    let (of_size, others): (Vec<_>, Vec<_>) = skipped
        .iter()
        .filter(|(_, events)| **events > 0)
        .partition(|(reason, _)| **reason == BLOCK_SIZE_MISMATCH);
    let lines = [(of_size, ": give the engine's --block-size"), (others, "")];
    let lines = lines.into_iter().filter(|(skips, _)| !skips.is_empty());
    lines.map(|(skips, remedy)| {
        let events: u64 = skips.iter().map(|(_, events)| **events).sum();
        let reasons = skips.iter().map(|(reason, _)| reason.replace('_', " "));
        let reasons = reasons.collect::<Vec<_>>().join(", ");
        let events = counted(events, "event");
        format!("{events} skipped ({reasons}){remedy}")
    })
}

fn device(device: &DeviceLine) -> String {
    let DeviceLine {
        held_blocks: held,
        distinct_blocks: distinct,
        repeated_blocks: repeated,
        ..
    } = device;
    let share = device.repeated_share.map_or_else(String::new, |share| {
        format!(", {repeated} ({}) held twice", percent(share))
    });
    format!("device memory: {held} blocks, {distinct} distinct{share}")
}

fn ranks(ranks: &[RankLine]) -> String {
    let table = Table {
        columns: [
            ("worker", Left),
            ("rank", Right),
            ("trust", Left),
            ("device", Right),
            ("host", Right),
            ("disk", Right),
            ("events/s", Right),
            ("last event", Right),
            ("lag", Right),
            ("seq", Right),
        ],
        rows: ranks
            .iter()
            .map(|rank| {
                let trust = rank.trust.replace('_', " ");
                let reason = rank.reason.map(|reason| reason.replace('_', " "));
                [
                    plain(&rank.worker),
                    rank.dp_rank.to_string(),
                    match reason {
                        Some(reason) => format!("{trust}: {reason}"),
                        None => trust,
                    },
                    rank.device_blocks.to_string(),
                    rank.host_blocks.to_string(),
                    rank.disk_blocks.to_string(),
                    or_dash(rank.events_per_second.map(|rate| format!("{rate:.1}"))),
                    or_dash(rank.last_event_age_seconds.map(duration)),
                    or_dash(rank.lag_seconds.map(duration)),
                    or_dash(rank.sequence.map(|sequence| sequence.to_string())),
                ]
            })
            .collect(),
    };
    table.text()
}

fn prompt_head(prompt: &PromptLine) -> String {
    format!(
        "prompt {}: {} tokens, {}",
        prompt.prompt,
        prompt.tokens,
        counted(prompt.blocks, "whole block")
    )
}

fn overlaps(overlaps: &[OverlapLine]) -> String {
    let table = Table {
        columns: [
            ("worker", Left),
            ("rank", Right),
            ("overlap", Right),
            ("tokens", Right),
            ("share", Right),
            ("host", Right),
            ("disk", Right),
        ],
        rows: overlaps
            .iter()
            .map(|overlap| {
                [
                    plain(&overlap.worker),
                    overlap.dp_rank.to_string(),
                    overlap.device_blocks.to_string(),
                    overlap.device_tokens.to_string(),
                    or_dash(overlap.device_share.map(percent)),
                    overlap.host_blocks.to_string(),
                    overlap.disk_blocks.to_string(),
                ]
            })
            .collect(),
    };
    table.text()
}

fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".to_owned())
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Three digits or so.
fn duration(seconds: f64) -> String {
    if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1000.0)
    } else if seconds < 100.0 {
        format!("{seconds:.1} s")
    } else if seconds < 7200.0 {
        format!("{:.0} min", seconds / 60.0)
    } else {
        format!("{:.0} h", seconds / 3600.0)
    }
}

/// Time of day.
fn clock(time_ms: u64) -> String {
    let seconds = time_ms / 1000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02} UTC", seconds % 60)
}

#[cfg(test)]
mod tests;
