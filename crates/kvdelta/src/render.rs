// SPDX-License-Identifier: Apache-2.0

//! Findings as text and as JSON, and what other reports share with them.

use std::fmt::{Display, Write as _};
use std::io::{self, Write as _};

use serde::Serialize;

use crate::doctor::facts::{Deployment, Pool, Role};
use crate::doctor::finding::{Finding, Severity, exit_code};

/// Subjects that the text names before it counts the rest.
const NAMED: usize = 4;

/// Columns of the text; addresses and paths may reach beyond.
const WIDTH: usize = 100;

/// Version of the JSON's keys.
const VERSION: u32 = 1;

#[derive(Debug, Serialize)]
struct Report<'a> {
    version: u32,
    exit_code: u8,
    discovery: &'a str,
    frontends: Vec<&'a str>,
    watched_seconds: Option<u64>,
    pools: Vec<PoolReport<'a>>,
    problems: usize,
    unknowns: usize,
    warnings: usize,
    notes: usize,
    findings: &'a [Finding],
}

#[derive(Debug, Serialize)]
struct PoolReport<'a> {
    namespace: &'a str,
    model: &'a str,
    prefill_workers: usize,
    decode_workers: usize,
    aggregated_workers: usize,
    /// Of the decode workers; empty if not known.
    block_size_tokens: Vec<u64>,
}

impl<'a> PoolReport<'a> {
    fn new(pool: &Pool<'a>) -> Self {
        let mut block_size_tokens: Vec<u64> = pool
            .of(Role::Decode)
            .filter_map(|worker| worker.block_size_tokens)
            .collect();
        block_size_tokens.sort_unstable();
        block_size_tokens.dedup();
        Self {
            namespace: pool.namespace,
            model: pool.model,
            prefill_workers: pool.of(Role::Prefill).count(),
            decode_workers: pool.of(Role::Decode).count(),
            aggregated_workers: pool.of(Role::Aggregated).count(),
            block_size_tokens,
        }
    }
}

fn count(findings: &[Finding], severity: Severity) -> usize {
    findings
        .iter()
        .filter(|finding| finding.severity == severity)
        .count()
}

/// The report as JSON.
pub(crate) fn json(deployment: &Deployment, findings: &[Finding]) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&Report {
        version: VERSION,
        exit_code: exit_code(findings),
        discovery: &deployment.discovery,
        frontends: deployment
            .frontends
            .iter()
            .map(|frontend| frontend.url.as_str())
            .collect(),
        watched_seconds: deployment.watched_seconds,
        pools: deployment.pools().iter().map(PoolReport::new).collect(),
        problems: count(findings, Severity::Problem),
        unknowns: count(findings, Severity::Unknown),
        warnings: count(findings, Severity::Warning),
        notes: count(findings, Severity::Note),
        findings,
    })
}

/// The report as text.
pub(crate) fn text(deployment: &Deployment, findings: &[Finding]) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{words}");
    };
    line(format!("discovery  {}", plain(&deployment.discovery)));
    for frontend in &deployment.frontends {
        line(format!("frontend   {}", plain(&frontend.url)));
    }
    for pool in &deployment.pools() {
        let report = PoolReport::new(pool);
        let sizes: Vec<String> = report
            .block_size_tokens
            .iter()
            .map(u64::to_string)
            .collect();
        let mut workers = format!(
            "{} prefill, {} decode",
            report.prefill_workers, report.decode_workers
        );
        if report.aggregated_workers > 0 {
            workers.push_str(&format!(", {} aggregated", report.aggregated_workers));
        }
        if !sizes.is_empty() {
            workers.push_str(&format!("; blocks of {} tokens", sizes.join(" and ")));
        }
        line(format!("pool       {}: {workers}", plain(&pool.name())));
    }
    for finding in findings {
        let severity = match finding.severity {
            Severity::Problem => "PROBLEM",
            Severity::Unknown => "UNKNOWN",
            Severity::Warning => "WARNING",
            Severity::Note => "NOTE",
        };
        line(String::new());
        line(format!("{severity} {}", finding.code));
        for (name, words) in [
            ("  about  ", &some_of(&finding.subjects)),
            ("  seen   ", &finding.seen),
            ("  where  ", &some_of(&finding.sources)),
            ("  do     ", &finding.action),
        ] {
            let layout = textwrap::Options::new(WIDTH)
                .initial_indent(name)
                .subsequent_indent("         ")
                .word_splitter(textwrap::WordSplitter::NoHyphenation)
                .break_words(false);
            line(textwrap::fill(&plain(words), layout));
        }
    }
    line(String::new());
    line(format!(
        "{}, {} unknown, {}, {}: {}",
        counted(count(findings, Severity::Problem), "problem"),
        count(findings, Severity::Unknown),
        counted(count(findings, Severity::Warning), "warning"),
        counted(count(findings, Severity::Note), "note"),
        match exit_code(findings) {
            0 => "nothing was found that keeps the flag from helping",
            1 => "the flag cannot help as it should",
            _ => "whether the flag can help is not known",
        }
    ));
    text
}

/// A table: names of the columns with the side that their values stand on, and the rows.
pub(crate) struct Table<const N: usize> {
    pub(crate) columns: [(&'static str, Side); N],
    pub(crate) rows: Vec<[String; N]>,
}

/// Where a column's values stand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

impl<const N: usize> Table<N> {
    /// A line a row, below one with the names.
    pub(crate) fn text(&self) -> String {
        let names = self.columns.map(|(name, _)| name.to_owned());
        let rows = || std::iter::once(&names).chain(&self.rows);
        let mut widths = [0; N];
        for row in rows() {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in rows() {
            let cells = row.iter().zip(widths).zip(self.columns);
            let cells = cells.map(|((cell, width), (_, side))| match side {
                Side::Left => format!("{cell:<width$}"),
                Side::Right => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// `text` with what would steer a terminal escaped: names come from strangers.
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for letter in text.chars() {
        // Beside the control characters, those that turn the direction of writing.
        let turns = matches!(letter, '\u{200e}' | '\u{200f}' | '\u{061c}'
            | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if letter.is_control() || turns {
            plain.extend(letter.escape_default());
        } else {
            plain.push(letter);
        }
    }
    plain
}

/// Writes a whole report to standard output.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn print(report: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(report.as_bytes())?;
    output.flush()
}

/// A line on standard error; without one there is nobody to tell.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{}", plain(line));
}

/// So many of a thing, without commas: `1 rank`, `1024 ranks`.
pub(crate) fn counted<N: Display + PartialEq + From<u8>>(count: N, what: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {what}{plural}")
}

fn some_of(names: &[String]) -> String {
    let mut unique: Vec<&str> = Vec::new();
    for name in names {
        if !unique.contains(&name.as_str()) {
            unique.push(name);
        }
    }
    let named = unique.iter().take(NAMED).copied().collect::<Vec<_>>();
    let rest = unique.len() - named.len();
    let mut text = named.join(", ");
    if rest > 0 {
        text.push_str(&format!(" and {rest} more"));
    }
    text
}
