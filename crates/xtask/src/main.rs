// SPDX-License-Identifier: Apache-2.0

//! `cargo xtask`: the commands that set up, patch, run and test kvdelta.

mod bench;
mod beside;
mod cache;
mod capacity;
mod chart;
mod claims;
mod client;
mod command;
mod counts;
mod demo;
mod diff_size;
mod env;
mod export_pr;
mod faults;
mod fleet;
mod frontend;
mod grid;
mod interrupt;
mod links;
mod live_claims;
mod live_index;
mod namespace;
mod outputs;
mod own_crates;
mod patch;
mod phase;
mod ports;
mod pr_text;
mod progress;
mod pytest;
mod report;
mod requests;
mod test;
mod unchanged;
mod upstream;
mod upstream_counts;
mod upstream_tests;
mod wheel;
mod workers;
mod workload;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::cache::Cache;

/// Set up, patch, run and test kvdelta.
///
/// Heavy things (Python environment, patched sources, builds) are kept in one cache folder,
/// `KVDELTA_CACHE`, and made again only when what went into them changes.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
#[command(after_help = "Examples:
  cargo xtask demo                      patch Dynamo, run it with real vLLM workers, show bytes moved
  cargo xtask demo --decode 4 --json run.json
  cargo xtask patch --check             does the series apply to the pinned sources?
  cargo xtask frontend --out bin        the frontend from the patched crates, in the folder bin
  cargo xtask test --fast               format, lints and the tests that need no engine
  cargo xtask test                      everything
  cargo xtask bench replay --help       a trace through a simulated fleet, at several weights
  cargo xtask bench index --quick       kvdelta's index beside those of dynamo-kv-router
  cargo xtask test --each-patch         upstream's tests after each patch of the series
  cargo xtask export-pr --phase 1 --onto ../dynamo

Exit codes: 0 done and true, 1 failed or not true, 2 an option that cannot be read.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the Python environment with the pinned engines, the tools and the test model.
    Env,
    /// Take the pinned upstream sources and apply the patch series to them.
    Patch(patch::Options),
    /// Build kvdelta-frontend, which runs in place of Dynamo's Python frontend.
    Frontend(frontend::Options),
    /// Build the wheel of the Python module kvdelta, which the packages for vLLM and SGLang need.
    Wheel(wheel::Options),
    /// Patch Dynamo, run it with real vLLM workers, and show how many bytes of KV moved.
    Demo(demo::Options),
    /// Format, lints and all tests.
    Test(test::Options),
    /// Measure what no test does.
    Bench(bench::Options),
    /// Write the pull request of one phase, in the form of Dynamo's repository.
    ExportPr(export_pr::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    interrupt::listen()?;
    let cache = Cache::open()?;
    match command {
        Command::Env => env::run(&cache),
        Command::Patch(options) => patch::run(&cache, &options),
        Command::Frontend(options) => frontend::run(&cache, &options),
        Command::Wheel(options) => wheel::run(&cache, &options),
        Command::Demo(options) => demo::run(&cache, &options),
        Command::Test(options) => test::run(&cache, &options),
        Command::Bench(options) => bench::run(&cache, options),
        Command::ExportPr(options) => export_pr::run(&cache, &options),
    }
}
