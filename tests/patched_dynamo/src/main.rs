// SPDX-License-Identifier: Apache-2.0

//! Records what Dynamo's router chooses and sends for seeded streams of requests.
//!
//! The program is built twice, against the registry's crates and against the patched ones. With the
//! flag off both must write the same records, byte for byte; `cargo xtask test` compares them.

mod cards;
mod names;
mod record;
mod requests;
mod scheduler;
mod stack;
mod worker;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use kvdelta_recorder::settings::{self, Settings};

use crate::record::Record;
use crate::stack::Routing;

/// Records what Dynamo's router chooses and sends for seeded streams of requests.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Histories through the scheduler and its default policy.
    Scheduler(Options),
    /// Model cards, each also to a file.
    Cards {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        model: Model,
        /// Folder for the cards.
        #[arg(long)]
        cards: PathBuf,
    },
    /// Requests through a whole frontend with workers that have no engine.
    Stack {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        model: Model,
        /// How the frontend routes.
        #[arg(long)]
        routing: Routing,
    },
    /// Times requests through a whole frontend with workers that answer at once, and writes JSON.
    Requests {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        model: Model,
        /// Requests of each kind.
        #[arg(long, default_value_t = 100)]
        count: usize,
    },
    /// Reads model cards that another build wrote and records what comes of each.
    ReadCards {
        /// Folder of the cards.
        #[arg(long)]
        cards: PathBuf,
        /// The record.
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Model {
    /// Folder of a tiny model, made when it is not there: the same for all runs to compare.
    #[arg(long = "model")]
    folder: PathBuf,
}

#[derive(Debug, Args)]
struct Options {
    /// The record.
    #[arg(long)]
    out: PathBuf,
    /// The weight as a field of the router's configuration; patched builds only.
    #[arg(long)]
    weight: Option<f64>,
    /// A policy file for the router.
    #[arg(long)]
    policy: Option<PathBuf>,
    /// Seed of the stream.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<String> {
    let mut record;
    match command {
        Command::Scheduler(options) => {
            let settings = options.settings()?;
            record = Record::create(&options.out)?;
            scheduler::record(&settings, options.seed, &mut record)?;
        }
        Command::Cards {
            options,
            model,
            cards,
        } => {
            let settings = options.settings()?;
            record = Record::create(&options.out)?;
            let model = settings::write_model(&model.folder)?;
            cards::write(&settings, &model, &cards, &mut record)?;
        }
        Command::Stack {
            options,
            model,
            routing,
        } => {
            let settings = options.settings()?;
            record = Record::create(&options.out)?;
            let model = settings::write_model(&model.folder)?;
            stack::record(&settings, routing, &model, options.seed, &mut record)?;
        }
        Command::Requests {
            options,
            model,
            count,
        } => {
            let settings = options.settings()?;
            let model = settings::write_model(&model.folder)?;
            let cases = requests::measure(&settings, &model, options.seed, count)?;
            fs::write(&options.out, serde_json::to_string(&cases)?)?;
            return Ok(format!("{} kinds of requests", cases.len()));
        }
        Command::ReadCards { cards, out } => {
            record = Record::create(&out)?;
            cards::read(&cards, &mut record)?;
        }
    }
    Ok(record.finish()?.to_string())
}

impl Options {
    fn settings(&self) -> Result<Settings> {
        let settings = Settings::new(self.weight, self.policy.as_deref())?;
        settings.install_policies()?;
        Ok(settings)
    }
}
