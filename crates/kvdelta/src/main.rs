// SPDX-License-Identifier: Apache-2.0

//! `kvdelta`: looks at a running Dynamo deployment from outside, and says what decode overlap would save.

mod cmd;
mod doctor;
mod estimate;
mod observe;
mod render;
mod replay;
mod sim;
mod trace;
mod unit;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Looks at a running Dynamo deployment from outside, and says what decode overlap would save; changes nothing.
#[derive(Debug, Parser)]
#[command(name = "kvdelta", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say what keeps `decode_overlap_score_weight` from helping.
    Doctor(cmd::doctor::Options),
    /// Say by formula what a delta saves of one request.
    Estimate(Box<cmd::estimate::Options>),
    /// Show what live workers hold, by their KV events.
    Observe(Box<cmd::observe::Options>),
    /// Send a trace through a simulated fleet and compare policies.
    Replay(Box<cmd::replay::Options>),
}

/// The command line. A negative number is a value of its option, which then refuses it by name.
fn command() -> clap::Command {
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|argument| {
            let is_option = argument.get_action().takes_values();
            argument.allow_negative_numbers(is_option)
        })
    })
}

fn main() -> ExitCode {
    let matches = command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Doctor(options) => cmd::doctor::run(&options),
        Command::Estimate(options) => cmd::estimate::run(&options),
        Command::Observe(options) => cmd::observe::run(&options),
        Command::Replay(options) => cmd::replay::run(&options),
    }
}
