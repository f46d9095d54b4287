// SPDX-License-Identifier: Apache-2.0

//! Measurements that are no test.

use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cache::Cache;
use crate::command::shown_status;
use crate::frontend;

/// Options of `cargo xtask bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench replay --trace conversation_trace.jsonl
  cargo xtask bench replay --trace conversation_trace.jsonl --speedup 4 --weights 0,2 --json
  cargo xtask bench replay --help              what else it takes, and where there is a trace

Exit codes: 0 done, 1 failed, 2 an option that cannot be used.")]
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
}

/// Runs `cargo xtask bench`.
pub(crate) fn run(cache: &Cache, options: Options) -> Result<ExitCode> {
    match options.bench {
        Bench::Replay { arguments } => {
            let mut replay = Command::new(frontend::example(cache, "fleet_replay")?);
            replay.args(arguments);
            let status = shown_status(&mut replay)?;
            // The replay has told what is wrong; its exit codes are this command's.
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
        }
    }
}
