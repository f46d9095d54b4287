// SPDX-License-Identifier: Apache-2.0

//! Tables for the terminal and for a page of docs/.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::spread::Spread;

const END: &str = "<!-- end -->";

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
    /// This machine, today; `command` without `cargo xtask`.
    pub fn here(command: &str) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find(|line| line.starts_with("model name"));
        let model = model.and_then(|line| line.split_once(':'));
        Self {
            processor: model
                .map_or("unknown processor", |(_, name)| name.trim())
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
            command: typed(command),
        }
    }
}

/// The command as typed, files without their folders.
fn typed(command: &str) -> String {
    let words = std::env::args_os().skip(1).map(|word| {
        let name = Path::new(&word).file_name();
        name.unwrap_or(&word).to_string_lossy().into_owned()
    });
    let words: Vec<_> = words.collect();
    [format!("cargo xtask {command}")]
        .into_iter()
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// A table with a title.
#[derive(Debug)]
pub struct Table {
    /// Its title.
    pub title: &'static str,
    /// What a reader must know.
    pub note: &'static str,
    /// Names of the columns.
    pub head: Vec<String>,
    /// As many cells each.
    pub rows: Vec<Vec<String>>,
}

/// What a benchmark says.
#[derive(Debug)]
pub struct Page<'a> {
    /// The command without `cargo xtask`.
    pub command: &'static str,
    /// Where and how.
    pub machine: &'a Machine,
    /// In order.
    pub tables: Vec<Table>,
    /// What was not measured, and why.
    pub left_out: &'a [String],
}

impl Page<'_> {
    /// For the terminal: columns aligned by spaces.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for table in &self.tables {
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
        out + &self.remarks()
    }

    /// For the documents.
    pub fn markdown(&self) -> String {
        let machine = self.machine;
        let mut out = format!(
            "`{}` on {}, {} cores, {}. Medians of the rounds; in brackets the quartiles.\n",
            machine.command, machine.processor, machine.cores, machine.date
        );
        for table in &self.tables {
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
        out + &self.remarks()
    }

    /// Shows a finished run as its options ask: `json` names a file for `data`, or is `-` for the terminal in
    /// place of the tables; with `markdown` they go into `docs`, a file of docs/.
    ///
    /// # Errors
    /// A file that cannot be written, or has no markers.
    pub fn show(
        &self,
        data: &impl Serialize,
        json: Option<&Path>,
        markdown: bool,
        docs: &str,
    ) -> Result<()> {
        let text = || serde_json::to_string_pretty(data);
        match json {
            Some(path) if path == Path::new("-") => println!("{}", text()?),
            path => {
                println!("{}", self.text());
                if let Some(path) = path {
                    fs::write(path, text()? + "\n")
                        .with_context(|| format!("--json: cannot write {}", path.display()))?;
                }
            }
        }
        if markdown {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
            self.write_into(&folder.join(docs))?;
        }
        Ok(())
    }

    /// Puts the markdown between the markers of `file`.
    pub fn write_into(&self, file: &Path) -> Result<()> {
        let shown = file.display();
        let begin = self.begin();
        let old = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        let parts = old.split_once(&begin).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(END)?;
            Some((before, after))
        });
        let (before, after) =
            parts.with_context(|| format!("{shown}: no lines {begin} and {END}"))?;
        let block = self.markdown();
        let new = format!("{before}{begin}\n{block}{END}{after}");
        fs::write(file, new).with_context(|| format!("cannot write {shown}"))
    }

    fn begin(&self) -> String {
        format!("<!-- begin: cargo xtask {} --markdown -->", self.command)
    }

    fn remarks(&self) -> String {
        let lines = self.left_out.iter().map(|line| format!("- {line}\n"));
        let lines: String = lines.collect();
        if lines.is_empty() {
            lines
        } else {
            format!("\nLeft out:\n\n{lines}")
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

/// The goal, and whether `value` meets it; only the goal where the run is not judged.
pub(crate) fn at_most(value: f64, goal: f64, judged: bool) -> String {
    verdict("≤", goal, value <= goal, judged)
}

/// As `at_most`, the other way round.
pub(crate) fn at_least(value: f64, goal: f64, judged: bool) -> String {
    verdict("≥", goal, value >= goal, judged)
}

fn verdict(sign: &str, goal: f64, is_met: bool, judged: bool) -> String {
    let verdict = match (judged, is_met) {
        (false, _) => "",
        (true, true) => " met",
        (true, false) => " missed",
    };
    format!("{sign} {goal}{verdict}")
}

pub(crate) fn heads(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

pub(crate) fn missing() -> String {
    "-".to_owned()
}

/// Marks answers that differ from the oracle's.
pub(crate) fn mark(wrong: usize) -> String {
    if wrong == 0 {
        String::new()
    } else {
        format!(" ({wrong} wrong)")
    }
}

pub(crate) fn micros(time: Spread) -> String {
    let digits = if time.median < 100_000.0 { 2 } else { 0 };
    scaled(time, 1e3, digits)
}

pub(crate) fn millions(rate: Spread) -> String {
    scaled(rate, 1e6, 2)
}

pub(crate) fn thousands(rate: Spread) -> String {
    scaled(rate, 1e3, 1)
}

pub(crate) fn ratio_of(ratio: Spread) -> String {
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

pub(crate) fn grouped(number: usize) -> String {
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

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let machine = Machine {
            processor: "a processor".to_owned(),
            cores: 2,
            date: "2026-01-01".to_owned(),
            command: "cargo xtask bench index".to_owned(),
        };
        let page = Page {
            command: "bench index",
            machine: &machine,
            tables: Vec::new(),
            left_out: &["the trace: no file was given".to_owned()],
        };
        let begin = page.begin();
        let folder = std::env::temp_dir().join(format!("kvdelta-benches-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("page.md");
        fs::write(&file, format!("before\n{begin}\nold\n{END}\nafter\n")).unwrap();
        page.write_into(&file).unwrap();
        let new = fs::read_to_string(&file).unwrap();
        assert!(new.starts_with(&format!("before\n{begin}\n")), "{new}");
        assert!(new.ends_with(&format!("{END}\nafter\n")), "{new}");
        assert!(!new.contains("old"), "{new}");
        assert!(new.contains("- the trace: no file was given\n"), "{new}");
        fs::write(&file, "no markers").unwrap();
        assert!(page.write_into(&file).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(123), "123");
    }
}
