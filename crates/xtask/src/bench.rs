// SPDX-License-Identifier: Apache-2.0

//! Measurements that are no test.

use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cache::Cache;
use crate::command::shown_run;
use crate::frontend;

/// Options of `cargo xtask bench`.
#[derive(Debug, Args)]
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
            shown_run(replay)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
