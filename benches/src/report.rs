// SPDX-License-Identifier: Apache-2.0

//! Tables for the terminal and for docs/index-benchmark.md.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::contender::{Contender, Way};
use crate::spread::Spread;
use crate::{ingest, memory, query};

const BEGIN: &str = "<!-- begin: cargo xtask bench index --markdown -->";
const END: &str = "<!-- end -->";

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where and how.
    pub machine: Machine,
    /// Times of queries.
    pub query: Vec<query::Row>,
    /// Speeds of loading, and readers' latencies.
    pub ingest: Vec<ingest::Row>,
    /// Bytes.
    pub memory: Vec<memory::Row>,
    /// Whether the data is large enough to be held against the goals.
    pub judged: bool,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
}

/// Where and how a run was made.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The processor's model.
    pub processor: String,
    /// Processors that the run may use.
    pub cores: usize,
    /// The day.
    pub date: String,
    /// The command.
    pub command: String,
}

impl Machine {
    /// This machine, today.
    pub fn here(command: String) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find(|line| line.starts_with("model name"));
        let model = model.and_then(|line| line.split_once(':'));
        Self {
            processor: model
                .map_or("unknown processor", |(_, name)| name.trim())
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
            command,
        }
    }
}

/// A table with a title.
#[derive(Debug)]
struct Table {
    title: &'static str,
    note: &'static str,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Report {
    /// For the terminal: columns aligned by spaces.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for table in self.tables() {
            let widths = table.widths();
            let _ = write!(out, "\n{}\n{}\n\n", table.title, table.note);
            for row in std::iter::once(&table.head).chain(&table.rows) {
                let cells = row.iter().zip(&widths).enumerate();
                let line: String = cells
                    .map(|(column, (cell, width))| match column {
                        0 => format!("{cell:<width$}"),
                        _ => format!("  {cell:>width$}"),
                    })
                    .collect();
                let _ = writeln!(out, "{}", line.trim_end());
            }
        }
        out + &self.remarks("\n")
    }

    /// For the documents.
    pub fn markdown(&self) -> String {
        let machine = &self.machine;
        let mut out = format!(
            "`{}` on {}, {} cores, {}. Medians of the rounds; in brackets the quartiles.\n",
            machine.command, machine.processor, machine.cores, machine.date
        );
        for table in self.tables() {
            let _ = write!(out, "\n### {}\n\n{}\n\n", table.title, table.note);
            let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
            out += &line(&table.head);
            let rule = std::iter::once("---").chain(std::iter::repeat("--:"));
            let rule: Vec<_> = rule.take(table.head.len()).map(str::to_owned).collect();
            out += &line(&rule);
            for row in &table.rows {
                out += &line(row);
            }
        }
        out + &self.remarks("\n")
    }

    /// Puts the markdown between the markers of `file`.
    pub fn write_into(&self, file: &Path) -> Result<()> {
        let shown = file.display();
        let old = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        let parts = old.split_once(BEGIN).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(END)?;
            Some((before, after))
        });
        let (before, after) =
            parts.with_context(|| format!("{shown}: no lines {BEGIN} and {END}"))?;
        let block = self.markdown();
        let new = format!("{before}{BEGIN}\n{block}{END}{after}");
        fs::write(file, new).with_context(|| format!("cannot write {shown}"))
    }

    fn remarks(&self, before: &str) -> String {
        let lines = self.left_out.iter().map(|line| format!("- {line}\n"));
        let lines: String = lines.collect();
        if lines.is_empty() {
            lines
        } else {
            format!("{before}Left out:\n\n{lines}")
        }
    }

    fn at_most(&self, value: f64, goal: f64) -> String {
        self.verdict("≤", goal, value <= goal)
    }

    fn at_least(&self, value: f64, goal: f64) -> String {
        self.verdict("≥", goal, value >= goal)
    }

    fn verdict(&self, sign: &str, goal: f64, is_met: bool) -> String {
        let verdict = match (self.judged, is_met) {
            (false, _) => "",
            (true, true) => " met",
            (true, false) => " missed",
        };
        format!("{sign} {goal}{verdict}")
    }

    fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if !self.query.is_empty() {
            tables.push(self.queries(
                "Query: tokens to the overlaps of 64 workers, microseconds",
                "Each index with its own hashing. *Hashing* is that of the whole prompt alone, the \
                 peers' and ours. *Ratio* is ours by the fastest peer's in the same round.",
                true,
            ));
            tables.push(self.queries(
                "Match alone: hashes to the overlaps of 64 workers, microseconds",
                "The prompt is hashed already, whole.",
                false,
            ));
        }
        if !self.ingest.is_empty() {
            tables.push(self.speeds());
            tables.push(self.latencies());
            tables.push(self.all_speeds());
        }
        if !self.memory.is_empty() {
            tables.push(self.bytes());
        }
        tables
    }

    fn queries(&self, title: &'static str, note: &'static str, from_tokens: bool) -> Table {
        let contenders = contenders(self.query.iter().flat_map(|row| row.times.keys()));
        let mut head = vec![
            "prompts".to_owned(),
            "tokens".to_owned(),
            "match".to_owned(),
        ];
        if from_tokens {
            head.extend(["hashing: peers".to_owned(), "ours".to_owned()]);
        }
        head.extend(contenders.iter().map(Contender::to_string));
        head.extend(["ratio", "to", "goal"].map(str::to_owned));
        let rows = self.query.iter().map(|row| {
            let mut cells = vec![
                row.name.clone(),
                grouped(row.mean_tokens),
                row.depth.name().to_owned(),
            ];
            if from_tokens {
                cells.extend([micros(row.peers_hashing), micros(row.our_hashing)]);
            }
            cells.extend(contenders.iter().map(|contender| {
                row.times.get(contender).map_or_else(missing, |times| {
                    let time = if from_tokens {
                        times.query
                    } else {
                        times.matching
                    };
                    micros(time) + &mark(times.wrong)
                })
            }));
            let ratio = if from_tokens {
                &row.query_ratio
            } else {
                &row.matching_ratio
            };
            match ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    ratio.peer.to_string(),
                    ratio
                        .goal
                        .map_or_else(missing, |goal| self.at_most(ratio.ratio.median, goal)),
                ]),
            }
            cells
        });
        Table {
            title,
            note,
            rows: rows.collect(),
            head,
        }
    }

    fn speeds(&self) -> Table {
        let rows = self.ingest.iter().map(|row| {
            let ours = row
                .speeds
                .iter()
                .find(|speed| speed.contender == Contender::Kvdelta);
            let ours = ours.and_then(|speed| speed.read.as_ref());
            let mut cells = vec![
                row.name.to_owned(),
                grouped(row.events),
                grouped(row.blocks),
                ours.map_or_else(missing, |read| millions(read.blocks)),
            ];
            match &row.ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    named(ratio.peer, ratio.way),
                    self.at_least(ratio.ratio.median, ratio.goal),
                ]),
            }
            match &row.processor_ratio {
                None => cells.extend([missing(), missing()]),
                Some(ratio) => {
                    cells.extend([ratio_of(ratio.ratio), named(ratio.peer, ratio.way)]);
                }
            }
            cells
        });
        Table {
            title: "Ingest: million blocks a second, one writer and one reader",
            note: "Events are made beforehand. *Ratio* is ours by the fastest way of the fastest peer \
                   that serves readers, by time on the clock; then by the writer's processor time, which \
                   other programs on the machine disturb less, of those that are written to directly.",
            head: heads(&[
                "data",
                "events",
                "blocks",
                "kvdelta",
                "ratio",
                "to",
                "goal",
                "by processor",
                "to",
            ]),
            rows: rows.collect(),
        }
    }

    fn latencies(&self) -> Table {
        let rows = self.ingest.iter().map(|row| {
            let ours = row
                .speeds
                .iter()
                .find(|speed| speed.contender == Contender::Kvdelta);
            let ours = ours.and_then(|speed| speed.read.as_ref());
            let mut cells = vec![
                row.name.to_owned(),
                ours.map_or_else(missing, |read| micros(read.p50)),
                ours.map_or_else(missing, |read| micros(read.p99)),
            ];
            match &row.p99_ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some(ratio) => cells.extend([
                    ratio_of(ratio.ratio),
                    named(ratio.peer, ratio.way),
                    self.at_most(ratio.ratio.median, ratio.goal),
                ]),
            }
            cells
        });
        Table {
            title: "Readers' latency while a writer runs at full speed, microseconds",
            note: "Match alone, prompts of the first half of the data, in the second half of the time. \
                   *Ratio* is our 99th percentile by that of the best peer.",
            head: heads(&["data", "p50", "p99", "p99 ratio", "to", "goal"]),
            rows: rows.collect(),
        }
    }

    fn all_speeds(&self) -> Table {
        let rows = self.ingest.iter().flat_map(|row| {
            row.speeds.iter().map(|speed| {
                let mut cells = vec![
                    row.name.to_owned(),
                    named(speed.contender, speed.way) + &mark(speed.wrong),
                    millions(speed.alone),
                ];
                match &speed.read {
                    None => cells.extend(std::iter::repeat_with(missing).take(5)),
                    Some(read) => cells.extend([
                        millions(read.blocks),
                        read.of_processor.map_or_else(missing, millions),
                        thousands(read.queries),
                        micros(read.p50),
                        micros(read.p99),
                    ]),
                }
                cells
            })
        });
        Table {
            title: "Ingest and readers, each index",
            note: "Million blocks a second with nobody reading, with one reader, and by the \
                   writer's processor time; thousand queries a second of that reader, its latencies in microseconds. *Pool* goes through the peer's \
                   own `ThreadPoolIndexer` of one thread, all others write on the measured thread.",
            head: heads(&[
                "data",
                "index",
                "alone",
                "with a reader",
                "by processor",
                "queries",
                "p50",
                "p99",
            ]),
            rows: rows.collect(),
        }
    }

    fn bytes(&self) -> Table {
        let contenders = contenders(self.memory.iter().flat_map(|row| row.measured.keys()));
        let mut head = heads(&["data", "pairs", "blocks"]);
        head.extend(contenders.iter().map(Contender::to_string));
        head.extend(["ratio", "to", "goal"].map(str::to_owned));
        let rows = self.memory.iter().map(|row| {
            let any = row.measured.values().next();
            let mut cells = vec![
                row.kind.name().to_owned(),
                any.map_or_else(missing, |measured| grouped(measured.entries)),
                any.map_or_else(missing, |measured| grouped(measured.blocks)),
            ];
            cells.extend(contenders.iter().map(|contender| {
                let measured = row.measured.get(contender);
                measured.map_or_else(missing, |measured| {
                    format!("{:.1}", measured.per_entry()) + &mark(measured.wrong)
                })
            }));
            match row.ratio {
                None => cells.extend([missing(), missing(), missing()]),
                Some((peer, ratio)) => cells.extend([
                    format!("{ratio:.2}"),
                    peer.to_string(),
                    self.at_most(ratio, memory::GOAL),
                ]),
            }
            cells
        });
        Table {
            title: "Memory: bytes for a (worker, block) pair",
            note: "Bytes asked of the allocator and not given back once all events are in and freed, \
                   each index in a process of its own. *Ratio* is ours by the leanest peer that serves \
                   readers.",
            head,
            rows: rows.collect(),
        }
    }
}

impl Table {
    fn widths(&self) -> Vec<usize> {
        let mut widths = vec![0; self.head.len()];
        for row in std::iter::once(&self.head).chain(&self.rows) {
            for (cell, width) in row.iter().zip(&mut widths) {
                *width = cell.chars().count().max(*width);
            }
        }
        widths
    }
}

fn heads(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn contenders<'a>(all: impl Iterator<Item = &'a Contender>) -> Vec<Contender> {
    let mut all: Vec<_> = all.copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn named(contender: Contender, way: Way) -> String {
    match way {
        Way::Direct => contender.to_string(),
        Way::Pool => format!("{contender}, pool"),
    }
}

fn missing() -> String {
    "-".to_owned()
}

/// Marks answers that differ from the oracle's.
fn mark(wrong: usize) -> String {
    if wrong == 0 {
        String::new()
    } else {
        format!(" ({wrong} wrong)")
    }
}

fn micros(time: Spread) -> String {
    let digits = if time.median < 100_000.0 { 2 } else { 0 };
    scaled(time, 1e3, digits)
}

fn millions(rate: Spread) -> String {
    scaled(rate, 1e6, 2)
}

fn thousands(rate: Spread) -> String {
    scaled(rate, 1e3, 1)
}

fn ratio_of(ratio: Spread) -> String {
    scaled(ratio, 1.0, 2)
}

fn scaled(value: Spread, unit: f64, digits: usize) -> String {
    if value.median.is_nan() {
        return missing();
    }
    let shown = |value: f64| format!("{:.digits$}", value / unit);
    let (low, high) = (shown(value.low), shown(value.high));
    format!("{} ({low}..{high})", shown(value.median))
}

fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Report {
        Report {
            machine: Machine {
                processor: "a processor".to_owned(),
                cores: 2,
                date: "2026-01-01".to_owned(),
                command: "cargo xtask bench index".to_owned(),
            },
            query: Vec::new(),
            ingest: Vec::new(),
            memory: Vec::new(),
            judged: true,
            left_out: vec!["the trace: no file was given".to_owned()],
        }
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let folder = std::env::temp_dir().join(format!("kvdelta-benches-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("page.md");
        fs::write(&file, format!("before\n{BEGIN}\nold\n{END}\nafter\n")).unwrap();
        empty().write_into(&file).unwrap();
        let new = fs::read_to_string(&file).unwrap();
        assert!(new.starts_with(&format!("before\n{BEGIN}\n")), "{new}");
        assert!(new.ends_with(&format!("{END}\nafter\n")), "{new}");
        assert!(!new.contains("old"), "{new}");
        assert!(new.contains("- the trace: no file was given\n"), "{new}");
        fs::write(&file, "no markers").unwrap();
        assert!(empty().write_into(&file).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(123), "123");
    }
}
