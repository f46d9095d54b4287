// SPDX-License-Identifier: Apache-2.0

//! What the grids over real engines share: fleets of each kind, and prompts of which a decode worker holds a part.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::stream::{self, StreamExt, TryStreamExt};

use crate::cache::Cache;
use crate::client::{Answer, Client};
use crate::demo::{FINISHED, Model};
use crate::env;
use crate::fleet::{BLOCK_SIZE, Connector, EngineSetup, Fleet, Parts, Workers};
use crate::frontend;
use crate::progress::{Step, say};
use crate::wheel;
use crate::workers;
use crate::workload::FIRST_WORD;

/// Blocks of a prompt, all whole.
pub(crate) const PROMPT_BLOCKS: usize = 64;
/// Requests in flight while prefixes are brought to the decode workers.
pub(crate) const SEEDS_AT_ONCE: usize = 4;
/// Until the router has the events of the last prefix.
pub(crate) const EVENTS_TIME: Duration = Duration::from_millis(700);
/// The connector's counters are brought up to date every few seconds.
const COUNTED_TIME: Duration = Duration::from_secs(12);
const WARM_UPS: usize = 10;
const WARM_UP_TOKENS: usize = 8;
/// Blocks that kvdelta's connector did not offer, on a prefill worker.
const SKIPPED_BLOCKS: &str = "vllm:kvdelta_skipped_blocks_total";

/// What the fleets of all ways are made of.
#[derive(Debug)]
pub(crate) struct Setups {
    python: PathBuf,
    folder: PathBuf,
    frontend: PathBuf,
    patched: Workers,
    kvdelta: Option<Connector>,
    pub(crate) model: Model,
}

impl Setups {
    /// Makes what is missing; kvdelta's connector only if it is wanted.
    pub(crate) fn prepare(cache: &Cache, connector: bool) -> Result<Self> {
        let python = env::engines(cache)?;
        let folder = env::model(cache, &python)?;
        Ok(Self {
            model: Model::read(&folder)?,
            folder,
            frontend: frontend::build(cache, frontend::Profile::Dev)?,
            patched: Workers::Patched(workers::overlay(cache, &python)?.context(workers::NONE)?),
            kvdelta: connector.then(|| wheel::connector(cache)).transpose()?,
            python,
        })
    }

    /// The installed workers of Dynamo, or the patched ones.
    pub(crate) fn parts(&self, patched: bool, engines: EngineSetup) -> Parts {
        Parts {
            python: self.python.clone(),
            model: self.folder.clone(),
            frontend: self.frontend.clone(),
            workers: if patched {
                self.patched.clone()
            } else {
                Workers::Stock
            },
            engines,
        }
    }

    /// kvdelta's connector on both sides, or vLLM's.
    pub(crate) fn engines(&self, kvdelta: bool) -> Result<EngineSetup> {
        let mut engines = EngineSetup::default();
        if kvdelta {
            let connector = self
                .kvdelta
                .as_ref()
                .context("the connector was not made")?;
            engines.prefill = connector.clone();
            engines.decode = connector.clone();
        }
        Ok(engines)
    }
}

/// An error if the connector has skipped no block on the prefill workers: then nothing of it was measured.
pub(crate) async fn check_skipped_blocks(client: &Client, fleet: &Fleet) -> Result<()> {
    tokio::time::sleep(COUNTED_TIME).await;
    let mut skipped = 0.0;
    for base in fleet.prefill_bases() {
        skipped += client.metric(base, SKIPPED_BLOCKS).await?.unwrap_or(0.0);
    }
    ensure!(
        skipped > 0.0,
        "kvdelta's connector skipped no block: no claim reached it"
    );
    say(format!("kvdelta's connector skipped {skipped} blocks"));
    Ok(())
}

/// Sends prompts that nobody holds until every decode worker has had one: the first one of a pair of workers
/// makes their connections.
pub(crate) async fn warm_up(client: &Client, fleet: &mut Fleet, vocabulary: u32) -> Result<()> {
    let step = Step::begin("warm-up");
    let base = fleet.base()?.to_owned();
    let mut random = fastrand::Rng::with_seed(u64::MAX);
    for _ in 0..WARM_UPS {
        let prompts: Vec<Vec<u32>> = (0..SEEDS_AT_ONCE)
            .map(|_| draw(&mut random, PROMPT_BLOCKS * BLOCK_SIZE, vocabulary))
            .collect();
        send(client, &base, &prompts, SEEDS_AT_ONCE, WARM_UP_TOKENS).await?;
        fleet.check()?;
        let finished = fleet.decode_counters(FINISHED).await?;
        if finished
            .iter()
            .all(|count| count.is_some_and(|count| count > 0.0))
        {
            step.end();
            return Ok(());
        }
    }
    bail!(
        "a decode worker got none of {} requests",
        WARM_UPS * SEEDS_AT_ONCE
    )
}

/// The answers in the order in which they end, `at_once` in flight all the time.
pub(crate) async fn send(
    client: &Client,
    base: &str,
    prompts: &[Vec<u32>],
    at_once: usize,
    output_tokens: usize,
) -> Result<Vec<Answer>> {
    stream::iter(prompts)
        .map(|prompt| client.complete(base, prompt, output_tokens))
        .buffer_unordered(at_once)
        .try_collect()
        .await
}

/// `count` prompts of [`PROMPT_BLOCKS`] whose first blocks nobody else has, and before them prompts that have these
/// and one token more.
pub(crate) fn prefixed(
    random: &mut fastrand::Rng,
    count: usize,
    cached_blocks: usize,
    vocabulary: u32,
) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let (mut seeds, mut prompts) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let prefix = draw(random, cached_blocks * BLOCK_SIZE, vocabulary);
        let rest = (PROMPT_BLOCKS - cached_blocks) * BLOCK_SIZE;
        if cached_blocks > 0 {
            seeds.push([prefix.clone(), draw(random, 1, vocabulary)].concat());
        }
        prompts.push([prefix, draw(random, rest, vocabulary)].concat());
    }
    (seeds, prompts)
}

fn draw(random: &mut fastrand::Rng, count: usize, vocabulary: u32) -> Vec<u32> {
    (0..count)
        .map(|_| random.u32(FIRST_WORD..vocabulary))
        .collect()
}

/// The share of a prompt that so many blocks are.
pub(crate) fn share(blocks: usize) -> String {
    match blocks {
        0 => "none".to_owned(),
        blocks if blocks + 1 == PROMPT_BLOCKS => "all but one block".to_owned(),
        blocks => {
            let (mut part, mut whole) = (blocks, PROMPT_BLOCKS);
            while part.is_multiple_of(2) && whole.is_multiple_of(2) {
                (part, whole) = (part / 2, whole / 2);
            }
            format!("{part}/{whole}")
        }
    }
}

/// Writes a file; an error names it.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
