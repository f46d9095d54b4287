// SPDX-License-Identifier: Apache-2.0

//! Measurements that are no test.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cache::{Cache, members, project_root};
use crate::capacity;
use crate::command::{logged, shown_status};
use crate::env;
use crate::faults;
use crate::fleet::engine_environment;
use crate::frontend;
use crate::links;
use crate::requests;
use crate::wheel;

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
  cargo xtask bench capacity --quick
  cargo xtask bench bindings
  cargo xtask bench faults --requests 150 --kills 3

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
    /// Calls of the Python module for a long request, beside a step of vLLM's scheduler.
    #[command(disable_help_flag = true)]
    Bindings {
        /// Options of the benchmark; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Requests through the frontend: unpatched, patched with the flag off, and with a weight.
    Requests(requests::Options),
    /// Real engines, and whatever can go wrong between them.
    Faults(faults::Options),
    /// Time to the first token over links of several rates, by what a decode worker holds of the prompt.
    Links(links::Options),
    /// Prefills a second while decode is behind, with vLLM's connector and with kvdelta's.
    Capacity(capacity::Options),
}

/// The package in `benches/`.
const PACKAGE: &str = "kvdelta-benches";

/// Runs `cargo xtask bench`.
pub(crate) fn run(cache: &Cache, options: Options) -> Result<ExitCode> {
    let (mut program, arguments) = match options.bench {
        Bench::Replay { arguments } => {
            let program = frontend::example(cache, "fleet_replay")?;
            (Command::new(program), arguments)
        }
        Bench::Index { arguments } => (Command::new(program(cache, "bench-index")?), arguments),
        Bench::Query { arguments } => (Command::new(program(cache, "bench-query")?), arguments),
        Bench::Bindings { arguments } => (bindings(cache)?, arguments),
        Bench::Requests(options) => return requests::run(cache, &options),
        Bench::Faults(options) => return faults::run(cache, &options),
        Bench::Links(options) => return links::run(cache, &options),
        Bench::Capacity(options) => return capacity::run(cache, &options),
    };
    let status = shown_status(program.args(arguments))?;
    // The program has told what is wrong; its exit codes are this command's.
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The benchmark of the Python module, in the environment of the engines.
fn bindings(cache: &Cache) -> Result<Command> {
    let overlay = wheel::overlay(cache)?;
    let mut python = Command::new(env::engines(cache)?);
    python
        .arg(wheel::vllm_folder().join("benches/bindings.py"))
        .env("PYTHONPATH", std::env::join_paths(overlay)?)
        .envs(engine_environment());
    Ok(python)
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
