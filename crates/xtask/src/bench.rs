// SPDX-License-Identifier: Apache-2.0

//! Measurements that are no test.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cache::{Cache, members, project_root};
use crate::command::{logged, shown_status};
use crate::frontend;
use crate::links;
use crate::requests;

/// Options of `cargo xtask bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench replay --trace conversation_trace.jsonl
  cargo xtask bench replay --trace conversation_trace.jsonl --speedup 4 --weights 0,2 --json
  cargo xtask bench replay --help              what else it takes, and where there is a trace
  cargo xtask bench index --trace conversation_trace.jsonl
  cargo xtask bench index --quick              small data, for its answers rather than its times
  cargo xtask bench query
  cargo xtask bench requests
  cargo xtask bench links --quick

Exit codes: 0 done, 1 failed, 2 an option that cannot be used, 77 skipped where this machine cannot do it.")]
pub(crate) struct Options {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// A trace through Dynamo's offline replay with the patched router, once for every weight.
    #[command(disable_help_flag = true)]
    Replay {
        /// Options of the replay; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// kvdelta's index beside those of dynamo-kv-router: queries, loading, memory, readers' latency.
    #[command(disable_help_flag = true)]
    Index {
        /// Options of the benchmark; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// From tokens to a claim, beside hashing alone and Dynamo's overlap scores.
    #[command(disable_help_flag = true)]
    Query {
        /// Options of the benchmark; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Requests through the frontend: unpatched, patched with the flag off, and with a weight.
    Requests(requests::Options),
    /// Time to the first token over links of several rates, by what a decode worker holds of the prompt.
    Links(links::Options),
}

/// The package in `benches/`.
const PACKAGE: &str = "kvdelta-benches";

/// Runs `cargo xtask bench`.
pub(crate) fn run(cache: &Cache, options: Options) -> Result<ExitCode> {
    let (program, arguments) = match options.bench {
        Bench::Replay { arguments } => (frontend::example(cache, "fleet_replay")?, arguments),
        Bench::Index { arguments } => (program(cache, "bench-index")?, arguments),
        Bench::Query { arguments } => (program(cache, "bench-query")?, arguments),
        Bench::Requests(options) => return requests::run(cache, &options),
        Bench::Links(options) => return links::run(cache, &options),
    };
    let status = shown_status(Command::new(program).args(arguments))?;
    // The program has told what is wrong; its exit codes are this command's.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// A program of the benchmarks, built for speed.
pub(crate) fn program(cache: &Cache, name: &str) -> Result<PathBuf> {
    let target = cache.target("benches", &members())?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--release", "--locked", "--package", PACKAGE])
        .current_dir(project_root())
        .env("CARGO_TARGET_DIR", &target);
    frontend::without_own_package(&mut cargo);
    let log = cache.folder("logs")?.join(format!("{name}.log"));
    logged(name, cargo, &log)?;
    Ok(target.join("release").join(name))
}
