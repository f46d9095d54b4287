// SPDX-License-Identifier: Apache-2.0

//! Requests through Dynamo's whole frontend: of unpatched crates, of patched ones with the flag off, and
//! with a weight.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, project_root};
use crate::command;
use crate::frontend::Profile;
use crate::progress::Step;
use crate::report::{Spread, grouped, median, put_between};
use crate::unchanged::{self, Crates};

/// Options of `cargo xtask bench requests`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench requests
  cargo xtask bench requests --rounds 1 --count 10     a look at it
  cargo xtask bench requests --release --markdown      as in docs/query-benchmark.md

The workers answer at once, so what is measured is the frontend; they run in its process.")]
pub(crate) struct Options {
    /// Rounds, in each of which every frontend has its turn.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Requests of each kind in a turn.
    #[arg(long, default_value_t = 100)]
    count: usize,
    /// The weight of the patched frontend with the flag on.
    #[arg(long, default_value = "2")]
    weight: String,
    /// These recorders, unpatched and patched, in place of newly built ones.
    #[arg(long, num_args = 2, value_names = ["UNPATCHED", "PATCHED"], conflicts_with = "release")]
    built: Option<Vec<PathBuf>>,
    /// Optimised frontends: builds of their own, with all of Dynamo's crates again.
    #[arg(long)]
    release: bool,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table into docs/query-benchmark.md too.
    #[arg(long)]
    markdown: bool,
}

/// A frontend to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Frontend {
    Unpatched,
    /// What two runs of the same differ by.
    UnpatchedAgain,
    Off,
    On,
}

impl Frontend {
    const ALL: [Self; 4] = [Self::Unpatched, Self::UnpatchedAgain, Self::Off, Self::On];

    fn crates(self) -> Crates {
        match self {
            Self::Unpatched | Self::UnpatchedAgain => Crates::Registry,
            Self::Off | Self::On => Crates::Patched,
        }
    }

    fn name(self, weight: &str) -> String {
        match self {
            Self::Unpatched => "unpatched".to_owned(),
            Self::UnpatchedAgain => "unpatched again".to_owned(),
            Self::Off => "patched, off".to_owned(),
            Self::On => format!("patched, weight {weight}"),
        }
    }
}

/// What the recorder writes of one kind of requests.
#[derive(Debug, Deserialize)]
struct Case {
    concurrency: usize,
    tokens: usize,
    seconds: f64,
    latencies: Vec<f64>,
    prefills: usize,
    claims: usize,
    query: Option<f64>,
}

/// One kind of requests through one frontend, a figure a round.
#[derive(Debug, Serialize)]
struct Row {
    concurrency: usize,
    tokens: usize,
    frontend: Frontend,
    /// Median latency in milliseconds.
    median_ms: Vec<f64>,
    /// 99th percentile in milliseconds.
    p99_ms: Vec<f64>,
    /// Requests a second.
    rate: Vec<f64>,
    /// Requests that prefill workers were sent, and those with a claim.
    prefills: usize,
    claims: usize,
    /// The frontend's own mean time of its decode query, in microseconds.
    query_us: Vec<f64>,
}

/// Runs `cargo xtask bench requests`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    ensure!(
        options.rounds > 0 && options.count > 0,
        "--rounds and --count: at least 1"
    );
    let profile = if options.release {
        Profile::Release
    } else {
        Profile::Dev
    };
    let [registry, patched] = match options.built.as_deref() {
        Some([registry, patched]) => [registry.clone(), patched.clone()],
        _ => [
            unchanged::build(cache, Crates::Registry, profile)?,
            unchanged::build(cache, Crates::Patched, profile)?,
        ],
    };
    let folder = tempfile::tempdir()?;
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..options.rounds {
        let step = Step::begin(format!("round {} of {}", round + 1, options.rounds));
        for place in 0..Frontend::ALL.len() {
            let frontend = Frontend::ALL[(place + round) % Frontend::ALL.len()];
            let program = match frontend.crates() {
                Crates::Registry => &registry,
                Crates::Patched => &patched,
            };
            for case in turn(program, folder.path(), frontend, options, round)? {
                add(&mut rows, frontend, &case, options.count)?;
            }
        }
        step.end();
    }
    rows.sort_by_key(|row| (row.concurrency, row.tokens, row.frontend as usize));
    let table = table(&rows, &options.weight);
    println!("{table}");
    if let Some(path) = &options.json {
        fs::write(path, serde_json::to_string_pretty(&rows)? + "\n")
            .with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    if options.markdown {
        write_into(
            &project_root().join("docs/query-benchmark.md"),
            options,
            &table,
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One run of a frontend over all kinds of requests.
fn turn(
    program: &Path,
    folder: &Path,
    frontend: Frontend,
    options: &Options,
    round: usize,
) -> Result<Vec<Case>> {
    let out = folder.join("requests.json");
    let mut recorder = unchanged::recorder(program);
    recorder
        .args(["requests", "--count", &options.count.to_string()])
        .args(["--seed", &round.to_string()])
        .arg("--model")
        .arg(folder.join("model"))
        .arg("--out")
        .arg(&out);
    match frontend {
        Frontend::Unpatched | Frontend::UnpatchedAgain => {}
        Frontend::Off => {
            recorder.args(["--weight", "0"]);
        }
        Frontend::On => {
            recorder.args(["--weight", &options.weight]);
        }
    }
    command::quiet(recorder, &folder.join("requests.log"))?;
    let text =
        fs::read_to_string(&out).with_context(|| format!("cannot read {}", out.display()))?;
    Ok(serde_json::from_str(&text)?)
}

fn add(rows: &mut Vec<Row>, frontend: Frontend, case: &Case, count: usize) -> Result<()> {
    ensure!(
        case.latencies.len() == count && case.prefills == count,
        "{count} requests gave {} answers and {} prefills",
        case.latencies.len(),
        case.prefills
    );
    let key = |row: &&mut Row| {
        (row.concurrency, row.tokens, row.frontend) == (case.concurrency, case.tokens, frontend)
    };
    let at = rows.iter_mut().find(key);
    let row = match at {
        Some(row) => row,
        None => {
            rows.push(Row {
                concurrency: case.concurrency,
                tokens: case.tokens,
                frontend,
                median_ms: Vec::new(),
                p99_ms: Vec::new(),
                rate: Vec::new(),
                prefills: 0,
                claims: 0,
                query_us: Vec::new(),
            });
            rows.last_mut().context("was just added")?
        }
    };
    let mut sorted = case.latencies.clone();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len() - 1) * 99 / 100;
    row.median_ms.push(median(sorted.clone()) / 1e3);
    row.p99_ms.push(sorted[place] / 1e3);
    row.rate.push(case.latencies.len() as f64 / case.seconds);
    row.prefills += case.prefills;
    row.claims += case.claims;
    row.query_us.extend(case.query);
    Ok(())
}

/// In the form of the documents, which a terminal shows well enough.
fn table(rows: &[Row], weight: &str) -> String {
    let mut out =
        "| at once | tokens | frontend | median, ms | ratio | added, us | 99th, ms | ratio | \
                   requests/s | ratio | with a claim | query, us |\n"
            .to_owned();
    out += "| --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n";
    for row in rows {
        let same = |base: &&Row| {
            (base.concurrency, base.tokens, base.frontend)
                == (row.concurrency, row.tokens, Frontend::Unpatched)
        };
        let Some(base) = rows.iter().find(same) else {
            continue;
        };
        let ratio = |ours: &[f64], theirs: &[f64]| {
            Spread::of_pairs(ours, theirs, |ours, theirs| ours / theirs).shown(3)
        };
        let added = Spread::of_pairs(&row.median_ms, &base.median_ms, |ours, theirs| {
            (ours - theirs) * 1e3
        });
        let query = match row.query_us.as_slice() {
            [] => "-".to_owned(),
            all => Spread::of(all.to_vec()).shown(0),
        };
        let [median, p99] = [&row.median_ms, &row.p99_ms].map(|all| Spread::of(all.clone()));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.0}% | {} |",
            row.concurrency,
            grouped(row.tokens as u64),
            row.frontend.name(weight),
            median.shown(2),
            ratio(&row.median_ms, &base.median_ms),
            added.shown(0),
            p99.shown(2),
            ratio(&row.p99_ms, &base.p99_ms),
            Spread::of(row.rate.clone()).shown(1),
            ratio(&row.rate, &base.rate),
            row.claims as f64 * 100.0 / row.prefills as f64,
            query,
        );
    }
    out
}

/// Puts the table into `file`.
fn write_into(file: &Path, options: &Options, table: &str) -> Result<()> {
    let release = if options.release { " --release" } else { "" };
    let command = format!(
        "`cargo xtask bench requests{release} --rounds {} --count {} --weight {}`: medians of the rounds; \
         in brackets the quartiles.",
        options.rounds, options.count, options.weight
    );
    put_between(
        file,
        "cargo xtask bench requests --markdown",
        &format!("{command}\n\n{table}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(latencies: &[f64]) -> Case {
        Case {
            concurrency: 1,
            tokens: 2048,
            seconds: 0.5,
            latencies: latencies.to_vec(),
            prefills: latencies.len(),
            claims: 1,
            query: None,
        }
    }

    #[test]
    fn rounds_are_compared_one_by_one() {
        let mut rows = Vec::new();
        for (base, on) in [(1000.0, 1500.0), (2000.0, 3000.0), (4000.0, 4000.0)] {
            add(&mut rows, Frontend::Unpatched, &case(&[base; 2]), 2).unwrap();
            add(&mut rows, Frontend::On, &case(&[on; 2]), 2).unwrap();
        }
        let table = table(&rows, "2");
        let on = table
            .lines()
            .find(|line| line.contains("weight 2"))
            .unwrap();
        assert!(
            on.contains("| 1.500 (1.500..1.500) | 500 (500..1000) |"),
            "{on}"
        );
        assert!(
            on.ends_with("| 4.0 (4.0..4.0) | 1.000 (1.000..1.000) | 50% | - |"),
            "{on}"
        );
    }

    #[test]
    fn a_request_without_an_answer_or_a_prefill_is_an_error() {
        let mut rows = Vec::new();
        assert!(add(&mut rows, Frontend::On, &case(&[1.0]), 2).is_err());
        let mut lost = case(&[1.0, 1.0]);
        lost.prefills = 1;
        assert!(add(&mut rows, Frontend::On, &lost, 2).is_err());
    }
}
