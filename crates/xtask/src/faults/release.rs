// SPDX-License-Identifier: Apache-2.0

//! Early release: what prefill has pinned while decode legs wait, with vLLM's own connector and with kvdelta's.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use crate::client::Client;
use crate::faults::check::whole;
use crate::faults::claims::{Claims, Hashed};
use crate::faults::engine::{Engine, Kind, Role, Setup, Spec};
use crate::faults::legs::{Ask, Legs, Prefilled};
use crate::faults::plan::{Connector, WORDS};
use crate::fleet::BLOCK_SIZE;
use crate::progress::say;

/// Prompts, and blocks of each: in all, and of the prefix that decode holds.
const PROMPTS: usize = 8;
const PROMPT_BLOCKS: usize = 64;
const HELD_BLOCKS: usize = 56;
/// Blocks of KV: both prefill workers' and decode's.
const AMPLE_BLOCKS: usize = 1024;
const FEW_BLOCKS: usize = 256;
const DECODE_BLOCKS: usize = 1200;
const MAX_TOKENS: usize = 2560;
const OUTPUT_TOKENS: usize = 8;
/// Seconds: no lease may end by itself.
const LEASE: u64 = 900;
const TIMEOUT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(200);
/// Polls in a row at which nothing moves before prompts count as stuck.
const STILL: usize = 15;

/// What one connector shows.
#[derive(Debug, PartialEq)]
struct Measured {
    connector: Connector,
    /// Of prefill's blocks with all prompts waiting for decode.
    usage: f64,
    /// Prompts that a prefill worker with few blocks took while none was fetched.
    accepted: usize,
    /// What decode read of them.
    bytes: u64,
    descriptors: u64,
    answers: Vec<Vec<u32>>,
}

/// Measures both connectors and compares.
pub(crate) async fn compare(parts: &Setup, client: &Client) -> Result<()> {
    let mut both = Vec::new();
    for connector in [Connector::Stock, Connector::Own] {
        let folder = parts.folder.join(match connector {
            Connector::Stock => "stock",
            Connector::Own => "own",
        });
        std::fs::create_dir_all(&folder)?;
        let setup = Setup {
            folder,
            ..parts.clone()
        };
        let measured = measure(&setup, client, connector).await?;
        say(format!(
            "{connector:?}: prefill has {:.1} % of its blocks pinned; with {FEW_BLOCKS} blocks it takes {} of {PROMPTS} \
             prompts; decode read {} bytes by {} descriptors",
            measured.usage * 100.0,
            measured.accepted,
            measured.bytes,
            measured.descriptors
        ));
        both.push(measured);
    }
    let broken = broken(&both[0], &both[1]);
    ensure!(broken.is_empty(), "{}", broken.join("; "));
    Ok(())
}

/// What kvdelta's connector must show beside vLLM's and does not.
fn broken(stock: &Measured, own: &Measured) -> Vec<String> {
    let mut broken = Vec::new();
    if own.usage * 5.0 > stock.usage {
        broken.push(format!(
            "prefill has {} pinned, vLLM's connector {}",
            own.usage, stock.usage
        ));
    }
    if own.accepted != PROMPTS || stock.accepted >= PROMPTS {
        broken.push(format!(
            "of {PROMPTS} prompts a small prefill worker took {}, with vLLM's connector {}",
            own.accepted, stock.accepted
        ));
    }
    if own.bytes != stock.bytes || own.descriptors > stock.descriptors {
        broken.push(format!(
            "decode read {} bytes by {} descriptors, with vLLM's connector {} by {}",
            own.bytes, own.descriptors, stock.bytes, stock.descriptors
        ));
    }
    if own.answers != stock.answers {
        broken.push("the answers differ".to_owned());
    }
    broken
}

/// Prompt `number`: a prefix of its own and a tail that ends within a block.
pub(crate) fn prompt(number: usize, blocks: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(7000 + number as u64);
    (0..PROMPT_BLOCKS * BLOCK_SIZE + 5)
        .map(|_| random.u32(WORDS))
        .take(blocks * BLOCK_SIZE + 5)
        .collect()
}

struct Scene {
    client: Client,
    legs: Legs,
    claims: Claims,
    ample: Engine,
    few: Engine,
    decode: Engine,
    connector: Connector,
}

async fn measure(setup: &Setup, client: &Client, connector: Connector) -> Result<Measured> {
    let kind = Kind {
        connector,
        lease: Some(LEASE),
    };
    let start = |role, number, blocks| {
        let spec = Spec {
            role,
            number,
            ranks: 1,
            blocks,
            max_tokens: MAX_TOKENS,
            asks_again: false,
        };
        Engine::start(setup, client, spec, kind)
    };
    let ample = start(Role::Prefill, 9, AMPLE_BLOCKS)?;
    let few = start(Role::Prefill, 8, FEW_BLOCKS)?;
    let decode = start(Role::Decode, 0, DECODE_BLOCKS)?;
    for engine in [&ample, &few, &decode] {
        engine.ready().await?;
    }
    let scene = Scene {
        client: client.clone(),
        legs: Legs::new()?,
        claims: Claims::follow([&ample, &few, &decode])?,
        ample,
        few,
        decode,
        connector,
    };
    for number in 0..PROMPTS {
        let warm = prompt(number, HELD_BLOCKS);
        let first = scene.prefill(&scene.ample, number, &warm).await?;
        scene.finish(number, &warm, first).await?;
    }
    let before = scene.moved(PROMPTS as u64).await?;

    let mut waiting = Vec::new();
    for number in 0..PROMPTS {
        let prompt = prompt(number, PROMPT_BLOCKS);
        waiting.push(scene.prefill(&scene.ample, number, &prompt).await?);
    }
    let usage = scene.usage(&scene.ample).await?;
    let mut answers = Vec::new();
    for (number, first) in waiting.into_iter().enumerate() {
        let prompt = prompt(number, PROMPT_BLOCKS);
        answers.push(scene.finish(number, &prompt, first).await?);
    }
    let after = scene.moved(2 * PROMPTS as u64).await?;
    let accepted = scene.accepted().await?;
    for engine in [&scene.ample, &scene.few, &scene.decode] {
        scene.empty(engine).await?;
    }
    Ok(Measured {
        connector,
        usage,
        accepted,
        bytes: after[0] - before[0],
        descriptors: after[1] - before[1],
        answers,
    })
}

impl Scene {
    fn ask<'a>(id: &'a str, prompt: &'a [u32]) -> Ask<'a> {
        Ask {
            id,
            prompt,
            salt: None,
            output_tokens: OUTPUT_TOKENS,
        }
    }

    /// The prefill leg at `engine` with the claim that a router makes: none for the stock connector.
    async fn prefill(&self, engine: &Engine, number: usize, prompt: &[u32]) -> Result<Prefilled> {
        let id = format!("release-{number}");
        let hashed = Hashed {
            tokens: prompt,
            salt: None,
        };
        let claim: Option<Value> = match self.connector {
            Connector::Stock => None,
            Connector::Own => self
                .claims
                .claim(self.decode.of, hashed, &id)
                .map(|claim| json!(claim)),
        };
        let ask = Self::ask(&id, prompt);
        Ok(self
            .legs
            .prefill(engine.base(), ask, claim.as_ref(), None)
            .await?)
    }

    /// The decode leg; its events have arrived when it returns.
    async fn finish(&self, number: usize, prompt: &[u32], first: Prefilled) -> Result<Vec<u32>> {
        let id = format!("release-{number}");
        let ask = Self::ask(&id, prompt);
        let decoded = self
            .legs
            .decode(self.decode.base(), ask, first.params)
            .await?;
        let hashed = Hashed {
            tokens: prompt,
            salt: None,
        };
        let blocks = prompt.len() / BLOCK_SIZE;
        ensure!(
            self.claims.holds(self.decode.of, hashed, blocks).await,
            "decode does not hold the {blocks} blocks of prompt {number} that it has just used"
        );
        Ok(decoded.tokens)
    }

    /// Bytes and descriptors that decode has read, once it has counted `transfers` of them.
    async fn moved(&self, transfers: u64) -> Result<[u64; 2]> {
        let deadline = Instant::now() + TIMEOUT;
        let base = self.decode.base();
        let counter = async |name: &str| -> Result<u64> {
            let value = self
                .client
                .metric(base, &format!("vllm:nixl_{name}"))
                .await?;
            Ok(whole(value.unwrap_or(0.0)))
        };
        while counter("bytes_transferred_count").await? < transfers {
            ensure!(
                Instant::now() < deadline,
                "decode has not counted {transfers} transfers"
            );
            self.decode.nudge().await?;
            tokio::time::sleep(POLL).await;
        }
        Ok([
            counter("bytes_transferred_sum").await?,
            counter("num_descriptors_sum").await?,
        ])
    }

    async fn gauge(&self, engine: &Engine, name: &str) -> Result<f64> {
        let value = self
            .client
            .metric(engine.base(), &format!("vllm:{name}"))
            .await?;
        value.with_context(|| format!("{} has no vllm:{name}", engine.name))
    }

    /// The part of the blocks that is pinned while no request runs.
    async fn usage(&self, engine: &Engine) -> Result<f64> {
        for _ in 0..3 {
            engine.nudge().await?;
        }
        self.gauge(engine, "kv_cache_usage_perc").await
    }

    async fn empty(&self, engine: &Engine) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let usage = self.usage(engine).await?;
            if usage == 0.0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{}: {usage} of its blocks are not free", engine.name);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Sends all prompts to the small prefill worker; how many it takes while none is fetched. The others go on
    /// when those are.
    async fn accepted(&self) -> Result<usize> {
        let accepted = std::cell::Cell::new(0);
        let (stuck, is_stuck) = tokio::sync::watch::channel(None);
        let requests = try_join_all((0..PROMPTS).map(|number| {
            let mut is_stuck = is_stuck.clone();
            let accepted = &accepted;
            async move {
                let prompt = prompt(number, PROMPT_BLOCKS);
                let first = self.prefill(&self.few, number, &prompt).await?;
                accepted.set(accepted.get() + 1);
                is_stuck.wait_for(Option::is_some).await?;
                self.finish(number, &prompt, first).await
            }
        }));
        let watch = async {
            let deadline = Instant::now() + TIMEOUT;
            let mut still = 0;
            while accepted.get() < PROMPTS && still < STILL {
                ensure!(
                    Instant::now() < deadline,
                    "a small prefill worker does not come to rest"
                );
                let before = accepted.get();
                tokio::time::sleep(POLL).await;
                let runs = self.gauge(&self.few, "num_requests_running").await?;
                let waits = self.gauge(&self.few, "num_requests_waiting").await?;
                let is_still = runs == 0.0 && waits > 0.0 && accepted.get() == before;
                still = if is_still { still + 1 } else { 0 };
            }
            let found = accepted.get();
            stuck.send(Some(found))?;
            Ok(found)
        };
        let (answers, found) = tokio::try_join!(requests, watch)?;
        ensure!(answers.len() == PROMPTS, "{} answers", answers.len());
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(connector: Connector, usage: f64, accepted: usize) -> Measured {
        Measured {
            connector,
            usage,
            accepted,
            bytes: 100,
            descriptors: 10,
            answers: vec![vec![1]],
        }
    }

    #[test]
    fn what_early_release_must_show() {
        let stock = measured(Connector::Stock, 0.5, 3);
        assert_eq!(
            broken(&stock, &measured(Connector::Own, 0.1, PROMPTS)),
            Vec::<String>::new()
        );
        let mut bad = measured(Connector::Own, 0.11, PROMPTS - 1);
        bad.bytes = 99;
        bad.answers = vec![vec![2]];
        assert_eq!(broken(&stock, &bad).len(), 4);
    }

    #[test]
    fn a_prompt_begins_with_its_warm_one() {
        let (long, short) = (prompt(3, PROMPT_BLOCKS), prompt(3, HELD_BLOCKS));
        assert_eq!(
            long[..HELD_BLOCKS * BLOCK_SIZE],
            short[..HELD_BLOCKS * BLOCK_SIZE]
        );
        assert_ne!(prompt(2, HELD_BLOCKS), short);
    }
}
