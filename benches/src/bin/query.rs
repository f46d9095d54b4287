// SPDX-License-Identifier: Apache-2.0

//! Measures the query from tokens to a claim.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use kvdelta_benches::claim::{Plan, Report, run};
use kvdelta_benches::page::Machine;
use kvdelta_benches::progress::Progress;

/// From tokens to a claim: beside hashing alone, and beside dynamo-kv-router 1.6.1's overlap scores.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench query",
    after_help = "Examples:
  cargo xtask bench query
  cargo xtask bench query --quick
  cargo xtask bench query --markdown

An answer that differs from the oracle's fails the run."
)]
struct Options {
    /// Small data and few rounds: seconds, for its answers rather than its times.
    #[arg(long)]
    quick: bool,
    /// Write all figures to a file, `-` for standard output in place of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table into docs/query-benchmark.md too.
    #[arg(long)]
    markdown: bool,
    /// Rounds.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut plan = if options.quick {
        Plan {
            rounds: 3,
            turn: Duration::from_micros(200),
            prompts: vec![(128, 4), (512, 2), (8_192, 1)],
            background: 50_000,
        }
    } else {
        Plan {
            rounds: 45,
            turn: Duration::from_millis(4),
            prompts: vec![(128, 32), (512, 32), (8_192, 8)],
            background: 1_000_000,
        }
    };
    plan.rounds = options.rounds.unwrap_or(plan.rounds).max(1);
    let report = Report {
        machine: Machine::here("bench query"),
        rows: run(&plan, &mut Progress::default())?,
        // Few rounds would decide.
        judged: !options.quick,
        left_out: vec![
            "waiting for the lock on the workers' configurations and for tasks, which Dynamo's call \
             through the router has besides"
                .to_owned(),
        ],
    };
    report.page().show(
        &report,
        options.json.as_deref(),
        options.markdown,
        "query-benchmark.md",
    )
}
