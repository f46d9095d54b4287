// SPDX-License-Identifier: Apache-2.0

//! The fault bench: real engines, and whatever can go wrong between them.

mod attempt;
mod check;
mod claims;
mod driver;
mod engine;
mod legs;
mod plan;
mod ranks;
mod release;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::cache::Cache;
use crate::client::Client;
use crate::env;
use crate::faults::check::Report;
use crate::faults::driver::Driver;
use crate::faults::engine::{Engine, Kind, Role, Setup, Spec};
use crate::faults::plan::{Connector, LONGEST_TOKENS, Plan};
use crate::fleet::{self, Aggregated, EngineSetup, MODEL, Parts, Workers};
use crate::interrupt;
use crate::outputs::Reference;
use crate::progress::Step;
use crate::wheel;

/// Blocks of KV: ample for prefill, whose leases pin them, and few for decode, so that prompts push others out.
const PREFILL_BLOCKS: usize = 1024;
const DECODE_BLOCKS: usize = 128;
/// Reference answers that are computed at once.
const REFERENCES_AT_ONCE: usize = 24;
/// The slice in `cargo xtask test`.
const SLICE: Options = Options {
    requests: 150,
    kills: 3,
    seed: 1,
    json: None,
};

/// Options of `cargo xtask bench faults`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask bench faults --requests 150 --kills 3 --seed 2     some minutes
  cargo xtask bench faults --requests 2000 --kills 20 --seed 1 --json faults.json

One prefill and two decode workers serve requests while their caches lose blocks, claims and offers are wrong,
leases end, notices are lost, clients leave and engines are killed. Every answer must be the aggregated
worker's, every request must end, and all blocks must be free afterwards.")]
pub(crate) struct Options {
    /// Requests.
    #[arg(long, default_value_t = 2000, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    requests: usize,
    /// Engines that are killed and started again on the way.
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// Of everything that is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write all outcomes to this file; `-` is the standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs `cargo xtask bench faults`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let report = measure(cache, options)?;
    let wrong = report.wrong();
    let text = format!("{}\n", serde_json::to_string_pretty(&report)?);
    match &options.json {
        Some(path) if path == Path::new("-") => {
            print!("{text}");
            eprint!("{}", report.table());
        }
        Some(path) => {
            fs::write(path, text)
                .with_context(|| format!("--json: cannot write {}", path.display()))?;
            print!("{}", report.table());
        }
        None => print!("{}", report.table()),
    }
    for wrong in &wrong {
        eprintln!("wrong: {wrong}");
    }
    Ok(if wrong.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The part of `cargo xtask test`.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let report = measure(cache, &SLICE)?;
    print!("{}", report.table());
    let wrong = report.wrong();
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

/// The part of `cargo xtask test` about early release.
pub(crate) fn check_release(cache: &Cache) -> Result<()> {
    let built = Built::of(cache)?;
    fleet::check_memory(3)?;
    interrupt::run(cache, "early-release", async |folder| {
        release::compare(&built.setup(folder), &Client::new(MODEL)?).await
    })
}

/// The part of `cargo xtask test` about tensor parallelism.
pub(crate) fn check_ranks(cache: &Cache) -> Result<()> {
    let built = Built::of(cache)?;
    fleet::check_memory(ranks::WORKERS)?;
    interrupt::run(cache, "tensor-parallel", async |folder| {
        ranks::check(&built.setup(folder), &Client::new(MODEL)?).await
    })
}

/// What engines need.
struct Built {
    python: PathBuf,
    model: PathBuf,
    python_path: Vec<PathBuf>,
}

impl Built {
    fn of(cache: &Cache) -> Result<Self> {
        let python = env::engines(cache)?;
        let [module, package] = wheel::overlay(cache)?;
        Ok(Self {
            model: env::model(cache, &python)?,
            python_path: vec![env::engines_folder(), module, package],
            python,
        })
    }

    fn setup(&self, folder: &Path) -> Setup {
        Setup {
            python: self.python.clone(),
            model: self.model.clone(),
            python_path: self.python_path.clone(),
            folder: folder.to_owned(),
        }
    }
}

fn measure(cache: &Cache, options: &Options) -> Result<Report> {
    let built = Built::of(cache)?;
    // The aggregated worker has gone before the run begins, but starts beside the others.
    fleet::check_memory(4)?;
    let plan = plan::plan(options.requests, options.kills, options.seed);
    let mut report = None;
    interrupt::run(cache, "faults", async |folder| {
        let found = scenario(&built.setup(folder), &plan, options.seed).await?;
        let is_right = found.wrong().is_empty();
        report = Some(found);
        // The folder with the logs is kept only after an error.
        anyhow::ensure!(is_right, "something is not as it must be");
        Ok(())
    })
    .or_else(|error| if report.is_some() { Ok(()) } else { Err(error) })?;
    report.context("the run has no report")
}

async fn scenario(setup: &Setup, plan: &Plan, seed: u64) -> Result<Report> {
    let client = Client::new(MODEL)?;
    let own = Kind {
        connector: Connector::Own,
        lease: None,
    };
    let start = |role, number, blocks| {
        let spec = Spec {
            role,
            number,
            ranks: 1,
            blocks,
            max_tokens: LONGEST_TOKENS.next_multiple_of(32),
            // One decode worker always does, the other as it finds best.
            asks_again: number == 1,
        };
        Engine::start(setup, &client, spec, own)
    };
    let prefill = start(Role::Prefill, 9, PREFILL_BLOCKS)?;
    let decode = [
        start(Role::Decode, 0, DECODE_BLOCKS)?,
        start(Role::Decode, 1, DECODE_BLOCKS)?,
    ];
    let aggregated = aggregated(setup, &client).await?;
    let references = references(&client, aggregated.base(), plan).await?;
    drop(aggregated);
    let step = Step::begin("prefill and decode workers");
    for engine in std::iter::once(&prefill).chain(&decode) {
        engine.ready().await?;
    }
    step.end();
    let driver = Driver::new(seed, prefill, decode, references, &client)?;
    driver.run(plan).await
}

async fn aggregated(setup: &Setup, client: &Client) -> Result<Aggregated> {
    let parts = Parts {
        python: setup.python.clone(),
        model: setup.model.clone(),
        frontend: PathBuf::new(),
        workers: Workers::Stock,
        engines: EngineSetup::default(),
    };
    Aggregated::start(&parts, &setup.folder, client).await
}

/// The aggregated worker's answers, by number of the request.
async fn references(client: &Client, base: &str, plan: &Plan) -> Result<Vec<Reference>> {
    let requests = plan.steps().count();
    let mut step = Step::begin(format!("{requests} reference answers"));
    let mut done = 0;
    let answers = stream::iter(plan.steps())
        .map(|request| client.reference(base, &request.prompt, request.output_tokens))
        .buffered(REFERENCES_AT_ONCE)
        .inspect(|_| {
            done += 1;
            step.tick(&format!("({done} of {requests})"));
        })
        .try_collect()
        .await?;
    step.end();
    Ok(answers)
}
